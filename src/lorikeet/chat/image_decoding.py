"""Decodes images from strangers with Pillow, within limits. Runs only in a helper process.

Pillow opens nothing but the four formats below: no vector graphics, documents or containers that refer to other files.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that are decoded, by Pillow's names."""
MAX_ASPECT = 200
"""Largest ratio of an image's sides. Image processors fail on longer strips, or make them millions of pixels wide."""

_MAX_SCANS = 32
"""Most scans of a JPEG file. Encoders write some 15 at most; each scan of a progressive file passes over all pixels."""
_START_OF_SCAN = b"\xff\xda"
# Bytes of the unpacked comments of a PNG file, which nobody reads; 64 MiB in Pillow.
PngImagePlugin.MAX_TEXT_MEMORY = 2**22


class ImageError(ValueError):
    """Raised for an image that cannot be used. The message continues the name of the image's part."""


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """Read the head of an image, and check it. The pixels are not decoded yet.

    Args:
        data: the content of a file.
        max_pixels: largest area.

    Raises:
        ImageError: the content is no image in one of the ``FORMATS``, or exceeds a limit.
    """
    # Pillow compares it with the head, and with each frame of a GIF, which may be larger.
    Image.MAX_IMAGE_PIXELS = max_pixels
    with _image_errors(max_pixels):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_head(image, data)
        return image


def rgb_pixels(image: Image.Image) -> Image.Image:
    """Decode an opened image as RGB, upright by its EXIF orientation. Of an animation only the first frame is decoded.

    Transparency is dropped, as in ``transformers.image_utils.load_image``.

    Raises:
        ImageError: the content is damaged, or exceeds a limit.
    """
    with _image_errors(Image.MAX_IMAGE_PIXELS or 0):
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _image_errors(max_pixels: int) -> Iterator[None]:
    """Turn Pillow's errors into :class:`ImageError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (ImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"has more than {max_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"is not an image in one of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's decoders raise many types on damaged files.
        reason = str(error).rstrip(".") or type(error).__name__
        raise ImageError(f"cannot be decoded: {reason[:200]}") from error


def _check_head(image: Image.Image, data: bytes) -> None:
    width, height = image.size
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"has {width} x {height} pixels; one side may be at most {MAX_ASPECT} times the other")
    # A JPEG file that names further images, as cameras with two lenses write it, is Pillow's MPO.
    if image.format in ("JPEG", "MPO") and data.count(_START_OF_SCAN) > _MAX_SCANS:
        raise ImageError(f"is a JPEG file of more than {_MAX_SCANS} scans")
