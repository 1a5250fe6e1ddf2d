"""Host workers are real processes that read weights from a host arena; rows of dead workers are not lost.

``pool`` is one whose rank computes itself, and one whose rank launches work of a device; that is a thread.
"""

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import LORA_MODULES, PRODUCTS, ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.kernels.lora import LoraPieces
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.host_arena import HostArena
from lorikeet.memory.packing import pack
from lorikeet.worker.host_lora.calibrate import measure_host
from lorikeet.worker.host_lora.pool import DevicePool, HostPool, HostRows, PoolSizes, start_worker_process
from lorikeet.worker.host_lora.ring import Ring, RingShape, RingSlice
from lorikeet.worker.host_lora.start import worker_cores
from lorikeet.worker.host_lora.worker import HostAdapter, ProductWidths, SliceWorker, site_of
from tests.adapters.builders import HIDDEN, geometry
from tests.support.exchanges import Exchanging, ThreadExchange

pytestmark = pytest.mark.slow

ELEMENTS = 256
BLOCKS = 200
ROWS = 48
PARTS = 6
ADAPTERS: dict[str, dict[str, tuple[int, ...]]] = {
    "small": {"q": (3, 0, 5), "v": (1, 2, 4)},
    "large": dict.fromkeys(("q", "k", "v"), (16, 16, 16)),
    "whole": dict.fromkeys(LORA_MODULES, (4, 8, 2)),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Store(NamedTuple):
    """A host arena with adapters in scattered blocks."""

    arena: HostArena
    host: Tensor
    geometry: ModelGeometry
    adapters: dict[str, HostAdapter]

    def pieces(self, name: str) -> LoraPieces:
        adapter = self.adapters[name]
        packing = pack(adapter.ranks, self.geometry, ELEMENTS)
        return AdapterLayout(packing, self.geometry).weights(adapter.blocks, self.host).pieces

    def expected(self, name: str, layer: int, x: Tensor, product: str = "qkv") -> Tensor:
        """What the adapter adds, in fp64 from the numbers that are there."""
        y = torch.zeros(len(x), ProductWidths(self.geometry).outputs[product], dtype=torch.float64)
        column = 0
        for module in PRODUCTS[product]:
            outputs = self.geometry.modules[module].out_features
            for a, bt in self.pieces(name).get((layer, module), ()):
                y[:, column : column + outputs] += x.double() @ a.double().T @ bt.double()
            column += outputs
        return y


def make_store(dtype: torch.dtype) -> Store:
    arena = HostArena.create(BLOCKS, ELEMENTS * dtype.itemsize)
    host = torch.from_numpy(arena.bytes).view(dtype)
    generator = torch.Generator().manual_seed(5)
    host.copy_(torch.randn(host.shape, generator=generator) * 0.3)
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    adapters = {}
    for name, ranks in ADAPTERS.items():
        count = pack(ranks, geometry(), ELEMENTS).blocks
        adapters[name] = HostAdapter(ranks, tuple(BlockId(order.pop()) for _ in range(count)))
    return Store(arena, host, geometry(), adapters)


def sizes_for(store: Store) -> PoolSizes:
    return PoolSizes(store.host.dtype, store.geometry, ROWS, PARTS)


def make_pool(store: Store, exchange: ThreadExchange | None) -> HostPool:
    processes = [start_worker_process() for _ in range(2)]
    make = HostPool if exchange is None else partial(DevicePool, Exchanging(exchange), exchange)
    return make(processes, [None, None], [store.arena], sizes_for(store))


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    made = make_store(torch.float32)
    yield made
    made.arena.close()


@pytest.fixture(scope="module", params=["rank", "device"])
def shared(store: Store, request: pytest.FixtureRequest) -> Iterator[HostPool]:
    exchange = ThreadExchange() if request.param == "device" else None
    pool = make_pool(store, exchange)
    try:
        pool.wait_until_ready()
        yield pool
    finally:
        if exchange is not None:
            exchange.end()
        pool.close()


@pytest.fixture
def pool(shared: HostPool) -> HostPool:
    """One for many tests: a worker takes seconds to start."""
    for helper in shared._helpers:
        helper.wait_until_ready()
    shared._timeout_s = 60.0
    shared.worker_tokens = 4
    shared.begin([])  # whoever has been through a step is replaced at once when it ends
    shared.end()
    return shared


def rows(count: int, seed: int, dtype: torch.dtype = torch.float32, width: int = HIDDEN) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(pool: HostPool, store: Store, layer: int, work: dict[str, int], product: str = "qkv") -> None:
    """Let the pool compute a layer, and compare it with what it should be."""
    dtype = store.host.dtype
    numbers = {name: number for number, name in enumerate(ADAPTERS)}
    parts: list[HostRows] = []
    first = 2  # rows that are not the host's lie before, between and behind
    for name, count in work.items():
        parts.append(HostRows(numbers[name], first, first + count))
        first += count + 1
    widths = ProductWidths(store.geometry)
    x = rows(first, len(work), dtype, widths.inputs[product])
    out = torch.ones(first, widths.outputs[product], dtype=dtype)
    expected = out.double()
    for (_, start, stop), name in zip(parts, work, strict=True):
        expected[start:stop] += store.expected(name, layer, x[start:stop], product)
    pool.submit(product, layer, x, pool.assign(parts))
    pool.add_to(out)
    pool.settle()
    assert (out.double() - expected).abs().max() <= TOLERANCES[dtype] * float(expected.abs().max())
    assert (expected != 1).any(dim=1).sum() == sum(work.values())


def test_host_worker_computes_every_ranks_own_columns(store: Store) -> None:
    other = store.host.clone()
    number = list(ADAPTERS).index("large")
    large = store.adapters["large"]
    layout = AdapterLayout(pack(large.ranks, store.geometry, ELEMENTS), store.geometry)
    for pieces in layout.weights(large.blocks, other).pieces.values():
        for _, bt in pieces:
            bt.mul_(2.0)
    ring = Ring.create(RingShape(2, 4, ROWS, HIDDEN, HIDDEN + 16, 2, 1, 2, 4, "float32"))
    worker = SliceWorker(ring, 0, [store.host, other], store.geometry)
    worker.begin(list(store.adapters.values()))
    x = rows(5, seed=1)
    torch.from_numpy(ring.x)[1, :5] = x
    worker.compute(1, site_of(2, "qkv"), RingSlice(0, number, 0, 5))
    mine, theirs = torch.from_numpy(ring.y)[1, :, :5].double()
    expected = store.expected("large", 2, x)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs, 2 * expected, rtol=1e-4, atol=1e-5)
    ring.close()


