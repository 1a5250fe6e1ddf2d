"""Attention of prefills and decodes over paged KV.

A program has a tile of rows of one sequence, for the query heads that share a KV head, and goes over the tokens that
they see with a running maximum (Dao et al., "FlashAttention", 2022). Blocks of tokens are found through the sequence's
table (Kwon et al., "PagedAttention", SOSP 2023); all layers of a block lie together, so that a layer's view is strided.
A few sequences would keep few programs busy, each for as long as its context is, and so would a long one among short
ones; then several share one's tokens, and what they found is put together (Dao et al., "Flash-Decoding", 2023). A graph
is launched before anybody knows contexts: each sequence's own says on the device how many programs share it. The others
end at once.

What follows from the shape of a step is no reason to compile anew, nor is where numbers lie that are read one by one.
"""

import triton
import triton.language as tl

from lorikeet.kernels.gpu.launch import await_last


@triton.jit
def _first_seen(position, window, TOKENS: tl.constexpr):
    """Return the first token that a row sees, or one before it with which a tile begins."""
    earliest = tl.where(window > 0, position - window + 1, 0)
    return tl.maximum(earliest, 0) // TOKENS * TOKENS


@triton.jit
def _share(tokens, usual, splits, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """Return how many of a sequence's tokens each split has: as many as if there were ``usual`` of them.

    If that is more than ``LEAST``, it is so many, or more where ``splits`` would else be too few. What the first ones
    leave nothing for has nothing to do.
    """
    tokens = tokens.to(tl.int32)  # whose division is a few instructions
    share = tl.maximum(tl.cdiv(tokens, splits), tl.minimum(tl.cdiv(tokens, usual), LEAST))
    return tl.cdiv(share, TOKENS) * TOKENS


@triton.jit(do_not_specialize=["numbers", "is_part", "row_starts", "contexts", "usual", "splits", "table_stride"])
def attention(
    q, kv, out, shares, numbers, is_part, row_starts, contexts, tables, scale, window, usual, splits, heads,
    q_stride, out_stride, block_stride, part_stride, token_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PRESETS: tl.constexpr, TOKENS: tl.constexpr, IS_SPLIT: tl.constexpr, LEAST: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``PRESETS // GROUP`` query rows of one sequence and one KV head; ``window`` 0 is none.

    Sequences are all, or those with ``numbers`` if they are a part. If ``IS_SPLIT``, they have one row each, and a
    program one of the ``splits`` of its tokens (see ``_share``): ``out[split, index]`` is the mean of the values that
    it saw, and ``shares[split, index, head]`` its largest score and its sum of weights. ``WIDE`` multiplies in fp32:
    the interpreter knows no products of bfloat16.
    """
    index, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(numbers + index, mask=is_part != 0, other=index)
    begin = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - begin
    context = tl.load(contexts + sequence)
    queries: tl.constexpr = PRESETS // GROUP
    first = 0 if IS_SPLIT else tl.program_id(2) * queries
    start = _first_seen(context - count + first, window, TOKENS)
    last = tl.minimum(context, context - count + first + queries)
    is_needed = first < count
    if IS_SPLIT:
        share = _share(last - start, usual, splits, TOKENS, LEAST)
        start += tl.program_id(2) * share
        is_needed = start < last
        last = tl.minimum(last, start + share)
    await_last(EARLY)
    if is_needed:
        member = tl.arange(0, PRESETS)
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
        largest = tl.full([PRESETS], float("-inf"), tl.float32)
        total = tl.zeros([PRESETS], tl.float32)
        sums = tl.zeros([PRESETS, WIDTH], tl.float32)
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
        written = begin + row
        if IS_SPLIT:
            written = tl.program_id(2) * tl.num_programs(0) + index + row
            share_of = shares + (written * heads + head) * 2
            tl.store(share_of, largest, mask=is_row)
            tl.store(share_of + 1, total, mask=is_row)
        place = written[:, None] * out_stride + head[:, None] * DIM + lane[None, :]
        tl.store(out + place, found.to(out.dtype.element_ty), mask=is_row[:, None] & is_lane[None, :])


@triton.jit(do_not_specialize=["numbers", "is_part", "row_starts", "contexts", "usual", "splits"])
def join_splits(
    found, shares, out, numbers, is_part, row_starts, contexts, window, usual, splits, out_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``out[row, head]`` of all that the splits of a sequence found, by their weights."""
    index, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sequence = tl.load(numbers + index, mask=is_part != 0, other=index)
    row, context = tl.load(row_starts + sequence), tl.load(contexts + sequence)
    split, lane = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    tokens = context - _first_seen(context - 1, window, TOKENS)
    is_split = (split < splits) & (split * _share(tokens, usual, splits, TOKENS, LEAST) < tokens)
    is_lane = lane < DIM
    place = split * tl.num_programs(0) + index
    share_of = shares + (place * heads + head) * 2
    await_last(EARLY)
    largest = tl.load(share_of, mask=is_split, other=float("-inf"))
    total = tl.load(share_of + 1, mask=is_split, other=0.0)
    raised = tl.max(largest, axis=0)
    weight = total * tl.exp(largest - tl.where(raised == float("-inf"), 0.0, raised))
    place = place[:, None] * out_stride + head * DIM + lane[None, :]
    value = tl.load(found + place, mask=is_split[:, None] & is_lane[None, :], other=0.0)
    whole = tl.sum(weight, axis=0)
    mean = tl.sum(value * weight[:, None], axis=0) / tl.where(whole == 0, 1.0, whole)
    tl.store(out + row * out_stride + head * DIM + lane, mean.to(out.dtype.element_ty), mask=is_lane)
