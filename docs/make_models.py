"""Write the table of ``docs/models.md``: what runs each decoder of transformers, from tiny random checkpoints.

.venv/bin/python docs/make_models.py

It takes minutes. ``pytest --all tests/models/test_library_bases.py`` compares the table with the same checkpoints.
"""

import gc
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from lorikeet.kernels.reference import ReferenceKernels  # noqa: E402
from lorikeet.models.transformers_attention import UnsupportedAttention  # noqa: E402
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model  # noqa: E402
from tests.models.library_bases import NOT_TRIED, NotTried, decoders, make_base, row  # noqa: E402

PAGE = Path(__file__).with_name("models.md")
_START, _END = "<!-- table -->", "<!-- end of table -->"


def refusal(kind: str) -> str:
    """Return why a decoder is refused; "" if it runs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_base(Path(folder), kind)
            model = load_model(Path(folder), torch.float32, torch.device("cpu"))
            TransformersDecoder(model, ReferenceKernels(), 128)
        except (NotTried, UnsupportedAttention) as error:
            return str(error)
        finally:
            gc.collect()
    return ""


def table(reasons: Mapping[str, str]) -> str:
    """Return the whole table, after its summary."""
    tried = {kind: reason for kind, reason in reasons.items() if not reason.startswith(NOT_TRIED)}
    runs = sum(not reason for reason in tried.values())
    lines = [
        f"{runs} of {len(tried)} run.",
        "",
        "| type | class | runs by | why not |",
        "|---|---|---|---|",
        *(row(kind, reason) for kind, reason in sorted(reasons.items())),
    ]
    return "\n".join(lines)


def write(reasons: Mapping[str, str]) -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text().partition(_START)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_START}\n\n{table(reasons)}\n\n{_END}{after}")


if __name__ == "__main__":
    write({kind: refusal(kind) for kind in decoders()})