def test_several_workers_compute_the_delta_of_the_weights(pool: HostPool, store: Store) -> None:
    before = pool.rescued_slices
    for turn in range(2):
        pool.begin(list(store.adapters.values()))
        for layer in range(store.geometry.layers):
            check(pool, store, layer, {"small": 5, "large": 11 + turn})
            check(pool, store, layer, {"large": 1})
            check(pool, store, layer, {"large": 30, "small": ROWS - 30})
        pool.end()
    assert pool.rescued_slices == before
    assert len(pool.handovers_s) > 0
    assert all(seconds > 0 for seconds in pool.handovers_s)


def test_a_worker_that_has_nothing_to_do_for_long_is_there_when_it_has(pool: HostPool, store: Store) -> None:
    idle = pool.process_ids[1]
    rescued = pool.rescued_slices
    pool.begin(list(store.adapters.values()))
    os.kill(idle, signal.SIGSTOP)
    for _ in range(3 * pool.ring.shape.descriptors):
        check(pool, store, 0, {"small": 1})  # one row, for the first worker
    os.kill(idle, signal.SIGCONT)
    check(pool, store, 1, {"large": 20})
    pool.end()
    assert pool.rescued_slices == rescued
    assert idle in pool.process_ids


def test_old_content_of_the_memory_has_no_effect(pool: HostPool, store: Store) -> None:
    pool.ring.y[:] = 123.0
    pool.begin([store.adapters["small"]])
    check(pool, store, 1, {"small": 7})  # q has no rank there, k none anywhere
    pool.end()


