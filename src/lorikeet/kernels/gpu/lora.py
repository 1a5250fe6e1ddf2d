"""What adapters of mixed ranks add to a product, straight from pool blocks.

Two launches, as Punica's SGMV has them (Chen et al., MLSys 2024): rows shrink to their adapter's rank, and expand to
the outputs. Which rows belong to which adapter, and where its pieces lie, stands in tables on the device, so that the
same launches serve any mix of adapters.
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
def shrink(
    x, inner, segments, targets, layer_modules, inputs, padded_rank, x_stride, inner_stride, target_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``inner[target, row, rank] = x[row] @ A[rank]`` for a tile of rows of one segment, over all its ranks.

    ``padded_rank`` above 0 computes so many ranks of every adapter, those that it has not as 0. ``WIDE`` multiplies in
    fp32: the interpreter knows no products of bfloat16.
    """
    segment, tile, target = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    begin, end, table, piece, last = _pieces(segments, segment, layer_module)
    row = begin + tile * ROWS + tl.arange(0, ROWS)
    if begin + tile * ROWS < end and piece < last:
        is_row = row < end
        done = tl.cast(0, tl.int64)
        for each in range(piece, last):
            rows_a = tl.load(table + 3 * each).to(tl.pointer_type(x.dtype.element_ty))
            ranks = tl.load(table + 3 * each + 2)
            width = tl.where(each + 1 == last, tl.maximum(ranks, padded_rank - done), ranks)
            for first in range(0, width, RANKS):
                rank = first + tl.arange(0, RANKS)
                sums = tl.zeros([ROWS, RANKS], tl.float32)
                for at in range(0, inputs, WIDTH):
                    column = at + tl.arange(0, WIDTH)
                    is_column = column < inputs
                    mine = tl.load(
                        x + row[:, None] * x_stride + column[None, :],
                        mask=is_row[:, None] & is_column[None, :],
                        other=0.0,
                    )
                    a = tl.load(
                        rows_a + rank[None, :] * inputs + column[:, None],
                        mask=(rank < ranks)[None, :] & is_column[:, None],
                        other=0.0,
                    )
                    if WIDE:
                        mine, a = mine.to(tl.float32), a.to(tl.float32)
                    sums += tl.dot(mine, a, input_precision="ieee")
                place = inner + target * target_stride + row[:, None] * inner_stride + (done + rank)[None, :]
                tl.store(place, sums, mask=is_row[:, None] & (rank < ranks)[None, :])
            done += ranks


@triton.jit
def expand(
    inner, out, segments, targets, layer_modules, padded_rank, out_stride, inner_stride, target_stride, tiles,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``out[row, column] += inner[target, row] @ Bᵀ[:, column]`` for a tile of rows and one of columns."""
    segment, tile = tl.program_id(0), tl.program_id(1)
    target, part = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    layer_module = layer_modules + tl.load(targets + 1 + 3 * target)
    outputs = tl.load(targets + 3 + 3 * target)
    begin, end, table, piece, last = _pieces(segments, segment, layer_module)
    row = begin + tile * ROWS + tl.arange(0, ROWS)
    column = part * WIDTH + tl.arange(0, WIDTH)
    if begin + tile * ROWS < end and piece < last and part * WIDTH < outputs:
        is_row, is_column = row < end, column < outputs
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        done = tl.cast(0, tl.int64)
        for each in range(piece, last):
            rows_b = tl.load(table + 3 * each + 1).to(tl.pointer_type(out.dtype.element_ty))
            ranks = tl.load(table + 3 * each + 2)
            width = tl.where(each + 1 == last, tl.maximum(ranks, padded_rank - done), ranks)
            for first in range(0, width, RANKS):
                rank = first + tl.arange(0, RANKS)
                is_rank = rank < ranks
                shrunk = tl.load(
                    inner + target * target_stride + row[:, None] * inner_stride + (done + rank)[None, :],
                    mask=is_row[:, None] & is_rank[None, :],
                    other=0.0,
                )
                b = tl.load(
                    rows_b + rank[:, None] * outputs + column[None, :],
                    mask=is_rank[:, None] & is_column[None, :],
                    other=0.0,
                )
                sums += tl.dot(shrunk, b.to(tl.float32), input_precision="ieee")
            done += ranks
        place = out + row[:, None] * out_stride + tl.load(targets + 2 + 3 * target) + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + sums).to(out.dtype.element_ty), mask=mask)
