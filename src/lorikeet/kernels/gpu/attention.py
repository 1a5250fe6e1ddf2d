"""Attention of prefills and decodes over paged KV, in one launch, or in two where a step of few decodes is split.

A program has a tile of rows of one sequence, for the query heads that share a KV head, and goes over the tokens that
they see with a running maximum (Dao et al., "FlashAttention", 2022). Blocks of tokens are found through the sequence's
table (Kwon et al., "PagedAttention", SOSP 2023); all layers of a block lie together, so that a layer's view is strided.
A few sequences would keep few programs busy, each for as long as its context is; then several share one's tokens, and
what they found is put together (Dao et al., "Flash-Decoding", 2023).
"""

import triton
import triton.language as tl

from lorikeet.kernels.gpu.early import await_last


@triton.jit
def attention(
    q, kv, out, shares, row_starts, contexts, tables, scale, window, splits, heads,
    q_stride, out_stride, block_stride, part_stride, token_stride, table_stride, split_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, IS_SPLIT: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``ROWS // GROUP`` query rows of one sequence and one KV head; ``window`` 0 is none.

    If ``IS_SPLIT``, one of so many ``splits`` of their tokens: ``out[split, row]`` is the mean of the values that it
    saw, and ``shares[split, row, head]`` its largest score and its sum of weights. ``WIDE`` multiplies in fp32: the
    interpreter knows no products of bfloat16.
    """
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, split = tl.program_id(2) // splits, (tl.program_id(2) % splits).to(tl.int64)
    begin = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - begin
    context = tl.load(contexts + sequence)
    queries: tl.constexpr = ROWS // GROUP
    first = tile * queries
    await_last(EARLY)
    if first < count:
        member = tl.arange(0, ROWS)
        row = first + member // GROUP
        is_row = (row < count) & (member < queries * GROUP)
        lane = tl.arange(0, WIDTH)
        is_lane = lane < DIM
        head = kv_head * GROUP + member % GROUP
        place = (begin + row)[:, None] * q_stride + head[:, None] * DIM + lane[None, :]
        query = tl.load(q + place, mask=is_row[:, None] & is_lane[None, :], other=0.0)
        if WIDE:
            query = query.to(tl.float32)
        position = context - count + row
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        last = tl.minimum(context, context - count + first + queries)
        earliest = tl.where(window > 0, context - count + first - window + 1, 0)
        start = tl.maximum(earliest, 0) // TOKENS * TOKENS
        if IS_SPLIT:
            share = tl.cdiv(tl.cdiv(last - start, splits), TOKENS) * TOKENS
            start += split * share
            last = tl.minimum(last, start + share)
        for at in range(start, last, TOKENS):
            token = at + tl.arange(0, TOKENS)
            there = token < last
            block = tl.load(tables + sequence * table_stride + token // BLOCK_TOKENS, mask=there, other=0)
            offset = block * block_stride + (token % BLOCK_TOKENS) * token_stride + kv_head * DIM
            held = there[:, None] & is_lane[None, :]
            # What is not there is 0 and no stale number: a NaN would survive a weight of 0.
            key = tl.load(kv + offset[:, None] + lane[None, :], mask=held, other=0.0)
            value = tl.load(kv + part_stride + offset[:, None] + lane[None, :], mask=held, other=0.0)
            if WIDE:
                key, value = key.to(tl.float32), value.to(tl.float32)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            seen = (token[None, :] <= position[:, None]) & is_row[:, None]
            seen = seen & ((window == 0) | (token[None, :] > position[:, None] - window))
            score = tl.where(seen, score, float("-inf"))
            raised = tl.maximum(largest, tl.max(score, axis=1))
            safe = tl.where(raised == float("-inf"), 0.0, raised)
            weight = tl.exp(score - safe[:, None])
            fade = tl.exp(largest - safe)
            total = total * fade + tl.sum(weight, axis=1)
            sums = sums * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            largest = raised
        found = sums / tl.where(total == 0, 1.0, total)[:, None]
        place = split * split_stride + (begin + row)[:, None] * out_stride + head[:, None] * DIM + lane[None, :]
        tl.store(out + place, found.to(out.dtype.element_ty), mask=is_row[:, None] & is_lane[None, :])
        if IS_SPLIT:
            share_of = shares + (split * (split_stride // out_stride) + begin + row) * 2 * heads + 2 * head
            tl.store(share_of, largest, mask=is_row)
            tl.store(share_of + 1, total, mask=is_row)


@triton.jit
def join_splits(
    found, shares, out, splits, out_stride, split_rows,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out[row, head]`` of all that the splits found, by their weights."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    split, lane = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    is_split, is_lane = split < splits, lane < DIM
    share_of = shares + (split * split_rows + row) * 2 * heads + 2 * head
    await_last(EARLY)
    largest = tl.load(share_of, mask=is_split, other=float("-inf"))
    total = tl.load(share_of + 1, mask=is_split, other=0.0)
    raised = tl.max(largest, axis=0)
    weight = total * tl.exp(largest - tl.where(raised == float("-inf"), 0.0, raised))
    place = (split * split_rows + row)[:, None] * out_stride + head * DIM + lane[None, :]
    value = tl.load(found + place, mask=is_split[:, None] & is_lane[None, :], other=0.0)
    whole = tl.sum(weight, axis=0)
    mean = tl.sum(value * weight[:, None], axis=0) / tl.where(whole == 0, 1.0, whole)
    tl.store(out + row * out_stride + head * DIM + lane, mean.to(out.dtype.element_ty), mask=is_lane)
