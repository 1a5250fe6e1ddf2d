"""One replica's folder of adapters: versions are whole or absent, checked on arrival, and found after a restart."""

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np
import pytest

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.manifest import MANIFEST_FILE, check_unchanged
from lorikeet.adapters.store import reference
from lorikeet.adapters.weights import load_weights
from lorikeet.cluster.adapters.folder import (
    Files,
    PoolFolder,
    PoolFolderError,
    PoolFolderUnwritableError,
    clear_abandoned_pools,
    read_files,
)
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from tests.adapters.builders import geometry, lora_tensors, write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def adapter(tmp_path: Path) -> AdapterRef:
    return reference("a", write_adapter(tmp_path / "source"), geometry())


@pytest.fixture
def files(adapter: AdapterRef) -> Files:
    return read_files(Path(adapter.folder))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool" / "r0"


def entries(root: Path) -> set[str]:
    """All that lies in a folder and in its corner for what arrives."""
    return {path.name for path in root.iterdir()} | {path.name for path in (root / ".incoming").iterdir()}


def test_stored_adapter_is_read_back_and_loaded(root: Path, adapter: AdapterRef, files: Files) -> None:
    folder = PoolFolder(root)
    place = folder.store(adapter.digest, files)
    assert place == folder.folder(adapter.digest)
    assert folder.held() == {adapter.digest: str(place)}
    back = folder.read(adapter.digest)
    assert {name: content.tobytes() for name, content in back.items()} == {
        name: content.tobytes() for name, content in files.items()
    }
    stored = msgspec.structs.replace(adapter, folder=str(place))
    check_unchanged(stored)
    for ours, theirs in zip(
        load_weights(stored, geometry(), "float32"), load_weights(adapter, geometry(), "float32"), strict=True
    ):
        assert np.array_equal(ours.a, theirs.a)
    assert (place / MANIFEST_FILE).exists()
    os.utime(place / WEIGHTS)
    with pytest.raises(AdapterError, match="was changed"):
        check_unchanged(stored)


def test_loader_resolves_names_that_depend_on_the_base(root: Path, tmp_path: Path) -> None:
    """The pool knows no base, for which a fused layer is three modules."""
    shapes = geometry().modules
    rows = sum(shapes[module].out_features for module in "qkv")
    generator, tensors = np.random.default_rng(0), {}
    for layer in range(geometry().layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj"
        for side, size in (("A", (4, shapes["q"].in_features)), ("B", (rows, 4))):
            tensors[f"{name}.lora_{side}.weight"] = generator.normal(size=size).astype(np.float32)
    fused = reference("a", write_adapter(tmp_path / "fused", tensors, target_modules=["qkv_proj"]), geometry())
    place = PoolFolder(root).store(fused.digest, read_files(Path(fused.folder)))
    stored = msgspec.structs.replace(fused, folder=str(place))
    ours, theirs = (list(load_weights(ref, geometry(), "float32")) for ref in (stored, fused))
    assert [each.module for each in ours] == ["q", "k", "v"] * geometry().layers
    assert all(np.array_equal(own.bt, other.bt) for own, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_damage_on_the_way_is_an_error_and_leaves_nothing(
    root: Path, adapter: AdapterRef, files: Files, name: str
) -> None:
    folder = PoolFolder(root)
    damaged = {each: content.copy() for each, content in files.items()}
    if name == WEIGHTS:
        damaged[name][-1] ^= 1
    else:
        text = damaged[name].tobytes().replace(b'"lora_alpha": 8', b'"lora_alpha": 9')
        damaged[name] = np.frombuffer(text, np.uint8)
    with pytest.raises(PoolFolderError, match=f"{adapter.digest}.*damaged.*digest"):
        folder.store(adapter.digest, damaged)
    damaged = {**files, name: files[name][:-1]}
    with pytest.raises(PoolFolderError, match="damaged"):
        folder.store(adapter.digest, damaged)
    assert folder.held() == {}
    assert entries(root) == {".incoming", ".lock"}


def test_next_owner_keeps_intact_versions_and_deletes_others(
    root: Path, tmp_path: Path, adapter: AdapterRef, files: Files
) -> None:
    other = reference("b", write_adapter(tmp_path / "other", lora_tensors(seed=1)), geometry())
    folder = PoolFolder(root)
    kept, damaged = folder.store(adapter.digest, files), folder.store(other.digest, read_files(Path(other.folder)))
    (damaged / WEIGHTS).write_bytes(b"short")
    (root / ".incoming" / "unfinished").mkdir()
    (root / "unfinished").mkdir()
    folder.close()
    after = PoolFolder(root)
    assert after.held() == {adapter.digest: str(kept)}
    assert entries(root) == {".incoming", ".lock", adapter.digest}
    with pytest.raises(PoolFolderError, match=other.digest):
        after.read(other.digest)


def test_a_folder_has_one_owner(root: Path) -> None:
    folder = PoolFolder(root)
    with pytest.raises(PoolFolderError, match="in use by another process"):
        PoolFolder(root)
    folder.close()
    PoolFolder(root).close()


def test_a_damaged_version_is_replaced_and_a_whole_one_is_kept(root: Path, adapter: AdapterRef, files: Files) -> None:
    folder = PoolFolder(root)
    place = folder.store(adapter.digest, files)
    inode = (place / WEIGHTS).stat().st_ino
    folder.store(adapter.digest, files)
    assert (place / WEIGHTS).stat().st_ino == inode
    (place / WEIGHTS).write_bytes(b"short")
    folder.store(adapter.digest, files)
    assert (place / WEIGHTS).stat().st_ino != inode
    assert folder.read(adapter.digest)[WEIGHTS].tobytes() == files[WEIGHTS].tobytes()


def test_a_deleted_version_is_gone_and_may_be_deleted_again(root: Path, adapter: AdapterRef, files: Files) -> None:
    folder = PoolFolder(root)
    folder.store(adapter.digest, files)
    folder.delete(adapter.digest)
    folder.delete(adapter.digest)
    assert entries(root) == {".incoming", ".lock"}
    with pytest.raises(PoolFolderError, match="there is no"):
        folder.read(adapter.digest)


def test_one_version_may_arrive_several_times_at_once(root: Path, adapter: AdapterRef, files: Files) -> None:
    folder = PoolFolder(root)
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda _: folder.store(adapter.digest, files), range(16)))
    assert set(places) == {folder.folder(adapter.digest)}
    assert folder.read(adapter.digest)[WEIGHTS].tobytes() == files[WEIGHTS].tobytes()
    assert entries(root) == {".incoming", ".lock", adapter.digest}


