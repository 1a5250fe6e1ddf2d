"""Write the table of ``docs/models.md``: what runs each decoder of transformers, from tiny random checkpoints.

.venv/bin/python docs/make_models.py

It takes minutes. ``pytest --all tests/models/test_library_bases.py`` compares the table with the same checkpoints.
"""

import gc
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from lorikeet.kernels.reference import ReferenceKernels  # noqa: E402
from lorikeet.models.transformers_attention import UnsupportedAttention  # noqa: E402
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model  # noqa: E402
from lorikeet.models.transformers_gathered import Way  # noqa: E402
from tests.models.library_bases import NOT_TRIED, NotTried, decoders, make_base, row  # noqa: E402

PAGE = Path(__file__).with_name("models.md")
_START, _END = "<!-- table -->", "<!-- end of table -->"


class Outcome(NamedTuple):
    """What became of a decoder.

    Attributes:
        reason: why it is refused; "" if it runs.
        remark: how it runs, if not by the kernels' attention.
    """

    reason: str
    remark: str = ""


def outcome(kind: str) -> Outcome:
    """Try to load a tiny checkpoint of a decoder."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_base(Path(folder), kind)
            model = load_model(Path(folder), torch.float32, torch.device("cpu"))
            return Outcome("", REMARKS[TransformersDecoder(model, ReferenceKernels(), 128).way])
        except (NotTried, UnsupportedAttention) as error:
            return Outcome(str(error))
        finally:
            gc.collect()


REMARKS = {
    Way.KERNELS: "",
    Way.PACKED: "own attention",
    Way.SINGLY: "own attention, one sequence after the other",
    Way.ANEW: "without a cache",
    Way.WHOLE: "the whole model for each token",
}


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return the whole table, after its summary."""
    tried = [each for each in outcomes.values() if not each.reason.startswith(NOT_TRIED)]
    runs = sum(not each.reason for each in tried)
    lines = [
        f"{runs} of {len(tried)} run.",
        "",
        "| type | class | runs by | how, or why not |",
        "|---|---|---|---|",
        *(
            f"{row(kind, each.reason)}{'' if each.reason else ' ' + each.remark} |"
            for kind, each in sorted(outcomes.items())
        ),
    ]
    return "\n".join(lines)


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text().partition(_START)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_START}\n\n{table(outcomes)}\n\n{_END}{after}")


if __name__ == "__main__":
    write({kind: outcome(kind) for kind in decoders()})
