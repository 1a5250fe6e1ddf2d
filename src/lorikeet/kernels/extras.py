"""The extras of adapters on the device, as views of pool blocks, and how a step applies them.

Extras are what an adapter has beside LoRA's A and B, such as DoRA's magnitudes (``core.adapter.AdapterExtra``). Rows of
the batch are adjusted segment by segment after the product of the base, so a step without such adapters runs as if
there were none. ``docs/decisions/adapter-extras.md`` says what the kinds mean.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lorikeet.core.adapter import EMBEDDING, HEAD
from lorikeet.core.geometry import ModelGeometry

if TYPE_CHECKING:
    from lorikeet.kernels.base import LoraBatch, LoraTargets, LoraWeights

_NORMS = ("layers.{}.input_layernorm.weight", "layers.{}.post_attention_layernorm.weight")
"""The norms of a layer of the own decoder on the residual stream, in the order of ``native/adjusts.h``."""


class ExtraMatrix(NamedTuple):
    """A matrix in pool blocks.

    Attributes:
        pieces: runs of its rows, ``[rows, columns]`` each, in order.
        tokens: of rows of the vocabulary, which tokens they are.
    """

    pieces: tuple[Tensor, ...]
    tokens: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(piece) for piece in self.pieces)

    @property
    def vector(self) -> Tensor:
        """All elements, in order; of a matrix in one piece as a view."""
        return self.pieces[0].flatten() if len(self.pieces) == 1 else torch.cat([p.flatten() for p in self.pieces])

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return rows by number, ``[len(numbers), columns]``."""
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
        """Overwrite all elements, in order."""
        for piece, part in zip(self.pieces, values.flatten().split([p.numel() for p in self.pieces]), strict=True):
            piece.copy_(part.view_as(piece))


