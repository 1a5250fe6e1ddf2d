"""Weights in shared memory: only a trainer's own files are read."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.adapters.errors import AdapterError, AdapterNotFound
from lorikeet.adapters.shared_memory import FOLDER, PREFIX, copy_shared, opened_shared


@pytest.fixture
def shared() -> Iterator[Path]:
    path = FOLDER / f"{PREFIX}{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def opened(name: str, max_bytes: int = 0) -> None:
    with opened_shared(name, max_bytes):
        pass


@pytest.mark.parametrize("size", [0, 7, 2**20, 9 * 2**20 + 5])
def test_weights_are_copied_and_their_digest_is_computed_on_the_way(shared: Path, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    shared.write_bytes(content)
    digest = hashlib.sha256(b"config")
    chunks = []
    with opened_shared(shared.name, 0) as source:
        copy_shared(source, tmp_path / "weights", digest, lambda: chunks.append(1))
    assert (tmp_path / "weights").read_bytes() == content
    assert digest.digest() == hashlib.sha256(b"config" + content).digest()
    assert len(chunks) == -(-size // 2**20)


def test_weights_that_are_cut_off_meanwhile_are_refused(shared: Path, tmp_path: Path) -> None:
    shared.write_bytes(bytes(3 * 2**20))
    with opened_shared(shared.name, 0) as source, pytest.raises(AdapterError, match="cut off"):
        copy_shared(source, tmp_path / "weights", hashlib.sha256(), lambda: os.truncate(shared, 2**20))


@pytest.mark.parametrize("name", ["other", f"{PREFIX}../../etc/passwd", f"{PREFIX}\0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(AdapterError, match="no name of shared weights"):
        opened(name)


def test_links_large_files_and_missing_ones_are_refused(shared: Path) -> None:
    with pytest.raises(AdapterNotFound):
        opened(shared.name)
    os.symlink("/etc/passwd", shared)
    with pytest.raises(AdapterError, match="cannot be read"):
        opened(shared.name)
    shared.unlink()
    shared.write_bytes(b"x" * 11)
    with pytest.raises(AdapterError, match="at most 10"):
        opened(shared.name, 10)
    shared.unlink()
    os.mkfifo(shared)
    with pytest.raises(AdapterError, match="does not belong"):
        opened(shared.name)
