"""Shadows of the memory's guarded parts: they price a part and its alternative on the events of the memory.

A shadow follows what the other choice would keep by the keys of blocks alone (ghosts). It holds a bounded number of
them, sampled by their hashes, so each stands for those that were left out. See ``core.guard``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from lorikeet.core.guard import HALF_LIFE_S, GuardedPart, Guards
from lorikeet.memory.copy_lead import COPIED_PART
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.policies.base import MIN_REUSED_SHARE, EvictionPolicy, MemoryView
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import BASE, NodeTransfer
from lorikeet.presets import HostKv

_MOST_GHOSTS = 8192
"""Most blocks of both tiers that a shadow follows."""
COPIES_IN_FLIGHT = 128
"""Most blocks of KV that are copied to the host ahead of their eviction at a time."""
EVICTIONS_PER_TICK = 64
RESERVED_SHARE = 0.05
"""Where KV is copied when it is evicted, the swapper evicts so many blocks a tick ahead of demand once the device was
full, until this share of it is free."""
_MOST_STALE = 1024
"""Most keys of ghosts, beside as many as there are ghosts, that are kept although they were used again later."""
_PRIOR_BLOCKS = 64.0
"""Blocks that are assumed to have been as expected at the start."""
_PROBE_S = 5.0
"""Seconds after which a load is tried although ``GuardedPart.LOADS`` is off, to measure how long loads take."""
_WEIGHT = 0.2
_WEIGHT_OF_PROBE = 0.8
"""Weights of the newest load in the mean ratio of measured to estimated times, and of a load that was the only one for
some seconds."""


class KeySample:
    """Samples block keys by their hash: a key is always in the sample or never.

    Args:
        blocks: number of blocks that may be cached at a time.

    Attributes:
        scale: number of blocks that each sampled one stands for.
    """

    def __init__(self, blocks: int) -> None:
        self._below = max(1, min(256, 256 * _MOST_GHOSTS // max(1, blocks)))
        self.scale = 256 / self._below

    def of(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the sampled keys."""
        below = self._below
        return [key for key in keys if key[0] < below]

    def placed(self, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Return the sampled keys with their places among ``keys``."""
        below = self._below
        return [(place, key) for place, key in enumerate(keys) if key[0] < below]


class GhostList:
    """Keys in the order in which a cache of limited size evicts them, without the cache.

    The keys of a use are kept together as a run with a number, and each key has the number of its last run. A key in an
    older run is skipped, so that a use moves no single key.

    Args:
        size: size of each key of :meth:`use`.
    """

    def __init__(self, size: float = 1.0) -> None:
        self._size = size
        self._run_of: dict[bytes, int] = {}
        self._first: deque[_Run] = deque()
        self._others: deque[_Run] = deque()
        self._queued = 0
        self._uses = 0
        self._more: dict[bytes, float] = {}  # sizes of adapters beyond that of a key
        self._all_more = 0.0

    def __contains__(self, key: bytes) -> bool:
        """Return whether the cache would hold a key."""
        return key in self._run_of

    @property
    def size(self) -> float:
        """Size of all keys."""
        return len(self._run_of) * self._size + self._all_more

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that the cache would not hold."""
        run_of = self._run_of
        return [key for key in keys if key not in run_of]

    def prefix(self, keys: Iterable[bytes]) -> int:
        """Return how many of the first keys the cache would hold."""
        return sum(1 for _ in takewhile(self._run_of.__contains__, keys))

    def use(self, keys: list[bytes], *, goes_first: bool = False) -> None:
        """Make distinct keys the last that are evicted; with ``goes_first`` only of those evicted first.

        Args:
            keys: the keys. Of these, the last key is evicted first.
            goes_first: whether the keys are evicted before all others.
        """
        if not keys:
            return
        self._uses += 1
        self._run_of.update(dict.fromkeys(keys, self._uses))
        (self._first if goes_first else self._others).append(_Run(self._uses, keys))
        self._queued += len(keys)
        if self._queued > _MOST_STALE + 2 * len(self._run_of):
            self._drop_stale()

    def use_adapter(self, key: bytes, size: float) -> None:
        """Make the key of an adapter of some size the last that is evicted."""
        self.use([key])
        self._all_more += size - self._size - self._more.pop(key, 0.0)
        self._more[key] = size - self._size

    def shrink(self, size: float) -> None:
        """Evict keys until the rest has at most this size."""
        run_of = self._run_of
        while (excess := self.size - size) > 0 and (queue := self._first or self._others):
            number, keys = queue[0]
            count = len(keys)
            while keys and excess > 0:
                key = keys.pop()
                if run_of.get(key) == number:
                    del run_of[key]
                    more = self._more.pop(key, 0.0)
                    self._all_more -= more
                    excess -= self._size + more
            self._queued -= count - len(keys)
            if not keys:
                queue.popleft()

    def _drop_stale(self) -> None:
        """Drop the keys that were used again later from their earlier runs."""
        run_of = self._run_of
        for queue in (self._first, self._others):
            runs = [_Run(number, [key for key in keys if run_of.get(key) == number]) for number, keys in queue]
            queue.clear()
            queue.extend(run for run in runs if run.keys)
        self._queued = len(run_of)


class _Run(NamedTuple):
    """Keys that were used together.

    Attributes:
        number: number of the use.
        keys: the keys; the last is evicted first.
    """

    number: int
    keys: list[bytes]


class _Fading:
    """A ratio of two sums that fade, so that it returns to 1 while nothing is measured.

    Args:
        prior: what both sums have at the start, and in which they fade.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._above = self._below = 0.0
        self._at_s = 0.0

    def add(self, above: float, below: float, now: float) -> None:
        """Add to both sums."""
        fade: float = 0.5 ** (max(0.0, now - self._at_s) / HALF_LIFE_S)
        self._at_s = now
        self._above = fade * self._above + above
        self._below = fade * self._below + below

    def value(self, now: float) -> float:
        """Return the ratio."""
        fade: float = 0.5 ** (max(0.0, now - self._at_s) / HALF_LIFE_S)
        return (fade * self._above + self._prior) / (fade * self._below + self._prior)


class _Waits:
    """The time for which requests wait for copies of KV, as a multiple of what the model of a choice expects.

    Both are counted per copied block, since the wait is measured while the choice acts, and modelled while it does not.
    """

    def __init__(self) -> None:
        self._modelled_s = self._modelled_blocks = 0.0
        self._ratio = _Fading(_PRIOR_BLOCKS)

    def model(self, seconds: float, blocks: float, now: float) -> float:
        """Add a modelled wait for blocks that would be copied; return it corrected."""
        self._modelled_s += seconds
        self._modelled_blocks += blocks
        return seconds * self._ratio.value(now)

    def copied(self, blocks: float, now: float) -> None:
        """Add blocks that were copied."""
        self._ratio.add(0.0, blocks, now)

    def measure(self, seconds: float, now: float) -> None:
        """Add a wait for copies."""
        if self._modelled_s:
            self._ratio.add(seconds * self._modelled_blocks / self._modelled_s, 0.0, now)


class CopyShadow:
    """Prices copies ahead of eviction (on) beside copies at eviction (off).

    KV that the acting choice keeps on the host is seen there; that of the other one is a ghost. Waits for copies are
    measured where the acting choice makes them, and else modelled: KV without a copy is copied when it is evicted, and
    requests wait for its blocks, as far as there is no reserve of free ones. Ghosts and model are corrected by what was
    measured while their choice acted.

    Args:
        guards: gets the costs.
        view: has prices.
        sample: chooses the blocks.
        tick_s: seconds between rounds of copies ahead of eviction.
        host_kv_blocks: returns the number of host blocks that KV may use.
    """

    def __init__(
        self, guards: Guards, view: MemoryView, sample: KeySample, tick_s: float, host_kv_blocks: Callable[[], int]
    ) -> None:
        guards.add(GuardedPart.COPIES)
        self._guards = guards
        self._view = view
        self._sample = sample
        self._copies_per_s = COPIES_IN_FLIGHT / tick_s if tick_s else 0.0
        self._host_kv_blocks = host_kv_blocks
        self._ahead = GhostList()
        self._at_eviction = GhostList()
        self._most_copied = view.device_blocks / COPIED_PART
        self._copied = self._most_copied  # blocks that could have been copied ahead by now
        self._most_reserved = view.device_blocks * RESERVED_SHARE
        self._frees_per_s = EVICTIONS_PER_TICK / tick_s if tick_s else 0.0
        self._refills = False
        self._found_on = _Fading(_PRIOR_BLOCKS)
        self._found_off = _Fading(_PRIOR_BLOCKS)
        self._waits_on = _Waits()
        self._waits_off = _Waits()
        self._reserved = self._most_reserved  # blocks that are free, where copies are made at eviction
        self._at_s = 0.0

    def evicted(self, top: int, keys: Sequence[bytes], now: float) -> None:
        """Record that KV of an adapter (its node) is evicted from the device."""
        sampled = self._sample.of(keys)
        view = self._view
        store_s = view.store_kv_alone_s(1)
        passed_s = max(0.0, now - self._at_s)
        self._at_s = now
        link_per_s = 1 / store_s if store_s else np.inf
        self._copied = min(self._most_copied, self._copied + passed_s * min(self._copies_per_s, link_per_s))
        if self._refills and passed_s:
            freed = passed_s * min(self._frees_per_s, link_per_s)
            self._reserved = min(self._most_reserved, self._reserved + freed)
            self._refills = self._reserved < self._most_reserved
        scale = self._sample.scale
        waiting = max(1, view.queued)
        share = view.evicted_kv_share(top)
        is_copied = share >= MIN_REUSED_SHARE
        late = self._ahead.missing(sampled)
        waits_on_s = waits_off_s = waited = 0.0
        lost: set[bytes] = set()
        if late:
            in_time = int(min(len(late), self._copied / scale)) if is_copied and view.loading_kv_pays(1) else 0
            self._copied -= in_time * scale
            rest = len(late) - in_time
            if rest > 0 and is_copied and view.waiting_for_a_copy_pays(max(1, round(rest * scale)), share):
                waits_on_s = store_s * rest * scale + view.iteration_s
                waited = rest * scale
                in_time = len(late)
            lost = set(late[in_time:])
        copied = len(self._at_eviction.missing(sampled))
        short = max(0.0, len(keys) - self._reserved)
        self._reserved = max(0.0, self._reserved - len(keys))
        self._refills |= short > 0  # only then the swapper evicts ahead of demand
        if short and copied:  # blocks that are free during a step are used by the next
            waits_off_s = store_s * min(short, copied * scale) + view.iteration_s
        sampled.reverse()  # the host evicts KV in the order in which the device did
        self._ahead.use([key for key in sampled if key not in lost] if lost else sampled.copy())
        self._at_eviction.use(sampled)
        for ghosts in (self._ahead, self._at_eviction):
            ghosts.shrink(self._host_kv_blocks() / scale)
        if self._guards.is_on(GuardedPart.COPIES):
            self._waits_on.copied(waited, now)
            other_s = waiting * self._waits_off.model(waits_off_s, copied * scale, now)
            if other_s:
                self._guards.note(GuardedPart.COPIES, 0.0, other_s, now)
        else:
            self._waits_off.copied(copied * scale, now)
            other_s = waiting * self._waits_on.model(waits_on_s, waited, now)
            if other_s:
                self._guards.note(GuardedPart.COPIES, other_s, 0.0, now)

    def waited(self, seconds: float, now: float) -> None:
        """Record that a request, the first in the queue, waited so long for blocks that were being copied."""
        cost_s = seconds * max(1, self._view.queued)
        if self._guards.is_on(GuardedPart.COPIES):
            self._waits_on.measure(seconds, now)
            self._guards.note(GuardedPart.COPIES, cost_s, 0.0, now)
        else:
            self._waits_off.measure(seconds, now)
            self._guards.note(GuardedPart.COPIES, 0.0, cost_s, now)

    def requested(self, sampled: Sequence[tuple[int, bytes]], path: Sequence[int], now: float) -> None:
        """Record that a request needs KV.

        Args:
            sampled: sampled keys of its blocks, with their places.
            path: its nodes that are on a tier.
            now: the time.
        """
        tree = self._view.tree
        acts = self._guards.is_on(GuardedPart.COPIES)
        own, other = (self._ahead, self._at_eviction) if acts else (self._at_eviction, self._ahead)
        found, expected = (self._found_on, self._found_off) if acts else (self._found_off, self._found_on)
        is_kept = is_expected = True
        blocks = loads = ghosts = 0
        used: list[bytes] = []
        at = np.asarray(path, np.int64)
        on_device = (tree.on_device[at] | (tree.moving[at] == NodeTransfer.IN)).tolist()
        for place, key in sampled:
            is_there = place < len(path)
            if is_there and on_device[place]:
                continue
            if key in own:
                found.add(is_there, 1.0, now)
            is_kept = is_kept and is_there
            is_expected = is_expected and key in other
            if not (is_kept or is_expected):
                break
            blocks += 1
            loads += is_kept
            ghosts += is_expected
            used.append(key)
        if not blocks:
            return
        used.reverse()  # later KV is evicted after earlier KV, because it is used after it
        for each in (own, other):
            each.use([key for key in used if key in each])
        scale = self._sample.scale
        compute_s = self._view.compute_kv_cost_s(1)
        load_s = min(compute_s, self._view.load_kv_alone_s(1))
        own_s = scale * (blocks * compute_s - loads * (compute_s - load_s))
        other_s = scale * (blocks * compute_s - ghosts * expected.value(now) * (compute_s - load_s))
        self._guards.note(GuardedPart.COPIES, *((own_s, other_s) if acts else (other_s, own_s)), now)


class EvictionShadow:
    """Prices the eviction of rarely reused KV first (on) beside that of the least recently used (off).

    Both are ghost lists of a device of the same size. A block or adapter that a request needs costs nothing where it is
    there, and else the time to load or compute it.

    Args:
        guards: gets the costs.
        view: has prices and the tree.
        sample: chooses the blocks.
        has_host: whether there is a host tier.
    """

    def __init__(self, guards: Guards, view: MemoryView, sample: KeySample, *, has_host: bool) -> None:
        guards.add(GuardedPart.EVICTION)
        self._guards = guards
        self._view = view
        self._sample = sample
        self._has_host = has_host
        self._by_worth = GhostList(sample.scale)
        self._by_use = GhostList(sample.scale)

    def requested(self, adapter: int, sampled: Sequence[bytes], now: float) -> None:
        """Record that a request needs an adapter (its node) and KV (sampled keys of its blocks)."""
        share = self._view.kv_share(adapter)
        view = self._view
        on_s, off_s = self._adapter_costs_s(adapter)
        kept_on = self._by_worth.prefix(sampled)
        kept_off = self._by_use.prefix(sampled)
        lost_on = max(0, kept_off - kept_on)
        lost_off = max(0, kept_on - kept_off)
        if lost_on or lost_off:
            recover_s = view.compute_kv_cost_s(1)
            if self._has_host and share >= MIN_REUSED_SHARE:
                recover_s = min(recover_s, view.load_kv_alone_s(1))
            recover_s *= self._sample.scale
            on_s += lost_on * recover_s
            off_s += lost_off * recover_s
        self._use(adapter, sampled, share)
        if on_s or off_s:
            self._guards.note(GuardedPart.EVICTION, on_s, off_s, now)

    def ended(self, adapter: int, keys: Sequence[bytes]) -> None:
        """Record that a request has computed blocks with these keys; ``adapter`` is the node of its adapter."""
        self._use(adapter, self._sample.of(keys), self._view.kv_share(adapter))

    def _adapter_costs_s(self, adapter: int) -> tuple[float, float]:
        key = self._view.tree.key_of(adapter) if adapter != BASE else b""
        lost_on = key not in self._by_worth
        lost_off = key not in self._by_use
        if adapter == BASE or lost_on == lost_off:
            return 0.0, 0.0
        load_s = float(self._view.load_s(np.array([adapter], np.int64))[0])
        return load_s * lost_on, load_s * lost_off

    def _use(self, adapter: int, sampled: Sequence[bytes], share: float) -> None:
        """Make a path the last that is evicted, later KV before earlier, and its adapter after it."""
        tree = self._view.tree
        for ghosts, goes_first in ((self._by_worth, share < MIN_REUSED_SHARE), (self._by_use, False)):
            ghosts.use(list(sampled), goes_first=goes_first)
            if adapter != BASE:
                ghosts.use_adapter(tree.key_of(adapter), float(tree.size[adapter]))
            ghosts.shrink(self._view.device_blocks)


class LoadShadow:
    """Prices loads of KV where estimates say that they pay (on) beside computing that KV again (off).

    Loads are judged by the time that they took. While none is made, estimates count, corrected by the last loads, and
    one is made from time to time, to see whether they still take so long.

    Args:
        guards: gets the costs.
        view: has prices.
    """

    def __init__(self, guards: Guards, view: MemoryView) -> None:
        guards.add(GuardedPart.LOADS)
        self._guards = guards
        self._view = view
        self._ratio = 1.0
        self._probe_s = -np.inf
        self._loads: dict[int, tuple[float, float, float]] = {}

    def loads(self, blocks: int, needed: int, now: float) -> bool:
        """Return whether a queued request loads KV from the host; see ``MemoryView.loading_kv_pays``."""
        view = self._view
        if not view.loading_kv_pays(blocks, needed, is_waiting=True):
            return False
        if self._guards.is_on(GuardedPart.LOADS):
            return True
        load_s = view.load_kv_cost_s(blocks, needed, is_waiting=True) * self._ratio
        compute_s = view.compute_kv_cost_s(blocks, is_waiting=True)
        is_probe = now >= self._probe_s + _PROBE_S
        if not is_probe and compute_s:
            self._guards.note(GuardedPart.LOADS, load_s, compute_s, now)
        return is_probe or self._guards.is_on(GuardedPart.LOADS)

    def began(self, transfer_id: int, blocks: int, needed: int, now: float) -> None:
        """Record the start of a load that a request waits for; it is among the transfers in flight already."""
        view = self._view
        estimate_s = view.load_kv_s(0)
        cost_s = view.load_kv_cost_s(0, max(blocks, needed), is_waiting=True)
        price = cost_s / estimate_s if estimate_s else 1.0
        self._loads[transfer_id] = estimate_s, price, view.compute_kv_cost_s(blocks, is_waiting=True)
        self._probe_s = now

    def ended(self, transfer_id: int, took_s: float, now: float) -> None:
        """Record the end of a transfer, which may be such a load."""
        load = self._loads.pop(transfer_id, None)
        if load is None:
            return
        estimate_s, price, compute_s = load
        if estimate_s:
            weight = _WEIGHT if self._guards.is_on(GuardedPart.LOADS) else _WEIGHT_OF_PROBE
            self._ratio += weight * (took_s / estimate_s - self._ratio)
        if compute_s:
            self._guards.note(GuardedPart.LOADS, took_s * price, compute_s, now)


class Shadows(NamedTuple):
    """The shadows of a memory; those of parts that it does not have or guard are None."""

    sample: KeySample
    copies: CopyShadow | None = None
    eviction: EvictionShadow | None = None
    loads: LoadShadow | None = None

    @classmethod
    def build(cls, view: MemoryView, options: MemoryOptions, eviction: EvictionPolicy, tiers: Tiers) -> "Shadows":
        """Create the shadows that a memory needs.

        Args:
            view: has prices, the tree and the guards.
            options: memory options of the preset.
            eviction: eviction policy of the preset.
            tiers: has the sizes of both tiers.
        """
        guards = view.guards
        host = tiers.host.total
        sample = KeySample(view.device_blocks + host)
        if not guards.enabled:
            return cls(sample)
        copies = loads = None
        if host and options.host_kv is HostKv.AHEAD:

            def host_kv_blocks() -> int:
                return host - tiers.host_counts().adapter

            copies = CopyShadow(guards, view, sample, options.tick_s, host_kv_blocks)
            loads = LoadShadow(guards, view)
        by_worth = eviction.worthless_below > -np.inf
        return cls(
            sample, copies, EvictionShadow(guards, view, sample, has_host=bool(host)) if by_worth else None, loads
        )

    def requested(self, adapter: int, keys: Sequence[bytes], path: Sequence[int], now: float) -> None:
        """Record the arrival of a request.

        Args:
            adapter: node of its adapter.
            keys: keys of its whole blocks.
            path: its nodes that are on a tier.
            now: the time.
        """
        if self.copies is None and self.eviction is None:
            return
        if self.copies is not None:
            self.copies.requested(self.sample.placed(keys), path, now)
        if self.eviction is not None:
            self.eviction.requested(adapter, self.sample.of(keys), now)
