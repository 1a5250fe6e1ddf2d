"""Predicts output lengths by the recent answers of an adapter."""

from collections import OrderedDict

from datasketches import kll_ints_sketch

_MIN_ANSWERS = 20
"""Number of answers from which an adapter's history is used.

With fewer answers, the history of all adapters is used.
"""

_SKETCH_ANSWERS = 500
"""Number of answers per sketch before a new sketch is started, so that the last 500 to 1,000 answers count."""

_RANK_ERROR_K = 200
"""Accuracy of the sketches; with the library's default of 200 the rank error is 1.3 %, in about a kilobyte."""

_MAX_ADAPTERS = 10_000
"""Largest number of adapters with a history. The adapters without an answer for longest are dropped first."""


class LengthHistory:
    """Predicts the median length of the recent answers of an adapter.

    The median is the constant that minimises the mean absolute error, of log lengths as well. Answers that
    ``max_tokens`` cut short count with their number of tokens, because the purpose is to predict the running time of
    requests. Adapters are identified by name, so that a new version inherits the history of the last version.

    Quantiles come from KLL sketches (Karnin, Lang, Liberty: Optimal quantile approximation in streams, FOCS 2016).
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
    """Holds two sketches; when the newer sketch is full, it replaces the older one."""

    def __init__(self) -> None:
        self._older = kll_ints_sketch(_RANK_ERROR_K)
        self._newer = kll_ints_sketch(_RANK_ERROR_K)
        self._median: int | None = None

    @property
    def answers(self) -> int:
        return int(self._older.n + self._newer.n)

    def add(self, tokens: int) -> None:
        if self._newer.n >= _SKETCH_ANSWERS:
            self._older = self._newer
            self._newer = kll_ints_sketch(_RANK_ERROR_K)
        self._newer.update(tokens)
        self._median = None

    def median(self) -> int | None:
        """Return the median of both sketches; None if they are empty. The median is cached until the next answer."""
        if self._median is None and self.answers:
            both = kll_ints_sketch(_RANK_ERROR_K)
            both.merge(self._older)
            both.merge(self._newer)
            self._median = int(both.get_quantile(0.5))
        return self._median
