"""Adapters to measure with, and how long their transfers take."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.profiling.rig import Rig
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.costs.fit import fit_line, quality
from lorikeet.costs.model import adapter_elements
from lorikeet.costs.profile import Figure, Link

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


def measure_loads(rig: Rig, adapters: RandomAdapters, rounds: int, tick: Callable[[], None]) -> Link:
    """Load one adapter of each rank ``rounds`` times, then all, which stay, and return the link from files to device.

    The files have been read before, as those of an adapter that is used now and then have.

    Args:
        rig: has none of them.
        adapters: to be loaded.
        rounds: at least one.
        tick: called once for each load.
    """
    seconds: dict[int, list[float]] = {rank: [] for rank in adapters.refs}
    for turn in range(rounds + 1):
        for rank, (ref, *_) in adapters.refs.items():
            taken_s = rig.load(ref)
            rig.evict(ref.digest)
            if turn:  # the first reads what was never read, into memory that was never written
                seconds[rank].append(taken_s)
            tick()
    for refs in adapters.refs.values():
        for ref in refs:
            rig.load(ref)
            tick()
    geometry = rig.sizes.geometry
    sizes_bytes = [adapter_elements(refs[0].ranks, geometry) * geometry.dtype_bytes for refs in adapters.refs.values()]
    found = fit_line(sizes_bytes, list(seconds.values()))
    byte_s, error_s = max(float(found.values[1]), 1e-15), float(found.errors[1])
    return Link(
        fixed=found.figure(0, "s"),
        bandwidth=Figure(1 / byte_s, "bytes/s", error_s / byte_s**2),
        fit=quality(found.predicted, found.measured),
    )


def loads_in_all(adapters: RandomAdapters, rounds: int) -> int:
    """Return how often :func:`measure_loads` ticks."""
    return len(adapters.refs) * (rounds + 1) + sum(map(len, adapters.refs.values()))
