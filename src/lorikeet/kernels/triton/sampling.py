"""Samples one token per row: the most likely token, or the kept token with the largest logit plus noise.

There are four launches: the largest logit, the filters, the draw, and the join. In the first and third launch, separate
programs handle parts of the vocabulary, since one program per row would leave most of the device idle. The results of a
part are in ``values`` (fp32) and ``tokens`` (int32), ``[2, rows, parts]``: the largest logit (NaN if any logit is NaN),
and the drawn token. The row's largest logit is the maximum over its parts.

The noise is the same as in ``kernels.sampling``: Philox 4x64 with ten rounds (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011) with numpy's counter, a function of only seed, position and token.
"""

import triton
import triton.language as tl

from lorikeet.kernels.sampling import GREEDY_BELOW
from lorikeet.kernels.triton.launch import wait_for_previous

MOST_PARTS = 256

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_MOST_PARTS = tl.constexpr(MOST_PARTS)
_MULTIPLY_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLY_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _philox(word_0, word_1, key):
    """Return the four words of a block. The counter's upper words and the key's second word are 0."""
    word_2 = word_0 * 0
    word_3 = word_0 * 0
    multiply_0 = word_2 + _MULTIPLY_0
    multiply_1 = word_2 + _MULTIPLY_1
    key_0 = word_2 + key
    key_1 = word_2
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(word_0, multiply_0)
        low_0 = word_0 * multiply_0
        high_1 = tl.umulhi(word_2, multiply_1)
        low_1 = word_2 * multiply_1
        word_0 = high_1 ^ word_1 ^ key_0
        word_1 = low_1
        word_2 = high_0 ^ word_3 ^ key_1
        word_3 = low_0
        key_0 += _WEYL_0
        key_1 += _WEYL_1
    return word_0, word_1, word_2, word_3


