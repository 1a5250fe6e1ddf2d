"""Hostile folders end the process that reads them, and nothing else."""

import json
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file

from lorikeet.adapters import reader
from lorikeet.adapters.checkpoint import DescribeOptions
from lorikeet.adapters.errors import AdapterError, AdapterStoreError
from lorikeet.adapters.reader import describe
from lorikeet.adapters.store import reference
from lorikeet.adapters.weights import load_weights
from tests.adapters.builders import LAYERS, geometry, lora_tensors, shard, write_adapter
from tests.support.waiting import wait_until

WEIGHTS = "adapter_model.safetensors"
ENDLESS = r"(?:(?:[a-z0-9_]|[a-z])+\.?)+!"
FITS = DescribeOptions(geometry())


@pytest.fixture
def new_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No process with other limits is left over before or after the test."""
    reader._end_idle()
    yield monkeypatch
    reader._end_idle()


def refusal(folder: Path, options: DescribeOptions = FITS) -> str:
    with pytest.raises(AdapterError) as caught:
        describe(folder, options)
    assert not isinstance(caught.value, AdapterStoreError)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_would_match_for_ever_is_refused(
    tmp_path: Path, new_limits: pytest.MonkeyPatch, key: str
) -> None:
    new_limits.setattr(reader, "_CPU_S", 0.2)
    write_adapter(tmp_path, **{key: {ENDLESS: 4} if key.endswith("pattern") else ENDLESS})
    assert refusal(tmp_path) == ("reading the patterns of adapter_config.json takes more than 0.2 s of CPU time")


@pytest.mark.parametrize("levels", [3, 4])
def test_counted_repeats_take_no_memory_and_match_nothing(tmp_path: Path, levels: int) -> None:
    repeats = "a"
    for _ in range(levels):
        repeats = f"({repeats}{{1000}})"
    found = describe(write_adapter(tmp_path / "a", rank_pattern={repeats: 64}), FITS)
    assert found.ranks(geometry()) == {"q": (4,) * LAYERS, "v": (4,) * LAYERS}
    assert "does not target" in refusal(write_adapter(tmp_path / "b", target_modules=repeats))


def test_two_thousand_patterns_are_matched_in_time(tmp_path: Path) -> None:
    patterns = {rf"layers\.[{n % 3}]+\.x.*_{n}": 64 for n in range(2000)}
    assert describe(write_adapter(tmp_path, rank_pattern=patterns), FITS).ranks(geometry())["q"] == (4,) * LAYERS


def header(tensors: int, data: bytes = b"") -> bytes:
    entries = ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(tensors))
    return struct.pack("<Q", len(entries) + 2) + b"{" + entries.encode() + b"}" + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(100_000), "its header has 5688891 bytes, at most 4194304 are read"),
        (header(30_000), "it lists more than 20000 tensors"),
        (struct.pack("<Q", 3_000_000) + b"[" * 3_000_000, "not a complete safetensors file (its header: "),
        (struct.pack("<Q", 3_000_000) + b"7" * 3_000_000, "not a complete safetensors file (its header: "),
        (b'\x0a\0\0\0\0\0\0\0{"\xff": {} }', "not a complete safetensors file (its header: "),
    ],
    ids=["large", "many", "nested", "number", "not UTF-8"],
)
def test_a_file_that_is_all_header_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(content)
    assert f"{WEIGHTS}: {reason}" in refusal(tmp_path)


def test_a_folder_that_takes_too_much_memory_is_refused(tmp_path: Path, new_limits: pytest.MonkeyPatch) -> None:
    new_limits.setattr(reader, "_MEMORY_BYTES", 4 * 2**20)
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(header(20_000))
    assert refusal(tmp_path) == f"reading the header of {WEIGHTS} takes more than 4 MiB of memory"


@pytest.mark.slow
def test_a_file_system_that_does_not_answer_is_given_up(tmp_path: Path, new_limits: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path)
    describe(tmp_path)  # starts a process
    new_limits.setattr(reader, "_SILENCE_S", 0.2)
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    assert refusal(tmp_path) == "reading adapter_config.json has made no progress for 0.2 s"


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(tmp_path: Path, new_limits: pytest.MonkeyPatch) -> None:
    before = describe(write_adapter(tmp_path))
    (idle,) = reader._idle
    os.kill(idle._process.pid, signal.SIGKILL)
    wait_until(lambda: not idle.is_alive, "the process has ended")
    assert describe(tmp_path) == before
    (idle,) = reader._idle
    new_limits.setattr(type(idle), "is_alive", True)
    os.kill(idle._process.pid, signal.SIGKILL)
    assert refusal(tmp_path) == "reading the adapter has failed: the process that read it was killed by SIGKILL"
    assert describe(tmp_path) == before


def test_a_process_that_cannot_be_started_is_the_servers_fault(tmp_path: Path, new_limits: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    new_limits.setattr(subprocess, "Popen", fail)
    with pytest.raises(AdapterStoreError, match=r"cannot be started: .*temporarily unavailable"):
        describe(write_adapter(tmp_path))


def test_names_in_a_refusal_are_short_and_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 100_000, "\\ud800"):
        (tmp_path / "adapter_config.json").write_text("{}")
        text = f'{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'
        write_adapter(tmp_path)
        (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(4))
        assert len(refusal(tmp_path).encode()) < 1100
    assert len(refusal(write_adapter(tmp_path, target_modules="(" * 15_000)).encode()) < 1100


def test_a_sharded_adapter_is_described_as_the_file_into_which_it_is_merged(tmp_path: Path) -> None:
    whole = describe(write_adapter(tmp_path / "whole"), FITS)
    shard(write_adapter(tmp_path / "a"))
    options = msgspec.structs.replace(FITS, read_weights=True)
    before = describe(tmp_path / "a", options)
    assert [name.partition(".")[0] for name in before.shards] == [f"adapter_model-0000{n}-of-00002" for n in (1, 2)]
    assert before.ranks(geometry()) == whole.ranks(geometry())
    after = describe(tmp_path / "a", msgspec.structs.replace(options, merge=True))
    assert after == msgspec.structs.replace(before, shards=())
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"adapter_config.json", WEIGHTS}
    assert describe(tmp_path / "a", options) == after
    merged = load_file(tmp_path / "a" / WEIGHTS)
    tensors = lora_tensors()
    assert merged.keys() == tensors.keys()
    assert all((merged[name] == tensors[name]).all() for name in tensors)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("[]", "Expected `object`"),
        ("{}", "weight_map does not map tensors to files"),
        ('{"weight_map": {"a": 7}}', "weight_map does not map tensors to files"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "'../secret.safetensors' cannot be the name"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "cannot be the name"),
        ('{"weight_map": {"a": "adapter_model.bin"}}', "cannot be the name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: there is no such file"),
        (json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(1001)}}), "at most 1000 are read"),
    ],
    ids=["list", "nothing", "number", "above", "elsewhere", "pickle", "missing", "many"],
)
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, index: str, reason: str) -> None:
    shard(write_adapter(tmp_path))
    (tmp_path / "adapter_model.safetensors.index.json").write_text(index)
    assert reason in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shard(write_adapter(tmp_path))
    first, second = sorted(tmp_path.glob("adapter_model-*"))
    second.write_bytes(first.read_bytes())
    assert "is in 2 of its files" in refusal(tmp_path)


def test_weights_that_cannot_be_merged_are_the_stores_fault(tmp_path: Path) -> None:
    shard(write_adapter(tmp_path / "a"))
    (tmp_path / "a" / WEIGHTS).symlink_to("/dev/full")
    with pytest.raises(AdapterStoreError, match="No space left"):
        describe(tmp_path / "a", msgspec.structs.replace(FITS, merge=True))


# --- Files that change while they are read ------------------------------------------------------


def test_file_truncated_during_read_is_an_error_naming_the_tensor(tmp_path: Path) -> None:
    ref = reference("x", write_adapter(tmp_path / "x"), geometry())
    weights = load_weights(ref, geometry(), "float32")
    next(weights)
    os.truncate(tmp_path / "x" / "adapter_model.safetensors", ref.weight_bytes // 2)
    with pytest.raises(
        AdapterError, match=r"adapter 'x'.*adapter_model.safetensors: was truncated while tensor .*lora"
    ):
        list(weights)
