"""Weights in shared memory: only a trainer's own files are read."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.adapters.description import WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError, AdapterNotFound
from lorikeet.adapters.shared_memory import FOLDER, PREFIX, copy_shared


@pytest.fixture
def shared() -> Iterator[Path]:
    path = FOLDER / f"{PREFIX}{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def test_weights_are_copied(shared: Path, tmp_path: Path) -> None:
    shared.write_bytes(b"weights" * 1000)
    copy_shared(shared.name, tmp_path, 0)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == b"weights" * 1000


@pytest.mark.parametrize("name", ["other", f"{PREFIX}../../etc/passwd", f"{PREFIX}\0"])
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no name of shared weights"):
        copy_shared(name, tmp_path, 0)


def test_links_large_files_and_missing_ones_are_refused(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound):
        copy_shared(shared.name, tmp_path, 0)
    os.symlink("/etc/passwd", shared)
    with pytest.raises(AdapterError, match="cannot be read"):
        copy_shared(shared.name, tmp_path, 0)
    shared.unlink()
    shared.write_bytes(b"x" * 11)
    with pytest.raises(AdapterError, match="at most 10"):
        copy_shared(shared.name, tmp_path, 10)
    shared.unlink()
    os.mkfifo(shared)
    with pytest.raises(AdapterError, match="does not belong"):
        copy_shared(shared.name, tmp_path, 0)
