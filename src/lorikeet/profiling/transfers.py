"""Measures transfers: adapters from files, blocks between tiers, merging an adapter into the base weights.

The adapters are random and written for the measurement.
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
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import Tier
from lorikeet.costs.fit import fit_line, fit_medians, quality
from lorikeet.costs.model import SequenceWork, adapter_elements
from lorikeet.costs.profile import Constant, Link, Switching, Transfers
from lorikeet.profiling.driver import ExecutorDriver
from lorikeet.profiling.steps import Adapters, decodes
from lorikeet.workloads.random_adapters import write_random_adapter
from lorikeet.workloads.synthetic import ATTENTION

MODULES = ATTENTION
RANKS = (8, 16, 32, 64, 128)
_COPIES = 4


class RandomAdapters(NamedTuple):
    """Holds random adapters on ``MODULES``, one folder for each rank. Copies differ only in their digest.

    Attributes:
        refs: references to the adapters, by rank, ascending.
    """

    refs: dict[int, list[AdapterRef]]

    def digests(self) -> dict[int, list[str]]:
        """Return the digests by rank."""
        return {rank: [ref.digest for ref in refs] for rank, refs in self.refs.items()}


def adapter_bytes(geometry: ModelGeometry, ranks: Sequence[int]) -> int:
    """Return the bytes of an adapter of the largest rank."""
    of_layers = (max(ranks),) * geometry.layers
    return adapter_elements(dict.fromkeys(MODULES, of_layers), geometry) * geometry.dtype_bytes


@contextmanager
def random_adapters(geometry: ModelGeometry, ranks: Sequence[int] = RANKS) -> Iterator[RandomAdapters]:
    """Write random adapters. Their files are deleted at the end."""
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
"""Numbers of blocks in a copy. Numbers that exceed the tier are left out."""


def measure_transfers(
    driver: ExecutorDriver, adapters: RandomAdapters, rounds: int, tick: Callable[[], None]
) -> Transfers:
    """Move one adapter of each rank and several numbers of blocks over all links, then load all adapters to stay.

    The files have been read before, like the files of an adapter in regular use, and the blocks have been written. The
    executor reports the time of a transfer, without waiting for its turn.

    Args:
        driver: driver that has not loaded these adapters.
        adapters: adapters to load.
        rounds: number of measurements, at least one.
        tick: called :func:`transfer_ticks` times.

    Raises:
        ExecutorDriverError: too few blocks on a tier, or a transfer failed.
    """
    driver.write_host()
    geometry = driver.sizes.geometry
    block_bytes = geometry.block_bytes(driver.sizes.block_size)
    reads = _seconds_by_bytes()
    copies = _seconds_by_bytes()
    for turn in range(rounds + 1):
        for tier in _TIERS:
            for ref, *_ in adapters.refs.values():
                taken_s = _read(driver, ref, tier)
                if turn:  # the first round reads uncached files
                    reads[tier][adapter_elements(ref.ranks, geometry) * geometry.dtype_bytes].append(taken_s)
                tick()
            for blocks in _counts(driver):
                taken_s = driver.copy(tier, blocks)
                if turn:
                    copies[tier][blocks * block_bytes].append(taken_s)
                tick()
    for refs in adapters.refs.values():
        for ref in refs:
            driver.load(ref)
            tick()
    return Transfers(
        source_to_device=_link(reads[Tier.DEVICE]),
        source_to_host=_link(reads[Tier.HOST]),
        host_to_device=_link(copies[Tier.DEVICE]),
        device_to_host=_link(copies[Tier.HOST]),
    )


def transfer_ticks(driver: ExecutorDriver, adapters: RandomAdapters, rounds: int) -> int:
    """Return the number of times that :func:`measure_transfers` calls ``tick``."""
    measured = len(_TIERS) * (len(adapters.refs) + len(_counts(driver)))
    return measured * (rounds + 1) + sum(map(len, adapters.refs.values()))


def _seconds_by_bytes() -> dict[Tier, dict[int, list[float]]]:
    """Return empty measurements, by target and by number of bytes."""
    return {tier: defaultdict(list) for tier in _TIERS}


def _counts(driver: ExecutorDriver) -> list[int]:
    return [blocks for blocks in _BLOCKS if blocks <= driver.most_copied_blocks]


def _read(driver: ExecutorDriver, ref: AdapterRef, target: Tier) -> float:
    if target is Tier.HOST:
        return driver.read_to_host(ref)
    taken_s = driver.load(ref)
    driver.evict(ref.digest)
    return taken_s


def _link(seconds: Mapping[int, list[float]]) -> Link:
    """Fit a link to seconds by bytes."""
    found = fit_line(list(seconds), list(seconds.values()))
    byte_s = max(float(found.values[1]), 1e-15)
    error_s = float(found.errors[1])
    return Link(
        fixed=found.constant(0, "s"),
        bandwidth=Constant(1 / byte_s, "bytes/s", error_s / byte_s**2),
        fit=quality(found.predicted, found.measured),
    )


_CONTEXT = 8


def measure_switching(driver: ExecutorDriver, adapters: Adapters, rounds: int, tick: Callable[[], None]) -> Switching:
    """Merge an adapter of each rank, then another of the same rank, then none.

    The second merge counts like the first, because it writes the same weights, each once.

    Args:
        driver: driver whose executor can merge and that has loaded the adapters, at least two of each rank.
        adapters: adapters that all target the same modules.
        rounds: number of measurements, at least one, after an uncounted round.
        tick: called :func:`switch_ticks` times.
    """
    base = driver.prepare(decodes(1, _CONTEXT))
    pairs = {rank: [AdapterDigest(digest) for digest in digests[:2]] for rank, digests in adapters.items()}
    steps = {
        digest: driver.prepare((SequenceWork(_CONTEXT, 1, True, digest, rank),))
        for rank, digests in pairs.items()
        for digest in digests
    }
    order = random.Random(0)
    merges: dict[int, list[float]] = {rank: [] for rank in pairs}
    restores: list[float] = []
    for turn in range(rounds + 1):
        for rank in order.sample(list(pairs), len(pairs)):
            merge_s = [driver.switch(steps[digest], digest) for digest in pairs[rank]]
            restore_s = driver.switch(base, None)
            if turn:  # the first round touches new memory
                merges[rank] += merge_s
                restores.append(restore_s)
            tick()
    merge = fit_line(list(merges), list(merges.values()))
    restore = fit_medians(np.ones((1, 1)), [restores])
    return Switching(
        merge=merge.constant(0, "s"),
        merge_rank=merge.constant(1, "s/rank"),
        restore=restore.constant(0, "s"),
        merge_fit=quality(merge.predicted, merge.measured),
    )


def switch_ticks(adapters: Adapters, rounds: int) -> int:
    """Return the number of times that :func:`measure_switching` calls ``tick``."""
    return len(adapters) * (rounds + 1)
