"""Names, versions and files: permissions to change them, and the deletion of files."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, insert
from sqlalchemy.engine import Engine

from lorikeet.adapters import manifest
from lorikeet.adapters import store as store_module
from lorikeet.adapters.catalog import AdapterCatalog, StoredAdapters
from lorikeet.adapters.chat import ChatOverrides
from lorikeet.adapters.checkpoint import AdapterChecks
from lorikeet.adapters.errors import (
    AdapterBusy,
    AdapterError,
    AdapterExists,
    AdapterNotServed,
    AdapterStoreError,
    UnknownAdapter,
)
from lorikeet.adapters.registry import NAMES, VERSIONS, RegistryRow, _version
from lorikeet.adapters.store import AdapterStore
from lorikeet.adapters.weights import load_weights
from lorikeet.config import AdapterSettings
from lorikeet.core.ids import AdapterDigest
from tests.adapters.builders import geometry, lora_tensors, shard, write_adapter

Open = Callable[..., AdapterCatalog]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Three adapters of different content."""
    for seed, name in enumerate(("formal", "pirate", "json")):
        write_adapter(tmp_path / "sources" / name, lora_tensors(seed=seed))
    return tmp_path / "sources"


@pytest.fixture
def settings(tmp_path: Path, sources: Path) -> AdapterSettings:
    return AdapterSettings(adapter_dir=str(sources), store_dir=str(tmp_path / "store"))


@pytest.fixture
def open_catalog(settings: AdapterSettings) -> Iterator[Open]:
    """Open catalogs over one store; all are closed at the end."""
    opened: list[AdapterCatalog] = []

    def open_one(base: str = "base", layers: int = 3, **options: object) -> AdapterCatalog:
        opened.append(AdapterCatalog(settings, base, geometry(layers=layers), **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def versions(settings: AdapterSettings) -> set[str]:
    return {folder.name for folder in (Path(settings.store_dir) / "versions").iterdir()}


def test_a_registered_adapter_can_be_looked_up_and_read(open_catalog: Open) -> None:
    catalog = open_catalog(now=lambda: 1234.5)
    record = catalog.register("team/formal@2", "formal").record
    assert catalog.get("team/formal@2") is record
    assert (record.name, record.source, record.created_at, record.max_rank) == ("team/formal@2", "formal", 1234.5, 4)
    assert record.ref.ranks == {"q": (4, 4, 4), "v": (4, 4, 4)}
    assert len(list(load_weights(record.ref, geometry(), "float32"))) == 6
    assert catalog.get("other") is None


def test_names_are_listed_oldest_first(open_catalog: Open) -> None:
    catalog = open_catalog()
    for name in ("c", "a", "b"):
        catalog.register(name, "formal")
    assert catalog.names() == ["c", "a", "b"]
    assert [record.name for record in catalog.list()] == ["c", "a", "b"]
    assert len(catalog) == 3


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".hidden",
        "/x",
        "a/../b",
        "a..b",
        "a//b",
        "a/",
        "x" * 129,
        "base:x",
        "a b",
        "ä",
        "a\n",
        "base",
        "alias",
        "x/stats",
    ],
)
def test_names_that_could_mislead_are_refused(open_catalog: Open, settings: AdapterSettings, name: str) -> None:
    with pytest.raises(AdapterError, match="name"):
        open_catalog(reserved_names=("alias",)).register(name, "formal")
    assert not versions(settings)


def test_a_taken_name_is_refused_and_keeps_its_version(open_catalog: Open) -> None:
    catalog = open_catalog()
    before = catalog.register("x", "formal").record
    with pytest.raises(AdapterExists, match="'x'"):
        catalog.register("x", "pirate")
    assert catalog.get("x") is before


def test_registering_the_same_content_again_changes_nothing(open_catalog: Open) -> None:
    catalog = open_catalog()
    first = catalog.register("x", "formal")
    assert catalog.register("x", "formal") == first._replace(is_unchanged=True)
    assert catalog.get("x") is first.record
    catalog.alias("y", "x")
    assert catalog.alias("y", "x").record is catalog.get("y")
    with pytest.raises(AdapterExists, match="'x'"):
        catalog.register("x", "formal", overrides=ChatOverrides(system_prompt="Be brief."))


