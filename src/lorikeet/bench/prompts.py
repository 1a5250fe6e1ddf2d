"""Prompts of given lengths from a seed: token ids, or words where a server takes only text."""

import numpy as np

from lorikeet.bench.arrivals import Range
from lorikeet.bench.workload import WorkloadRequest

DEFAULT_IDS = Range(300, 10_000)
"""Ordinary tokens in the usual vocabularies: special and byte tokens lie below, or far above."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()
"""Common words, most of them one token each with the space before them."""

_OWN, _SHARED = 0, 1


class Prompts:
    """Makes the same prompts for the same seed.

    Args:
        seed: another one makes other prompts, so that nothing is found in a prefix cache.
        run: number of the run; as good as another seed.
        ids: the token ids to draw from.
        block_tokens: length of one of a request's ``prefix_blocks``.
    """

    def __init__(self, seed: int, run: int = 0, ids: Range = DEFAULT_IDS, block_tokens: int = 512) -> None:
        self._seed = (seed, run)
        self._ids = ids
        self._block_tokens = block_tokens

    def token_ids(self, index: int, request: WorkloadRequest) -> list[int]:
        """Return ``request.input_tokens`` ids: first those of its prefix blocks, then its own.

        Args:
            index: place of the request in its workload; makes its own tokens differ from all others'.
            request: gives length and prefix blocks.
        """
        whole = -(-request.input_tokens // self._block_tokens)
        shared = [self._draw(self._block_tokens, _SHARED, block) for block in request.prefix_blocks[:whole]]
        missing = max(0, request.input_tokens - len(shared) * self._block_tokens)
        return np.concatenate([*shared, self._draw(missing, _OWN, index)])[: request.input_tokens].tolist()

    def words(self, index: int, request: WorkloadRequest) -> str:
        """Return ``request.input_tokens`` words, by the same rules."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(index, request))

    def _draw(self, count: int, *key: int) -> np.ndarray:
        generator = np.random.default_rng((*self._seed, *key))
        return generator.integers(self._ids.low, self._ids.high, count, endpoint=True)
