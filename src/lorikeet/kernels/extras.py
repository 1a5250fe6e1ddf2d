"""Applies the extras of adapters to a step, and computes extras that depend on the base.

Rows of the batch are adjusted segment by segment after the product of the base, so a step without such adapters runs
as if there were none. ``docs/decisions/adapter-extras.md`` describes the kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.adapter import EMBEDDING, HEAD
from lorikeet.kernels.lora import LoraBatch, LoraTargets, LoraWeights


def scaled_inputs(x: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> Tensor:
    """Return the input of a product times the factors of adapters. ``x`` is not changed."""
    out = x
    for segment in lora.segments_with("input"):
        for target in targets.each:
            factor = segment.extras.vector("input", layer, target.module)
            if factor is not None:
                if out is x:
                    out = x.clone()
                out[segment.start : segment.stop] *= factor
    return out


def replace_products(
    out: Tensor, x: Tensor, bias: Tensor | None, lora: LoraBatch, layer: int, targets: LoraTargets
) -> None:
    """Overwrite the outputs of modules whose whole weight an adapter replaces.

    Args:
        out: ``[T, out]``, changed.
        x: ``[T, in]``, the input of the product.
        bias: the base's bias, ``[out]``.
        lora: the adapters.
        layer: index of the layer.
        targets: the modules of the product.
    """
    for segment in lora.segments_with("weight"):
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


def scale_and_shift(out: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> None:
    """Multiply outputs by the factors of adapters, and add the adapters' summands, like ``Kernels.scale_and_shift``."""
    for segment in lora.segments_with("scale", "shift"):
        rows = slice(segment.start, segment.stop)
        for module, column, outputs in targets.each:
            scale, shift = segment.extras.affine(layer, module)
            if scale is None and shift is None:
                continue
            part = out[rows, column : column + outputs]
            wide = part.float() if scale is None else part.float() * scale[:outputs].float()
            part.copy_(wide if shift is None else wide + shift[:outputs].float())


def embed(x: Tensor, token_ids: Tensor, lora: LoraBatch) -> None:
    """Overwrite the embeddings ``x [T, hidden]`` of tokens for which adapters have trained embeddings."""
    for segment in lora.vocabulary_segments(EMBEDDING):
        rows = slice(segment.start, segment.stop)
        extras = segment.extras
        ids = token_ids[rows]
        if (weight := extras.get("weight", 0, EMBEDDING)) is not None:
            x[rows] = weight.rows_of(ids.clamp(max=weight.rows - 1)).to(x.dtype)
        if (trained := extras.get("rows", 0, EMBEDDING)) is not None:
            for token, row in zip(trained.tokens, torch.cat(trained.pieces), strict=True):
                x[rows][ids == token] = row.to(x.dtype)
        if (scale := extras.vector("scale", 0, EMBEDDING)) is not None:
            x[rows] *= scale
        a = extras.get("a", 0, EMBEDDING)
        b = extras.get("b", 0, EMBEDDING)
        if a is not None and b is not None:
            found = a.rows_of(ids.clamp(max=a.rows - 1)) @ torch.cat(b.pieces)
            x[rows] += found if scale is None else found * scale


