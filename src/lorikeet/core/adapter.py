"""What the engine must know of an adapter without reading its weights."""

import msgspec

from lorikeet.core.ids import AdapterDigest, AdapterName


class AdapterRef(msgspec.Struct, frozen=True):
    """One version of an adapter, as requests carry it.

    Attributes:
        name: the name it was asked for by. Two names may share a digest.
        digest: the version; everything cached is keyed by it.
        folder: where ``adapter_config.json`` and ``adapter_model.safetensors`` of this version lie.
        ranks: for each module of ``LORA_MODULES`` that it changes, the rank on every layer (0: untouched).
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
