"""Prefills with adapters that are being loaded give the logits of loaded adapters."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import torch
from torch import Tensor

from lorikeet.adapters.store import reference
from lorikeet.config import ClusterSettings, EngineSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.machine import usable_cores
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import StepPlan, StepResult, Tier, Transfer
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.prefill_pipeline import cut, load_order
from lorikeet.engine.build import assemble
from lorikeet.memory.packing import block_runs, pack
from lorikeet.models.config import read_model_config
from lorikeet.presets import HostLayers, resolve_preset
from lorikeet.worker.host_lora import start
from lorikeet.worker.host_lora.assisted_step import HostLoraLeader
from lorikeet.worker.host_lora.pool import DevicePool
from lorikeet.worker.host_lora.start import wanted_workers
from lorikeet.worker.torch_executor import TorchExecutor, build_torch_executor
from lorikeet.worker.transfer import transfers
from lorikeet.worker.transfer.device import Cpu
from lorikeet.worker.transfer.state import PartialAdapter
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.models.checkpoints import make_checkpoint
from tests.support.driver import BLOCK_TOKENS, Driver, fp32_settings, random_tokens
from tests.support.exchanges import Exchanging, PromptExchange
from tests.support.gates import Gate
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LAYERS = 6
GROUPS = 3
QKV = ("q", "k", "v")
ADAPTERS = {"qkv": (8, QKV), "qv": (5, ("q", "v")), "other": (12, QKV), "all": (4, LORA_MODULES)}
ADAPTERS["columns"] = (6, ("q", "v", "gate", "up"))
"""Of products whose input no rank has alone."""
PROMPTS = {"qkv": 21, "qv": 9, "other": 14, "all": 11, "columns": 10, "base": 7}


class Models(NamedTuple):
    folder: Path
    adapters: dict[str, AdapterRef]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "base", "llama", num_hidden_layers=LAYERS)
    geometry = read_model_config(folder / "base").geometry(4)
    adapters = {}
    for seed, (name, (rank, modules)) in enumerate(ADAPTERS.items()):
        path = write_random_adapter(folder / name, geometry, rank, modules=modules, seed=seed, b_std=0.4)
        adapters[name] = reference(name, path, geometry)
    return Models(folder / "base", adapters)


class ColdDriver(Driver):
    """Brings adapters from the host through a gate, and runs them before they are there."""

    def __init__(self, executor: TorchExecutor, sizes: EngineSizes, adapters: dict[str, AdapterRef]) -> None:
        super().__init__(executor, sizes)
        assert executor.host_lora is not None
        self.host_lora: HostLoraLeader = executor.host_lora
        self.gate = Gate(executor.transfers)
        self.refs = adapters
        self.assisted: set[AdapterDigest] = set()
        self.logits: list[Tensor] = []
        self._runs = 0
        self._host: dict[str, tuple[BlockId, ...]] = {}
        first = 0
        for name, ref in adapters.items():
            self._host[name] = tuple(BlockId(block) for block in range(first, first + self.blocks_of(ref)))
            first += self.blocks_of(ref)
            self.move(self.transfer(Tier.SOURCE, Tier.HOST, ref, self._host[name]))
        forward = executor._rank.forward

        def noted(plan: StepPlan, ran: int) -> Tensor:
            result = forward(plan, ran)
            self.logits.append(result[0])
            return result

        executor._rank.forward = noted  # type: ignore[method-assign,assignment]

    def execute(self, plan: StepPlan) -> StepResult:
        assisted = tuple(digest for digest in plan.adapters if digest in self.assisted)
        return super().execute(msgspec.structs.replace(plan, assisted=assisted))

    def bring(self, *names: str, left: tuple[int, int] = (0, 0)) -> None:
        """Begin to transfer adapters; they arrive group by group as the gate says, those of the first name first."""
        transfers = []
        for name in names:
            ref = self.refs[name]
            geometry = self.sizes.local_geometry
            packing = pack(ref.ranks, geometry, geometry.block_elements(BLOCK_TOKENS))
            runs = block_runs(packing, load_order(cut(LAYERS, LAYERS // GROUPS)))
            assert len(runs) == GROUPS
            made: Transfer = self.transfer(Tier.HOST, Tier.DEVICE, ref, self._host[name])
            transfers.append(msgspec.structs.replace(made, groups=runs, left_to_host=left))
        self.move(*transfers, wait=False)
        self.assisted = {self.refs[name].digest for name in names}

    def arrive(self, adapters: int) -> None:
        """Let all arrive that is on its way."""
        self.gate.open(100)
        self.wait_for_transfers(adapters)
        self.gate.shut()
        self.assisted = set()

    def evict_all(self) -> None:
        self.execute(StepPlan(0, evictions=tuple(ref.digest for ref in self.refs.values())))

    def prefill(self, *names: str, chunk: int = 1000) -> dict[str, Tensor]:
        """Run prompts in one step, or in chunks; return the last logits of each. ``base`` has no adapter."""
        self._runs += 1
        keys = {name: f"{name} {self._runs}" for name in names}
        for name, key in keys.items():
            self.add(key, random_tokens(PROMPTS[name], seed=PROMPTS[name]), self.refs.get(name))
        left = {key: PROMPTS[name] for name, key in keys.items()}
        found: dict[str, Tensor] = {}
        while any(left.values()):
            work = {key: min(chunk, tokens) for key, tokens in left.items() if tokens}
            left = {key: tokens - work.get(key, 0) for key, tokens in left.items()}
            result = self.step(work)
            order = sorted(work, key=lambda key: self._adapters[key] or "")
            sampled = [key for key, tokens in zip(order, result.tokens, strict=True) if tokens]
            found |= dict(zip(sampled, self.logits[-1].clone(), strict=True))
        return {name: found[key] for name, key in keys.items()}


@pytest.fixture(scope="module", params=["rank", "device"])
def made(models: Models, request: pytest.FixtureRequest) -> Iterator[ColdDriver]:
    """The rank hands rows over itself, or as work of a device."""
    settings = fp32_settings(preset="toppings", host_memory_bytes=2**21, memory_bytes=2**22)
    exchange = PromptExchange()
    device = Exchanging(exchange) if request.param == "device" else Cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "device_at", lambda place: device)
        executor, _, sizes = build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)
    driver = ColdDriver(executor, sizes, models.adapters)
    assert isinstance(driver.host_lora.pool, DevicePool) == (request.param == "device")
    exchange.meanwhile = driver.host_lora.pool._collect_all
    yield driver
    driver.gate.open(1000)
    executor.close()
    assert not getattr(device, "registered", ())


@pytest.fixture
def driver(made: ColdDriver) -> ColdDriver:
    made.evict_all()
    made.host_lora.pool._helpers[0].wait_until_ready()
    return made


@pytest.fixture(scope="module")
def resident(made: ColdDriver) -> dict[str, Tensor]:
    """Logits of each prompt with its adapter on the device."""
    made.evict_all()
    made.move(*(made.transfer(Tier.SOURCE, Tier.DEVICE, ref) for ref in made.refs.values()), wait=False)
    made.arrive(len(made.refs))
    return made.prefill(*PROMPTS)


def counted(driver: ColdDriver, act: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], AssistCounters]:
    before = driver.host_lora.counters
    found = act()
    after = driver.host_lora.counters
    return found, AssistCounters(*(new - old for old, new in zip(before, after, strict=True)))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, logits in found.items():
        torch.testing.assert_close(logits, expected[name], rtol=2e-4, atol=2e-4)
        assert logits.argmax() == expected[name].argmax()


def test_adapters_change_the_logits_by_far_more_than_the_tolerance(
    driver: ColdDriver, resident: dict[str, Tensor]
) -> None:
    for name in ("qkv", "qv", "other"):
        key = f"{name} without"
        driver.add(key, random_tokens(PROMPTS[name], seed=PROMPTS[name]))
        driver.step({key: PROMPTS[name]})
        assert (driver.logits[-1][0] - resident[name]).abs().max() > 0.05


@pytest.mark.parametrize(("groups", "host_layers"), [(0, 6), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", ["qkv", "qv", "all"])
def test_prefill_logits_match_the_resident_adapter_whatever_has_arrived(
    driver: ColdDriver, resident: dict[str, Tensor], name: str, groups: int, host_layers: int
) -> None:
    driver.bring(name)
    driver.gate.open(groups)
    driver.gate.wait_until_shut()
    found, counts = counted(driver, lambda: driver.prefill(name))
    assert_same(found, resident)
    assert counts == AssistCounters(host_layers, LAYERS - host_layers, 0, 0, 0)
    driver.arrive(1)
    assert_same(driver.prefill(name), resident)


def test_an_adapter_that_has_arrived_needs_no_host(driver: ColdDriver, resident: dict[str, Tensor]) -> None:
    driver.bring("qkv")
    driver.gate.open(100)
    driver.wait_for_transfers(1)
    driver.gate.shut()
    found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    assert counts == AssistCounters(0, 0, 0, 0, 0)


@pytest.mark.parametrize("at", range(LAYERS))
def test_layers_that_arrive_while_the_prefill_runs_are_the_devices_from_then_on(
    driver: ColdDriver, resident: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    decide = driver.host_lora.is_for_host

    def decided(arrival: PartialAdapter, layer: int, tokens: int) -> bool:
        if layer == at:
            driver.gate.open(2)  # the second group and the third; the first comes last
            assert arrival.wait_for(LAYERS - 1)
        return decide(arrival, layer, tokens)

    monkeypatch.setattr(driver.host_lora, "is_for_host", decided)
    driver.bring("qkv")
    found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    host_layers = max(at, 2)
    assert counts == AssistCounters(host_layers, LAYERS - host_layers, 0, 0, 0)
    driver.arrive(1)


def test_cold_and_warm_adapters_and_the_base_share_a_step(driver: ColdDriver, resident: dict[str, Tensor]) -> None:
    warm = [driver.transfer(Tier.SOURCE, Tier.DEVICE, driver.refs[name]) for name in ("all", "other", "columns")]
    driver.move(*warm, wait=False)
    driver.arrive(3)
    driver.bring("qkv", "qv")
    driver.gate.open(GROUPS - 1)  # of the first adapter, and none of the second
    driver.gate.wait_until_shut()
    found, counts = counted(driver, lambda: driver.prefill(*PROMPTS))
    assert_same(found, resident)
    assert counts == AssistCounters(2 + LAYERS, LAYERS - 2, 0, 0, 0)
    driver.arrive(2)


def test_a_chunked_prefill_continues_with_the_layers_that_have_arrived(
    driver: ColdDriver, resident: dict[str, Tensor]
) -> None:
    driver.bring("qkv", "other")
    found, counts = counted(driver, lambda: driver.prefill("qkv", "other", "base", chunk=8))
    assert_same(found, resident)
    assert counts == AssistCounters((3 + 2) * LAYERS, 0, 0, 0, 0)
    driver.arrive(2)


def test_a_worker_that_is_killed_in_the_middle_of_a_prefill_loses_nothing(
    driver: ColdDriver, resident: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = driver.host_lora.is_for_host
    pool = driver.host_lora.pool
    (first,) = pool.process_ids

    def decided(arrival: PartialAdapter, layer: int, tokens: int) -> bool:
        if layer == 3:
            os.kill(first, signal.SIGKILL)
        return decide(arrival, layer, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(driver.host_lora, "is_for_host", decided)
        driver.bring("qkv")
        found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    assert counts[:4] == (LAYERS, 0, 0, 3)
    pool._helpers[0].wait_until_ready()
    assert driver.host_lora.counters.lost_workers == 1
    found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    assert counts == AssistCounters(LAYERS, 0, 0, 0, 0)
    driver.arrive(1)


def test_a_layer_that_the_host_computes_though_it_has_arrived_is_counted(
    driver: ColdDriver, resident: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.host_lora, "is_for_host", lambda arrival, layer, tokens: True)
    driver.bring("qkv")
    driver.gate.open(1)
    driver.gate.wait_until_shut()
    found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    assert counts == AssistCounters(LAYERS, 0, 2, 0, 0)
    driver.arrive(1)


def test_a_static_plan_leaves_its_layers_to_the_host_though_they_are_there(
    driver: ColdDriver, resident: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.host_lora, "_layers", HostLayers.STATIC)
    driver.bring("qkv", left=(0, 4))
    driver.gate.open(GROUPS - 1)  # all but the first two layers
    driver.gate.wait_until_shut()
    found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    assert counts == AssistCounters(4, 2, 2, 0, 0)
    driver.arrive(1)


@pytest.mark.parametrize("host_s", [60.0, 0.0])
def test_wait_flag_waits_for_a_layer_that_arrives_before_the_host_is_done(
    driver: ColdDriver, resident: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, host_s: float
) -> None:
    costs = driver.sizes.assist
    assert costs is not None
    changed = msgspec.structs.replace(costs, host_fixed_s=host_s, host_token_s=0.0, host_token_rank_s=0.0)
    monkeypatch.setattr(driver.host_lora, "_costs", changed)
    monkeypatch.setattr(driver.host_lora, "_layers", HostLayers.PATIENT)
    waiting = PartialAdapter.wait_for

    def waited(arrival: PartialAdapter, layer: int, timeout_s: float | None = None) -> bool:
        driver.gate.open(GROUPS)
        return waiting(arrival, layer, timeout_s)

    driver.bring("qkv")
    driver.gate.open(1)
    driver.gate.wait_until_shut()
    with monkeypatch.context() as patch:
        patch.setattr(PartialAdapter, "wait_for", waited)
        found, counts = counted(driver, lambda: driver.prefill("qkv"))
    assert_same(found, resident)
    assert counts[:2] == ((0, LAYERS) if host_s else (LAYERS - 2, 2))
    driver.arrive(1)


def test_adapters_of_any_modules_are_assisted_together(driver: ColdDriver, resident: dict[str, Tensor]) -> None:
    """Beside rows of the base, some on the host and some arrived, in chunks that sample and chunks that do not."""
    driver.bring("all", "qv")
    driver.gate.open(1)
    driver.gate.wait_until_shut()
    assert_same(driver.prefill("all", "qv", "base", chunk=8), resident)
    driver.arrive(2)


def test_costs_of_assisted_prefills_are_measured(made: ColdDriver) -> None:
    costs = made.sizes.assist
    assert costs is not None
    assert (costs.layers, costs.workers) == (LAYERS, 1)
    assert costs.worker_tokens == made.host_lora.pool.worker_tokens >= 1
    assert len(costs.device_layer) >= 1
    assert min(costs.host_fixed_s, costs.host_token_rank_s, costs.load_bandwidth, costs.load_fixed_s) > 0
    assert all(seconds > 0 for _, seconds in costs.device_layer)
    assert costs.can_assist(made.refs["qkv"])
    assert costs.layer_groups(made.refs["qkv"], 16)


def test_static_groups_but_the_last_are_waited_for_and_the_last_is_the_hosts(models: Models) -> None:
    settings = fp32_settings(preset="toppings:static", host_memory_bytes=2**21, memory_bytes=2**22)
    executor, _, sizes = build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)
    try:
        driver = ColdDriver(executor, sizes, models.adapters)
        driver.bring("qkv")
        driver.arrive(1)
        expected = driver.prefill("qkv")
        driver.evict_all()
        driver.bring("qkv", left=(0, 2))
        driver.gate.open(GROUPS - 1)
        found, counts = counted(driver, lambda: driver.prefill("qkv"))
        assert_same(found, expected)
        assert counts == AssistCounters(2, LAYERS - 2, 0, 0, 0)
        driver.gate.open(100)
        driver.wait_for_transfers(1)
    finally:
        executor.close()


def test_other_ranks_follow_rank_0_on_every_layer(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fp32_settings(preset="toppings", host_memory_bytes=2**21, memory_bytes=2**22, tensor_parallel=2)
    executor, _, sizes = build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)
    names = ("qkv", "columns", "base")
    try:
        driver = ColdDriver(executor, sizes, models.adapters)
        host = driver.host_lora
        ring = driver.host_lora.pool.ring
        driver.bring("qkv", "columns")
        driver.arrive(2)
        expected = driver.prefill(*names)
        driver.evict_all()
        driver.bring("qkv", "columns")
        driver.gate.open(GROUPS - 1)  # of the first adapter, and none of the second; the gate is rank 0's alone
        driver.gate.wait_until_shut()
        for name in ("qkv", "columns"):
            arrival = executor.transfers.partial_adapter(models.adapters[name].digest)
            assert arrival is not None
            wait_until(
                lambda arrival=arrival: ring.arrived(1, arrival.transfer_id) >= max(arrival.needed),
                "the other rank has read what has arrived",
            )
        found, counts = counted(driver, lambda: driver.prefill(*names))
        assert_same(found, expected)
        assert counts == AssistCounters(2 + LAYERS, LAYERS - 2, 0, 0, 0)
        with monkeypatch.context() as patch:  # what rank 0 alone has is not there
            patch.setattr(host, "_others", lambda arrival: iter((0,)))
            found, counts = counted(driver, lambda: driver.prefill(*names))
        assert_same(found, expected)
        assert counts == AssistCounters(2 * LAYERS, 0, 0, 0, 0)
        (worker,) = host.pool.process_ids
        os.kill(worker, signal.SIGKILL)
        found, counts = counted(driver, lambda: driver.prefill(*names))
        assert_same(found, expected)
        assert counts[:3] == (2 + LAYERS, LAYERS - 2, 0)
        driver.arrive(2)
        assert_same(driver.prefill(*names), expected)
    finally:
        executor.close()


@pytest.mark.parametrize("changed", [{"preset": "auto"}, {"host_memory_bytes": 0}, {"host_lora_workers": 0}])
def test_workers_are_started_only_where_they_can_be_of_use(models: Models, changed: dict[str, object]) -> None:
    settings = fp32_settings(**{"preset": "toppings", "host_memory_bytes": 2**20, **changed})
    executor, _, sizes = build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)
    try:
        assert executor.host_lora is None
        assert sizes.assist is None
        notes = assemble(settings, executor, sizes, MonotonicClock()).notes
        told = any(note.startswith("cold prefills are not assisted") for note in notes)
        assert told == (settings.engine.preset == "toppings")
    finally:
        executor.close()


def test_one_device_has_workers_and_several_have_none() -> None:
    preset = resolve_preset("toppings")[1]
    for device, ranks, workers in (("cpu", 1, 3), ("cpu", 2, 3), ("cuda", 1, 3), ("cuda", 2, 0)):
        engine = EngineSettings(device=device, tensor_parallel=ranks, host_memory_bytes=2**20, host_lora_workers=3)
        assert wanted_workers(engine, preset) == workers


def test_by_default_a_cpu_assists_only_with_cores_that_no_step_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "usable_cores", lambda: {0, 1, 2, 3})
    monkeypatch.delenv("OMP_NUM_THREADS")
    default = resolve_preset("auto")[1]
    for link_bytes_per_s, threads, workers in ((1e9, 3, 1), (1e9, 4, 0), (1e9, 0, 0), (0, 3, 0)):
        engine = EngineSettings(threads=threads, link_bytes_per_s=link_bytes_per_s, host_memory_bytes=2**20)
        assert wanted_workers(engine, default) == workers
        assert wanted_workers(engine, resolve_preset("toppings")[1]) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_has_a_core_of_its_own_unless_another_replica_may_use_it(models: Models, replicas: int) -> None:
    settings = fp32_settings(preset="toppings", host_memory_bytes=2**21, memory_bytes=2**22)
    settings = msgspec.structs.replace(settings, cluster=ClusterSettings(replicas=replicas))
    executor, _, _ = build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)
    try:
        assert executor.host_lora is not None
        (worker,) = executor.host_lora.pool.process_ids
        cores = usable_cores()
        own = {max(cores)} if replicas == 1 and len(cores) > 1 else cores
        assert set(psutil.Process(worker).cpu_affinity() or ()) == own
    finally:
        executor.close()
