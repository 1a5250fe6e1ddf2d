"""Predicts output lengths by the recent answers of an adapter."""

from array import array
from bisect import insort
from collections import OrderedDict

_MIN_ANSWERS = 20
"""Number of answers from which an adapter's history is used.

With fewer answers, the history of all adapters is used.
"""

_GENERATION = 500
"""Number of answers of a generation. The newest two generations count, so that old answers are forgotten."""

_MAX_ADAPTERS = 10_000
"""Largest number of adapters with a history. The adapters without an answer for longest are dropped first."""


class LengthHistory:
    """Predicts the median length of the recent answers of an adapter.

    The median is the constant that minimises the mean absolute error, of log lengths as well. Answers that
    ``max_tokens`` cut short count with their number of tokens, because the purpose is to predict the running time of
    requests. Adapters are identified by name, so that a new version inherits the history of the last version. Equal
    answers in equal order give equal predictions, so that a simulation can be repeated.
    """

    def __init__(self) -> None:
        self._all = _Recent()
        self._by_adapter = OrderedDict[str | None, _Recent]()

    def predict(self, adapter: str | None) -> int | None:
        """Return the predicted number of tokens of an adapter's next answer (None for the base model).

        With fewer than 20 answers of the adapter, return the median of all answers. Without any answer, return None.
        """
        recent = self._by_adapter.get(adapter)
        return (recent if recent is not None and recent.answers >= _MIN_ANSWERS else self._all).median()

    def add(self, adapter: str | None, tokens: int) -> None:
        """Record a finished answer of ``tokens`` tokens."""
        recent = self._by_adapter.pop(adapter, None) or _Recent()
        self._by_adapter[adapter] = recent
        if len(self._by_adapter) > _MAX_ADAPTERS:
            self._by_adapter.popitem(last=False)
        recent.add(tokens)
        self._all.add(tokens)


class _Recent:
    """Holds the lengths of two generations of answers, sorted. A full newer generation replaces the older one."""

    def __init__(self) -> None:
        self._older = array("i")
        self._newer = array("i")
        self._median: int | None = None

    @property
    def answers(self) -> int:
        return len(self._older) + len(self._newer)

    def add(self, tokens: int) -> None:
        if len(self._newer) >= _GENERATION:
            self._older = self._newer
            self._newer = array("i")
        insort(self._newer, tokens)
        self._median = None

    def median(self) -> int | None:
        """Return the median of both generations; None without answers. It is cached until the next answer."""
        if self._median is None and self.answers:
            self._median = sorted((*self._older, *self._newer))[self.answers // 2]
        return self._median
