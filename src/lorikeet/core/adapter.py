"""References to adapters: name, version and sizes, without weights."""

from collections.abc import Mapping

import msgspec

from lorikeet.core.geometry import SCORE
from lorikeet.core.ids import AdapterDigest, AdapterName

EMBEDDING = "embedding"
HEAD = "head"
"""The modules of the vocabulary, as extras name them."""


class AdapterExtra(msgspec.Struct, frozen=True, array_like=True):
    """Weights of an adapter besides LoRA's A and B, of one kind for one module, with a matrix on each of some layers.

    DoRA's magnitudes, biases, whole norms, linear layers and embeddings, and trained tokens are extras. The kinds are
    listed in ``docs/decisions/adapter-extras.md``.

    Attributes:
        kind: kind of the weights, such as ``magnitude``.
        module: a module of the geometry, the path of a vector of the base, ``embedding`` or ``head``.
        columns: number of columns of the matrices.
        rows: number of rows of the matrix on each layer; 0 on a layer without one.
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
    """A reference to one version of an adapter, which requests carry.

    Attributes:
        name: the name in the request. Two names may share a digest.
        digest: digest of the version. All caches use it as the key.
        folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors`` of this version.
        ranks: for each module that the adapter changes, the rank on every layer (0: unchanged). For a score head
            (``geometry.SCORE``), the number of labels on the last layer, and 0 on other layers.
        weight_bytes: size of the weights file.
        extras: weights besides low-rank matrices on linear modules.
        changes_tower: whether it also changes the model's vision tower or projector.
    """

    name: AdapterName
    digest: AdapterDigest
    folder: str
    ranks: dict[str, tuple[int, ...]]
    weight_bytes: int
    extras: tuple[AdapterExtra, ...] = ()
    changes_tower: bool = False

    @property
    def shape(self) -> Shape:
        """The adapter's ranks and extras, as a hashable value."""
        return tuple(self.ranks.items()), self.extras

    @property
    def max_rank(self) -> int:
        """Largest rank over all modules and layers."""
        return largest_rank(self.ranks)

    @property
    def labels(self) -> int:
        """Number of labels of the score head, 0 without one."""
        return max(self.ranks.get(SCORE, (0,)))


def largest_rank(ranks: Mapping[str, tuple[int, ...]]) -> int:
    """Return the largest rank in ``AdapterRef.ranks``. The labels of a score head do not count as a rank."""
    return max((max(by_layer) for module, by_layer in ranks.items() if module != SCORE), default=0)
