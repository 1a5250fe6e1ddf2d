"""Layers with a state per sequence: the causal convolution, the recurrence, and its gated norm.

Columns of a state do not depend on each other, so a program has the whole key dimension and some columns of one head of
one sequence. A step reads and writes a state once, and bits do not depend on where a prompt is cut.
"""

import triton
import triton.language as tl

from lorikeet.kernels.triton.launch import wait_for_previous

_NORM_EPS = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["starts", "resumed", "offsets"])
def causal_conv(
    x, weight, bias, tails, out, starts, resumed, offsets, channels, row_stride, parts,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Convolve ``ROWS`` rows and ``WIDTH`` channels of one sequence. Rows before its first are its tail, if resumed."""
    sequence = tl.program_id(0)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    is_resumed = tl.load(resumed + sequence) != 0
    is_padding = tl.load(offsets + sequence * parts) < 0
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < channels
    own = channels // parts
    tail = tails + tl.load(offsets + sequence * parts + channel // own, mask=inside, other=0) + channel % own
    first = tl.program_id(2) * ROWS
    wait_for_previous(PDL)
    if (first < count) & (is_padding == 0):
        row = first + tl.arange(0, ROWS)
        found = tl.zeros([ROWS, WIDTH], tl.float32)
        if HAS_BIAS:
            found += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            at = row - (TAPS - 1) + tap
            factor = tl.load(weight + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
            is_row = (at >= 0) & (row < count)
            place = (begin + at)[:, None] * row_stride + channel[None, :]
            value = tl.load(x + place, mask=is_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
            is_tail = (at < 0) & is_resumed
            place = tail[None, :] + (at + TAPS - 1)[:, None] * own
            value += tl.load(place, mask=is_tail[:, None] & inside[None, :], other=0.0)
            found += factor[None, :] * value
        if HAS_SILU:
            found = found / (1.0 + tl.exp(-found))
        place = (begin + row)[:, None] * channels + channel[None, :]
        tl.store(out + place, found.to(out.dtype.element_ty), mask=(row < count)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["starts", "resumed", "offsets"])
def shift_tails(
    x, tails, starts, resumed, offsets, channels, row_stride, parts,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replace ``WIDTH`` channels of a sequence's tail by its last rows. Earlier rows are overwritten last."""
    sequence = tl.program_id(0)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    is_resumed = tl.load(resumed + sequence) != 0
    is_padding = tl.load(offsets + sequence * parts) < 0
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < channels
    own = channels // parts
    tail = tails + tl.load(offsets + sequence * parts + channel // own, mask=inside, other=0) + channel % own
    wait_for_previous(PDL)
    if (count > 0) & (is_padding == 0):
        for index in tl.static_range(TAPS - 1):
            at = count - (TAPS - 1) + index
            value = tl.load(x + (begin + at) * row_stride + channel, mask=inside & (at >= 0), other=0.0)
            old = tl.load(tail + (at + TAPS - 1) * own, mask=inside & (at < 0) & is_resumed, other=0.0)
            tl.store(tail + index * own, value.to(tl.float32) + old, mask=inside)


@triton.jit(do_not_specialize=["starts", "resumed", "offsets"])
def recurrence(
    queries, keys, values, decay, beta, skip, states, out, starts, resumed, offsets,
    query_stride, key_stride, value_stride, heads, group, scale,
    KEY_DIM: tl.constexpr, KEYS: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    IS_DELTA: tl.constexpr, HAS_SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Update some columns of one head of one sequence's state, row by row. The columns stay in registers."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    is_resumed = tl.load(resumed + sequence) != 0
    is_padding = tl.load(offsets + sequence * heads) < 0
    offset = tl.load(offsets + sequence * heads + head)
    lane = tl.arange(0, KEYS)
    is_lane = lane < KEY_DIM
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < VALUE_DIM
    wait_for_previous(PDL)
    if (begin < end) & (is_padding == 0):
        inside = is_lane[:, None] & is_column[None, :]
        state_at = states + offset + lane[:, None] * VALUE_DIM + column[None, :]
        state = tl.load(state_at, mask=inside & is_resumed, other=0.0)
        key_lane = (head // group) * KEY_DIM + lane
        place = head * VALUE_DIM + column
        for row in range(begin, end):
            query = tl.load(queries + row * query_stride + key_lane, mask=is_lane, other=0.0).to(tl.float32)
            key = tl.load(keys + row * key_stride + key_lane, mask=is_lane, other=0.0).to(tl.float32)
            if IS_DELTA:
                query *= tl.rsqrt(tl.sum(query * query, axis=0) + _NORM_EPS)
                key *= tl.rsqrt(tl.sum(key * key, axis=0) + _NORM_EPS)
            value = tl.load(values + row * value_stride + place, mask=is_column, other=0.0).to(tl.float32)
            state *= tl.exp(tl.load(decay + row * heads + head))
            added = value
            if IS_DELTA:
                added -= tl.sum(state * key[:, None], axis=0)
            added *= tl.load(beta + row * heads + head)
            state += key[:, None] * added[None, :]
            found = tl.sum(state * (query * scale)[:, None], axis=0)
            if HAS_SKIP:
                found += value * tl.load(skip + head)
            tl.store(out + row * heads * VALUE_DIM + place, found.to(out.dtype.element_ty), mask=is_column)
        tl.store(state_at, state, mask=inside)


@triton.jit
def gated_norm(
    x, gate, weight, out, columns, x_stride, gate_stride, weights, eps,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, IS_NORM_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and gate one group of columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < GROUP
    column = tl.program_id(1) * GROUP + lane
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = opened / (1.0 + tl.exp(-opened))
    factor = tl.load(weight + column % weights, mask=inside, other=0.0).to(tl.float32)
    normed = value
    if not IS_NORM_FIRST:
        normed = value * opened
    found = normed * tl.rsqrt(tl.sum(normed * normed, axis=0) / GROUP + eps) * factor
    if IS_NORM_FIRST:
        found *= opened
    tl.store(out + row * columns + column, found.to(out.dtype.element_ty), mask=inside)
