"""Prompts of given lengths from a seed: token ids, or words where a server takes only text."""

import numpy as np

from lorikeet.bench.choices import Range
from lorikeet.bench.prompt_tokens import combine, prompt_token_ids
from lorikeet.bench.workload import WorkloadRequest

DEFAULT_IDS = Range(300, 10_000)
"""Ordinary tokens in the usual vocabularies: special and byte tokens lie below, or far above."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()
"""Common words, most of them one token each with the space before them."""


class Prompts:
    """Makes the same prompts for the same seed.

    Args:
        seed: another one makes other prompts, so that nothing is found in a prefix cache.
        run: number of the run; as good as another seed.
        ids: the token ids to draw from.
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
        """Return ``request.input_tokens`` words, by the same rules."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(index, request))
