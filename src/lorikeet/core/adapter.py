"""A reference to an adapter: its name, version and sizes, without its weights."""

from collections.abc import Mapping

import msgspec

from lorikeet.core.geometry import SCORE
from lorikeet.core.ids import AdapterDigest, AdapterName

EMBEDDING = "embedding"
HEAD = "head"
"""The modules of the vocabulary, as extras name them."""


class AdapterExtra(msgspec.Struct, frozen=True, array_like=True):
    """Weights of an adapter beside LoRA's A and B: one kind for one module, a matrix on each of some layers.

    DoRA's magnitudes, biases, whole norms, linear layers and embeddings, and trained tokens are extras. The kinds are
    listed in ``docs/decisions/adapter-extras.md``.

    Attributes:
        kind: kind of the weights, such as ``magnitude``.
        module: a module of the geometry, the path of a vector of the base, ``embedding`` or ``head``.
        columns: columns of the matrices.
        rows: rows of the matrix on each layer; 0 on a layer without one.
        tokens: token ids of the rows, for rows of the vocabulary.
    """

    kind: str
    module: str
    columns: int
    rows: tuple[int, ...]
    tokens: tuple[int, ...] = ()


Shape = tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[AdapterExtra, ...]]
"""Ranks and extras of an adapter, which determine where its weights are in its blocks."""


class AdapterRef(msgspec.Struct, frozen=True):
    """One version of an adapter, as requests carry it.

    Attributes:
        name: the name in the request. Two names may share a digest.
        digest: the version. All caches are keyed by it.
        folder: holds ``adapter_config.json`` and ``adapter_model.safetensors`` of this version.
        ranks: for each module of the geometry that it changes, the rank on every layer (0: unchanged); for its score
            head, if it has one (``geometry.SCORE``), the number of labels on the last layer, and 0 on the others.
        weight_bytes: size of the weights file.
        extras: weights beside low-rank matrices on linear modules.
    """

    name: AdapterName
    digest: AdapterDigest
    folder: str
    ranks: dict[str, tuple[int, ...]]
    weight_bytes: int
    extras: tuple[AdapterExtra, ...] = ()

    @property
    def shape(self) -> Shape:
        """Its ranks and extras, hashable."""
        return tuple(self.ranks.items()), self.extras

    @property
    def max_rank(self) -> int:
        """Largest rank over all modules and layers."""
        return largest_rank(self.ranks)

    @property
    def labels(self) -> int:
        """Labels of its score head, 0 without one."""
        return max(self.ranks.get(SCORE, (0,)))


def largest_rank(ranks: Mapping[str, tuple[int, ...]]) -> int:
    """Return the largest rank in ``AdapterRef.ranks``; the labels of a score head do not count as a rank."""
    return max((max(by_layer) for module, by_layer in ranks.items() if module != SCORE), default=0)
