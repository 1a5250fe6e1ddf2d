"""Finds what a folder holds instead of an adapter, for error messages."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from lorikeet.adapters.description import CONFIG_FILE

PICKLED_FILE = "adapter_model.bin"
"""Weights as old versions of PEFT save them: a pickle, which the server does not read."""
_MOST_NAMED = 3


def other_formats(names: Iterable[str]) -> str:
    """Return a hint about weights in another format among the files of a folder; empty without them."""
    others = sorted(name for name in names if name.startswith("adapter_model.") and not name.endswith(".safetensors"))
    if not others:
        return ""
    hint = f"; {', '.join(others)} is ignored, since only safetensors is supported"
    return hint + (": `lorikeet adapters convert FOLDER OUT` rewrites it" if PICKLED_FILE in others else "")


def inner_adapters(folder: Path) -> str:
    """Return a hint about adapters in the folders of a folder; empty without them.

    PEFT saves each adapter that has a name of its own in such a folder.
    """
    try:
        found = [file.parent.name for file in islice(folder.glob(f"*/{CONFIG_FILE}"), _MOST_NAMED + 1)]
    except OSError:
        return ""
    if not found:
        return ""
    named = ", ".join(sorted(found)[:_MOST_NAMED]) + (", …" if len(found) > _MOST_NAMED else "")
    return f"; there is an adapter in {named}: name that folder" if len(found) == 1 else f"; adapters are in {named}"
