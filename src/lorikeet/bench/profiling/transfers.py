"""Measures transfers: adapters from files, blocks between tiers, merging an adapter into the base weights.

The adapters are random ones, written for the measurement.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np

from lorikeet.adapters.store import reference
from lorikeet.bench.profiling.driver import ExecutorDriver
from lorikeet.bench.profiling.steps import Adapters, decodes
from lorikeet.bench.random_adapters import write_random_adapter
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import Tier
from lorikeet.costs.fit import fit_line, fit_medians, quality
from lorikeet.costs.model import SequenceWork, adapter_elements
from lorikeet.costs.profile import Constant, Link, Switching, Transfers

MODULES = ATTENTION
RANKS = (8, 16, 32, 64, 128)
_COPIES = 4


class RandomAdapters(NamedTuple):
    """Adapters on ``MODULES``, one folder for each rank; copies differ in nothing but their digest.

    Attributes:
        refs: by rank, ascending.
    """

    refs: dict[int, list[AdapterRef]]

    def digests(self) -> dict[int, list[str]]:
        """Return the digests by rank."""
        return {rank: [ref.digest for ref in refs] for rank, refs in self.refs.items()}


def adapter_bytes(geometry: ModelGeometry, ranks: Sequence[int]) -> int:
    """Return what an adapter of the largest rank takes."""
    of_layers = (max(ranks),) * geometry.layers
    return adapter_elements(dict.fromkeys(MODULES, of_layers), geometry) * geometry.dtype_bytes


@contextmanager
def random_adapters(geometry: ModelGeometry, ranks: Sequence[int] = RANKS) -> Iterator[RandomAdapters]:
    """Write adapters; the files are gone at the end."""
    with TemporaryDirectory(prefix="lorikeet-profile-") as scratch:
        refs: dict[int, list[AdapterRef]] = {}
        for rank in ranks:
            folder = write_random_adapter(Path(scratch) / f"rank-{rank}", geometry, rank, modules=MODULES, seed=rank)
            ref = reference(folder.name, folder, geometry)
            refs[rank] = [
                msgspec.structs.replace(ref, digest=AdapterDigest(f"{ref.digest}-{i}")) for i in range(_COPIES)
            ]
        yield RandomAdapters(refs)


_TIERS = (Tier.HOST, Tier.DEVICE)
_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
"""Of a copy, as far as there are so many."""


def measure_transfers(
    rig: ExecutorDriver, adapters: RandomAdapters, rounds: int, tick: Callable[[], None]
) -> Transfers:
    """Move one adapter of each rank and several numbers of blocks over all links, then load all adapters to stay.

    The files have been read before, as those of an adapter that is used now and then have, and the blocks were written.
    What a transfer takes is what the executor says of it: its turn is not waited for.

    Args:
        rig: has none of the adapters.
        adapters: to be loaded.
        rounds: how often each is measured, at least once.
        tick: called :func:`transfers_in_all` times.

    Raises:
        ExecutorDriverError: there are too few blocks on a tier, or a transfer failed.
    """
    rig.write_host()
    geometry = rig.sizes.geometry
    block_bytes = geometry.block_bytes(rig.sizes.block_size)
    reads, copies = _seconds_by_bytes(), _seconds_by_bytes()
    for turn in range(rounds + 1):
        for tier in _TIERS:
            for ref, *_ in adapters.refs.values():
                taken_s = _read(rig, ref, tier)
                if turn:  # the first reads what was never read
                    reads[tier][adapter_elements(ref.ranks, geometry) * geometry.dtype_bytes].append(taken_s)
                tick()
            for blocks in _counts(rig):
                taken_s = rig.copy(tier, blocks)
                if turn:
                    copies[tier][blocks * block_bytes].append(taken_s)
                tick()
    for refs in adapters.refs.values():
        for ref in refs:
            rig.load(ref)
            tick()
    return Transfers(
        source_to_device=_link(reads[Tier.DEVICE]),
        source_to_host=_link(reads[Tier.HOST]),
        host_to_device=_link(copies[Tier.DEVICE]),
        device_to_host=_link(copies[Tier.HOST]),
    )


def transfers_in_all(rig: ExecutorDriver, adapters: RandomAdapters, rounds: int) -> int:
    """Return how often :func:`measure_transfers` ticks."""
    measured = len(_TIERS) * (len(adapters.refs) + len(_counts(rig)))
    return measured * (rounds + 1) + sum(map(len, adapters.refs.values()))


def _seconds_by_bytes() -> dict[Tier, dict[int, list[float]]]:
    """Return room for measurements: by target, then by bytes."""
    return {tier: defaultdict(list) for tier in _TIERS}


def _counts(rig: ExecutorDriver) -> list[int]:
    return [blocks for blocks in _BLOCKS if blocks <= rig.most_copied_blocks]


def _read(rig: ExecutorDriver, ref: AdapterRef, target: Tier) -> float:
    if target is Tier.HOST:
        return rig.read_to_host(ref)
    taken_s = rig.load(ref)
    rig.evict(ref.digest)
    return taken_s


def _link(seconds: Mapping[int, list[float]]) -> Link:
    """Fit a link to seconds by bytes."""
    found = fit_line(list(seconds), list(seconds.values()))
    byte_s, error_s = max(float(found.values[1]), 1e-15), float(found.errors[1])
    return Link(
        fixed=found.figure(0, "s"),
        bandwidth=Constant(1 / byte_s, "bytes/s", error_s / byte_s**2),
        fit=quality(found.predicted, found.measured),
    )


_CONTEXT = 8


def measure_switching(rig: ExecutorDriver, adapters: Adapters, rounds: int, tick: Callable[[], None]) -> Switching:
    """Merge an adapter of each rank, another of the same rank in its place, and none.

    The second merge counts as the first does: it writes the same weights, each once.

    Args:
        rig: its executor's row merges, and it has loaded the adapters: two at least of each rank.
        adapters: all of them change the same modules.
        rounds: how often each is measured, at least once, after a round that is not kept.
        tick: called :func:`switches_in_all` times.
    """
    base = rig.prepare(decodes(1, _CONTEXT))
    pairs = {rank: [AdapterDigest(digest) for digest in digests[:2]] for rank, digests in adapters.items()}
    steps = {
        digest: rig.prepare((SequenceWork(_CONTEXT, 1, True, digest, rank),))
        for rank, digests in pairs.items()
        for digest in digests
    }
    order = random.Random(0)
    merges: dict[int, list[float]] = {rank: [] for rank in pairs}
    restores: list[float] = []
    for turn in range(rounds + 1):
        for rank in order.sample(list(pairs), len(pairs)):
            merge_s = [rig.switch(steps[digest], digest) for digest in pairs[rank]]
            restore_s = rig.switch(base, None)
            if turn:  # the first writes and reads what was not touched before
                merges[rank] += merge_s
                restores.append(restore_s)
            tick()
    merge = fit_line(list(merges), list(merges.values()))
    restore = fit_medians(np.ones((1, 1)), [restores])
    return Switching(
        merge=merge.figure(0, "s"),
        merge_rank=merge.figure(1, "s/rank"),
        restore=restore.figure(0, "s"),
        merge_fit=quality(merge.predicted, merge.measured),
    )


def switches_in_all(adapters: Adapters, rounds: int) -> int:
    """Return how often :func:`measure_switching` ticks."""
    return len(adapters) * (rounds + 1)