def test_error_of_missing_files_names_them(root: Path, tmp_path: Path) -> None:
    with pytest.raises(PoolFolderError, match=CONFIG):
        read_files(tmp_path)
    with pytest.raises(PoolFolderError, match=MANIFEST_FILE):
        PoolFolder(root).read(AdapterDigest("0" * 64))


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PoolFolderError, match="cannot be written"):
        PoolFolder(tmp_path / "file" / "r0")


def test_a_root_that_was_deleted_is_made_again_unless_it_was_discarded(
    root: Path, adapter: AdapterRef, files: Files
) -> None:
    folder = PoolFolder(root)
    folder.store(adapter.digest, files)
    shutil.rmtree(root)
    assert folder.held() == {}
    with pytest.raises(PoolFolderError, match="in use by another process"):
        PoolFolder(root)
    place = folder.store(adapter.digest, files)
    assert folder.held() == {adapter.digest: str(place)}
    folder.discard()
    with pytest.raises(PoolFolderError, match="cannot be read"):
        folder.held()
    assert not root.exists()


def test_a_root_that_cannot_be_read_is_an_error(root: Path) -> None:
    folder = PoolFolder(root)
    shutil.rmtree(root)
    root.write_text("")
    with pytest.raises(PoolFolderError, match="cannot be read"):
        folder.held()


def test_pools_of_killed_servers_are_deleted_and_no_others(tmp_path: Path, adapter: AdapterRef, files: Files) -> None:
    killed, living, own = (tmp_path / f"lorikeet-pool-{name}" for name in ("killed", "living", "own"))
    for pool in (killed, living):
        for replica in ("r0", "r1"):
            PoolFolder(pool / replica).store(adapter.digest, files)
    owner = PoolFolder(living / "r1")  # the other locks went with their owners
    kept = tmp_path / "chosen"
    PoolFolder(kept / "r0").store(adapter.digest, files)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (tmp_path / "lorikeet-pool-link").symlink_to(elsewhere)
    own.mkdir()
    clear_abandoned_pools(kept)
    assert killed.is_dir(), "only a temporary pool clears others"
    clear_abandoned_pools(own)
    assert not killed.exists()
    assert sorted(path.name for path in living.iterdir()) == ["r1"]
    assert owner.held().keys() == {adapter.digest}
    assert own.is_dir()
    assert (elsewhere / "precious").exists()
    assert (kept / "r0").is_dir()


def test_a_folder_that_is_cleared_while_it_is_opened_is_made_again(
    root: Path, adapter: AdapterRef, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, cleared = fcntl.flock, []

    def clear_first(file: TextIO, how: int) -> None:
        if not cleared:
            cleared.append(shutil.rmtree(root))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", clear_first)
    folder = PoolFolder(root)
    folder.store(adapter.digest, files)
    with pytest.raises(PoolFolderError, match="in use"):
        PoolFolder(root)


def test_full_disk_differs_from_damaged_content(
    root: Path, adapter: AdapterRef, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    folder = PoolFolder(root)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(PoolFolderUnwritableError, match="No space left"):
            folder.store(adapter.digest, files)
    with pytest.raises(PoolFolderError) as caught:
        folder.store(AdapterDigest("0" * 64), files)
    assert not isinstance(caught.value, PoolFolderUnwritableError)
