"""Declares layers with a recurrence: sizes, modules, tensors in checkpoints, and states.

There are two kinds, which the same kernels compute: linear attention by the gated delta rule (Yang et al., "Gated Delta
Networks", 2024), and state spaces (Mamba-2; Dao and Gu, "Transformers are SSMs", 2024), whose C, B and x are here
queries, keys and values. Does not import torch.
"""

from math import gcd, inf
from typing import NamedTuple

import msgspec

from lorikeet.core.geometry import RECURRENCE_INPUTS, RECURRENCE_OUT, RECURRENCE_VECTOR, ModulePath, ModuleShape
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


class Recurrence(msgspec.Struct, frozen=True):
    """The recurrence of some layers of a decoder.

    Attributes:
        is_delta: whether it is the gated delta rule; else a state space.
        on: for each layer, whether it has the recurrence in place of attention.
        key_heads: number of heads of queries and keys. Each serves ``value_heads / key_heads`` neighbouring heads of
            values.
        value_heads: number of heads of values, each with a state.
        key_dim, value_dim: number of elements of a head.
        taps: number of rows that the convolution reads, the row itself included.
        has_conv_bias: whether the convolution has a bias.
        step_limits: see ``Kernels.recurrence_gates``.
    """

    is_delta: bool
    on: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    has_conv_bias: bool = False
    step_limits: tuple[float, float] = (0.0, inf)

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
        """Indices of the layers with the recurrence."""
        return tuple(layer for layer, is_on in enumerate(self.on) if is_on)

    def share(self, ranks: int) -> "Recurrence":
        """Return one rank's share, which has some of the heads."""
        return msgspec.structs.replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    @property
    def module(self) -> str:
        """Name of the layer's module in checkpoints."""
        return "linear_attn" if self.is_delta else "mamba"

    @property
    def norm_group(self) -> int:
        """Number of neighbouring outputs that are normalised together."""
        return self.value_dim if self.is_delta else self.values // self.key_heads

    @property
    def norm_size(self) -> int:
        """Number of weights of the output's norm. By the delta rule all heads share them."""
        return self.value_dim if self.is_delta else self.values

    def projections(self) -> dict[str, tuple[Section, ...]]:
        """Return the sections of each projection of a layer's input, by the projection's name in checkpoints."""
        q = Section("recurrence_q", self.keys)
        k = Section("recurrence_k", self.keys)
        v = Section("recurrence_v", self.values)
        z = Section("recurrence_z", self.values)
        b = Section("recurrence_b", self.value_heads)
        a = Section("recurrence_a", self.value_heads)
        if self.is_delta:
            return {"in_proj_qkv": (q, k, v), "in_proj_z": (z,), "in_proj_b": (b,), "in_proj_a": (a,)}
        return {"in_proj": (z, v, k, q, a)}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules in the product of a layer's input, in its order."""
        there = {section.name for sections in self.projections().values() for section in sections}
        return tuple(module for module in RECURRENCE_INPUTS if module in there)

    def conv_sections(self) -> tuple[Section, ...]:
        """Return the channels of the convolution, in the order of checkpoints. They are computed as q, k, v."""
        sections = Section("q", self.keys), Section("k", self.keys), Section("v", self.values)
        return sections if self.is_delta else sections[::-1]

    def module_shapes(self, hidden_size: int) -> dict[str, ModuleShape]:
        """Return the shape of each linear module, in packing order."""
        sizes = {section.name: section.features for each in self.projections().values() for section in each}
        shapes = {name: ModuleShape(hidden_size, sizes[name]) for name in self.inputs}
        return {**shapes, RECURRENCE_OUT: ModuleShape(self.values, hidden_size)}

    def paths(self) -> tuple[ModulePath, ...]:
        """Return the modules of a layer by their names in checkpoints."""
        projections = {
            name: tuple(section.name for section in sections) for name, sections in self.projections().items()
        }
        return tuple(
            ModulePath(f"layers.{{}}.{self.module}.{name}", modules)
            for name, modules in {**projections, "out_proj": (RECURRENCE_OUT,)}.items()
        )

    def vectors(self) -> dict[str, int]:
        """Return the number of elements of the weights that adapters may replace whole, by path; none of a state space.

        They are the convolution, A_log, dt_bias and the norm.
        """
        sizes = {
            "conv1d": self.channels * self.taps,
            "A_log": self.value_heads,
            "dt_bias": self.value_heads,
            "norm": self.value_dim,
        }
        return {RECURRENCE_VECTOR.format(name): size for name, size in sizes.items()} if self.is_delta else {}

    def states(self) -> tuple[StateShape, ...]:
        """Return the states of all layers: first that of each convolution, then that of each recurrence."""
        # A part of the convolution's state is that of a head, so that no part is larger than a head's matrix.
        channels = gcd(self.key_dim, self.value_dim)
        conv = (self.taps - 1, channels)
        return (
            *(StateShape(layer, CONV, self.channels // channels, conv) for layer in self.layers),
            *(StateShape(layer, RECURRENT, self.value_heads, (self.key_dim, self.value_dim)) for layer in self.layers),
        )
