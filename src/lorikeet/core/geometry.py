"""The sizes of a model, as the memory and the adapter packer need them."""

import msgspec

LORA_MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The seven linear modules of a decoder layer that an adapter may change, in packing order."""


PRODUCTS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The fused linear weights of a decoder layer, and the modules of each, in row order."""


class ModuleShape(msgspec.Struct, frozen=True, array_like=True):
    """Input and output features of one linear module."""

    in_features: int
    out_features: int


class ModelGeometry(msgspec.Struct, frozen=True):
    """Sizes of one decoder, whole or as one tensor-parallel rank holds it.

    Attributes:
        layers: number of decoder layers.
        kv_heads: key/value heads (of one rank, in the geometry of a rank).
        head_dim: elements of one head.
        modules: shape of each of :data:`LORA_MODULES`.
        dtype_bytes: bytes of one element of KV and adapter weights.
    """

    layers: int
    kv_heads: int
    head_dim: int
    modules: dict[str, ModuleShape]
    dtype_bytes: int

    def kv_elements_per_token(self) -> int:
        """Elements of the keys and values of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def block_elements(self, block_size: int) -> int:
        """Elements of a block that holds ``block_size`` tokens of KV over all layers."""
        return block_size * self.kv_elements_per_token()

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block that holds ``block_size`` tokens of KV over all layers."""
        return self.block_elements(block_size) * self.dtype_bytes
