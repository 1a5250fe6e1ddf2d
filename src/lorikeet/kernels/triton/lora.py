"""Grouped LoRA for adapters of mixed ranks, with weights read in place from pool blocks.

There are two launches, as in Punica's SGMV (Chen et al., MLSys 2024): ``shrink`` multiplies rows with their adapter's
A, and ``expand`` multiplies the results with B. With few rows, inputs are split among programs (split-K). Tables on the
device hold the adapter of each row and the addresses of its pieces, so the same launches serve any mix of adapters.

Each kernel has a variant for segments of one row, whose time goes into reading the adapter. Tiles of tensor cores would
be almost empty there.

With PDL a kernel looks up the addresses of its weights, and may read some weights, before it waits for the previous
kernel.

Arguments that change between layers or batches are not specialised, so that an argument that becomes a multiple of 16
causes no recompilation.
"""

import triton
import triton.language as tl

from lorikeet.kernels.triton.launch import wait_for_previous


@triton.jit
def _pieces(segments, segment, layer_module):
    """Return the rows of a segment, its adapter's piece table, and the range of pieces for (layer, module).

    An unused segment has no rows, no pieces, and addresses of 0.
    """
    begin = tl.load(segments + 4 * segment)
    end = tl.load(segments + 4 * segment + 1)
    table = tl.load(segments + 4 * segment + 2).to(tl.pointer_type(tl.int64))
    index = tl.load(segments + 4 * segment + 3).to(tl.pointer_type(tl.int64))
    there = begin < end
    first = tl.load(index + layer_module, mask=there, other=0)
    return begin, end, table, first, tl.load(index + layer_module + 1, mask=there, other=0)


@triton.jit
def _piece(table, each, kind, ALIGNED: tl.constexpr):
    """Return pointers to a piece's A and B rows, and the number of rows."""
    a = tl.load(table + 3 * each).to(tl.pointer_type(kind))
    b = tl.load(table + 3 * each + 1).to(tl.pointer_type(kind))
    if ALIGNED:  # Otherwise the compiler reads single elements, since it cannot know the alignment.
        a = tl.multiple_of(a, 16)
        b = tl.multiple_of(b, 16)
    return a, b, tl.load(table + 3 * each + 2)


@triton.jit
def _columns(targets, target, EVEN: tl.constexpr):
    """Return the number of outputs of a target, and the target's first column."""
    outputs = tl.load(targets + 3 + 3 * target)
    start = tl.load(targets + 2 + 3 * target)
    if EVEN:
        outputs = tl.multiple_of(outputs, 16)
        start = tl.multiple_of(start, 16)
    return outputs, start


