"""Adapters to measure with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.costs.model import adapter_elements

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
