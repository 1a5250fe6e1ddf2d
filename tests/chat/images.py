"""Files of images, harmless and hostile, made by the tests."""

import base64
import io
import struct
import zlib
from typing import Any


def picture(size: tuple[int, int] = (24, 16), *, seed: int = 0) -> Any:
    """Return a Pillow image of noise."""
    import numpy as np
    from PIL import Image

    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def image_file(kind: str = "PNG", size: tuple[int, int] = (24, 16), *, seed: int = 0, **options: Any) -> bytes:
    """Return the file of an image of noise in a format of Pillow."""
    file = io.BytesIO()
    picture(size, seed=seed).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """Return a file as a ``data:`` URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png_of_zeros(width: int, height: int, *, rows: int | None = None) -> bytes:
    """Return a black one-bit PNG, which takes a thousandth of its pixels; ``rows`` of them are really there."""
    line = b"\0" + bytes((width + 7) // 8)
    lines = zlib.compress(line * (height if rows is None else rows), 9)
    head = struct.pack("!IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", lines) + _chunk(b"IEND", b"")


def png_with_text(length: int, comments: int = 1) -> bytes:
    """Return a PNG with compressed comments that unpack to ``length`` bytes each."""
    file = image_file()
    comment = _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(length), 9))
    return file[:33] + comment * comments + file[33:]


def png_with_profile(length: int) -> bytes:
    """Return a PNG whose compressed colour profile unpacks to ``length`` bytes."""
    file = image_file()
    profile = _chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(length), 9))
    return file[:33] + profile + file[33:]


def jpeg_of_scans(scans: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    file = image_file("JPEG", (256, 256), progressive=True)
    start = file.rindex(b"\xff\xda")
    return file[:start] + file[start:-2] * scans + file[-2:]


def mpo_file(jpeg: bytes) -> bytes:
    """Return a JPEG file with the index of a further image, so that Pillow's format of it is MPO."""
    file = io.BytesIO()
    picture((8, 8)).save(file, "MPO", save_all=True, append_images=[picture((8, 8))])
    whole = file.getvalue()
    start = whole.index(b"MPF\0") - 4
    index = whole[start : start + 2 + int.from_bytes(whole[start + 2 : start + 4])]
    return jpeg[:2] + index + jpeg[2:]


def gif_with_large_frame(width: int, height: int) -> bytes:
    """Return a GIF of 1 x 1 pixels, whose only frame says that it is larger."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    return screen + frame + b"\x3b"


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + name + content + struct.pack("!I", zlib.crc32(name + content))
