"""A reference to an adapter: what the engine must know without reading its weights."""

import msgspec

from lorikeet.core.ids import AdapterDigest, AdapterName


class AdapterRef(msgspec.Struct, frozen=True):
    """One version of an adapter, as requests carry it.

    Attributes:
        name: the name in the request. Two names may share a digest.
        digest: the version. All caches are keyed by it.
        folder: holds ``adapter_config.json`` and ``adapter_model.safetensors`` of this version.
        ranks: for each module of the geometry that it changes, the rank on every layer (0: unchanged).
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
        return max((max(by_layer) for by_layer in self.ranks.values()), default=0)
