"""Files from strangers: each is an image or a refusal, whatever is done to it."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.chat.image_models import write_model
from tests.chat.images import (
    image_file,
    jpeg_of_scans,
    mpo_file,
    picture,
    png_of_zeros,
    png_with_profile,
    png_with_text,
)
from tests.support.step_counts import examples

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

from lorikeet.chat.image_decoding import ImageError, open_image, rgb_pixels  # noqa: E402 - imports Pillow
from lorikeet.chat.image_processor import ImageProcessor  # noqa: E402

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
OTHERS = ("BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "SGI", "JPEG2000", "DDS", "ICNS", "PDF", "EPS", "AVIF", "MSP")
MODES = {
    "PNG": ("RGB", "L", "P", "RGBA", "1"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("RGB", "L", "RGBA"),
}
NUMBERS = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\1\0\0")
MOST_PIXELS = 2**20


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    return ImageProcessor(write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2_5_vl"))


def check(processor: ImageProcessor, data: bytes) -> None:
    """Check that a file is an image, or a refusal that is not a fault of the code."""
    try:
        read = processor.process(rgb_pixels(open_image(data, MOST_PIXELS)))
    except ImageError:
        return
    assert read.text.count(processor.tokens.embedding) > 0


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """An image in some format and mode, perhaps animated or turned."""
    kind = draw(st.sampled_from(FORMATS))
    size = draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    options: dict[str, Any] = {}
    if kind != "JPEG" and draw(st.booleans()):
        options |= {
            "save_all": True,
            "append_images": [picture(size, seed=seed) for seed in range(draw(st.integers(1, 5)))],
        }
    if kind in ("JPEG", "PNG"):
        options |= {"JPEG": {"progressive": draw(st.booleans())}, "PNG": {"optimize": draw(st.booleans())}}[kind]
    if kind != "GIF":
        exif = Image.Exif()
        exif[0x0112] = draw(st.integers(0, 9))
        options["exif"] = exif
    image = picture(size).convert(draw(st.sampled_from(MODES[kind])))
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file that is cut, changed in some bytes, mixed with another one, or has large numbers in it."""
    data = bytearray(draw(files()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("cut", "change", "number", "repeat", "mix", "after", "before"))):
            case "cut":
                del data[at:]
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=4))
            case "number":
                data[at : at + 4] = draw(
                    st.sampled_from((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\1\0\0"))
                )
            case "repeat":
                data[at:at] = bytes(data[at : at + 64]) * draw(st.integers(1, 500))
            case "mix":
                data[at:] = draw(files())[at:]
            case "after":
                data += draw(st.sampled_from((b"PK\x03\x04", b"<script>alert(1)</script>", image_file("TIFF"))))
            case "before":
                data[:0] = draw(st.sampled_from((b"<svg/>", b"%PDF-1.7\n", b"GIF89a", b"\xff\xd8\xff", b"RIFF")))
    return bytes(data)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=damaged() | files() | st.binary(max_size=300))
@example(data=b"")
@example(data=png_of_zeros(10_000, 1))
@example(data=png_of_zeros(60_000, 60_000, rows=1))
@example(data=png_of_zeros(1000, 1000, rows=1))
@example(data=png_with_text(2**27))
@example(data=png_with_profile(2**27))
@example(data=jpeg_of_scans(100))
@example(data=mpo_file(jpeg_of_scans(100)))
def test_every_file_is_an_image_or_refused(processor: ImageProcessor, data: bytes) -> None:
    check(processor, data)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_is_cut_anywhere_is_an_image_or_refused(
    processor: ImageProcessor, kind: str, pytestconfig: Any
) -> None:
    data = image_file(kind, (12, 8))
    step = 1 if pytestconfig.getoption("--all") else len(data) // 50
    for end in range(0, len(data), step):
        check(processor, data[:end])


@pytest.mark.parametrize("kind", OTHERS)
def test_files_in_other_formats_are_refused(kind: str) -> None:
    image = picture((32, 32))
    file = io.BytesIO()
    (image.convert("1") if kind == "MSP" else image).save(file, kind)
    with pytest.raises(ImageError, match="is not an image in one of the formats"):
        open_image(file.getvalue(), MOST_PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_as_transformers_turns_them(kind: str, orientation: int) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_file(kind, exif=exif)
    ours = rgb_pixels(open_image(data, MOST_PIXELS))
    theirs = load_image(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))
