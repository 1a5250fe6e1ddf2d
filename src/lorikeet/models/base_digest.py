"""Computes the digest of a base model from its files. Large files are read only in part."""

import hashlib
from pathlib import Path

_PIECE_BYTES = 2**16
_PIECES = 256
_FILES = ("config.json", "*.safetensors", "*.gguf")


def files_digest(folder: Path) -> str:
    """Return the hex SHA-256 of the config and the weights of a model folder.

    A file of up to 16 MiB is read whole. For a larger file, the digest covers the size and 256 pieces of 64 KiB at
    equal distances, including the first and last bytes. Reading the whole file would delay the start by minutes, and
    another training run changes every piece. So the digest distinguishes models, but does not prove that no byte was
    altered.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(b"lorikeet base 1\n")
    for file in sorted({file for pattern in _FILES for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(b"%s\n%d\n" % (file.name.encode(), size))
        with file.open("rb") as content:
            if size <= _PIECES * _PIECE_BYTES:
                digest.update(content.read())
                continue
            for piece in range(_PIECES):
                content.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                digest.update(content.read(_PIECE_BYTES))
    return digest.hexdigest()


def base_digest(files: str, *arithmetic: str) -> str:
    """Return the hex SHA-256 of a base with the settings that it is served with.

    Args:
        files: the result of :func:`files_digest`.
        arithmetic: the settings that change the base's results, such as the dtype.
    """
    return hashlib.sha256("\n".join((files, *arithmetic)).encode()).hexdigest()
