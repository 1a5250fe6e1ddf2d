"""The digest of a base model."""

from pathlib import Path

import pytest

from lorikeet.models.base_digest import base_digest, files_digest

LARGE = 2**24 + 5


def write(folder: Path, weights: bytes = b"weights", config: bytes = b"{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_the_digest_depends_on_content_and_not_on_the_place(tmp_path: Path) -> None:
    one = files_digest(write(tmp_path / "one"))
    assert files_digest(write(tmp_path / "two")) == one
    (tmp_path / "two" / "README.md").write_text("not a weight")
    assert files_digest(tmp_path / "two") == one
    for at, changed in enumerate((write(tmp_path / "3", b"weightz"), write(tmp_path / "4", config=b"{ }"))):
        assert files_digest(changed) != one, at


@pytest.mark.parametrize("at", [0, 2**16, LARGE // 2, LARGE - 1])
def test_large_files_are_read_in_pieces_from_the_first_byte_to_the_last(tmp_path: Path, at: int) -> None:
    weights = bytearray(LARGE)
    before = files_digest(write(tmp_path / "before", bytes(weights)))
    weights[at] = 1
    assert files_digest(write(tmp_path / "after", bytes(weights))) != before


def test_the_size_of_a_large_file_counts(tmp_path: Path) -> None:
    assert files_digest(write(tmp_path / "one", bytes(2**26))) != files_digest(
        write(tmp_path / "two", bytes(2**26 + 1))
    )


def test_dtype_and_quantisation_count() -> None:
    served = {base_digest("f", *how) for how in (("bfloat16", ""), ("float32", ""), ("bfloat16", "int4"))}
    assert len(served) == 3
