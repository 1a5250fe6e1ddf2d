"""A reference to an adapter: what the engine must know without reading its weights."""

from collections.abc import Mapping

import msgspec

from lorikeet.core.geometry import SCORE
from lorikeet.core.ids import AdapterDigest, AdapterName


class AdapterRef(msgspec.Struct, frozen=True):
    """One version of an adapter, as requests carry it.

    Attributes:
        name: the name in the request. Two names may share a digest.
        digest: the version. All caches are keyed by it.
        folder: holds ``adapter_config.json`` and ``adapter_model.safetensors`` of this version.
        ranks: for each module of the geometry that it changes, the rank on every layer (0: unchanged); for its score
            head, if it has one (``geometry.SCORE``), the number of labels on the last layer, and 0 on the others.
        weight_bytes: size of the weights file.
    """

    name: AdapterName
    digest: AdapterDigest
    folder: str
    ranks: dict[str, tuple[int, ...]]
    weight_bytes: int

    @property
    def max_rank(self) -> int:
        """Largest rank over all modules and layers."""
        return largest_rank(self.ranks)

    @property
    def labels(self) -> int:
        """Labels of its score head, 0 without one."""
        return max(self.ranks.get(SCORE, (0,)))


def largest_rank(ranks: Mapping[str, tuple[int, ...]]) -> int:
    """Return the largest rank in ``AdapterRef.ranks``, of which the labels of a score head are none."""
    return max((max(by_layer) for module, by_layer in ranks.items() if module != SCORE), default=0)
