"""Runs every kind of request on an executor with several ranks."""

from pathlib import Path
from typing import Any

from lorikeet.core.adapter import AdapterRef
from lorikeet.models.config import read_model_config
from tests.models.checkpoints import make_checkpoint
from tests.support.driver import ALL, Driver, make_adapter, random_tokens


def make_model(folder: Path, **overrides: int) -> tuple[Path, dict[str, AdapterRef]]:
    """Save a tiny model and two adapters for it."""
    make_checkpoint(folder / "base", "llama", **overrides)
    geometry = read_model_config(folder / "base").geometry(4)
    return folder / "base", {
        "narrow": make_adapter(
            folder / "base", folder / "narrow", geometry, 1, r=3, target_modules=["q_proj", "o_proj"]
        ),
        "wide": make_adapter(folder / "base", folder / "wide", geometry, 2, r=16, target_modules=ALL),
    }


def run_everything(driver: Driver, adapters: dict[str, AdapterRef]) -> dict[str, list[int]]:
    """Chunked prefill, mixed adapters, repeats, seeded sampling, a resumed sequence; return all tokens."""
    assert [done.error for done in driver.load(*adapters.values())] == [None, None]
    names = ["base", "narrow", "wide", "sampled"]
    for index, name in enumerate(names):
        params: dict[str, Any] = {"temperature": 1.0, "seed": 5} if name == "sampled" else {}
        driver.add(name, random_tokens(8 + index, seed=index), adapters.get(name), **params)
    driver.step({"base": 8, "narrow": 4})
    driver.step({"base": 1, "narrow": 5, "wide": 10, "sampled": 11})
    driver.decode(names, 4)
    driver.decode(names, 8, repeat=4)
    driver.drop("wide")
    driver.add("wide", random_tokens(10, seed=2), adapters["wide"], driver.token_ids("wide"))
    driver.step({"wide": 10 + len(driver.token_ids("wide"))})
    driver.decode(names, 6, repeat=3)
    return {name: driver.token_ids(name) for name in names}
