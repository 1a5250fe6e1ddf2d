"""Shadows of the memory's parts, on loads that change every five minutes which choice wins."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest

from lorikeet.core.guard import GuardedPart, Guards
from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.shadows import CopyShadow, EvictionShadow, GhostList, KeySample, LoadShadow
from lorikeet.memory.tree import DependencyTree
from tests.memory.trees import add_adapter, add_kv, leave, view_of

PHASE_S = 300.0
PHASES = 4
COMPUTE_S = 0.04
BASE_S = 0.02
"""What a request waits whatever acts."""


class World:
    """A clock and the guards of an engine. It adds up the waiting with each choice, and with the guard's."""

    def __init__(self, part: GuardedPart, seed: int) -> None:
        self.guards = Guards(enabled=True)
        self.chance = random.Random(seed)
        self.tree = DependencyTree()
        self.view = view_of(self.tree, device_blocks=1000)
        self.view.guards = self.guards
        self.view.prefill_s = lambda blocks: COMPUTE_S * blocks
        self.now = 0.0
        self._part = part
        self.cost_s = self.best_s = 0.0
        self._phase_s = [0.0, 0.0]
        self.always_s = [0.0, 0.0]

    def phases(self, per_s: float) -> Iterator[bool]:
        """Yield at random times whether the part should win now."""
        for phase in range(PHASES):
            while self.now < (phase + 1) * PHASE_S:
                self.now += self.chance.expovariate(per_s)
                yield phase % 2 == 0
            self.best_s += min(self._phase_s)
            self._phase_s = [0.0, 0.0]

    def add(self, on_s: float, off_s: float, acting_s: float | None = None) -> None:
        """Add the waiting of a request with each choice, and with the guard's."""
        acting_s = BASE_S + (acting_s if acting_s is not None else on_s if self.is_on else off_s)
        for choice, seconds in enumerate((on_s, off_s)):
            self._phase_s[choice] += BASE_S + seconds
            self.always_s[choice] += BASE_S + seconds
        self.cost_s += acting_s
        self.guards.waited(acting_s, self.now)

    @property
    def is_on(self) -> bool:
        return self.guards.is_on(self._part)

    @property
    def regret(self) -> float:
        """Cost above that of the better choice of each phase, as a share of the latter."""
        return self.cost_s / self.best_s - 1


def loads(seed: int) -> World:
    """A link that is as fast as it seems, then four times slower."""
    world = World(GuardedPart.LOADS, seed)
    world.view.load_kv_s = lambda blocks: 0.02 * max(blocks, 1)
    shadow = LoadShadow(world.guards, world.view)
    for transfer, is_fast in enumerate(world.phases(per_s=20)):
        took_s = 0.02 if is_fast else 0.08
        acts = shadow.loads(1, 1, world.now)
        if acts:
            shadow.began(transfer, 1, 1, world.now)
            shadow.ended(transfer, took_s, world.now)
        world.add(took_s, COMPUTE_S, took_s if acts else COMPUTE_S)
    return world


def evictions(seed: int) -> World:
    """KV of an adapter that is rarely reused as a whole, but that is reused soon, if at all, in every other phase."""
    world = World(GuardedPart.EVICTION, seed)
    single, chat = add_adapter(world.tree), add_adapter(world.tree)
    size = 200
    world.view = view_of(world.tree, device_blocks=size)
    world.view.guards = world.guards
    world.view.prefill_s = lambda blocks: COMPUTE_S * blocks
    shares = {single: 0.0, chat: 0.5}
    world.view.kv_share = shares.__getitem__
    shadow = EvictionShadow(world.guards, world.view, KeySample(size), has_host=False)
    caches = [GhostList(), GhostList(), GhostList()]  # always on, always off, as the guard chooses
    recent: dict[int, OrderedDict[bytes, None]] = {single: OrderedDict(), chat: OrderedDict()}
    for wins in world.phases(per_s=40):
        # The part wins where only the chat's KV returns, after more single shots than the device holds.
        adapter = world.chance.choice((single, single, single, chat))
        returns = adapter == (chat if wins else single) and world.chance.random() < 0.5 and len(recent[adapter]) > 50
        key = list(recent[adapter])[-50 if wins else -20] if returns else world.chance.randbytes(16)
        costs = [0.0 if key in cache else COMPUTE_S for cache in caches] if returns else [0.0, 0.0, 0.0]
        for cache, is_on in zip(caches, (True, False, world.is_on), strict=True):
            cache.use([key], goes_first=is_on and shares[adapter] < 0.05)
            cache.shrink(100 if wins else size - 20)
        world.add(*costs)
        shadow.requested(adapter, [key], world.now)
        recent[adapter][key] = None
        recent[adapter].move_to_end(key)
        while len(recent[adapter]) > 100:
            recent[adapter].popitem(last=False)
    return world