class ExtraWeights:
    """The extras of one adapter.

    Args:
        matrices: by kind, layer and module.
        geometry: of the model.

    Attributes:
        is_prepared: whether what is computed on the device has been.
        kinds: those of linear modules and vectors.
        vocabulary: embedding or head, if it has extras of them.
        fits_one_call: whether the native kernels can apply them in the one call that computes all layers. That knows
            factors and summands of outputs and norms of the residual stream, but no whole weights, factors of inputs
            or norms of heads.
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
        head_norms = {f"layers.{{}}.self_attn.{side}_norm.weight" for side in "qk"}
        self.fits_one_call = not any(
            module not in (EMBEDDING, HEAD) and (kind in ("weight", "input") or module in head_norms)
            for kind, _, module in matrices
        )
        self._tables: tuple[Tensor, Tensor | None] | None = None
        self.kinds = frozenset(kind for kind, _, module in matrices if module not in (EMBEDDING, HEAD))
        self.vocabulary = frozenset(module for _, _, module in matrices if module in (EMBEDDING, HEAD))

    def get(self, kind: str, layer: int, module: str) -> ExtraMatrix | None:
        """Return a matrix; None if there is none."""
        return self._matrices.get((kind, layer, module))

    def vector(self, kind: str, layer: int, module: str) -> Tensor | None:
        """Return a vector; None if there is none."""
        found = self._matrices.get((kind, layer, module))
        return None if found is None else found.vector

    def affine(self, layer: int, module: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors of a module's output, and what is added to it."""
        return self._affine.get((layer, module), (None, None))

    def drop_shift(self, layer: int, module: str) -> None:
        """Note that nothing is added to a module's output."""
        scale, _ = self._affine[layer, module]
        self._affine[layer, module] = scale, None

    def tables(self) -> tuple[int, int]:
        """Return the addresses of tables of addresses, as ``native/adjusts.h`` has them; valid while this lives.

        One is of the factors and summands, by layer and module; the other of the norms, by layer, 0 if there are none.
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


def scaled_inputs(x: Tensor, lora: "LoraBatch", layer: int, targets: "LoraTargets") -> Tensor:
    """Return the input of a product, with the factors that adapters have for it; ``x`` is not changed."""
    out = x
    for segment in lora.adjusted("input"):
        for target in targets.each:
            factor = segment.extras.vector("input", layer, target.module)
            if factor is not None:
                if out is x:
                    out = x.clone()
                out[segment.start : segment.stop] *= factor
    return out


def replace_products(
    out: Tensor, x: Tensor, bias: Tensor | None, lora: "LoraBatch", layer: int, targets: "LoraTargets"
) -> None:
    """Overwrite the output of modules of which adapters have whole weights.

    Args:
        out: ``[T, out]``, changed.
        x: ``[T, in]``, its input.
        bias: of the base, ``[out]``.
        lora: the adapters.
        layer: of the model.
        targets: the modules of the product.
    """
    for segment in lora.adjusted("weight"):
        rows = slice(segment.start, segment.stop)
        for module, column, outputs in targets.each:
            weight = segment.extras.get("weight", layer, module)
            if weight is None:
                continue
            own = segment.extras.vector("bias", layer, module)
            if own is None and bias is not None:
                own = bias[column : column + outputs]
            found = weight.product(x[rows])
            out[rows, column : column + outputs] = found if own is None else found + own


def scale_and_shift(out: Tensor, lora: "LoraBatch", layer: int, targets: "LoraTargets") -> None:
    """Multiply outputs by the factors of adapters, and add their summands, as ``Kernels.scale_and_shift``."""
    for segment in lora.adjusted("scale", "shift"):
        rows = slice(segment.start, segment.stop)
        for module, column, outputs in targets.each:
            scale, shift = segment.extras.affine(layer, module)
            if scale is None and shift is None:
                continue
            part = out[rows, column : column + outputs]
            wide = part.float() if scale is None else part.float() * scale[:outputs].float()
            part.copy_(wide if shift is None else wide + shift[:outputs].float())


def embed(x: Tensor, token_ids: Tensor, lora: "LoraBatch") -> None:
    """Replace the embeddings ``x [T, hidden]`` of tokens where adapters have their own, in place."""
    for segment in lora.adjusted_vocabulary(EMBEDDING):
        rows, extras = slice(segment.start, segment.stop), segment.extras
        ids = token_ids[rows]
        if (weight := extras.get("weight", 0, EMBEDDING)) is not None:
            x[rows] = weight.rows_of(ids.clamp(max=weight.rows - 1)).to(x.dtype)
        if (trained := extras.get("rows", 0, EMBEDDING)) is not None:
            for token, row in zip(trained.tokens, torch.cat(trained.pieces), strict=True):
                x[rows][ids == token] = row.to(x.dtype)
        if (scale := extras.vector("scale", 0, EMBEDDING)) is not None:
            x[rows] *= scale
        a, b = extras.get("a", 0, EMBEDDING), extras.get("b", 0, EMBEDDING)
        if a is not None and b is not None:
            found = a.rows_of(ids.clamp(max=a.rows - 1)) @ torch.cat(b.pieces)
            x[rows] += found if scale is None else found * scale


def adjust_logits(logits: Tensor, hidden: Tensor, lora: "LoraBatch", *, is_tied: bool) -> Tensor:
    """Return logits with the output layers of adapters that have their own.

    Args:
        logits: ``[S, vocab]`` of the base, changed in place.
        hidden: ``[S, hidden]``, the input of the output layer.
        lora: the adapters of these rows.
        is_tied: whether the base's output layer is its embedding, so that trained rows of one are of both.

    Returns:
        The logits; minus infinity for tokens that an adapter's smaller vocabulary lacks.
    """
    for segment in lora.adjusted_vocabulary(EMBEDDING, HEAD):
        rows, extras = slice(segment.start, segment.stop), segment.extras
        x, part = hidden[rows].to(logits.dtype), logits[rows]
        if (weight := extras.get("weight", 0, HEAD)) is not None:
            part[:, : weight.rows] = weight.product(x)
            part[:, weight.rows :] = -torch.inf
        trained = extras.get("rows", 0, HEAD) or (extras.get("rows", 0, EMBEDDING) if is_tied else None)
        if trained is not None:
            part[:, torch.tensor(trained.tokens, device=part.device)] = trained.product(x)
        a, b = extras.get("a", 0, HEAD), extras.get("b", 0, HEAD)
        if a is not None and b is not None:
            found = b.product(a.product(x))
            part[:, : found.shape[1]] += found
        if (added := extras.vector("lora_bias", 0, HEAD)) is not None:
            part[:, : len(added)] += added
        if (scale := extras.vector("scale", 0, HEAD)) is not None:
            part[:, : len(scale)] *= scale
        if (bias := extras.vector("bias", 0, HEAD)) is not None:
            part[:, : len(bias)] += bias
    return logits


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each row, fp32, computed in slices so that no whole copy is made."""
    return torch.cat([torch.linalg.vector_norm(part.float(), dim=1) for part in weight.split(_SLICE_ROWS)])


_SLICE_ROWS = 4096


class ProductShare(NamedTuple):
    """A tensor-parallel rank's share of a product.

    Attributes:
        outputs: by module, which of its outputs the rank computes. Their factors and summands are at the beginning of
            vectors as long as those of the whole model.
        total: returns the sum of a tensor over the ranks, where each has some of the inputs.
        adds_bias: whether the rank adds what is added once, such as biases.
    """

    outputs: Mapping[str, slice]
    total: Callable[[Tensor], Tensor] | None = None
    adds_bias: bool = True


