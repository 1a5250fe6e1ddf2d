"""Norm, rotary embedding with the KV store, and gating: one pass over memory each. Arithmetic is in fp32."""

import triton
import triton.language as tl


@triton.jit
def add_norm(x, delta, weight, out, hidden, eps, ADDED: tl.constexpr, WIDTH: tl.constexpr):
    """One row: ``x += delta`` if there is one; ``out`` is its RMS norm times ``weight``."""
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, WIDTH)
    inside = column < hidden
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(delta + row + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    # Rounded before the weight is applied, in Llama's order.
    normed = wide.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (normed * scale).to(x.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, out, columns, WIDTH: tl.constexpr):
    """A part of one row of ``silu(gate) * up``."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside, other=0.0)
    # Rounded between the two, as torch does.
    silu = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + column, (silu * up.to(tl.float32)).to(gate_up.dtype.element_ty), mask=inside)


@triton.jit
def rotary_store(
    qkv, cos, sin, kv, slot_blocks, slot_offsets, q_norm, k_norm, eps,
    heads, kv_heads, row_stride, block_stride, part_stride, token_stride,
    HALF: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row: queries are rotated in place, keys rotated into the row's slot, values copied there.

    Rows whose slot is in block -1 only fill the launch, and are stored nowhere.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    source = qkv + row * row_stride + head * 2 * HALF
    first = tl.load(source + lane, mask=inside, other=0.0)
    second = tl.load(source + HALF + lane, mask=inside, other=0.0)
    block = tl.load(slot_blocks + row)
    slot = block * block_stride + tl.load(slot_offsets + row) * token_stride
    has_slot = inside & (block >= 0)
    is_key = (head >= heads) & (head < heads + kv_heads)
    if head >= heads + kv_heads:
        target = kv + slot + part_stride + (head - heads - kv_heads) * 2 * HALF
        tl.store(target + lane, first, mask=has_slot)
        tl.store(target + HALF + lane, second, mask=has_slot)
    else:
        low, high = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / (2 * HALF) + eps)
            of_key, of_query = inside & is_key, inside & (head < heads)
            by_low = tl.load(k_norm + lane, mask=of_key, other=0.0) + tl.load(q_norm + lane, mask=of_query, other=0.0)
            by_high = tl.load(k_norm + HALF + lane, mask=of_key, other=0.0)
            by_high += tl.load(q_norm + HALF + lane, mask=of_query, other=0.0)
            # Rounded before and after the weight is applied, as torch does.
            low = (low * scale).to(first.dtype).to(tl.float32) * by_low.to(tl.float32)
            high = (high * scale).to(first.dtype).to(tl.float32) * by_high.to(tl.float32)
            low, high = low.to(first.dtype).to(tl.float32), high.to(first.dtype).to(tl.float32)
        angle = row * 2 * HALF + lane
        cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        rotated_low = (low * cos_low - high * sin_low).to(first.dtype)
        rotated_high = (high * cos_high + low * sin_high).to(first.dtype)
        if is_key:
            target = kv + slot + (head - heads) * 2 * HALF
            tl.store(target + lane, rotated_low, mask=has_slot)
            tl.store(target + HALF + lane, rotated_high, mask=has_slot)
        else:
            tl.store(source + lane, rotated_low, mask=inside)
            tl.store(source + HALF + lane, rotated_high, mask=inside)
