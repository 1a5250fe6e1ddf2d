"""Whether adapters or KV leave the host tier: whichever saves less time per block."""

import pytest

from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.host_values import HostValues
from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.tree import DependencyTree
from lorikeet.presets import HostKv, Preset
from tests.memory.asks import ask, words
from tests.memory.trees import add_adapter, add_kv, view_of
from tests.support.scripted import Bench

LOAD_S = 0.001
COMPUTE_S = 0.011


def priced(view: MemoryView, reread_s: float, share: float = 0.5, price: float = 1.0) -> None:
    """Set the seconds per block of every kind."""
    view.reread_s = lambda blocks: reread_s * blocks
    view.load_kv_s = view.load_kv_alone_s = lambda blocks: LOAD_S * blocks
    view.prefill_s = lambda blocks: COMPUTE_S * blocks
    view.delay_per_lost_second = lambda excluded: price
    view.evicted_kv_share = lambda top: share


def test_a_block_is_worth_the_seconds_that_it_saves_at_the_rate_of_its_requests() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, size=4, last_use_s=5.0)
    kv = add_kv(tree, adapter, there=False, last_use_s=10.0)
    view = view_of(tree)
    values = HostValues(view)
    assert not values.known(), "nothing was measured"
    priced(view, reread_s=0.003)
    assert values.known()
    assert values.of(adapter, 15.0) == pytest.approx(0.003 / 10), "its last request is ten seconds ago"
    # A computed block delays one more request besides its own; half of the blocks are reused.
    assert values.of(kv, 15.0) == pytest.approx(0.5 * (2 * COMPUTE_S - LOAD_S) / 5)


def test_kv_that_costs_less_to_compute_than_to_load_is_worth_nothing() -> None:
    tree = DependencyTree()
    kv = add_kv(tree, add_adapter(tree), there=False)
    view = view_of(tree)
    priced(view, reread_s=0.003)
    view.prefill_s = lambda blocks: LOAD_S / 3 * blocks
    assert HostValues(view).of(kv, 1.0) == 0.0


def kv_and_adapter_compete(reread_s: float, share: float, *, measured: bool = True) -> tuple[int, int]:
    """Fill the host with KV, then with adapters that are each used once; return its blocks of KV and of adapters."""
    bench = Bench(blocks=20, host_blocks=12, preset=Preset(host_kv=HostKv.AHEAD, swap_interval_s=1e-6))
    if measured:
        priced(bench.memory._view, reread_s, share)
    for index in range(4):
        ask(bench, f"kv{index}", words(1000 * index, 5))
    assert bench.memory.host_counts().kv > 6
    for index in range(6):
        ask(bench, f"adapter{index}", [1, 2], f"a{index}", blocks=3)
    host = bench.memory.host_counts()
    return host.kv, host.adapter


def test_the_host_keeps_kv_that_is_worth_more_than_adapters() -> None:
    kv, adapters = kv_and_adapter_compete(reread_s=1e-6, share=0.9)
    assert kv >= 6
    assert adapters <= 6


def test_the_host_keeps_adapters_that_are_worth_more_than_kv() -> None:
    assert kv_and_adapter_compete(reread_s=0.1, share=0.1) == (0, 12)


def test_adapters_displace_kv_while_nothing_is_measured() -> None:
    assert kv_and_adapter_compete(0.0, 0.0, measured=False) == (0, 12)


@pytest.mark.parametrize(("reread_s", "is_kept"), [(1e-6, False), (0.1, True)])
def test_kv_takes_the_room_of_an_adapter_that_is_worth_less(reread_s: float, is_kept: bool) -> None:
    bench = Bench(blocks=12, host_blocks=4, preset=Preset(host_kv=HostKv.AHEAD, swap_interval_s=1e-6))
    priced(bench.memory._view, reread_s, share=0.9)
    ask(bench, "adapter", [1, 2], "a", blocks=4)
    assert bench.memory.host_counts().adapter == 4
    for index in range(4):
        ask(bench, f"kv{index}", words(1000 * index, 5))
    node = bench.memory.tree.adapter(AdapterDigest("digest-a"))
    assert node is not None
    assert bool(bench.memory.tree.on_host[node]) == is_kept
    assert (bench.memory.host_counts().kv > 0) != is_kept
