"""How long it takes to merge another adapter into the base weights, and to take it out."""

import random
from collections.abc import Callable

import numpy as np

from lorikeet.bench.profiling.rig import Rig
from lorikeet.bench.profiling.sweeps import Adapters, decodes
from lorikeet.core.ids import AdapterDigest
from lorikeet.costs.fit import fit_line, fit_medians, quality
from lorikeet.costs.model import SequenceWork
from lorikeet.costs.profile import Switching

_CONTEXT = 8


def measure_switching(rig: Rig, adapters: Adapters, rounds: int, tick: Callable[[], None]) -> Switching:
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
