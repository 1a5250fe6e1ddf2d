"""One token per row: the most likely one, or that with the largest sum of logit and noise.

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
        value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        value = (value - top) / scale
        kept = inside & (value >= tl.where(greedy, float("-inf"), least))
        if not greedy:
            value += _gumbel(token, seed, position)
        value = tl.where(kept, value, float("-inf"))
        better = value > best
        chosen = tl.where(better, token, chosen)
        best = tl.where(better, value, best)
    most = tl.max(best, axis=0)
    first = tl.min(tl.where(best == most, chosen, vocab), axis=0)
    finite = (tl.max(sick, axis=0) == 0) & (tl.abs(top) != float("inf"))
    tl.store(out + row, tl.where(finite, first, -1))
