"""What adapters of mixed ranks add to a product, straight from pool blocks.

Two launches, as Punica's SGMV has them (Chen et al., MLSys 2024): rows shrink to their adapter's rank, and expand to
the outputs. Where rows are few, the inputs are split among programs, as split-K products are. Which rows belong to
which adapter, and where its pieces lie, stands in tables on the device, so that the same launches serve any mix of
adapters.
"""

import triton
import triton.language as tl


@triton.jit
def _pieces(segments, segment, layer_module):
    """Return the rows of a segment, the table of its adapter's pieces, and which of them are of (layer, module).

    A segment without rows has none: it only fills a table, and its addresses are 0.
    """
    begin = tl.load(segments + 4 * segment)
    end = tl.load(segments + 4 * segment + 1)
    table = tl.load(segments + 4 * segment + 2).to(tl.pointer_type(tl.int64))
    index = tl.load(segments + 4 * segment + 3).to(tl.pointer_type(tl.int64))
    there = begin < end
    first = tl.load(index + layer_module, mask=there, other=0)
    return begin, end, table, first, tl.load(index + layer_module + 1, mask=there, other=0)


@triton.jit
def _piece(table, each, ALIGNED: tl.constexpr):
    """Return the addresses of a piece's A and B rows, and how many they are."""
    a = tl.load(table + 3 * each)
    b = tl.load(table + 3 * each + 1)
    if ALIGNED:  # else the compiler reads element by element: it knows nothing of addresses from a table
        a, b = tl.multiple_of(a, 16), tl.multiple_of(b, 16)
    return a, b, tl.load(table + 3 * each + 2)


@triton.jit
def shrink(
    x, inner, segments, targets, layer_modules, inputs, padded_rank, rank_tiles, parts, part_inputs,
    x_stride, inner_stride, target_stride, part_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``inner[part, target, row, rank] = x[row] @ A[rank]`` over one part of the inputs.

    A program has a tile of rows of one segment and one of ranks, so that a step of few rows, too, has programs enough
    to read adapters as fast as the memory can. ``padded_rank`` above 0 computes so many ranks of every adapter, those
    that it has not as 0. ``WIDE`` multiplies in fp32: the interpreter knows no products of bfloat16.
    """
    segment = tl.program_id(0)
    tile, rank_tile = tl.program_id(1) // rank_tiles, tl.program_id(1) % rank_tiles
    target, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    begin, end, table, piece, last = _pieces(segments, segment, layer_module)
    row = begin + tile * ROWS + tl.arange(0, ROWS)
    if begin + tile * ROWS < end and piece < last:
        is_row = row < end
        first = rank_tile * RANKS
        rank = first + tl.arange(0, RANKS)
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        done = tl.cast(0, tl.int64)
        for each in range(piece, last):
            a_address, _, ranks = _piece(table, each, ALIGNED)
            rows_a = a_address.to(tl.pointer_type(x.dtype.element_ty))
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
                        mine, a = mine.to(tl.float32), a.to(tl.float32)
                    sums += tl.dot(mine, a, input_precision="ieee")
            done += ranks
        place = inner + part * part_stride + target * target_stride + row[:, None] * inner_stride + rank[None, :]
        tl.store(place, sums, mask=is_row[:, None] & (rank < done)[None, :])


@triton.jit
def expand(
    inner, out, segments, targets, layer_modules, padded_rank, parts, column_tiles,
    out_stride, inner_stride, target_stride, part_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[row, column] += inner[:, target, row] @ Bᵀ[:, column]`` for a tile of rows and one of columns.

    The parts of the inputs are summed first, in their order.
    """
    segment, tile = tl.program_id(0), tl.program_id(1)
    target, column_tile = tl.program_id(2) // column_tiles, tl.program_id(2) % column_tiles
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    outputs = tl.load(targets + 3 + 3 * target)
    begin, end, table, piece, last = _pieces(segments, segment, layer_module)
    row = begin + tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * WIDTH + tl.arange(0, WIDTH)
    if begin + tile * ROWS < end and piece < last and column_tile * WIDTH < outputs:
        is_row, is_column = row < end, column < outputs
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        done = tl.cast(0, tl.int64)
        for each in range(piece, last):
            _, b_address, ranks = _piece(table, each, ALIGNED)
            rows_b = b_address.to(tl.pointer_type(out.dtype.element_ty))
            width = tl.where(each + 1 == last, tl.maximum(ranks, padded_rank - done), ranks)
            for first in range(0, width, RANKS):
                rank = first + tl.arange(0, RANKS)
                is_rank = rank < ranks
                place = inner + target * target_stride + row[:, None] * inner_stride + (done + rank)[None, :]
                held = is_row[:, None] & is_rank[None, :]
                shrunk = tl.load(place, mask=held, other=0.0)
                for part in range(1, parts):
                    shrunk += tl.load(place + part * part_stride, mask=held, other=0.0)
                b = tl.load(
                    rows_b + rank[:, None] * outputs + column[None, :],
                    mask=is_rank[:, None] & is_column[None, :],
                    other=0.0,
                )
                sums += tl.dot(shrunk, b.to(tl.float32), input_precision=PRECISION)
            done += ranks
        place = out + row[:, None] * out_stride + tl.load(targets + 2 + 3 * target) + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + sums).to(out.dtype.element_ty), mask=mask)