@triton.jit(do_not_specialize=["layer_modules", "padded_rank", "rank_tiles", "parts"])
def shrink(
    x, inner, segments, targets, layer_modules, inputs, padded_rank, rank_tiles, parts, part_inputs,
    x_stride, inner_stride, target_stride, part_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute ``inner[part, target, row, rank] = x[row] @ A[rank]`` over one part of the inputs.

    A program computes a tile of rows of one segment and a tile of ranks, so that steps with few rows also have enough
    programs to read adapters at memory bandwidth. If ``padded_rank`` is above 0, this number of ranks is computed for
    every adapter, with 0 for missing ranks. ``WIDE`` multiplies in fp32, since the interpreter has no bfloat16
    products.
    """
    segment = tl.program_id(0)
    tile = tl.program_id(1) // rank_tiles
    rank_tile = tl.program_id(1) % rank_tiles
    target = tl.program_id(2) // parts
    part = tl.program_id(2) % parts
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    begin, end, table, piece, last = _pieces(segments, segment, layer_module)
    row = begin + tile * ROWS + tl.arange(0, ROWS)
    wait_for_previous(PDL)
    if begin + tile * ROWS < end and piece < last:
        is_row = row < end
        first = rank_tile * RANKS
        rank = first + tl.arange(0, RANKS)
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        done = tl.cast(0, tl.int64)
        for each in range(piece, last):
            rows_a, _, ranks = _piece(table, each, x.dtype.element_ty, ALIGNED)
            width = tl.where(each + 1 == last, tl.maximum(ranks, padded_rank - done), ranks)
            if first < done + width and first + RANKS > done:
                own = rank - done
                is_rank = (own >= 0) & (own < ranks)
                stop = tl.minimum((part + 1) * part_inputs, inputs)
                for at in range(part * part_inputs, stop, WIDTH):
                    column = at + tl.arange(0, WIDTH)
                    is_column = column < inputs
                    mine = tl.load(
                        x + row[:, None] * x_stride + column[None, :],
                        mask=is_row[:, None] & is_column[None, :],
                        other=0.0,
                    )
                    a = tl.load(
                        rows_a + own[None, :] * inputs + column[:, None],
                        mask=is_rank[None, :] & is_column[:, None],
                        other=0.0,
                    )
                    if WIDE:
                        mine = mine.to(tl.float32)
                        a = a.to(tl.float32)
                    sums += tl.dot(mine, a, input_precision="ieee")
            done += ranks
        place = inner + part * part_stride + target * target_stride + row[:, None] * inner_stride + rank[None, :]
        tl.store(place, sums, mask=is_row[:, None] & (rank < done)[None, :])


@triton.jit(do_not_specialize=["layer_modules", "padded_rank", "column_tiles"])
def expand(
    inner, out, segments, targets, layer_modules, padded_rank, column_tiles,
    out_stride, inner_stride, target_stride, part_stride,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ``out[row, column] += inner[:, target, row] @ Bᵀ[:, column]`` for a tile of rows and columns.

    The parts of the inputs are summed first, in order, and rounded like torch's first product. ``EVEN`` means that
    columns and outputs of all targets are multiples of 16.
    """
    segment = tl.program_id(0)
    tile = tl.program_id(1)
    target = tl.program_id(2) // column_tiles
    column_tile = tl.program_id(2) % column_tiles
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    outputs, start = _columns(targets, target, EVEN)
    begin, end, table, piece, last = _pieces(segments, segment, layer_module)
    row = begin + tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * WIDTH + tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    if begin + tile * ROWS < end and piece < last and column_tile * WIDTH < outputs:
        is_row = row < end
        is_column = column < outputs
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        done = tl.cast(0, tl.int64)
        for each in range(piece, last):
            _, rows_b, ranks = _piece(table, each, out.dtype.element_ty, ALIGNED)
            width = tl.where(each + 1 == last, tl.maximum(ranks, padded_rank - done), ranks)
            for first in range(0, width, RANKS):
                rank = first + tl.arange(0, RANKS)
                is_rank = rank < ranks
                place = inner + target * target_stride + row[:, None] * inner_stride + (done + rank)[None, :]
                held = is_row[:, None] & is_rank[None, :]
                shrunk = tl.load(place, mask=held, other=0.0)
                for part in tl.static_range(1, PARTS):
                    shrunk += tl.load(place + part * part_stride, mask=held, other=0.0)
                b = tl.load(
                    rows_b + rank[:, None] * outputs + column[None, :],
                    mask=is_rank[:, None] & is_column[None, :],
                    other=0.0,
                )
                shrunk = shrunk.to(b.dtype)
                if WIDE:
                    shrunk = shrunk.to(tl.float32)
                    b = b.to(tl.float32)
                sums += tl.dot(shrunk, b, input_precision="ieee")
            done += ranks
        place = out + row[:, None] * out_stride + start + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + sums).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rank_rows(table, piece, last, rank, width, AT: tl.constexpr, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to the A (``AT`` 0) or B (``AT`` 1) rows of ranks, a mask of valid ranks, and the total rank."""
    address = rank * 0
    is_rank = rank < 0
    done = tl.cast(0, tl.int64)
    for each in range(piece, last):
        begin = tl.load(table + 3 * each + AT)
        ranks = tl.load(table + 3 * each + 2)
        own = rank - done
        is_own = (own >= 0) & (own < ranks)
        address = tl.where(is_own, begin + own * width * (kind.primitive_bitwidth // 8), address)
        is_rank = is_rank | is_own
        done += ranks
    rows = address.to(tl.pointer_type(kind))
    return tl.multiple_of(rows, 16) if ALIGNED else rows, is_rank, done


@triton.jit(do_not_specialize=["layer_modules", "padded_rank", "parts"])
def shrink_row(
    x, inner, segments, targets, layer_modules, inputs, padded_rank, parts, part_inputs,
    x_stride, inner_stride, target_stride, part_stride,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute :func:`shrink` for segments of one row, and prefetch the next tile of A during each product."""
    segment = tl.program_id(0)
    rank_tile = tl.program_id(1)
    target = tl.program_id(2) // parts
    part = tl.program_id(2) % parts
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    row, _end, table, piece, last = _pieces(segments, segment, layer_module)
    rank = (rank_tile * RANKS + tl.arange(0, RANKS)).to(tl.int64)
    rows_a, is_rank, ranks = _rank_rows(table, piece, last, rank, inputs, 0, x.dtype.element_ty, ALIGNED)
    begin = part * part_inputs
    stop = tl.minimum(begin + part_inputs, inputs)
    column = begin + tl.arange(0, WIDTH)
    a = tl.load(rows_a[:, None] + column[None, :], mask=is_rank[:, None] & (column < stop)[None, :], other=0.0)
    wait_for_previous(PDL)
    ranks = tl.maximum(ranks, padded_rank)
    if piece < last and rank_tile * RANKS < ranks:
        sums = tl.zeros([RANKS], tl.float32)
        for _tile in range(begin, stop, WIDTH):
            mine = tl.load(x + row * x_stride + column, mask=column < stop, other=0.0)
            column += WIDTH
            following = tl.load(
                rows_a[:, None] + column[None, :], mask=is_rank[:, None] & (column < stop)[None, :], other=0.0
            )
            sums += tl.sum(a.to(tl.float32) * mine.to(tl.float32)[None, :], axis=1)
            a = following
        place = inner + part * part_stride + target * target_stride + row * inner_stride + rank
        tl.store(place, sums, mask=rank < ranks)


@triton.jit(do_not_specialize=["layer_modules", "padded_rank", "column_tiles"])
def expand_row(
    inner, out, segments, targets, layer_modules, padded_rank, column_tiles,
    out_stride, inner_stride, target_stride, part_stride,
    PARTS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute :func:`expand` for segments of one row, and prefetch the next tile of B during each product."""
    segment = tl.program_id(0)
    target = tl.program_id(1) // column_tiles
    column_tile = tl.program_id(1) % column_tiles
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    outputs, start = _columns(targets, target, EVEN)
    row, _end, table, piece, last = _pieces(segments, segment, layer_module)
    column = column_tile * WIDTH + tl.arange(0, WIDTH)
    is_column = column < outputs
    rank = tl.arange(0, RANKS).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    rows_b, is_rank, ranks = _rank_rows(table, piece, last, rank, outputs, 1, kind, ALIGNED and EVEN)
    b = tl.load(rows_b[:, None] + column[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0)
    wait_for_previous(PDL)
    if piece < last and column_tile * WIDTH < outputs:
        sums = tl.zeros([RANKS, WIDTH], tl.float32)
        for _tile in range(0, tl.maximum(ranks, padded_rank), RANKS):
            place = inner + target * target_stride + row * inner_stride + rank
            shrunk = tl.load(place, mask=is_rank, other=0.0)
            for part in tl.static_range(1, PARTS):
                shrunk += tl.load(place + part * part_stride, mask=is_rank, other=0.0)
            rank += RANKS
            rows_b, is_rank, _total = _rank_rows(table, piece, last, rank, outputs, 1, kind, ALIGNED and EVEN)
            following = tl.load(
                rows_b[:, None] + column[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0
            )
            sums += shrunk[:, None] * b.to(tl.float32)
            b = following
        place = out + row * out_stride + start + column
        before = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
        tl.store(place, (before + tl.sum(sums, axis=0)).to(kind), mask=is_column)
