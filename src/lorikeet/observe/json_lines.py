"""Repairs files of JSON lines that end with half a line, because their writer was killed."""

import os
from pathlib import Path

_CHUNK_BYTES = 2**16


def drop_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed process has left. A missing file is ignored."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _CHUNK_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                file.truncate(begin + newline + 1)
                return
            end = begin
        file.truncate(0)
