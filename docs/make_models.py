"""Write the tables of ``docs/models.md``: what runs each decoder of transformers, and which classes take images.

They are made from tiny random checkpoints.

.venv/bin/python docs/make_models.py [decoders | images]

It takes minutes. ``pytest --all tests/models`` compares the tables with the same checkpoints.
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
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # noqa: E402

from lorikeet.kernels.reference import ReferenceKernels  # noqa: E402
from lorikeet.models.transformers_attention import UnsupportedAttention  # noqa: E402
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model  # noqa: E402
from lorikeet.models.transformers_gathered import Way  # noqa: E402
from tests.models.library_bases import NOT_TRIED, NotTried, decoders, make_base, row  # noqa: E402
from tests.models.vision_bases import image_row, why_without_images  # noqa: E402

PAGE = Path(__file__).with_name("models.md")
_DECODERS = "<!-- table -->", "<!-- end of table -->"
_IMAGES = "<!-- table of images -->", "<!-- end of the table of images -->"


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


def image_table(reasons: Mapping[str, str]) -> str:
    """Return the table of classes that take images, after its summary, from the reasons why classes take none."""
    tried = [each for each in reasons.values() if not each.startswith(NOT_TRIED)]
    lines = [
        f"{tried.count('')} of {len(reasons)} take images, and {len(reasons) - len(tried)} could not be tried.",
        "",
    ]
    lines += ["| type | class | images | why not |", "|---|---|---|---|"]
    return "\n".join([*lines, *(image_row(kind, each) for kind, each in sorted(reasons.items()))])


def why_not(kind: str) -> str:
    """Return why a class takes no images, or why that was not tried; empty if it takes them."""
    try:
        return why_without_images(kind)
    except NotTried as error:
        return str(error)
    finally:
        gc.collect()


def write(marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two marks in the page."""
    start, end = marks
    before, _, rest = PAGE.read_text().partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["decoders", "images"]
    if "decoders" in wanted:
        write(_DECODERS, table({kind: outcome(kind) for kind in decoders()}))
    if "images" in wanted:
        write(_IMAGES, image_table({kind: why_not(kind) for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}))