def test_replacing_points_the_name_to_the_new_version_and_deletes_the_old(
    open_catalog: Open, settings: AdapterSettings
) -> None:
    catalog = open_catalog()
    old = catalog.register("x", "formal").record
    new, replaced, *_ = catalog.register("x", "pirate", replace=True)
    assert replaced is old
    assert new.digest != old.digest
    assert catalog.get("x") is new
    assert versions(settings) == {new.digest}


def test_replacing_with_the_same_content_changes_nothing(open_catalog: Open, settings: AdapterSettings) -> None:
    catalog = open_catalog()
    before = catalog.register("x", "formal").record
    assert catalog.register("x", "formal", replace=True) == (before, None, (), True)
    assert versions(settings) == {before.digest}


def test_the_digest_follows_content_and_scaling_but_not_notes(open_catalog: Open, sources: Path) -> None:
    catalog = open_catalog()
    digest = catalog.register("a", "formal").record.digest
    write_adapter(sources / "annotated", lora_tensors(seed=0), lora_dropout=0.3, base_model_name_or_path="x")
    assert catalog.register("b", "annotated").record.digest == digest
    for index, change in enumerate(({"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}})):
        write_adapter(sources / "changed", lora_tensors(seed=0), **change)
        assert catalog.register(f"c{index}", "changed").record.digest != digest


def test_names_share_a_version_which_goes_with_the_last(open_catalog: Open, settings: AdapterSettings) -> None:
    catalog = open_catalog()
    digest = catalog.register("a", "formal").record.digest
    catalog.register("b", "formal")
    assert [ref.digest for ref in catalog.versions()] == [digest]
    assert catalog.remove("a").name == "a"
    assert versions(settings) == {digest}
    assert catalog.has(digest)
    catalog.remove("b")
    assert not versions(settings)
    assert not catalog.has(digest)
    assert catalog.versions() == ()
    with pytest.raises(UnknownAdapter, match="'b'"):
        catalog.remove("b")


def test_files_stay_while_a_request_uses_them(open_catalog: Open, settings: AdapterSettings) -> None:
    catalog = open_catalog()
    record = catalog.register("x", "formal").record
    catalog.acquire(record.digest)
    catalog.acquire(record.digest)
    catalog.remove("x")
    catalog.release(record.digest)
    assert catalog.get("x") is None
    assert versions(settings) == {record.digest}
    catalog.release(record.digest)
    catalog.close()
    assert not versions(settings)


def test_a_removed_version_cannot_be_acquired_and_no_use_ends_twice(open_catalog: Open) -> None:
    catalog = open_catalog()
    digest = catalog.register("x", "formal").record.digest
    with pytest.raises(ValueError, match="more often"):
        catalog.release(digest)
    catalog.remove("x")
    with pytest.raises(UnknownAdapter):
        catalog.acquire(digest)


def test_a_version_registered_again_while_its_last_request_ends_is_kept(
    open_catalog: Open, settings: AdapterSettings
) -> None:
    catalog = open_catalog()
    digest = catalog.register("x", "formal").record.digest
    catalog.acquire(digest)
    catalog.remove("x")
    catalog.register("y", "formal")
    catalog.release(digest)
    catalog.close()
    assert versions(settings) == {digest}


def test_of_two_uploads_of_one_name_exactly_one_wins(open_catalog: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = open_catalog()
    started = threading.Event()
    finish = threading.Event()
    fetch = store_module.fetch

    def slow_fetch(source: str, *arguments: object) -> None:
        started.set()
        assert finish.wait(30)
        fetch(source, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module, "fetch", slow_fetch)
    first = threading.Thread(target=catalog.register, args=("x", "formal"))
    first.start()
    assert started.wait(30)
    for attempt in (lambda: catalog.register("x", "pirate", replace=True), lambda: catalog.remove("x")):
        with pytest.raises(AdapterBusy, match="'x'"):
            attempt()
    assert catalog.get("x") is None
    finish.set()
    first.join(30)
    record = catalog.get("x")
    assert record is not None
    assert record.source == "formal"
    catalog.remove("x")  # and the name is free again


@pytest.mark.slow
def test_threads_that_change_one_store_leave_exactly_the_named_versions(
    open_catalog: Open, settings: AdapterSettings
) -> None:
    catalog = open_catalog()

    def work(number: int) -> None:
        for round_number in range(8):
            source = ("formal", "pirate", "json")[(number + round_number) % 3]
            record = catalog.register(f"n{number}", source, replace=True).record
            catalog.acquire(record.digest)
            assert Path(record.folder, "adapter_model.safetensors").exists()
            if round_number % 3 == 2:
                catalog.remove(f"n{number}")
            assert Path(record.folder, "adapter_model.safetensors").exists()
            catalog.release(record.digest)

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    catalog.close()
    assert not failures
    assert versions(settings) == {record.digest for record in catalog.list()}
    assert not list((Path(settings.store_dir) / "incoming").iterdir())


def test_an_adapter_that_does_not_fit_is_refused_and_leaves_nothing(
    open_catalog: Open, settings: AdapterSettings, sources: Path
) -> None:
    catalog = open_catalog()
    (sources / "formal" / "adapter_model.safetensors").write_bytes(b"PK\3\4 not weights")
    with pytest.raises(AdapterError, match=r"formal: adapter_model.safetensors: .* zip"):
        catalog.register("x", "formal")
    with pytest.raises(AdapterError, match="only 2 layers"):
        open_catalog(layers=2).register("x", "pirate")
    assert catalog.get("x") is None
    assert not versions(settings)
    assert not list((Path(settings.store_dir) / "incoming").iterdir())
    catalog.register("x", "pirate")


def test_adapters_that_the_server_refuses_are_not_registered(open_catalog: Open, settings: AdapterSettings) -> None:
    def refuse(_: object) -> None:
        raise AdapterError("takes more blocks than there are")

    with pytest.raises(AdapterError, match="more blocks"):
        open_catalog(accept=refuse).register("x", "formal")
    assert not versions(settings)


def test_adapters_survive_a_restart_and_their_digest_is_not_computed_again(
    open_catalog: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_catalog()
    before = first.register("x", "formal").record
    first.close()
    monkeypatch.setattr(store_module, "describe", lambda *_: pytest.fail("read the files"))
    monkeypatch.setattr(manifest, "describe", lambda *_: pytest.fail("read the files"))
    after = open_catalog().get("x")
    assert after is not None
    assert after.row == before.row
    assert after.ref == before.ref
    assert len(list(load_weights(after.ref, geometry(), "float32"))) == 6


def test_removed_adapters_stay_removed_after_a_restart(open_catalog: Open) -> None:
    first = open_catalog()
    first.register("x", "formal")
    first.remove("x")
    first.close()
    assert open_catalog().names() == []


def test_a_trusted_source_is_not_remembered_after_a_restart(open_catalog: Open, settings: AdapterSettings) -> None:
    first = open_catalog()
    trusted = first.register("x", str(Path(settings.adapter_dir, "formal")), trusted=True).record
    kept = first.register("y", "pirate").record
    first.close()
    assert versions(settings) == {trusted.digest, kept.digest}
    assert open_catalog().names() == ["y"]
    assert versions(settings) == {kept.digest}


def test_a_trusted_name_registered_again_at_run_time_is_remembered(open_catalog: Open, sources: Path) -> None:
    first = open_catalog()
    first.register("x", str(sources / "formal"), trusted=True)
    first.register("x", "formal", replace=True)
    first.close()
    assert open_catalog().names() == ["x"]


def test_a_store_of_two_servers_keeps_the_versions_of_both(open_catalog: Open, settings: AdapterSettings) -> None:
    first = open_catalog()
    preloaded = first.register("x", str(Path(settings.adapter_dir, "formal")), trusted=True).record
    second = open_catalog()
    second.register("y", "formal")
    second.remove("y")
    assert versions(settings) == {preloaded.digest}
    second.close()
    first.remove("x")
    assert not versions(settings)


def test_a_server_follows_changes_of_another_server(open_catalog: Open, settings: AdapterSettings) -> None:
    first = open_catalog()
    second = open_catalog()
    first.register("x", "formal")
    first.register("served", "json", persistent=False)
    assert second.follow()[0][:3] == ("x", first.get("x"), None)
    assert second.follow() == [], "each change once"
    assert first.follow() == [], "its own are known"

    second.register("served", "formal")
    replaced = second.register("x", "pirate", replace=True)
    (change,) = first.follow()
    assert change[:3] == ("x", replaced.record, replaced.replaced), "what was named at the start stays"
    assert len(list(load_weights(change.record.ref, geometry(), "float32"))) == 6

    second.remove("x")
    assert [each[:3] for each in first.follow()] == [("x", None, replaced.record)]
    assert "x" not in first

    second.register("gone", "json")
    shutil.rmtree(Path(settings.store_dir) / "versions" / second.get("gone").digest)
    (change,) = first.follow()
    assert "files are missing" in change.why_not
    with pytest.raises(AdapterNotServed, match="files are missing"):
        first.get("gone")
    for number in range(120):
        second.alias(f"many-{number}", "served")
    assert len(first.follow()) == 120, "however many there were"


def test_two_servers_cannot_both_add_one_name(open_catalog: Open) -> None:
    first = open_catalog()
    second = open_catalog()
    first.register("x", "formal")
    with pytest.raises(AdapterExists, match="'x'"):
        second.register("x", "pirate")
    assert second.get("x") is None
    assert second.register("x", "formal").record.digest == first.get("x").digest, "both added the same content"


def test_adapter_with_missing_files_is_reported_and_can_be_repaired_or_removed(
    open_catalog: Open, sources: Path
) -> None:
    first = open_catalog()
    shutil.rmtree(first.register("x", "formal").record.folder)
    shutil.rmtree(first.register("y", "pirate").record.folder)
    first.close()
    catalog = open_catalog()
    assert len(catalog.notes) == 2
    assert "'x'" in catalog.notes[0]
    assert catalog.names() == ["x", "y"]
    assert catalog.versions() == (), "there is nothing to read"
    with pytest.raises(AdapterNotServed, match="'x' is registered, but its files are missing"):
        catalog.get("x")
    catalog.register("x", "formal", replace=True)
    record = catalog.get("x")
    assert record is not None
    assert catalog.versions() == (record.ref,)
    assert len(list(load_weights(record.ref, geometry(), "float32"))) == 6
    catalog.remove("y")
    assert catalog.get("y") is None


@pytest.mark.parametrize("how", ["shorter", "touched", "missing"])
def test_a_stored_file_that_changed_is_not_loaded(open_catalog: Open, how: str) -> None:
    record = open_catalog().register("x", "formal").record
    weights = Path(record.folder, "adapter_model.safetensors")
    content = weights.read_bytes()
    if how == "missing":
        weights.unlink()
    else:
        weights.write_bytes(content[:-4] if how == "shorter" else content[:-1] + b"x")
    with pytest.raises(AdapterError, match=r"'x'.*adapter_model\.safetensors"):
        list(load_weights(record.ref, geometry(), "float32"))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "version.json"])
def test_registering_again_replaces_files_that_were_damaged(open_catalog: Open, name: str) -> None:
    """As by a machine that lost power before they were on its disk."""
    catalog = open_catalog()
    record = catalog.register("x", "formal").record
    file = Path(record.folder, name)
    content = file.read_bytes()
    file.write_bytes(content[:-4] if name.endswith("safetensors") else b"")
    if name != "adapter_config.json":  # which is not read any more
        with pytest.raises(AdapterError, match=name):
            list(load_weights(record.ref, geometry(), "float32"))
    catalog.register("x", "formal", replace=True)
    assert name == "version.json" or file.read_bytes() == content
    assert len(list(load_weights(record.ref, geometry(), "float32"))) == 6


def test_weights_that_overflow_the_dtype_once_scaled_are_not_loaded(open_catalog: Open, sources: Path) -> None:
    write_adapter(sources / "strong", lora_alpha=1e7)
    record = open_catalog().register("x", "strong").record
    with pytest.raises(AdapterError, match=r"'x': q of layer 0: too large for float16"):
        list(load_weights(record.ref, geometry(), "float16"))


def test_weights_that_overflow_the_dtype_of_the_server_are_not_registered(
    open_catalog: Open, settings: AdapterSettings, sources: Path
) -> None:
    write_adapter(sources / "strong", lora_alpha=1e7)
    with pytest.raises(AdapterError, match=r"strong: .*q of layer 0: too large for float16"):
        open_catalog(checks=AdapterChecks("float16")).register("x", "strong")
    assert not versions(settings)
    open_catalog(checks=AdapterChecks("bfloat16")).register("x", "strong")


def test_weights_of_a_server_of_another_dtype_are_not_served_where_they_overflow(
    open_catalog: Open, sources: Path
) -> None:
    write_adapter(sources / "strong", lora_alpha=1e7)
    before = open_catalog(checks=AdapterChecks("bfloat16"))
    record = before.register("x", "strong").record
    before.register("y", "formal")
    before.close()
    catalog = open_catalog(checks=AdapterChecks("float16"))
    assert catalog.notes == ("adapter 'x' is registered, but its weights are too large for float16",)
    assert [ref.name for ref in catalog.versions()] == ["y"]
    with pytest.raises(AdapterNotServed, match="'x' is registered, but its weights are too large for float16"):
        catalog.get("x")
    catalog.close()
    assert open_catalog(checks=AdapterChecks("float32")).get("x") == record


def test_a_sharded_adapter_is_served(open_catalog: Open, sources: Path) -> None:
    whole = open_catalog().register("whole", "formal").record
    shard(sources / "formal")
    record = open_catalog().register("x", "formal").record
    assert {file.name for file in Path(record.folder).iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "version.json"
    }  # fmt: skip
    both = [list(load_weights(each.ref, geometry(), "float32")) for each in (whole, record)]
    for one, other in zip(*both, strict=True):
        assert (one.layer, one.module) == (other.layer, other.module)
        assert (one.a == other.a).all()
        assert (one.bt == other.bt).all()


def test_patterns_are_not_matched_after_registration(open_catalog: Open, sources: Path) -> None:
    write_adapter(sources / "formal", rank_pattern={"self_attn.q.*": 4}, alpha_pattern={".*1.self_attn.q_proj": 32})
    record = open_catalog().register("x", "formal").record
    before = list(load_weights(record.ref, geometry(), "float32"))
    Path(record.folder, "adapter_config.json").unlink()
    for one, other in zip(before, load_weights(record.ref, geometry(), "float32"), strict=True):
        assert (one.bt == other.bt).all()


def test_a_version_of_an_older_lorikeet_is_read_again(open_catalog: Open, settings: AdapterSettings) -> None:
    first = open_catalog()
    record = first.register("x", "formal").record
    expected = list(load_weights(record.ref, geometry(), "float32"))
    file = Path(record.folder, "version.json")
    stored = json.loads(file.read_bytes())
    file.write_text(json.dumps({name: stored[name] for name in ("weight_bytes", "weight_mtime_ns")}))
    first.close()
    catalog = open_catalog()
    after = catalog.get("x")
    assert after is not None
    for one, other in zip(expected, load_weights(after.ref, geometry(), "float32"), strict=True):
        assert (one.bt == other.bt).all()
    catalog.register("x", "formal", replace=True)
    assert json.loads(file.read_bytes())["modules"] == stored["modules"]


def test_rows_of_another_base_are_kept_but_not_served(open_catalog: Open, settings: AdapterSettings) -> None:
    first = open_catalog()
    digest = first.register("x", "formal").record.digest
    first.close()
    for other in (open_catalog(base="another"), open_catalog(layers=4)):
        assert other.get("x") is None
        assert other.notes == ("1 adapter (x) registered for another base model: not served",)
        other.close()
    second = open_catalog(base="another")
    second.register("x", "formal")
    second.remove("x")
    second.close()
    assert versions(settings) == {digest}, "a row of the first base still needs it"
    again = open_catalog()
    assert again.names() == ["x"]
    assert not again.notes


def test_a_row_under_a_name_that_the_base_has_now_is_kept_but_not_served(
    open_catalog: Open, settings: AdapterSettings
) -> None:
    first = open_catalog()
    digest = first.register("prod", "formal").record.digest
    first.register("other", "pirate")
    first.close()
    renamed = open_catalog(reserved_names=("prod",))
    assert renamed.get("prod") is None
    assert (renamed.names(), len(renamed.versions()), renamed.has(digest)) == (["other"], 1, False)
    assert renamed.notes == ("1 adapter (prod) registered under a name that now belongs to the base model: not served",)
    renamed.close()
    assert digest in versions(settings)
    again = open_catalog()
    assert again.names() == ["prod", "other"]
    assert not again.notes


def test_an_adapter_that_is_still_read_when_the_catalog_closes_comes_to_nothing(
    open_catalog: Open, settings: AdapterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_catalog()
    fetch = store_module.fetch

    def fetch_late(*arguments: object) -> None:
        catalog.close()
        fetch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module, "fetch", fetch_late)
    with pytest.raises(AdapterStoreError, match="the server is stopping"):
        catalog.register("x", "formal")
    with pytest.raises(AdapterStoreError, match="the server is stopping"):
        catalog.remove("x")
    assert not versions(settings)
    assert not open_catalog().names()


def test_adapters_registered_by_others_during_start_are_served(open_catalog: Open, settings: AdapterSettings) -> None:
    running = open_catalog()
    running.register("old", "formal")
    running.register("kept", "formal")
    stored = StoredAdapters(settings)
    running.remove("old")
    running.register("new", "pirate")
    starting = open_catalog(stored=stored)
    assert starting.names() == ["kept", "new"]
    assert starting.get("new") is not None
    assert not starting.notes


@pytest.mark.slow
def test_ten_thousand_adapters_open_with_a_handful_of_queries(
    open_catalog: Open, settings: AdapterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_catalog()
    sample = first.register("sample", "formal").record.row
    rows = [RegistryRow(f"adapter-{n}", f"{n:064x}", f"source-{n}", n, sample.ranks, 4, 100) for n in range(10_000)]
    with first._registry._writing("all") as connection:
        connection.execute(insert(VERSIONS), [_version(row) for row in rows])
        connection.execute(insert(NAMES), [first._registry._name(row) for row in rows])
    first.close()
    for row in rows:
        (Path(settings.store_dir) / "versions" / row.digest).mkdir()
    statements: list[str] = []

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    monkeypatch.setattr(store_module, "describe", lambda *_: pytest.fail("read the files"))
    event.listen(Engine, "before_cursor_execute", count)
    try:
        catalog = open_catalog()
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert len(catalog) == 10_001
    assert len(statements) < 24
    assert not [record for record in catalog.list() if "ref" in vars(record)], "ranks are decoded when asked for"
    assert not catalog.notes


def test_a_version_that_cannot_be_deleted_in_the_background_is_logged(
    open_catalog: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_store: AdapterStore, _digest: AdapterDigest) -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(AdapterStore, "remove", fail)
    catalog = open_catalog()
    record = catalog.register("x", "formal").record
    catalog.acquire(record.digest)
    catalog.remove("x")
    catalog.release(record.digest)
    catalog.close()
    assert record.digest in caplog.text
    assert "the disk is gone" in caplog.text
