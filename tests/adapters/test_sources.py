"""Adapters come from where the settings allow, and from nowhere else."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest

from lorikeet.adapters.errors import AdapterError, AdapterNotFound, AdapterStoreError
from lorikeet.adapters.sources import fetch, host_of, shown_source
from lorikeet.adapters.url_reader import UrlRead, read_url, without_credentials
from lorikeet.config import AdapterSettings
from tests.adapters.builders import shard, write_adapter

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """The folder that adapters may be loaded from, with one inside."""
    write_adapter(tmp_path / "allowed" / "team" / "formal")
    return tmp_path / "allowed"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """An adapter at ``memory://bucket/team/formal``, and one beside the team's folder."""
    memory = fsspec.filesystem("memory")
    for folder in ("team/formal", "team-evil/formal"):
        memory.put(str(write_adapter(tmp_path / "uploaded")), f"/bucket/{folder}", recursive=True)
    yield "memory://bucket"
    memory.rm("/bucket", recursive=True)


def refusal(source: str, settings: AdapterSettings, into: Path, trusted: bool = False) -> str:
    with pytest.raises(AdapterError) as caught:
        fetch(source, settings, into, trusted)
    return str(caught.value)


@pytest.mark.parametrize("form", ["{}/team/formal", "team/formal", "file://{}/team/formal", "local://{}/team/formal"])
def test_a_folder_inside_the_allowed_one_is_copied(allowed: Path, into: Path, form: str) -> None:
    fetch(form.format(allowed), AdapterSettings(adapter_dir=str(allowed)), into)
    for name in FILES:
        assert (into / name).read_bytes() == (allowed / "team/formal" / name).read_bytes()


def test_weights_that_are_all_header_are_not_copied(allowed: Path, into: Path) -> None:
    weights = allowed / "team" / "formal" / "adapter_model.safetensors"
    weights.write_bytes((5 * 2**20).to_bytes(8, "little") + bytes(6 * 2**20))
    settings = AdapterSettings(adapter_dir=str(allowed))
    assert "its header has 5242880 bytes, at most 4194304 are read" in refusal("team/formal", settings, into)
    assert not (into / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/srv/adapters/formal/", "formal"),
        ("~/formal", "formal"),
        ("local:///srv/formal", "formal"),
        ("team/formal", "formal"),
        ("hf://org/formal", "hf://org/formal"),
    ],
)
def test_clients_see_no_folders_of_the_server(source: str, shown: str) -> None:
    assert shown_source(source) == shown


