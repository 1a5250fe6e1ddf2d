"""Attention of prefills and decodes over paged KV.

A program computes a tile of rows of one sequence for the query heads that share a KV head. It loops over the visible
tokens with a running maximum (Dao et al., "FlashAttention", 2022). Blocks of tokens are found through the block table
(Kwon et al., "PagedAttention", SOSP 2023). A block holds all layers, so a layer's view is strided.

Few sequences, or one long sequence among short ones, would keep few programs busy. Then the tokens of a sequence are
split among several programs, and a second kernel joins the results (Dao et al., "Flash-Decoding", 2023). A graph is
launched before contexts are known. The device computes the number of splits from each context, and superfluous programs
return immediately.

Arguments that depend on the shape of a step are not specialised, so that they cause no recompilation.
"""

import triton
import triton.language as tl

from lorikeet.kernels.triton.launch import wait_for_previous


@triton.jit
def _first_seen(position, window, TOKENS: tl.constexpr):
    """Return the first token that a row sees, rounded down to the start of a tile."""
    earliest = tl.where(window > 0, position - window + 1, 0)
    return tl.maximum(earliest, 0) // TOKENS * TOKENS


@triton.jit
def _share(tokens, usual, splits, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """Return the number of tokens per split: ``tokens / usual``, but at most ``LEAST`` if ``splits`` allow it.

    Splits without tokens have nothing to do.
    """
    tokens = tokens.to(tl.int32)  # A 32-bit division takes few instructions.
    share = tl.maximum(tl.cdiv(tokens, splits), tl.minimum(tl.cdiv(tokens, usual), LEAST))
    return tl.cdiv(share, TOKENS) * TOKENS


@triton.jit(do_not_specialize=["numbers", "is_part", "row_starts", "contexts", "usual", "splits", "table_stride"])
def attention(
    q, kv, out, shares, numbers, is_part, row_starts, contexts, tables, scale, softcap, window, usual, splits, heads,
    q_stride, out_stride, block_stride, part_stride, token_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, IS_SPLIT: tl.constexpr, CAPPED: tl.constexpr, LEAST: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of ``ROWS // GROUP`` query rows of one sequence and one KV head; ``window`` 0 means none.

    If ``is_part``, only the sequences with indices ``numbers`` are computed. If ``IS_SPLIT``, they have one row each,
    and a program handles one of the splits of the tokens (see ``_share``): ``out[split, index]`` is the weighted mean
    of its values, and ``shares[split, index, head]`` its largest score and its sum of weights. If ``CAPPED``, scores
    are ``softcap * tanh(score / softcap)``. ``WIDE`` multiplies in fp32, since the interpreter has no bfloat16
    products.
    """
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    sequence = tl.load(numbers + index, mask=is_part != 0, other=index)
    begin = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - begin
    context = tl.load(contexts + sequence)
    queries: tl.constexpr = ROWS // GROUP
    first = 0 if IS_SPLIT else tl.program_id(2) * queries
    start = _first_seen(context - count + first, window, TOKENS)
    last = tl.minimum(context, context - count + first + queries)
    is_needed = first < count
    if IS_SPLIT:
        share = _share(last - start, usual, splits, TOKENS, LEAST)
        start += tl.program_id(2) * share
        is_needed = start < last
        last = tl.minimum(last, start + share)
    wait_for_previous(PDL)
    if is_needed:
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
        for at in range(start, last, TOKENS):
            token = at + tl.arange(0, TOKENS)
            there = token < last
            block = tl.load(tables + sequence * table_stride + token // BLOCK_TOKENS, mask=there, other=0)
            offset = block * block_stride + (token % BLOCK_TOKENS) * token_stride + kv_head * DIM
            held = there[:, None] & is_lane[None, :]
            # Missing tokens are loaded as 0: a stale NaN would survive a weight of 0.
            key = tl.load(kv + offset[:, None] + lane[None, :], mask=held, other=0.0)
            value = tl.load(kv + part_stride + offset[:, None] + lane[None, :], mask=held, other=0.0)
            if WIDE:
                key = key.to(tl.float32)
                value = value.to(tl.float32)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / softcap)))
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
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute ``out[row, head]``, the weighted mean of the results of a sequence's splits."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    sequence = tl.load(numbers + index, mask=is_part != 0, other=index)
    row = tl.load(row_starts + sequence)
    context = tl.load(contexts + sequence)
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, WIDTH)
    tokens = context - _first_seen(context - 1, window, TOKENS)
    is_split = (split < splits) & (split * _share(tokens, usual, splits, TOKENS, LEAST) < tokens)
    is_lane = lane < DIM
    place = split * tl.num_programs(0) + index
    share_of = shares + (place * heads + head) * 2
    wait_for_previous(PDL)
    largest = tl.load(share_of, mask=is_split, other=float("-inf"))
    total = tl.load(share_of + 1, mask=is_split, other=0.0)
    raised = tl.max(largest, axis=0)
    weight = total * tl.exp(largest - tl.where(raised == float("-inf"), 0.0, raised))
    place = place[:, None] * out_stride + head * DIM + lane[None, :]
    value = tl.load(found + place, mask=is_split[:, None] & is_lane[None, :], other=0.0)
    whole = tl.sum(weight, axis=0)
    mean = tl.sum(value * weight[:, None], axis=0) / tl.where(whole == 0, 1.0, whole)
    tl.store(out + row * out_stride + head * DIM + lane, mean.to(out.dtype.element_ty), mask=is_lane)