def copies(seed: int) -> World:
    """Requests wait for copies at eviction, then KV is lost that seemed not worth its copy ahead."""
    world = World(GuardedPart.COPIES, seed)
    adapter = add_adapter(world.tree)
    blocks = [add_kv(world.tree, adapter) for _ in range(8)]
    for node in reversed(blocks):
        leave(world.tree, node)
    view = world.view
    view.store_kv_s = view.store_kv_alone_s = lambda count: 0.01 * count
    view.load_kv_s = view.load_kv_alone_s = lambda count: 0.001 * count
    view.iteration_s = 0.02
    share = [0.5]
    view.evicted_kv_share = lambda top: share[0]
    shadow = CopyShadow(world.guards, view, KeySample(1000), 0.1, lambda: 100_000)
    lost: list[bytes] = []
    for wins in world.phases(per_s=10):
        share[0] = 0.5 if wins else 0.0
        keys = [world.chance.randbytes(16) for _ in range(8)]
        is_on = world.is_on
        shadow.evicted(adapter, keys, world.now)
        if wins:  # the link copies 100 blocks a second, and 80 are evicted: the reserve is used up again and again
            wait_s = 8 * 0.01
            if not is_on:
                shadow.waited(wait_s, world.now)
            world.add(0.0, wait_s)
            continue
        lost.append(keys[0])
        if len(lost) > 20:
            # The oldest comes back: the device has none of it, and the host only with copies at eviction.
            key = lost.pop(0)
            shadow.requested([(0, key)], [] if is_on else blocks[:1], world.now)
            world.add(COMPUTE_S, 0.001)
    return world


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("run", [loads, evictions, copies], ids=["loads", "evictions", "copies"])
def test_adversarial_loads_cost_at_most_five_percent(run: Callable[[int], World], seed: int) -> None:
    world = run(seed)
    assert world.regret <= 0.05
    assert world.cost_s < 0.95 * min(world.always_s), "neither choice alone comes near"
    assert world.cost_s == run(seed).cost_s, "the same seed gives the same choices"


def test_ghosts_are_bounded_however_many_blocks_there_are() -> None:
    sample = KeySample(10_000_000)
    ghosts = GhostList(sample.scale)
    chance = random.Random(3)
    for _ in range(20_000):
        ghosts.use(sample.of([chance.randbytes(16)]))
        ghosts.shrink(4_000_000)
    assert ghosts.size <= 4_000_000


def test_keys_that_go_first_are_evicted_before_older_ones() -> None:
    ghosts = GhostList()
    ghosts.use([b"old"])
    ghosts.use([b"worthless"], goes_first=True)
    ghosts.use([b"new"])
    ghosts.shrink(2)
    assert [key in ghosts for key in (b"old", b"worthless", b"new")] == [True, False, True]


def test_a_view_without_data_costs_nothing() -> None:
    guards = Guards(enabled=True)
    view = MemoryView(DependencyTree(), 100, guards=guards)
    shadow = LoadShadow(guards, view)
    assert shadow.loads(1, 1, 0.0), "nothing is known of the time to compute"
    assert guards.stats()["loads"].on_s == 0.0
