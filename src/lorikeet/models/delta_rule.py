"""Declares layers with a gated delta rule: sizes, modules, tensors in checkpoints, and states.

The rule is linear attention with a state per head (Yang et al., "Gated Delta Networks", 2024). Does not import torch.
"""

from math import gcd
from typing import NamedTuple

import msgspec

from lorikeet.core.geometry import DELTA_OUT, DELTA_VECTOR, ModulePath, ModuleShape
from lorikeet.core.states import StateShape

CONV = "conv"
RECURRENT = "recurrent"
"""Names of the two states of a layer: the last inputs of its convolution, and a matrix for each head."""


class Section(NamedTuple):
    """Neighbouring outputs of a projection, or channels of the convolution, that are split over ranks by heads.

    Attributes:
        name: a module of the geometry, or a part of the convolution.
        features: number of outputs or channels in the whole model.
    """

    name: str
    features: int


class DeltaRule(msgspec.Struct, frozen=True):
    """The gated delta rule of some layers of a decoder.

    Attributes:
        on: for each layer, whether it has the rule in place of attention.
        key_heads: number of heads of queries and keys. Each serves ``value_heads / key_heads`` neighbouring heads of
            values.
        value_heads: number of heads of values, each with a state.
        key_dim, value_dim: number of elements of a head.
        taps: number of rows that the convolution reads, the row itself included.
    """

    on: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Number of elements of all keys of a row."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of elements of all values of a row."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers with the rule."""
        return tuple(layer for layer, is_on in enumerate(self.on) if is_on)

    def share(self, ranks: int) -> "DeltaRule":
        """Return one rank's share, which has some of the heads."""
        return msgspec.structs.replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def projections(self) -> dict[str, tuple[Section, ...]]:
        """Return the sections of each projection of a layer's input, by the projection's name in checkpoints.

        The projections are computed as one product, in this order.
        """
        return {
            "in_proj_qkv": (
                Section("delta_q", self.keys),
                Section("delta_k", self.keys),
                Section("delta_v", self.values),
            ),
            "in_proj_z": (Section("delta_z", self.values),),
            "in_proj_b": (Section("delta_b", self.value_heads),),
            "in_proj_a": (Section("delta_a", self.value_heads),),
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules in the product of a layer's input."""
        return tuple(section.name for sections in self.projections().values() for section in sections)

    def conv_sections(self) -> tuple[Section, ...]:
        """Return the channels of the convolution."""
        return Section("q", self.keys), Section("k", self.keys), Section("v", self.values)

    def module_shapes(self, hidden_size: int) -> dict[str, ModuleShape]:
        """Return the shape of each linear module, in packing order."""
        sections = [section for each in self.projections().values() for section in each]
        shapes = {section.name: ModuleShape(hidden_size, section.features) for section in sections}
        return {**shapes, DELTA_OUT: ModuleShape(self.values, hidden_size)}

    def paths(self) -> tuple[ModulePath, ...]:
        """Return the modules of a layer by their names in checkpoints."""
        projections = {
            name: tuple(section.name for section in sections) for name, sections in self.projections().items()
        }
        return tuple(
            ModulePath(f"layers.{{}}.linear_attn.{name}", modules)
            for name, modules in {**projections, "out_proj": (DELTA_OUT,)}.items()
        )

    def vectors(self) -> dict[str, int]:
        """Return the number of elements of the weights that adapters may replace whole, by path.

        They are in the order of ``DeltaWeights``.
        """
        sizes = {
            "conv1d": self.channels * self.taps,
            "A_log": self.value_heads,
            "dt_bias": self.value_heads,
            "norm": self.value_dim,
        }
        return {DELTA_VECTOR.format(name): size for name, size in sizes.items()}

    def states(self) -> tuple[StateShape, ...]:
        """Return the states of all layers: first that of each convolution, then that of each recurrence."""
        # A part of the convolution's state is that of a head, so that no part is larger than a head's matrix.
        channels = gcd(self.key_dim, self.value_dim)
        conv = (self.taps - 1, channels)
        return (
            *(StateShape(layer, CONV, self.channels // channels, conv) for layer in self.layers),
            *(StateShape(layer, RECURRENT, self.value_heads, (self.key_dim, self.value_dim)) for layer in self.layers),
        )
