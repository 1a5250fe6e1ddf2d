"""Decoding of images from strangers."""

import pytest

from tests.chat.images import (
    gif_with_large_frame,
    image_file,
    jpeg_of_scans,
    mpo_file,
    picture,
    png_of_zeros,
    png_with_profile,
    png_with_text,
)

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

from lorikeet.chat.image_decoding import ImageError, open_image, rgb_pixels  # noqa: E402 - imports Pillow

MOST = 2**16


def decoded(data: bytes) -> "Image.Image":
    return rgb_pixels(open_image(data, MOST))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_four_formats_are_decoded(kind: str) -> None:
    image = decoded(image_file(kind))
    assert (image.mode, image.size) == ("RGB", (24, 16))


def test_a_photo_of_two_lenses_is_its_first_image() -> None:
    image = decoded(mpo_file(image_file("JPEG")))
    assert (image.mode, image.size) == ("RGB", (24, 16))


def test_pixels_of_lossless_files_are_exact() -> None:
    assert decoded(image_file("PNG")).tobytes() == picture().tobytes()
    assert decoded(image_file("WEBP", lossless=True)).tobytes() == picture().tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16", "CMYK"])
def test_images_of_all_modes_become_rgb(mode: str) -> None:
    import io

    file = io.BytesIO()
    Image.new(mode, (5, 4)).save(file, "JPEG" if mode == "CMYK" else "PNG")
    assert decoded(file.getvalue()).mode == "RGB"


def test_the_orientation_of_a_photo_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the picture is at the right
    turned = decoded(image_file("PNG", exif=exif))
    assert turned.size == (16, 24)
    assert turned.tobytes() == picture().transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_only_the_first_frame_of_an_animation_is_decoded(kind: str) -> None:
    frames = [picture(seed=seed) for seed in range(1, 4)]
    options = {"lossless": True} if kind == "WEBP" else {}
    animated = image_file(kind, save_all=True, append_images=frames, **options)
    assert decoded(animated).size == (24, 16)
    if kind != "GIF":
        assert decoded(animated).tobytes() == picture().tobytes()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png_of_zeros(60_000, 60_000, rows=1), "has more than 65536 pixels"),
        (png_of_zeros(400, 400), "has more than 65536 pixels"),
        (gif_with_large_frame(9000, 9000), "has more than 65536 pixels"),
        (png_of_zeros(10_000, 1), "one side may be at most 200 times the other"),
        (png_of_zeros(1, 10_000), "one side may be at most 200 times the other"),
        (jpeg_of_scans(100), "is a JPEG file of more than 32 scans"),
        (mpo_file(jpeg_of_scans(100)), "is a JPEG file of more than 32 scans"),
        (png_with_text(2**26), "cannot be decoded"),
        (png_with_text(2**20 - 1, 5), "cannot be decoded: Too much memory used in text chunks"),
        (png_with_profile(2**26), "cannot be decoded"),
        (image_file("PNG")[:-30], "cannot be decoded"),
        (image_file("JPEG", (200, 200))[:900], "cannot be decoded: image file is truncated"),
        (image_file("WEBP")[:100], "cannot be decoded|is not an image"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
            "is not an image in one of",
        ),
        (b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", "is not an image in one of the formats PNG, JPEG, WEBP, GIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (image_file("BMP"), "is not an image"),
        (image_file("TIFF"), "is not an image"),
        (image_file("ICO", (16, 16)), "is not an image"),
        (b"GIF89a", "cannot be decoded|is not an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "cannot be decoded|is not an image"),
        (b"x", "is not an image"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_hostile_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decoded(data)


def test_a_file_of_two_kinds_is_only_its_image() -> None:
    page = b"<script>alert(1)</script>PK\x03\x04"
    assert decoded(image_file("PNG") + page).tobytes() == picture().tobytes()