def prepare_product(
    weights: "LoraWeights",
    layer: int,
    targets: "LoraTargets",
    bias: Tensor | None,
    product: Callable[[Tensor], Tensor],
    norms: Callable[[], Tensor],
    share: ProductShare | None = None,
) -> None:
    """Compute what changes the outputs of a product of the base, into the blocks of an adapter.

    DoRA's factors are magnitude / ‖W + sBA‖, row by row (https://arxiv.org/abs/2402.09353, section 4). The square of
    that norm is ‖W‖² + 2 sB·(AWᵀ) + sB·(AAᵀ)sBᵀ, so the sum of W and sBA is never made.

    Args:
        weights: of the adapter, changed.
        layer: of the model.
        targets: the modules of the product.
        bias: of the base, ``[out]``.
        product: returns ``x [n, in]`` times the base's weight, ``[n, out]``.
        norms: returns the norm of each row of the base's weight, fp32 ``[out]``.
        share: of the rank; None if it computes the whole product.
    """
    extras = weights.extras
    assert extras is not None
    for module, column, outputs in targets.each:
        scale, shift = extras.affine(layer, module)
        if scale is None and shift is None:
            continue
        part = slice(column, column + outputs)
        kinds = ("magnitude", "output", "bias", "lora_bias")
        own = slice(None) if share is None else share.outputs[module]
        magnitude, output, new, added = (
            None if vector is None else vector[own] for vector in (extras.vector(kind, layer, module) for kind in kinds)
        )
        factor: Tensor | float = 1.0
        if magnitude is not None:
            pieces = weights.pieces.get((layer, module), ())
            total = None if share is None else share.total
            factor = magnitude.double() / dora_norms(norms()[part], pieces, product, part, total)
        elif output is not None:
            factor = output.double()
        if scale is not None:
            assert isinstance(factor, Tensor)
            scale[:outputs].copy_(factor)
        if shift is None:
            continue
        old = None if bias is None else bias[part].double()
        if (old is None and new is None and added is None) or (share is not None and not share.adds_bias):
            extras.drop_shift(layer, module)
            continue
        value = torch.zeros(outputs, dtype=torch.float64, device=shift.device)
        if old is not None:
            value -= factor * old
        kept = old if new is None else new.double()
        if kept is not None:
            value += kept
        if added is not None:
            value += factor * added.double()
        shift[:outputs].copy_(value)


def dora_norms(
    norms: Tensor,
    pieces: Sequence[tuple[Tensor, Tensor]],
    product: Callable[[Tensor], Tensor],
    part: slice = slice(None),
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the norms of the rows of W + sBA, fp64 ``[out]``.

    Args:
        norms: of the rows of W, ``[out]``.
        pieces: rows of A ``[r, in]`` and of sBᵀ ``[r, out]``.
        product: returns ``a Wᵀ``, ``[r, out]`` with ``part`` of its columns.
        part: which columns those are.
        total: returns the sum over ranks of which each has some of the inputs.
    """
    squares = norms.double().square()
    if pieces:
        a, bt = (torch.cat(side) for side in zip(*pieces, strict=True))
        wide, b = a.double(), bt.double()
        squares += 2 * (b * product(a)[:, part].double()).sum(0) + (b * ((wide @ wide.T) @ b)).sum(0)
    if total is not None:
        squares = total(squares)
    return squares.clamp(min=0).sqrt()


def prepare_vocabulary(
    weights: "LoraWeights", embedding: Tensor, logits: Callable[[Tensor], Tensor], norms: Callable[[], Tensor]
) -> None:
    """Compute DoRA's factors of embedding and output layer, into the blocks of an adapter.

    Args:
        weights: of the adapter, changed.
        embedding: of the base, ``[vocab, hidden]``.
        logits: returns ``x [n, hidden]`` times the base's output layer, ``[n, vocab]``.
        norms: returns the norm of each row of that.
    """
    extras = weights.extras
    assert extras is not None
    if (magnitude := extras.vector("magnitude", 0, EMBEDDING)) is not None:
        own, a, b = (extras.get(kind, 0, EMBEDDING) for kind in ("weight", "a", "b"))
        wide = (embedding if own is None else torch.cat(own.pieces)).float()
        if a is not None and b is not None:
            wide = wide + torch.cat(a.pieces).float() @ torch.cat(b.pieces).float()
        scale = extras.get("scale", 0, EMBEDDING)
        assert scale is not None
        scale.fill(magnitude / torch.linalg.vector_norm(wide, dim=0))
    if (magnitude := extras.vector("magnitude", 0, HEAD)) is not None:
        own, a, b, scale = (extras.get(kind, 0, HEAD) for kind in ("weight", "a", "b", "scale"))
        assert scale is not None
        pieces = []
        if a is not None and b is not None:
            pieces = [(torch.cat(a.pieces), torch.cat(b.pieces).T)]
        if own is None:
            found = dora_norms(norms(), pieces, logits)
        else:
            found = dora_norms(torch.cat([row_norms(piece) for piece in own.pieces]), pieces, own.product)
        scale.fill(magnitude.double() / found)
