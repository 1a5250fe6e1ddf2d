"""Finds the environments in which unchanged trainers run."""

from pathlib import Path

from benchmarks.clients.__main__ import FOLDER, prepare

HERE = Path(__file__).parent


def python(client: str, *, install: bool = False) -> Path | None:
    """Return the Python of a client's environment; None if it is not installed.

    Args:
        client: the client's name in ``benchmarks.clients``.
        install: whether to install a client that is not there, which takes minutes.
    """
    folder = FOLDER / client
    if install:
        prepare(client)
    return folder / "bin" / "python" if (folder / ".recipe").is_file() else None