@triton.jit
def _gumbel(first, seed, position, WIDTH: tl.constexpr):
    """Return fp32 noise for ``WIDTH`` tokens.

    Eight tokens share a block, half a word each, and ``first`` starts a block.
    """
    block = (first // 8 + tl.arange(0, WIDTH // 8)).to(tl.uint64)
    one, two, three, four = _philox(block + 1, block * 0 + position, seed)
    words = tl.interleave(tl.interleave(one, three), tl.interleave(two, four))
    halves = tl.interleave(words & 0xFFFFFFFF, words >> 32)
    uniform = (halves.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _logits(row_logits, token, vocab):
    """Return fp32 logits, with -inf beyond the vocabulary."""
    return tl.load(row_logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _store_best(values, tokens, place, value, token):
    """Store the largest value (NaN if any value is NaN), and the lowest token with that value."""
    most = tl.max(value, axis=0)
    first = tl.min(tl.where(value == most, token, 2147483647), axis=0)
    is_invalid = tl.max((value != value).to(tl.int32), axis=0) > 0
    tl.store(values + place, tl.where(is_invalid, float("nan"), most))
    tl.store(tokens + place, first)


@triton.jit
def largest(logits, values, tokens, vocab, part_width, row_stride, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Find the largest logit of one part of a row, and the first token with that logit."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    begin = part * part_width
    lane = tl.arange(0, WIDTH)
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    chosen = tl.zeros([WIDTH], tl.int32)
    wait_for_previous(PDL)
    for at in range(begin, begin + part_width, WIDTH):
        value = _logits(logits + row * row_stride, at + lane, vocab)
        better = (value > best) | (value != value)  # A NaN is kept.
        best = tl.where(better, value, best)
        chosen = tl.where(better, at + lane, chosen)
    _store_best(values, tokens, row * parts + part, best, chosen)


@triton.jit
def _top(values, row, parts):
    """Return a row's largest logit. The result is undefined if a logit is NaN, since such a row gets no token."""
    part = tl.arange(0, _MOST_PARTS)
    return tl.max(tl.load(values + row * parts + part, mask=part < parts, other=float("-inf")), axis=0)


@triton.jit
def _scaled(value, top, scale):
    """Return logits minus the largest logit, divided by the temperature."""
    return (value - top) / scale


@triton.jit
def _swap_order(bits):
    """Map the bits of a float to an integer with the same order, or back."""
    return tl.where(bits < 0, bits ^ ((1 << (bits.dtype.primitive_bitwidth - 1)) - 1), bits)


@triton.jit
def _rank_of(number, dtype: tl.constexpr):
    """Return the rank (int64) of a number in the order of all numbers of the logits' dtype."""
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    return _swap_order(number.to(dtype).to(bits, bitcast=True)).to(tl.int64)


@triton.jit
def _number_at(place, dtype: tl.constexpr):
    """Return the fp32 number with a rank; infinity for ranks beyond it."""
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    place = tl.minimum(place, _rank_of(tl.full([], float("inf"), tl.float32), dtype))
    return _swap_order(place.to(bits)).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _highest_with(wanted, row_logits, vocab, lowest, top, scale, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the highest threshold, at least ``lowest``, such that the logits at or above it weigh at least ``wanted``.

    A logit weighs ``exp(logit - top)`` if ``BY_MASS``, else 1. The threshold is a number of the logits' dtype, found by
    a search over the ordered numbers of this dtype. Each pass over the row tests three thresholds, which gives two bits
    of the threshold's rank. The search needs no memory for a sort, and sums do not depend on other rows. Three
    thresholds are fastest: seven need fewer but longer passes.
    """
    dtype: tl.constexpr = row_logits.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    log_base = 1.4426950408889634 / scale  # This way a weight takes one multiplication.
    place = _rank_of(lowest, dtype)
    step = tl.full([], 1 << (dtype.primitive_bitwidth - 2), tl.int64)
    reach = tl.maximum(_rank_of(top, dtype) - place, 0)  # The rank of a NaN may be below all others.
    while step > reach:
        step = step // 4
    while step > 0:
        low = _number_at(place + step, dtype)
        middle = _number_at(place + 2 * step, dtype)
        high = _number_at(place + 3 * step, dtype)
        from_low = tl.zeros([WIDTH], tl.float32)
        from_middle = from_low
        from_high = from_low
        for at in range(0, vocab, WIDTH):
            value = _logits(row_logits, at + lane, vocab)
            weight = tl.exp2((value - top) * log_base) if BY_MASS else 1.0
            from_low = tl.where(value >= low, from_low + weight, from_low)
            from_middle = tl.where(value >= middle, from_middle + weight, from_middle)
            from_high = tl.where(value >= high, from_high + weight, from_high)
        place += step * (tl.sum(from_low, axis=0) >= wanted).to(tl.int64)
        place += step * (tl.sum(from_middle, axis=0) >= wanted).to(tl.int64)
        place += step * (tl.sum(from_high, axis=0) >= wanted).to(tl.int64)
        step = step // 4
    return _number_at(place, dtype)


@triton.jit
def _raised(least, bound):
    """Return the larger of two bounds.

    ``bound`` is NaN if -inf was divided by a temperature that is infinite in fp32.
    """
    return tl.where(bound > least, bound, least)


@triton.jit(do_not_specialize=["parts"])
def filter_rows(
    logits, temperatures, top_ks, top_ps, min_ps, values, lowest, vocab, parts, row_stride,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find a row's lowest scaled logit that min-p, top-k and top-p keep, in this order, or -inf without filters."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    least = tl.full([], float("-inf"), tl.float32)
    by_number = (top_k > 0) & (top_k < vocab)
    if (temperature >= _GREEDY_BELOW) & (by_number | (top_p < 1) | (min_p > 0)):
        row_logits = logits + row * row_stride
        lane = tl.arange(0, WIDTH)
        top = _top(values, row, parts)
        kept = least
        if min_p > 0:
            least = tl.log(min_p)
        if by_number:
            number = top_k.to(tl.float32)
            kept = _highest_with(number, row_logits, vocab, kept, top, temperature, False, WIDTH)
            least = _raised(least, _scaled(kept, top, temperature))
        if top_p < 1:
            sums = tl.zeros([WIDTH], tl.float32)
            for at in range(0, vocab, WIDTH):
                value = _scaled(_logits(row_logits, at + lane, vocab), top, temperature)
                sums = tl.where(value >= least, sums + tl.exp(value), sums)
            mass = tl.maximum(top_p * tl.sum(sums, axis=0), 1.0)  # At least the most likely token is kept.
            kept = _highest_with(mass, row_logits, vocab, kept, top, temperature, True, WIDTH)
            least = _raised(least, _scaled(kept, top, temperature))
    tl.store(lowest + row, least)


@triton.jit
def draw(
    logits, temperatures, lowest, seeds, positions, values, tokens, vocab, part_width, row_stride,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw the best token of one part of a row among scaled logits of at least ``lowest``. Greedy rows draw nothing."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    begin = part * part_width
    lane = tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    temperature = tl.load(temperatures + row)
    if temperature >= _GREEDY_BELOW:
        top = _top(values, row, parts)
        least = tl.load(lowest + row)
        seed = tl.load(seeds + row).to(tl.uint64)
        position = tl.load(positions + row).to(tl.uint64)
        best = tl.full([WIDTH], float("-inf"), tl.float32)
        chosen = tl.zeros([WIDTH], tl.int32)
        for at in range(begin, begin + part_width, WIDTH):
            value = _scaled(_logits(logits + row * row_stride, at + lane, vocab), top, temperature)
            kept = value >= least
            if tl.max(kept.to(tl.int32), axis=0) > 0:  # This skips the noise, which is most of the work.
                value = tl.where(kept, value + _gumbel(at, seed, position, WIDTH), float("-inf"))
                better = value > best
                best = tl.where(better, value, best)
                chosen = tl.where(better, at + lane, chosen)
        _store_best(values, tokens, (tl.num_programs(0) + row) * parts + part, best, chosen)


@triton.jit(do_not_specialize=["parts"])
def join(temperatures, values, tokens, out, parts, PDL: tl.constexpr):
    """Choose a row's token from the results of its parts. The token is -1 if the largest logit is not finite."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, _MOST_PARTS)
    wait_for_previous(PDL)
    is_drawn = (tl.load(temperatures + row) >= _GREEDY_BELOW).to(tl.int64)
    logit = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    place = (is_drawn * tl.num_programs(0) + row) * parts + part
    value = tl.load(values + place, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + place, mask=part < parts, other=0)
    first = tl.min(tl.where(value == tl.max(value, axis=0), token, 2147483647), axis=0)
    is_invalid = (tl.max((logit != logit).to(tl.int32), axis=0) > 0) | (tl.abs(tl.max(logit, axis=0)) == float("inf"))
    tl.store(out + row, tl.where(is_invalid, -1, first).to(tl.int64))