@pytest.mark.parametrize("source", ["team/formal", "memory://bucket/team/formal"])
def test_the_files_of_a_sharded_adapter_are_copied(allowed: Path, into: Path, bucket: str, source: str) -> None:
    folder = allowed / "team" / "formal"
    shard(folder)
    memory = fsspec.filesystem("memory")
    memory.rm("/bucket/team/formal", recursive=True)
    memory.put(str(folder), "/bucket/team/formal", recursive=True)
    settings = AdapterSettings(adapter_dir=str(allowed), allowed_sources=(bucket,))
    fetch(source, settings, into)
    assert {file.name for file in into.iterdir()} == {file.name for file in folder.iterdir()}
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    fetch(source, msgspec.structs.replace(settings, max_bytes=size), into)
    assert "allowed" in refusal(source, msgspec.structs.replace(settings, max_bytes=size - 1), into)
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()
    memory.rm("/bucket/team/formal/adapter_model-00002-of-00002.safetensors")
    with pytest.raises(AdapterNotFound, match=r"adapter_model-00002-of-00002.safetensors is not there"):
        fetch(source, settings, into)
    (folder / "adapter_model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    memory.put(str(folder / "adapter_model.safetensors.index.json"), "/bucket/team/formal/")
    assert "cannot be the name" in refusal(source, settings, into)


def test_without_an_adapter_folder_no_local_path_is_read(allowed: Path, into: Path) -> None:
    assert "--adapter-dir" in refusal(str(allowed / "team/formal"), AdapterSettings(), into)


@pytest.mark.parametrize("path", ["{}/../secret", "../secret", "team/../../secret", "file://{}/../secret"])
def test_a_path_with_dots_is_refused(allowed: Path, into: Path, path: str) -> None:
    write_adapter(allowed.parent / "secret")
    assert "'..' is not allowed" in refusal(path.format(allowed), AdapterSettings(adapter_dir=str(allowed)), into)


@pytest.mark.parametrize("form", ["{}/secret", "file://{}/secret", "{}/allowed-not"])
def test_a_folder_outside_the_allowed_one_is_refused(allowed: Path, into: Path, form: str) -> None:
    for name in ("secret", "allowed-not"):
        write_adapter(allowed.parent / name)
    found = refusal(form.format(allowed.parent), AdapterSettings(adapter_dir=str(allowed)), into)
    assert "outside the folder" in found


def test_a_link_out_of_the_allowed_folder_is_refused(allowed: Path, into: Path) -> None:
    secret = write_adapter(allowed.parent / "secret")
    settings = AdapterSettings(adapter_dir=str(allowed))
    (allowed / "link").symlink_to(secret)
    assert "outside the folder" in refusal("link", settings, into)
    (allowed / "folder").mkdir()
    for name in FILES:
        (allowed / "folder" / name).symlink_to(secret / name)
    assert "leads outside the allowed folder" in refusal("folder", settings, into)
    assert not list(into.iterdir())


def test_a_folder_that_becomes_a_link_while_it_is_opened_is_refused(
    allowed: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = write_adapter(allowed.parent / "secret")
    really_open = os.open

    def swap_and_open(path: Path, flags: int) -> int:
        (allowed / "team").rename(allowed / "moved")
        (secret.parent / "formal").symlink_to(secret)
        (allowed / "team").symlink_to(secret.parent)
        return really_open(path, flags)

    monkeypatch.setattr("lorikeet.adapters.sources.os.open", swap_and_open)
    assert "leads outside" in refusal("team/formal", AdapterSettings(adapter_dir=str(allowed)), into)
    assert not list(into.iterdir())


def test_the_allowed_folder_may_be_named_by_the_home_folder(
    allowed: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(allowed.parent))
    fetch("team/formal", AdapterSettings(adapter_dir="~/allowed"), into)
    assert "no-such-user" in refusal("team/formal", AdapterSettings(adapter_dir="~no-such-user/x"), into)


@pytest.mark.parametrize("source", ["team/formal", "memory://bucket/team/formal"])
def test_a_full_disk_is_the_stores_fault(
    allowed: Path, into: Path, bucket: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lorikeet.adapters.sources.os.fsync", fail)
    settings = AdapterSettings(adapter_dir=str(allowed), allowed_sources=(bucket,))
    with pytest.raises(AdapterStoreError, match="No space left"):
        fetch(source, settings, into)


def test_a_source_that_cannot_be_read_is_not_the_stores_fault(
    into: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.read", fail, raising=False)
    with pytest.raises(AdapterError, match=r"cannot be read: .*Input/output error") as caught:
        fetch(f"{bucket}/team/formal", AdapterSettings(allowed_sources=(bucket,)), into)
    assert not isinstance(caught.value, AdapterStoreError)


def test_a_url_that_takes_too_long_is_given_up(into: Path, bucket: str) -> None:
    settings = AdapterSettings(allowed_sources=(bucket,), source_timeout_s=1e-9)
    assert "not read within" in refusal(f"{bucket}/team/formal", settings, into)


def test_links_within_the_allowed_folder_are_followed(allowed: Path, into: Path) -> None:
    (allowed / "link").symlink_to(allowed / "team" / "formal")
    fetch("link", AdapterSettings(adapter_dir=str(allowed)), into)
    for name in FILES:
        assert (into / name).read_bytes() == (allowed / "team" / "formal" / name).read_bytes()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_files_that_are_not_regular_are_refused_without_hanging(allowed: Path, into: Path, make: object) -> None:
    weights = allowed / "team/formal" / FILES[1]
    weights.unlink()
    make(weights)  # type: ignore[operator]
    found = refusal("team/formal", AdapterSettings(adapter_dir=str(allowed)), into)
    assert f"{FILES[1]}: not a regular file" in found


def test_links_in_a_circle_and_impossible_paths_are_refused(allowed: Path, into: Path) -> None:
    (allowed / "circle").symlink_to(allowed / "circle")
    settings = AdapterSettings(adapter_dir=str(allowed))
    for path in ("circle", "x" * 5000, "a\0b", "no/such/folder"):
        assert refusal(path, settings, into)


def test_the_error_of_a_missing_file_lists_the_files_of_the_folder(allowed: Path, into: Path) -> None:
    (allowed / "team/formal" / FILES[1]).rename(allowed / "team/formal/adapter_model.bin")
    found = refusal("team/formal", AdapterSettings(adapter_dir=str(allowed)), into)
    assert f"{FILES[1]} is not there; adapter_model.bin is ignored" in found


@pytest.mark.parametrize("missing", ["folder", "file"])
@pytest.mark.parametrize("kind", ["local", "url"])
def test_missing_and_refused_sources_have_different_errors(
    allowed: Path, into: Path, bucket: str, kind: str, missing: str
) -> None:
    settings = AdapterSettings(adapter_dir=str(allowed), allowed_sources=(bucket,))
    (allowed / "team/formal" / FILES[1]).unlink()
    fsspec.filesystem("memory").rm(f"/bucket/team/formal/{FILES[1]}")
    path = "team/formal" if missing == "file" else "no/such"
    no_folder = "there is no folder 'no/such' in" if kind == "local" else "there is no such folder"
    with pytest.raises(AdapterNotFound, match="is not there" if missing == "file" else no_folder):
        fetch(path if kind == "local" else f"{bucket}/{path}", settings, into)


@pytest.mark.parametrize("kind", ["local", "url"])
def test_a_trusted_source_may_lie_anywhere(allowed: Path, into: Path, bucket: str, kind: str) -> None:
    folder = allowed / "team" / "formal"
    fetch(str(folder) if kind == "local" else f"{bucket}/team/formal", AdapterSettings(), into, trusted=True)
    for name in FILES:
        assert (into / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "prefix", ["memory://bucket/team/", "memory://bucket/team", "memory://bucket/", "MEMORY://bucket"]
)
def test_a_url_below_an_allowed_one_is_copied(into: Path, bucket: str, tmp_path: Path, prefix: str) -> None:
    fetch(f"{bucket}/team/formal", AdapterSettings(allowed_sources=("s3://other/", prefix)), into)
    for name in FILES:
        assert (into / name).read_bytes() == (tmp_path / "uploaded" / name).read_bytes()


@pytest.mark.parametrize(
    "source",
    [
        "memory://bucket/team-evil/formal",
        "memory://bucket/team/../team-evil/formal",
        "memory://bucket/team/%2e%2e/team-evil/formal",
        "memory://bucket/team\\..\\x",
        "memory://bucket//team/formal",
        "memory://bucket",
        "memory://",
        "s3://bucket/team/formal",
        "simplecache::memory://bucket/team/formal",
        "memory://bucket/team/formal::zip://x",
        "memory://bucket/team/formal?versionId=3",
        "hf://bucket/team@refs/pr/1",
        "hf://bucket/team@0123456789abcdef/formal",
    ],
)
def test_any_other_url_is_refused(into: Path, bucket: str, source: str) -> None:
    settings = AdapterSettings(allowed_sources=("memory://bucket/team/", "memory://", "hf://bucket/"))
    assert refusal(source, settings, into).startswith(source)
    assert not list(into.iterdir())


def test_credentials_of_a_source_are_never_shown(into: Path) -> None:
    settings = AdapterSettings(allowed_sources=("https://user:word@host/team/",))
    assert refusal("https://host/team/x", settings, into).endswith("allowed: https://…@host/team/)")
    for source in ("hf://org/repo@main", "https://host/a@b", "/folder/x@y", "s3://bucket/team"):
        assert without_credentials(source) == source
    assert without_credentials("https://to@ken@host/x") == "https://…@host/x"


def test_without_allowed_sources_no_url_is_read(into: Path, bucket: str) -> None:
    assert "(--allow-source; allowed: none)" in refusal(f"{bucket}/team/formal", AdapterSettings(), into)


def test_a_url_that_cannot_be_read_reports_the_reason(into: Path, bucket: str) -> None:
    settings = AdapterSettings(allowed_sources=(bucket,))
    assert "nonsense" in refusal("nonsense://x/y", AdapterSettings(allowed_sources=("nonsense://x",)), into)
    fsspec.filesystem("memory").mv(f"/bucket/team/formal/{FILES[1]}", "/bucket/team/formal/adapter_model.pt")
    assert "adapter_model.pt is ignored" in refusal(f"{bucket}/team/formal", settings, into)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_file_over_the_size_limit_is_refused_before_it_is_copied(into: Path, bucket: str, trusted: bool) -> None:
    settings = AdapterSettings(allowed_sources=(bucket,), max_bytes=1000)
    assert "at most 1000 are allowed" in refusal(f"{bucket}/team/formal", settings, into, trusted)
    assert not (into / FILES[1]).exists()


def test_a_source_that_sends_more_than_it_announced_is_cut_off(
    into: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFileSystem.info", lambda *_args, **_options: {"size": None}
    )
    monkeypatch.setattr("lorikeet.adapters.url_reader._CHUNK_BYTES", 100)
    settings = AdapterSettings(allowed_sources=(bucket,), max_bytes=1000)
    assert "larger than the allowed 1000 bytes" in refusal(f"{bucket}/team/formal", settings, into)
    assert (into / FILES[1]).stat().st_size <= 1000


def test_a_local_file_over_the_size_limit_is_refused(allowed: Path, into: Path) -> None:
    settings = AdapterSettings(adapter_dir=str(allowed), max_bytes=1000)
    assert "larger than the allowed 1000 bytes" in refusal("team/formal", settings, into)


def test_a_missing_file_system_is_explained(into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(AdapterError, match=r"pip install 'lorikeet-serve\[s3\]'"):
        read_url(UrlRead("s3://bucket/x", str(into), {FILES[0]: 1000}, None))


@pytest.mark.parametrize("source", ["x" * 10_000, "a/" * 5000, ("y" * 200 + "/") * 10, "hf://" + "x" * 10_000])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_source_of_any_length_is_only_refused(allowed: Path, into: Path, source: str, trusted: bool) -> None:
    found = refusal(source, AdapterSettings(adapter_dir=str(allowed)), into, trusted)
    assert len(found) < 3 * len(str(allowed)) + 5000


def test_a_source_names_its_host() -> None:
    assert host_of("team/formal") is host_of("file:///team/formal") is None
    assert host_of("https://user:word@Host:8000/team") == "https://host:8000"
    assert host_of("s3://bucket/team") == "s3://bucket"
    assert host_of("HF://one/repo") == host_of("hf://other/repo") == "hf://"
