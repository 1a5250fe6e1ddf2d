"""RMS norm, rotary embedding with the KV store, and gating, each in one pass over memory with fp32 arithmetic."""

import triton
import triton.language as tl

from lorikeet.kernels.triton.launch import wait_for_previous


@triton.jit
def add_norm(
    x, delta, weight, out, hidden, eps, offset, ADDED: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute ``x += delta`` for a row if ``ADDED``, and its RMS norm times the weight (``+ offset`` if ``OFFSET``)."""
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, WIDTH)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(delta + row + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    if OFFSET:
        scale += offset
    else:
        # The norm is rounded before the weight is applied, in Llama's order.
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row + column, (wide * scale).to(x.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate_up, out, columns, GELU: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Compute ``silu(gate) * up``, or ``gelu(gate) * up`` if ``GELU``, for a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    wait_for_previous(PDL)
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside, other=0.0)
    inner = gate
    if GELU:  # GELU is approximated by tanh with sqrt(8 / pi) * (x + 0.044715 x^3).
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    # The result is rounded between the two factors, like in torch.
    found = (gate / (1.0 + tl.exp(-inner))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + column, (found * up.to(tl.float32)).to(gate_up.dtype.element_ty), mask=inside)


@triton.jit
def rotary_store(
    qkv, cos, sin, kv, slot_blocks, slot_offsets, q_norm, k_norm, eps, offset,
    heads, kv_heads, row_stride, block_stride, part_stride, token_stride,
    HALF: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    NORMED: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate queries of some heads of a row in place, and store the rotated keys and the values in the row's slot.

    A lane has a pair of elements. The first ``PAIRS`` pairs are rotated. A pair is two neighbours, or two elements that
    are ``PAIRS`` apart. Other elements stay unchanged, since the cos of their pairs is 1. Padding rows, whose block is
    -1, are not stored.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, WIDTH)
    is_lane = lane < HALF
    is_query = head < heads
    is_value = head >= heads + kv_heads
    inside = (head < heads + 2 * kv_heads)[:, None] & is_lane[None, :]
    if NEIGHBOURS:
        is_rotated = lane < PAIRS
        one = tl.where(is_rotated, 2 * lane, PAIRS + lane)
        other = tl.where(is_rotated, 2 * lane + 1, HALF + lane)
    else:
        one = tl.where(lane < PAIRS, lane, PAIRS + lane)
        other = tl.where(lane < PAIRS, PAIRS + lane, HALF + lane)
    wait_for_previous(PDL)
    place = qkv + row * row_stride + (head * 2 * HALF)[:, None]
    first = tl.load(place + one[None, :], mask=inside, other=0.0)
    second = tl.load(place + other[None, :], mask=inside, other=0.0)
    low = first.to(tl.float32)
    high = second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)[:, None]
        low = low * scale
        high = high * scale
        low_weight = _norm_of(q_norm, k_norm, one, is_lane, is_query)
        high_weight = _norm_of(q_norm, k_norm, other, is_lane, is_query)
        if OFFSET:
            low_weight = low_weight + offset
            high_weight = high_weight + offset
        else:
            # The norm is rounded before and after the weight is applied, like in torch.
            low = low.to(first.dtype).to(tl.float32)
            high = high.to(first.dtype).to(tl.float32)
        low = low * low_weight
        high = high * high_weight
        low = low.to(first.dtype).to(tl.float32)
        high = high.to(first.dtype).to(tl.float32)
    angle = row * 2 * HALF + lane
    cos_low = tl.load(cos + angle, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + HALF, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + HALF, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    rotated_low = (low * cos_low - high * sin_low).to(first.dtype)
    rotated_high = (high * cos_high + low * sin_high).to(first.dtype)
    tl.store(place + one[None, :], rotated_low, mask=inside & is_query[:, None])
    tl.store(place + other[None, :], rotated_high, mask=inside & is_query[:, None])
    block = tl.load(slot_blocks + row)
    slot = block * block_stride + tl.load(slot_offsets + row) * token_stride
    own = tl.where(is_value, part_stride + (head - heads - kv_heads) * 2 * HALF, (head - heads) * 2 * HALF)
    target = kv + slot + own[:, None]
    is_stored = inside & (head >= heads)[:, None] & (block >= 0)
    tl.store(target + one[None, :], tl.where(is_value[:, None], first, rotated_low), mask=is_stored)
    tl.store(target + other[None, :], tl.where(is_value[:, None], second, rotated_high), mask=is_stored)


@triton.jit
def _norm_of(q_norm, k_norm, lane, is_lane, is_query):
    """Return the weights of each head's norm, fp32 ``[heads, lanes]``."""
    of_query = tl.load(q_norm + lane, mask=is_lane, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + lane, mask=is_lane, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
