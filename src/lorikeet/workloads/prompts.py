"""Makes the contents of prompts, a pure function of a workload's request: equal prefix blocks have equal tokens.

There is no stateful generator. The p-th token of a text with key k is SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014) of k at step p, scaled to the vocabulary. So prompts can be made in
any order and by any process, and a thousand tokens take tens of microseconds.
"""

import numpy as np

from lorikeet.workloads.workload import Range, WorkloadRequest

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

_OWN = 0
_SHARED = 1


def combine(*numbers: int) -> int:
    """Return one 64-bit number for several; different inputs give different results with high probability."""
    state = 0
    for number in numbers:
        state = _mixed((state + number + _STEP) & _MASK)
    return state


def prompt_token_ids(request: WorkloadRequest, index: int, seed: int, block_size: int, ids: np.ndarray) -> list[int]:
    """Return ``request.input_tokens`` token ids: the tokens of its prefix blocks, then its own.

    The i-th prefix block covers the tokens from ``i * block_size`` on; the last may be cut short. Texts with different
    keys (block ids, indices, seeds) differ with high probability: n tokens of them are equal in one case of ``len(ids)
    ** n``.

    Args:
        request: gives length and prefix blocks.
        index: the request's index in its workload, so that its own tokens differ from all others'.
        seed: a different seed makes different prompts.
        block_size: length of one of ``request.prefix_blocks``.
        ids: token ids to draw from, int64.
    """
    tokens = request.input_tokens
    shared = request.prefix_blocks[: -(-tokens // block_size)]
    shared_tokens = min(tokens, len(shared) * block_size)
    steps = np.empty(tokens, np.uint64)
    if shared:
        # combine(seed, _SHARED, block) for all blocks at once.
        blocks = np.array([block & _MASK for block in shared], np.uint64)
        keys = _mixed_array(blocks + np.uint64((combine(seed, _SHARED) + _STEP) & _MASK))
        offsets = np.arange(block_size, dtype=np.uint64) * np.uint64(_STEP)
        steps[:shared_tokens] = (keys[:, None] + offsets).ravel()[:shared_tokens]
    if shared_tokens < tokens:
        offsets = np.arange(tokens - shared_tokens, dtype=np.uint64) * np.uint64(_STEP)
        steps[shared_tokens:] = offsets + np.uint64(combine(seed, _OWN, index))
    draws = _mixed_array(steps) >> np.uint64(32)
    return ids[(draws * np.uint64(len(ids))) >> np.uint64(32)].tolist()


def _mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed_array(values: np.ndarray) -> np.ndarray:
    """Mix each element in place, like ``_mixed``, modulo 2^64."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


DEFAULT_IDS = Range(300, 10_000)
"""Ordinary tokens in common vocabularies: special and byte tokens are below, or far above."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()
"""Common words, most of them one token each with the space before them."""


class Prompts:
    """Makes the prompts of a workload; the same seed makes the same prompts.

    Args:
        seed: a different seed makes different prompts, so that nothing is found in a prefix cache.
        run: number of the run; acts as a second seed.
        ids: token ids to draw from.
        block_size: length of one of a request's ``prefix_blocks``.
    """

    def __init__(self, seed: int, run: int = 0, ids: Range = DEFAULT_IDS, block_size: int = 512) -> None:
        self._seed = combine(seed, run)
        self._ids = np.arange(ids.low, ids.high + 1)
        self.block_size = block_size

    def token_ids(self, index: int, request: WorkloadRequest) -> list[int]:
        """Return the prompt of ``request``, the ``index``-th of its workload; see ``prompt_token_ids``."""
        return prompt_token_ids(request, index, self._seed, self.block_size, self._ids)

    def words(self, index: int, request: WorkloadRequest) -> str:
        """Return ``request.input_tokens`` words, chosen by the same rules."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(index, request))
