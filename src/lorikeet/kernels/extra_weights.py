"""An adapter's extras on the device, as views of arena blocks.

Extras are the tensors of an adapter besides LoRA's A and B, such as DoRA's magnitudes (``core.adapter.AdapterExtra``).
``docs/decisions/adapter-extras.md`` describes the kinds.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.adapter import EMBEDDING, HEAD
from lorikeet.core.geometry import RECURRENCE_VECTOR, ModelGeometry

_NORMS = ("layers.{}.input_layernorm.weight", "layers.{}.post_attention_layernorm.weight")
"""The norms of a layer of our decoder on the residual stream, in the order of ``native/extras.h``."""


class ExtraMatrix(NamedTuple):
    """A matrix in arena blocks.

    Attributes:
        pieces: runs of the matrix's rows in order, ``[rows, columns]`` each.
        tokens: token ids of the rows, for a matrix of the vocabulary.
    """

    pieces: tuple[Tensor, ...]
    tokens: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(piece) for piece in self.pieces)

    @property
    def vector(self) -> Tensor:
        """All elements in order, as a view if the matrix has one piece."""
        return self.pieces[0].flatten() if len(self.pieces) == 1 else torch.cat([p.flatten() for p in self.pieces])

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return the rows with these numbers, ``[len(numbers), columns]``."""
        found = self.pieces[0].new_empty(len(numbers), self.pieces[0].shape[1])
        first = 0
        for piece in self.pieces:
            here = ((numbers >= first) & (numbers < first + len(piece))).nonzero()[:, 0]
            found[here] = piece[numbers[here] - first]
            first += len(piece)
        return found

    def product(self, x: Tensor) -> Tensor:
        """Return ``x [n, columns]`` times the transpose, ``[n, rows]``, in the dtype of ``x``."""
        return torch.cat([x @ piece.to(x.dtype).T for piece in self.pieces], dim=1)

    def fill(self, values: Tensor) -> None:
        """Overwrite all elements in order."""
        for piece, part in zip(self.pieces, values.flatten().split([p.numel() for p in self.pieces]), strict=True):
            piece.copy_(part.view_as(piece))


class ExtraWeights:
    """The extras of one adapter.

    Args:
        matrices: matrices by kind, layer and module.
        geometry: sizes of the model.

    Attributes:
        is_prepared: whether the extras that depend on the base have been computed.
        kinds: kinds of the extras of linear modules and vectors.
        vocabulary: which of embedding and head have extras.
        fits_one_call: whether the native kernels can apply the extras in the one call that computes all layers. The
            call supports factors and summands of outputs and norms of the residual stream, but no whole weights,
            factors of inputs, norms of heads or weights of a recurrence.
    """

    def __init__(self, matrices: Mapping[tuple[str, int, str], ExtraMatrix], geometry: ModelGeometry) -> None:
        self._matrices = matrices
        self._sizes = geometry.layers, geometry.module_slots
        self._modules = {module: number for number, module in enumerate(geometry.modules)}
        self.is_prepared = False
        self._affine: dict[tuple[int, str], tuple[Tensor | None, Tensor | None]] = {}
        places = dict.fromkeys((layer, module) for _, layer, module in matrices)
        for layer, module in places:
            scale, shift = (self.vector(kind, layer, module) for kind in ("scale", "shift"))
            if module not in (EMBEDDING, HEAD) and (scale is not None or shift is not None):
                self._affine[layer, module] = scale, shift
        others = {f"layers.{{}}.self_attn.{side}_norm.weight" for side in "qk"}
        others |= {RECURRENCE_VECTOR.format(name) for name in ("conv1d", "A_log", "dt_bias", "norm")}
        self.fits_one_call = not any(
            module not in (EMBEDDING, HEAD) and (kind in ("weight", "input") or module in others)
            for kind, _, module in matrices
        )
        self._tables: tuple[Tensor, Tensor | None] | None = None
        self.kinds = frozenset(kind for kind, _, module in matrices if module not in (EMBEDDING, HEAD))
        self.vocabulary = frozenset(module for _, _, module in matrices if module in (EMBEDDING, HEAD))

    def get(self, kind: str, layer: int, module: str) -> ExtraMatrix | None:
        """Return a matrix; None if the adapter does not have it."""
        return self._matrices.get((kind, layer, module))

    def vector(self, kind: str, layer: int, module: str) -> Tensor | None:
        """Return a vector; None if the adapter does not have it."""
        found = self._matrices.get((kind, layer, module))
        return None if found is None else found.vector

    def affine(self, layer: int, module: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors of a module's output, and its summands."""
        return self._affine.get((layer, module), (None, None))

    def drop_shift(self, layer: int, module: str) -> None:
        """Record that nothing is added to a module's output."""
        scale, _ = self._affine[layer, module]
        self._affine[layer, module] = scale, None

    def tables(self) -> tuple[int, int]:
        """Return two addresses of tables of addresses for ``native/extras.h``, valid while this object lives.

        The first table has the factors and summands by layer and module; the second has the norms by layer, and its
        address is 0 if there are none.
        """
        assert self.is_prepared
        if self._tables is None:
            self._tables = self._make_tables()
        affines, norms = self._tables
        return affines.data_ptr(), 0 if norms is None else norms.data_ptr()

    def _make_tables(self) -> tuple[Tensor, Tensor | None]:
        layers, slots = self._sizes
        affines = torch.zeros(layers * slots, 2, dtype=torch.int64)
        for (layer, module), pair in self._affine.items():
            affines[layer * slots + self._modules[module]] = torch.tensor(
                [0 if each is None else each.data_ptr() for each in pair]
            )
        if "vector" not in self.kinds:
            return affines, None
        norms = torch.zeros(layers, len(_NORMS), dtype=torch.int64)
        for layer in range(layers):
            for number, path in enumerate(_NORMS):
                own = self.vector("vector", layer, path)
                norms[layer, number] = 0 if own is None else own.data_ptr()
        return affines, norms
