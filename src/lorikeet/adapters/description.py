"""Describes an adapter whose files have been read and checked."""

from math import prod

import msgspec

from lorikeet.adapters.chat import AdapterChat
from lorikeet.core.adapter import EMBEDDING, HEAD, AdapterExtra
from lorikeet.core.geometry import SCORE, ModelGeometry

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
"""The index of a sharded adapter, which maps each tensor to a file."""

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
MAX_HEADER_BYTES = 4 * 2**20
"""A model of 126 layers with LoRA on all modules has 400 KB."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a safetensors file.

    Attributes:
        name: the tensor's key.
        dtype: dtype in the spelling of safetensors (``BF16``, ``F16``, ``F32``, ...).
        shape: sizes of its dimensions.
        start, stop: byte range in the file, half-open.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def shaped(self, *shape: int) -> "TensorEntry":
        """Return an entry for the same elements in another shape."""
        return msgspec.structs.replace(self, shape=shape)

    def row_range(self, first: int, count: int) -> "TensorEntry":
        """Return an entry for ``count`` rows of a matrix, or elements of a vector, from ``first`` on."""
        row_bytes = (self.stop - self.start) // self.shape[0]
        start = self.start + first * row_bytes
        shape = (count, *self.shape[1:])
        return msgspec.structs.replace(self, shape=shape, start=start, stop=start + count * row_bytes)


class ModuleTensors(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA of one module.

    Attributes:
        layer, module: the module, which is one of the geometry's or ``geometry.SCORE``. For ``SCORE``, A is the head's
            matrix, and B has no rows.
        rank: the module's rank.
        scaling: the factor of B·A, with rsLoRA and patterns applied.
        a: A, ``[rank, in_features]``.
        b: B, ``[out_features, rank]``, or the B of several experts with the columns of all.
        columns: the module's first column in ``b``, and the distance to its next column.
        are_turned: whether ``a`` and ``b`` have rows and columns exchanged, as the B and A of a parameter with a row
            for each input.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    a: TensorEntry
    b: TensorEntry
    columns: tuple[int, int] = (0, 1)
    are_turned: bool = False

    @property
    def a_shape(self) -> tuple[int, ...]:
        """Shape of the module's A."""
        return self.a.shape[::-1] if self.are_turned else self.a.shape

    @property
    def b_shape(self) -> tuple[int, ...]:
        """Shape of the module's B, without other experts' columns."""
        if self.are_turned:
            return self.b.shape[::-1]
        first, step = self.columns
        return *self.b.shape[:1], len(range(first, self.b.shape[1], step))


class ExtraTensor(msgspec.Struct, frozen=True, array_like=True):
    """A matrix of an adapter besides A and B.

    Attributes:
        kind, module, columns, tokens: see ``AdapterExtra``.
        layer: index of its layer.
        rows: number of rows of the matrix.
        entry: the tensor in the file. None for a matrix that is computed on the device from other matrices.
        scaling: factor of the matrix.
        is_transposed: whether the file has rows and columns exchanged.
    """

    kind: str
    module: str
    layer: int
    rows: int
    columns: int
    entry: TensorEntry | None = None
    scaling: float = 1.0
    tokens: tuple[int, ...] = ()
    is_transposed: bool = False

    @property
    def is_split(self) -> bool:
        """Whether each tensor-parallel rank would need only some of the matrix's columns or rows."""
        return self.kind in ("weight", "input") and self.module not in (EMBEDDING, HEAD)

    @property
    def is_product(self) -> bool:
        """Whether rows are multiplied by a matrix of its own, which is not LoRA on a linear module."""
        return self.kind == "weight" or self.module in (EMBEDDING, HEAD)


class TowerTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of an adapter for the vision tower or projector.

    Attributes:
        module: name of the module, see ``TowerModules``; "" for a parameter beside the modules.
        kind: ``a``, ``b`` or ``lora_bias`` of LoRA, or the name of a parameter of the module that it replaces.
        entry: the tensor in the file.
        scaling: factor of B·A.
    """

    module: str
    kind: str
    entry: TensorEntry
    scaling: float = 1.0


class AdapterDescription(msgspec.Struct, frozen=True):
    """The description of an adapter: everything that the server uses except the weights.

    Attributes:
        base_model: name of the base model in the config; "" if there is none.
        modules: modules in packing order.
        weight_bytes: size of the weights file.
        shards: names of the weights files of a sharded adapter that was not merged; otherwise empty. The tensors' byte
            ranges and ``weight_bytes`` are those of the merged file.
        digest: digest of the version; "" if the weights were not read.
        largest: largest magnitude among the weights and numbers computed from them, for ``numbers.fits``; 0 if the
            weights were not read.
        warnings: sentences about ignored keys.
        chat: the chat settings that differ from the base model's.
        extras: the matrices besides A and B, ordered by kind, module and layer.
        tower: the tensors for the parts of the base that compute images.
    """

    base_model: str
    modules: tuple[ModuleTensors, ...]
    weight_bytes: int
    shards: tuple[str, ...] = ()
    digest: str = ""
    largest: float = 0.0
    warnings: tuple[str, ...] = ()
    chat: AdapterChat = AdapterChat()
    extras: tuple[ExtraTensor, ...] = ()
    tower: tuple[TowerTensor, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of weights."""
        low_rank = sum(each.rank * (each.a_shape[1] + each.b_shape[0]) for each in self.modules)
        extras = sum(each.rows * each.columns for each in self.extras if each.entry is not None)
        return low_rank + extras + sum(prod(each.entry.shape) for each in self.tower)

    def extras_of(self, geometry: ModelGeometry) -> tuple[AdapterExtra, ...]:
        """Return the extras in the form of ``AdapterRef.extras``."""
        rows: dict[tuple[str, str, int, tuple[int, ...]], list[int]] = {}
        for each in self.extras:
            key = (each.kind, each.module, each.columns, each.tokens)
            rows.setdefault(key, [0] * geometry.layers)[each.layer] = each.rows
        return tuple(
            AdapterExtra(kind, module, columns, tuple(by_layer), tokens)
            for (kind, module, columns, tokens), by_layer in rows.items()
        )

    def ranks(self, geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
        """Return the rank on every layer for each changed module, in the form of ``AdapterRef.ranks``."""
        found: dict[str, list[int]] = {}
        for each in self.modules:
            found.setdefault(each.module, [0] * geometry.layers)[each.layer] = each.rank
        return {module: tuple(found[module]) for module in (*geometry.modules, SCORE) if module in found}
