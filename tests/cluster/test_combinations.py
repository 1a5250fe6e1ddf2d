"""The default's engine under the cluster policies of papers, on two live replicas."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from lorikeet.client.client import EngineClient
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.open import open_cluster
from lorikeet.config import AdapterSettings, ClusterSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from lorikeet.simulator.scenario import make_scenario
from lorikeet.simulator.study import run_scenario
from tests.support.live import engine_process, finish, greedy, live_settings, make_adapter, make_model, prompt

pytestmark = pytest.mark.slow

LORASERVE = "auto,placement=loraserve,routing=table"
OTHERS = (
    "auto,routing=toppings",
    "auto,placement=dlora,routing=dlora,comigration=True",
    pytest.param("auto,placement=rank-groups,routing=placed-work", marks=pytest.mark.long),
    pytest.param("auto,routing=first-fit", marks=pytest.mark.long),
)
RANKS = {"a": 4, "b": 16, "c": 4, "d": 64}
REQUESTS = 20
TOKENS = 12


class Bench(NamedTuple):
    """Settings of an engine, its adapters, and the answers of one engine alone."""

    settings: Settings
    adapters: list[AdapterRef]
    answers: list[list[int]]


async def answers_of(client: EngineClient | ClusterClient, adapters: list[AdapterRef]) -> list[list[int]]:
    """Send greedy requests of all adapters and the base at once, and return the tokens of their answers."""
    versions: list[AdapterRef | None] = [None, *adapters]
    handles = [
        client.submit(greedy(str(number), prompt(9, seed=number), TOKENS, versions[number % len(versions)]))
        for number in range(REQUESTS)
    ]
    for finished, _ in await asyncio.gather(*map(finish, handles)):
        assert finished.reason is FinishReason.LENGTH
    return [list(handle.token_ids) for handle in handles]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("combinations")
    model = make_model(folder / "model")
    adapters = [make_adapter(folder / name, model, seed=seed, rank=RANKS[name]) for seed, name in enumerate(RANKS)]
    settings = msgspec.structs.replace(
        live_settings(model, memory_bytes=24 * 2**20), adapters=AdapterSettings(store_dir=str(folder / "store"))
    )
    async with engine_process(settings) as client:
        client.register_adapters(adapters)
        return Bench(settings, adapters, await answers_of(client, adapters))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("preset", [LORASERVE, *OTHERS])
async def test_answers_are_those_of_one_engine(bench: Bench, preset: str, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(
        bench.settings,
        engine=msgspec.structs.replace(bench.settings.engine, preset=f"{preset},placement_period_s=0.2"),
        adapters=AdapterSettings(store_dir=str(tmp_path / "store")),
        cluster=ClusterSettings(replicas=2),
    )
    async with AsyncExitStack() as stack:
        client = open_cluster(settings, stack)
        stack.push_async_callback(client.close)
        await client.start(lambda progress: None)
        client.register_adapters(bench.adapters)
        for _ in range(3):
            assert await answers_of(client, bench.adapters) == bench.answers


@pytest.mark.parametrize("preset", [pytest.param(LORASERVE, marks=pytest.mark.long), *OTHERS])
def test_the_simulation_answers_every_request(preset: str) -> None:
    fields = {
        "profile": "a100-80-llama-2-7b",
        "preset": preset,
        "replicas": 2,
        "rate": "8",
        "count": 80,
        "adapters": 20,
        "ranks": "8,64",
        "prompt_tokens": "64-256",
        "output_tokens": "8-32",
        "slo": "ttft=2,tpot=0.2",
    }
    run = run_scenario(make_scenario(None, fields), lambda stage, done, total: None).simulated.run
    assert [each.error for each in run.exchanges] == [None] * 80
