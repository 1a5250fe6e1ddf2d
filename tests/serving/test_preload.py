"""Adapters that the settings name are registered at every start."""

from pathlib import Path

import pytest
import structlog

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.config import AdapterSettings, ConfigError
from lorikeet.serving.preload import log_restored, names_to_show, preload_adapters
from tests.support.fakes import GEOMETRY


async def test_a_version_loaded_at_run_time_gives_way_to_the_settings_with_a_note(
    sources: Path, tmp_path: Path
) -> None:
    settings = AdapterSettings(adapter_dir=str(sources), store_dir=str(tmp_path / "store"))
    shown: list[tuple[int, int]] = []
    logs = []
    for _ in range(2):
        catalog = AdapterCatalog(settings, "base", GEOMETRY)
        with structlog.testing.capture_logs() as logged:
            await preload_adapters(catalog, [f"x={sources / 'formal'}"], lambda *done: shown.append(done))
        record = catalog.get("x")
        assert record is not None
        assert record.source == str(sources / "formal")
        catalog.register("x", "pirate", replace=True)
        logs.append(logged)
        catalog.close()
    without, (note,) = logs
    assert not without
    assert (note["adapter"], note["source"], note["not_served"]) == ("x", str(sources / "formal"), "pirate")
    assert shown == [(0, 1), (1, 1)] * 2
    catalog = AdapterCatalog(settings, "base", GEOMETRY)
    record = catalog.get("x")
    assert record is not None
    assert record.source == "pirate", "as it was, once the settings do not name it"
    catalog.close()


@pytest.mark.parametrize(("pair", "reason"), [("x", "have the form"), ("x=/nowhere", "'x': /nowhere: there is no")])
async def test_a_name_that_cannot_be_registered_stops_the_start(
    sources: Path, tmp_path: Path, pair: str, reason: str
) -> None:
    catalog = AdapterCatalog(AdapterSettings(store_dir=str(tmp_path / "store")), "base", GEOMETRY)
    with pytest.raises(ConfigError, match=reason):
        await preload_adapters(catalog, [pair], lambda *_: None)
    catalog.close()


async def test_the_adapters_of_the_settings_are_shown_before_older_ones(sources: Path, tmp_path: Path) -> None:
    settings = AdapterSettings(adapter_dir=str(sources), store_dir=str(tmp_path / "store"))
    catalog = AdapterCatalog(settings, "base", GEOMETRY)
    catalog.register("older", "pirate")
    pairs = [f"{name}={sources / 'formal'}" for name in ("x", "a")]
    await preload_adapters(catalog, pairs, lambda *_: None)
    assert names_to_show(catalog, pairs) == ["x", "a", "older"]
    catalog.close()


async def test_adapters_loaded_at_run_time_before_are_logged_at_the_next_start(sources: Path, tmp_path: Path) -> None:
    settings = AdapterSettings(adapter_dir=str(sources), store_dir=str(tmp_path / "store"))
    catalog = AdapterCatalog(settings, "base", GEOMETRY)
    catalog.register("older", "pirate")
    catalog.close()
    catalog = AdapterCatalog(settings, "base", GEOMETRY)
    await preload_adapters(catalog, [f"x={sources / 'formal'}"], lambda *_: None)
    with structlog.testing.capture_logs() as logs:
        log_restored(catalog)
    assert [(line["number"], line["adapters"]) for line in logs] == [(1, "older")]
    catalog.close()