def adjust_logits(logits: Tensor, hidden: Tensor, lora: LoraBatch, *, is_tied: bool) -> Tensor:
    """Return logits computed with the trained output layers of adapters.

    Args:
        logits: ``[S, vocab]`` of the base, changed in place.
        hidden: ``[S, hidden]``, the input of the output layer.
        lora: the rows' adapters.
        is_tied: whether the base's output layer is its embedding, so that trained rows belong to both.

    Returns:
        The logits. They are minus infinity for tokens that an adapter's smaller vocabulary lacks.
    """
    for segment in lora.vocabulary_segments(EMBEDDING, HEAD):
        rows = slice(segment.start, segment.stop)
        extras = segment.extras
        x = hidden[rows].to(logits.dtype)
        part = logits[rows]
        if (weight := extras.get("weight", 0, HEAD)) is not None:
            part[:, : weight.rows] = weight.product(x)
            part[:, weight.rows :] = -torch.inf
        trained = extras.get("rows", 0, HEAD) or (extras.get("rows", 0, EMBEDDING) if is_tied else None)
        if trained is not None:
            part[:, torch.tensor(trained.tokens, device=part.device)] = trained.product(x)
        a = extras.get("a", 0, HEAD)
        b = extras.get("b", 0, HEAD)
        if a is not None and b is not None:
            found = b.product(a.product(x))
            part[:, : found.shape[1]] += found
        if (added := extras.vector("lora_bias", 0, HEAD)) is not None:
            part[:, : len(added)] += added
        if (scale := extras.vector("scale", 0, HEAD)) is not None:
            part[:, : len(scale)] *= scale
        if (bias := extras.vector("bias", 0, HEAD)) is not None:
            part[:, : len(bias)] += bias
        if (embedding := extras.get("weight", 0, EMBEDDING)) is not None:
            part[:, embedding.rows :] = -torch.inf
    return logits


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each row in fp32, computed in slices to avoid a copy of the whole weight."""
    return torch.cat([torch.linalg.vector_norm(part.float(), dim=1) for part in weight.split(_SLICE_ROWS)])


_SLICE_ROWS = 4096


class ProductShare(NamedTuple):
    """A tensor-parallel rank's share of a product.

    Attributes:
        outputs: for each module, the outputs that the rank computes. Their factors and summands are at the beginning of
            vectors that are as long as in the whole model.
        total: function that returns the sum of a tensor over the ranks, if each rank has a part of the inputs.
        adds_bias: whether the rank adds biases and other summands that are added once.
    """

    outputs: Mapping[str, slice]
    total: Callable[[Tensor], Tensor] | None = None
    adds_bias: bool = True


def prepare_product(
    weights: LoraWeights,
    layer: int,
    targets: LoraTargets,
    bias: Tensor | None,
    product: Callable[[Tensor], Tensor],
    norms: Callable[[], Tensor],
    share: ProductShare | None = None,
) -> None:
    """Compute the factors and summands of a product of the base, and write them to an adapter's blocks.

    DoRA's factors are magnitude / ‖W + sBA‖, row by row (https://arxiv.org/abs/2402.09353, section 4). The square of
    the norm is ‖W‖² + 2 sB·(AWᵀ) + sB·(AAᵀ)sBᵀ, so the sum of W and sBA is never computed.

    Args:
        weights: weights of the adapter, changed.
        layer: index of the layer.
        targets: the modules of the product.
        bias: the base's bias, ``[out]``.
        product: function that returns ``x [n, in]`` times the base's weight, ``[n, out]``.
        norms: function that returns the norm of each row of the base's weight, fp32 ``[out]``.
        share: the rank's share; None if it computes the whole product.
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
        norms: norms of the rows of W, ``[out]``.
        pieces: rows of A ``[r, in]`` and of sBᵀ ``[r, out]``.
        product: function that returns ``part`` of the columns of ``a Wᵀ [r, out]``.
        part: the columns.
        total: function that returns the sum over the ranks, if each rank has a part of the inputs.
    """
    squares = norms.double().square()
    if pieces:
        a, bt = (torch.cat(side) for side in zip(*pieces, strict=True))
        wide = a.double()
        b = bt.double()
        squares += 2 * (b * product(a)[:, part].double()).sum(0) + (b * ((wide @ wide.T) @ b)).sum(0)
    if total is not None:
        squares = total(squares)
    return squares.clamp(min=0).sqrt()


def prepare_vocabulary(
    weights: LoraWeights, embedding: Tensor, logits: Callable[[Tensor], Tensor], norms: Callable[[], Tensor]
) -> None:
    """Compute DoRA's factors of embedding and output layer, and write them to an adapter's blocks.

    Args:
        weights: weights of the adapter, changed.
        embedding: the base's embedding, ``[vocab, hidden]``.
        logits: function that returns ``x [n, hidden]`` times the base's output layer, ``[n, vocab]``.
        norms: function that returns the norm of each row of the output layer.
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
