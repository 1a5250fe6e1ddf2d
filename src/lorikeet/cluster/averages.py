"""What routing expects of requests to come: averages over those that have finished."""

from collections import OrderedDict

from lorikeet.core.ids import AdapterDigest

ALPHA = 0.02
"""Weight of the newest answer: the average is about one over the last 50."""

_MOST_ADAPTERS = 65_536
"""The versions that are remembered; of more, those that have not answered for longest are forgotten."""


class Averages:
    """Answers' lengths, and times that requests ran for.

    Args:
        output_tokens: length of an answer before any has been seen.
        execution_s: time from admission to the end, before any has been seen.

    Attributes:
        output_tokens: exponential average (TOPPINGS' ``avg_resp_len``).
    """

    def __init__(self, output_tokens: float = 128.0, execution_s: float = 1.0) -> None:
        self.output_tokens = output_tokens
        self._seen = 0
        self._execution_s = execution_s
        self._by_adapter = OrderedDict[AdapterDigest | None, tuple[int, float]]()

    def finished(self, adapter: AdapterDigest | None, output_tokens: int, execution_s: float | None) -> None:
        """Take in an answer that was not cut short; ``execution_s`` is None if its admission was not seen.

        Until so many have been seen that one has the weight ``ALPHA``, all have the same, so that the first few count.
        """
        self._seen += 1
        weight = max(ALPHA, 1 / self._seen)
        self.output_tokens += weight * (max(1, output_tokens) - self.output_tokens)
        if execution_s is not None:
            count, mean_s = self._by_adapter.pop(adapter, (0, 0.0))
            self._by_adapter[adapter] = count + 1, mean_s + (execution_s - mean_s) / (count + 1)
            if len(self._by_adapter) > _MOST_ADAPTERS:
                self._by_adapter.popitem(last=False)
            self._execution_s += weight * (execution_s - self._execution_s)

    def execution_s(self, adapter: AdapterDigest | None) -> float:
        """Return the mean over finished requests of an adapter (dLoRA's L); before any, the average over all."""
        entry = self._by_adapter.get(adapter)
        return self._execution_s if entry is None else entry[1]
