"""How long transfers take: adapters from their files, and blocks between the tiers."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from lorikeet.bench.profiling.adapters import RandomAdapters
from lorikeet.bench.profiling.rig import Rig
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.plan import Tier
from lorikeet.costs.fit import fit_line, quality
from lorikeet.costs.model import adapter_elements
from lorikeet.costs.profile import Figure, Link, Transfers

_TIERS = (Tier.HOST, Tier.DEVICE)
_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
"""Of a copy, as far as there are so many."""


def measure_transfers(rig: Rig, adapters: RandomAdapters, rounds: int, tick: Callable[[], None]) -> Transfers:
    """Move one adapter of each rank and several numbers of blocks over all links, then load all adapters to stay.

    The files have been read before, as those of an adapter that is used now and then have, and the blocks were written.
    What a transfer takes is what the executor says of it: its turn is not waited for.

    Args:
        rig: has none of the adapters.
        adapters: to be loaded.
        rounds: how often each is measured, at least once.
        tick: called :func:`transfers_in_all` times.

    Raises:
        RigError: there are too few blocks on a tier, or a transfer failed.
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


def transfers_in_all(rig: Rig, adapters: RandomAdapters, rounds: int) -> int:
    """Return how often :func:`measure_transfers` ticks."""
    measured = len(_TIERS) * (len(adapters.refs) + len(_counts(rig)))
    return measured * (rounds + 1) + sum(map(len, adapters.refs.values()))


def _seconds_by_bytes() -> dict[Tier, dict[int, list[float]]]:
    """Return room for measurements: by target, then by bytes."""
    return {tier: defaultdict(list) for tier in _TIERS}


def _counts(rig: Rig) -> list[int]:
    return [blocks for blocks in _BLOCKS if blocks <= rig.most_copied_blocks]


def _read(rig: Rig, ref: AdapterRef, target: Tier) -> float:
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
        bandwidth=Figure(1 / byte_s, "bytes/s", error_s / byte_s**2),
        fit=quality(found.predicted, found.measured),
    )
