"""One token per row: the most likely one, or that with the largest sum of logit and noise among those that are kept.

The noise is that of ``kernels.choose``: Philox 4x64 with ten rounds (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) as numpy counts it, a function of seed, position and token alone.
"""

import triton
import triton.language as tl

from lorikeet.kernels.choose import GREEDY_BELOW

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_MULTIPLY_0, _MULTIPLY_1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _philox(word_0, word_1, key):
    """Return the four words of a block; the counter's upper words and the key's second are 0."""
    word_2, word_3 = word_0 * 0, word_0 * 0
    multiply_0, multiply_1 = word_2 + _MULTIPLY_0, word_2 + _MULTIPLY_1
    key_0, key_1 = word_2 + key, word_2
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(word_0, multiply_0), word_0 * multiply_0
        high_1, low_1 = tl.umulhi(word_2, multiply_1), word_2 * multiply_1
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0 += _WEYL_0
        key_1 += _WEYL_1
    return word_0, word_1, word_2, word_3


@triton.jit
def _gumbel(token, seed, position):
    """Return fp32 noise of tokens: each has half a word."""
    word = (token // 2).to(tl.uint64)
    one, two, three, four = _philox(word // 4 + 1, word * 0 + position, seed)
    lane = word % 4
    raw = tl.where(lane == 0, one, tl.where(lane == 1, two, tl.where(lane == 2, three, four)))
    half = tl.where(token % 2 == 0, raw & 0xFFFFFFFF, raw >> 32)
    uniform = (half.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _scaled(logits, place, inside, top, scale):
    """Return logits as filters and noise see them: fp32, 0 for the largest, divided by the temperature."""
    value = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    return (value - top) / scale


@triton.jit
def _in_order(bits):
    """Turn the bits of fp32 into integers that are ordered as the numbers are, or back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _lowest_with_less_above(
    logits, start, vocab, top, scale, least, limit, BY_MASS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the lowest number above which lies less than ``limit`` of what is at least ``least``, or 0.

    What lies there counts by its probability's numerator, or else each token as 1. All numbers from -inf to 0 are
    halved until one is left: a sort without its memory, and its sums do not depend on the other rows.
    """
    lane = tl.arange(0, WIDTH)
    low, high = tl.full([], -2139095041, tl.int32), tl.full([], 0, tl.int32)  # -inf, 0
    for _ in range(31):
        middle = low + (high - low) // 2
        bound = _in_order(middle).to(tl.float32, bitcast=True)
        above = tl.zeros([WIDTH], tl.float32)
        for at in range(0, vocab, WIDTH):
            value = _scaled(logits, start + at + lane, at + lane < vocab, top, scale)
            weight = tl.exp(value) if BY_MASS else 1.0
            above += tl.where((value > bound) & (value >= least), weight, 0.0)
        is_less = tl.sum(above, axis=0) < limit
        high, low = tl.where(is_less, middle, high), tl.where(is_less, low, middle)
    return _in_order(high).to(tl.float32, bitcast=True)


@triton.jit
def filter_rows(
    logits, temperatures, top_ks, top_ps, min_ps, lowest, vocab, row_stride, WIDTH: tl.constexpr
):  # fmt: skip
    """Find for one row the lowest scaled logit that min-p, top-k and top-p, in this order, leave; -inf without them."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    least = tl.full([], float("-inf"), tl.float32)
    by_number = (top_k > 0) & (top_k < vocab)
    if (temperature >= _GREEDY_BELOW) & (by_number | (top_p < 1) | (min_p > 0)):
        lane = tl.arange(0, WIDTH)
        start = row * row_stride
        largest = tl.full([WIDTH], float("-inf"), tl.float32)
        for at in range(0, vocab, WIDTH):
            value = tl.load(logits + start + at + lane, mask=at + lane < vocab, other=float("-inf"))
            largest = tl.maximum(largest, value.to(tl.float32))
        top = tl.max(largest, axis=0)
        if min_p > 0:
            least = tl.log(min_p)
        if by_number:
            number = top_k.to(tl.float32)
            kept = _lowest_with_less_above(logits, start, vocab, top, temperature, least, number, False, WIDTH)
            least = tl.maximum(least, kept)
        if top_p < 1:
            sums = tl.zeros([WIDTH], tl.float32)
            for at in range(0, vocab, WIDTH):
                value = _scaled(logits, start + at + lane, at + lane < vocab, top, temperature)
                sums += tl.where(value >= least, tl.exp(value), 0.0)
            mass = top_p * tl.sum(sums, axis=0)
            kept = _lowest_with_less_above(logits, start, vocab, top, temperature, least, mass, True, WIDTH)
            least = tl.maximum(least, kept)
    tl.store(lowest + row, least)


@triton.jit
def draw(logits, temperatures, lowest, seeds, positions, out, vocab, row_stride, WIDTH: tl.constexpr):
    """Choose for one row among the tokens whose scaled logit is at least ``lowest``; -1 if the top is not finite."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    largest = tl.full([WIDTH], float("-inf"), tl.float32)
    sick = tl.zeros([WIDTH], tl.int32)
    for at in range(0, vocab, WIDTH):
        inside = at + lane < vocab
        value = tl.load(logits + row * row_stride + at + lane, mask=inside, other=float("-inf")).to(tl.float32)
        sick = tl.maximum(sick, (value != value).to(tl.int32))
        largest = tl.maximum(largest, value)
    top = tl.max(largest, axis=0)
    temperature = tl.load(temperatures + row)
    least, seed = tl.load(lowest + row), tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    greedy = temperature < _GREEDY_BELOW
    scale = tl.where(greedy, 1.0, temperature)
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    chosen = tl.full([WIDTH], 0, tl.int64)
    for at in range(0, vocab, WIDTH):
        token = at + lane.to(tl.int64)
        inside = token < vocab
        value = _scaled(logits, row * row_stride + token, inside, top, scale)
        kept = inside & (value >= tl.where(greedy, float("-inf"), least))
        if (not greedy) and tl.max(kept.to(tl.int32), axis=0) > 0:  # noise is most of the work
            value += _gumbel(token, seed, position)
        value = tl.where(kept, value, float("-inf"))
        better = value > best
        chosen = tl.where(better, token, chosen)
        best = tl.where(better, value, best)
    most = tl.max(best, axis=0)
    first = tl.min(tl.where(best == most, chosen, vocab), axis=0)
    finite = (tl.max(sick, axis=0) == 0) & (tl.abs(top) != float("inf"))
    tl.store(out + row, tl.where(finite, first, -1))
