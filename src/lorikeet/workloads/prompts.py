"""Makes the contents of prompts as a pure function of a workload's requests. Equal prefix blocks have equal tokens.

The p-th token of a text with key k is SplitMix64 (Steele, Lea and Flood, "Fast
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
    """Combine several numbers into one 64-bit number. Different inputs give different results with high probability."""
    state = 0
    for number in numbers:
        state = _mixed((state + number + _STEP) & _MASK)
    return state


def prompt_token_ids(request: WorkloadRequest, index: int, seed: int, block_size: int, ids: np.ndarray) -> list[int]:
    """Return ``request.input_tokens`` token ids: the tokens of the prefix blocks, then the request's unique tokens.

    The i-th prefix block covers the tokens from ``i * block_size`` on. The last block may be cut short. Texts with
    different keys (block ids, indices, seeds) differ with high probability: n of their tokens are equal in one case of
    ``len(ids) ** n``.

    Args:
        request: request with length and prefix blocks.
        index: the request's index in its workload, so that its unique tokens differ from those of other requests.
        seed: a different seed makes different prompts.
        block_size: length of a prefix block.
        ids: token ids to draw from, int64.
    """
    tokens = request.input_tokens
    shared = request.prefix_blocks[: -(-tokens // block_size)]
    shared_tokens = min(tokens, len(shared) * block_size)
    steps = np.empty(tokens, np.uint64)
    if shared:
        # This computes combine(seed, _SHARED, block) for all blocks in one operation.
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
"""Token ids that are ordinary tokens in common vocabularies. Special and byte tokens have lower or much higher ids."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()
"""Common words. Most of them are a single token with the space before them."""


class Prompts:
    """Makes the prompts of a workload. Equal seeds make equal prompts.

    Args:
        seed: seed of the prompts. Different seeds make different prompts, so that a prefix cache has no hits.
        run: number of the run; acts as a second seed.
        ids: token ids to draw from.
        block_size: length of a prefix block.
    """

    def __init__(self, seed: int, run: int = 0, ids: Range = DEFAULT_IDS, block_size: int = 512) -> None:
        self._seed = combine(seed, run)
        self._ids = np.arange(ids.low, ids.high + 1)
        self.block_size = block_size

    def token_ids(self, index: int, request: WorkloadRequest) -> list[int]:
        """Return the prompt of ``request``, the ``index``-th of its workload; see ``prompt_token_ids``."""
        return prompt_token_ids(request, index, self._seed, self.block_size, self._ids)

    def words(self, index: int, request: WorkloadRequest) -> str:
        """Return ``request.input_tokens`` words, which are chosen by the rules of ``token_ids``."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(index, request))