def test_workers_find_adapters_at_the_blocks_of_the_step(pool: HostPool, store: Store) -> None:
    large = store.adapters["large"]
    pool.begin(list(store.adapters.values()))
    check(pool, store, 2, {"large": 6})
    pool.end()
    elsewhere = tuple(reversed(large.blocks))
    there = store.host[list(large.blocks)].clone()
    store.host[list(elsewhere)] = there
    try:
        changed = store._replace(adapters={**store.adapters, "large": HostAdapter(large.ranks, elsewhere)})
        pool.begin(list(changed.adapters.values()))
        check(pool, changed, 2, {"large": 6})
        pool.end()
    finally:
        store.host[list(large.blocks)] = there


def test_each_product_of_a_layer_is_handed_over_separately(pool: HostPool, store: Store) -> None:
    """Their rows of x and y differ in width, and share the ring."""
    pool.begin(list(store.adapters.values()))
    for layer in range(store.geometry.layers):
        for product in PRODUCTS:
            check(pool, store, layer, {"whole": 9, "large": 3} if product == "qkv" else {"whole": 12}, product)
    pool.end()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    store = make_store(dtype)
    shape = RingShape(2, 4, ROWS, HIDDEN, HIDDEN + 16, 1, 1, 2, 4, str(dtype).removeprefix("torch."))
    ring = Ring.create(shape)
    worker = SliceWorker(ring, 0, [store.host], store.geometry)
    worker.begin(list(store.adapters.values()))
    x = rows(9, 1, dtype)
    torch.from_numpy(ring.x).view(dtype)[1, :9] = x
    ring.write_cut(1, [RingSlice(0, 1, 0, 4), RingSlice(0, 1, 4, 5)])
    ring.describe(1, 1, site_of(2, "qkv"), 1)
    ring.signal_x(1)
    worker.run(1)
    assert ring.has_y(1, 0)
    y = torch.from_numpy(ring.y).view(dtype)[1, 0, :9]
    expected = store.expected("large", 2, x)
    assert (y.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * float(expected.abs().max())


def test_a_worker_that_is_killed_loses_no_rows_and_is_replaced(pool: HostPool, store: Store) -> None:
    rescued = pool.rescued_slices
    lost = pool.lost_workers
    first, second = pool.process_ids
    pool.begin(list(store.adapters.values()))
    check(pool, store, 0, {"small": 5, "large": 9})
    os.kill(first, signal.SIGKILL)
    for layer in (1, 2):
        check(pool, store, layer, {"small": 5, "large": 9})
    pool.end()
    assert pool.rescued_slices > rescued
    for helper in pool._helpers:
        helper.wait_until_ready()
    assert pool.lost_workers == lost + 1
    new, same = pool.process_ids
    assert same == second
    assert new not in (first, second)
    rescued = pool.rescued_slices
    pool.begin(list(store.adapters.values()))
    check(pool, store, 0, {"small": 9, "large": 9})
    pool.end()
    assert pool.rescued_slices == rescued


def test_a_worker_that_does_not_answer_is_ended_before_its_rows_are_computed(pool: HostPool, store: Store) -> None:
    stopped, _ = pool.process_ids
    rescued = pool.rescued_slices
    os.kill(stopped, signal.SIGSTOP)
    pool._timeout_s = 0.2
    pool.begin(list(store.adapters.values()))
    check(pool, store, 1, {"large": 16})
    check(pool, store, 2, {"large": 16})
    pool.end()
    assert pool.rescued_slices == rescued + 1  # of the first layer; then it was asked no more
    assert stopped not in pool.process_ids


def test_a_worker_that_reports_an_error_is_not_waited_for(pool: HostPool, store: Store) -> None:
    stopped, _ = pool.process_ids
    rescued = pool.rescued_slices
    os.kill(stopped, signal.SIGSTOP)
    pool.begin(list(store.adapters.values()))
    pool.ring.signal_error(pool.ticket + 1, 0)
    check(pool, store, 1, {"large": 16})
    pool.end()
    assert pool.rescued_slices == rescued + 1


def test_times_of_a_lost_worker_are_not_measured(pool: HostPool, store: Store) -> None:
    os.kill(pool.process_ids[0], signal.SIGSTOP)
    pool.ring.signal_error(pool.ticket + 1, 0)
    with pytest.raises(ExecutorError, match="a host worker was lost during its measurement"):
        measure_host(pool, store.geometry, store.host, torch.device("cpu"))
    pool.end()


def test_without_any_worker_the_rank_computes(pool: HostPool, store: Store) -> None:
    rescued = pool.rescued_slices
    for process_id in pool.process_ids:
        os.kill(process_id, signal.SIGKILL)
    pool.begin(list(store.adapters.values()))
    for layer in range(3):
        check(pool, store, layer, {"large": 7, "small": 2})
    pool.end()
    assert pool.rescued_slices >= rescued + 4


def test_a_step_that_fails_between_two_layers_leaves_nothing_behind(pool: HostPool, store: Store) -> None:
    pool.begin(list(store.adapters.values()))
    pool.submit("qkv", 0, rows(9, 1), pool.assign([HostRows(0, 4, 7)]))
    pool.end()
    pool.begin(list(store.adapters.values()))
    check(pool, store, 0, {"small": 3})
    pool.end()


@pytest.fixture
def behind(store: Store) -> Iterator[tuple[DevicePool, ThreadExchange]]:
    """A device that does nothing yet."""
    exchange = ThreadExchange()
    pool = make_pool(store, exchange)
    assert isinstance(pool, DevicePool)
    pool.wait_until_ready()
    pool._timeout_s = 60.0
    yield pool, exchange
    exchange.goes_on.set()
    exchange.end()
    pool.close()


def test_the_thread_continues_before_the_device_runs_its_launches(
    behind: tuple[DevicePool, ThreadExchange], store: Store
) -> None:
    pool, exchange = behind
    pool.begin(list(store.adapters.values()))
    first, second = (torch.zeros(9, HIDDEN + 16) for _ in range(2))
    exchange.goes_on.clear()
    for layer, qkv in enumerate((first, second)):
        pool.submit("qkv", layer, rows(9, seed=layer), pool.assign([HostRows(1, 2, 7)]))
        pool.add_to(qkv)
    assert not pool.ring.has_x(1)
    os.kill(pool.process_ids[0], signal.SIGKILL)
    exchange.goes_on.set()
    pool.end()
    pool.settle()
    for layer, qkv in enumerate((first, second)):
        expected = store.expected("large", layer, rows(9, seed=layer)[2:7])
        torch.testing.assert_close(qkv[2:7].double(), expected, rtol=1e-4, atol=1e-5)
        assert not qkv[:2].any()
        assert not qkv[7:].any()
    assert pool.rescued_slices > 0


def test_a_device_that_fails_is_not_waited_for(behind: tuple[DevicePool, ThreadExchange], store: Store) -> None:
    pool, exchange = behind
    pool.begin(list(store.adapters.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "record_event", FailedMark)
        pool.submit("qkv", 0, rows(9, 1), pool.assign([HostRows(0, 4, 7)]))
    with pytest.raises(RuntimeError, match="the device has failed"):
        pool.end()


def test_a_device_that_cannot_register_the_ring_is_reported(store: Store) -> None:
    exchange = ThreadExchange()
    device = Exchanging(exchange)
    processes = [start_worker_process()]
    make = partial(DevicePool, device, exchange, processes, [None], [store.arena])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "register", refuse)
        with pytest.raises(ExecutorError, match="the shared memory of host workers: no"):
            make(sizes_for(store))
    assert processes[0].has_ended.wait(60.0)
    exchange.end()


class FailedMark:
    def wait(self) -> None:
        raise RuntimeError("the device has failed")


def refuse(memory: Tensor) -> None:
    raise RuntimeError("no")


def test_workers_get_cores_of_their_own_where_the_rank_leaves_some() -> None:
    assert worker_cores(2, 1, {0, 3, 5}) == [3, 5]
    assert worker_cores(1, 1, {0, 1}) == [1]
    assert worker_cores(1, 2, {0, 1}) == [None]
    assert worker_cores(2, 0, set(range(8))) == [None, None]
