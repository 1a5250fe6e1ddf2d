"""Write the tables of ``docs/adapters.md``: which kinds of adapters are served or converted, as measured.

    python docs/make_adapters.py

Each kind is served over tiny random bases, all in one batch, and compared with PEFT. It takes minutes.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import PeftModel

from lorikeet.adapters.peft_config import CONVERTED_TYPES, REFUSED_TYPES, SERVED_TYPES
from lorikeet.convert.peft import convert
from lorikeet.kernels.backends import choose_kernels
from lorikeet.models.config import read_model_config
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model
from tests.models.checkpoints import make_checkpoint
from tests.models.library_bases import make_base, random_ids
from tests.models.peft_family import CONVERTED, GPT2_LIKE, LLAMA_LIKE, make
from tests.models.test_library_bases import MAX_MODEL_LEN, log_probabilities
from tests.models.test_peft_adapters import expected, load, serve

PAGE = Path(__file__).parent / "adapters.md"
LARGEST_RANK = 1024
BASES = {
    "own decoder (qwen3)": ("qwen3-biases", LLAMA_LIKE),
    "transformers (gemma3)": ("gemma3_text", LLAMA_LIKE),
    "transformers (gpt2)": ("gpt2", GPT2_LIKE),
}


def main() -> None:
    """Replace the tables in the page."""
    columns = {name: outcomes(*of) for name, of in BASES.items()}
    kinds = list(dict.fromkeys(kind for column in columns.values() for kind in column))
    lines = ["| kind | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {kind} | " + " | ".join(column.get(kind, "–") for column in columns.values()) + " |" for kind in kinds
    ]
    types = ["| type | what to expect | rank | error | log probabilities |", "|---|---|---|---|---|", *rows_of_types()]
    text = _replaced(PAGE.read_text(), "table", lines)
    PAGE.write_text(_replaced(text, "types", types))


def _replaced(text: str, name: str, lines: list[str]) -> str:
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    assert all(mark in text for mark in marks)
    content = "\n\n".join((marks[0], "\n".join(lines), marks[1]))
    return re.sub(f"{marks[0]}.*{marks[1]}", lambda _: content, text, flags=re.DOTALL)


def outcomes(kind: str, every: dict[str, Any]) -> dict[str, str]:
    """Return in words whether each kind of adapter answers as PEFT over a base."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = folder / "base"
        if every is LLAMA_LIKE and kind != "gemma3_text":
            make_checkpoint(base, kind, vocab_size=96)
            geometry, implementation = read_model_config(base).geometry(4), "auto"
        else:
            make_base(base, kind)
            kernels = choose_kernels("auto", torch.float32, torch.device("cpu"))
            model = load_model(base, torch.float32, torch.device("cpu"))
            geometry = TransformersDecoder(model, kernels, MAX_MODEL_LEN).geometry
            implementation = "transformers"
        found = serve(folder, base, geometry, every, implementation)
        return {
            name: "token for token" if answer == expected(peft, asked) else "differs"
            for name, asked, answer, peft in zip(every, *found, strict=True)
        }


def rows_of_types() -> list[str]:
    """Return a row for each type of PEFT, and for each initialisation of LoRA that is converted."""
    rows = {name: f"| `{name}` | served | | | |" for name in SERVED_TYPES}
    rows |= {name: f"| `{name}` | refused: {why} | | | |" for name, why in REFUSED_TYPES.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base, ids = folder / "base", random_ids(11, 1)
        make_checkpoint(base, "llama", vocab_size=96)
        for name, config in CONVERTED.items():
            make(load(base), folder / name, config())
            found = convert(folder / name, folder / f"{name}-lora", base, LARGEST_RANK, 1e-6)
            by_peft, by_lora = (
                log_probabilities(PeftModel.from_pretrained(load(base), folder / each).eval(), ids, adapted=True)
                for each in (name, f"{name}-lora")
            )
            rank, error = max(each.rank for each in found), max(each.error for each in found)
            shown = f"`{name}`" if name in CONVERTED_TYPES else f"`LORA` initialised as {name}"
            differ = float((by_peft - by_lora).abs().max())
            rows[name] = f"| {shown} | converted | {rank} | {error:.0e} | {differ:.0e} |"
    return [rows[name] for name in sorted(rows, key=str.upper)]


if __name__ == "__main__":
    main()
