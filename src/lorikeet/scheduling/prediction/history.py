"""What the answers of an adapter were like lately."""

from collections import OrderedDict

from datasketches import kll_ints_sketch

_ENOUGH = 20
"""Answers of an adapter from which on they are believed; before, all answers are asked."""

_SKETCH_ANSWERS = 500
"""Answers in a sketch before a new one is begun: what is remembered are the last 500 to 1,000."""

_RANK_ERROR_K = 200
"""Of the sketches: with the library's usual 200, ranks are right to 1.3 % and a sketch takes about a kilobyte."""

_MOST_ADAPTERS = 10_000
"""The adapters that are remembered; of more, those that have not answered for longest are forgotten."""


class LengthHistory:
    """Predicts the median of the recent answers of an adapter.

    The median is the constant that minimises the mean absolute error, and of log lengths too. An answer counts with
    the tokens that it had, also where ``max_tokens`` cut it short: what matters is how long requests run. Adapters
    are known by name, so that a new version goes on from what the last one was like.

    Quantiles come from KLL sketches (Karnin, Lang, Liberty: Optimal quantile approximation in streams, FOCS 2016).
    """

    def __init__(self) -> None:
        self._all = _Recent()
        self._by_adapter = OrderedDict[str | None, _Recent]()

    def predict(self, adapter: str | None) -> int | None:
        """Return the tokens of the next answer of ``adapter`` (None for the base model).

        Before it has given 20 answers, the median of all is returned; None if nobody has given one.
        """
        recent = self._by_adapter.get(adapter)
        return (recent if recent is not None and recent.answers >= _ENOUGH else self._all).median()

    def add(self, adapter: str | None, tokens: int) -> None:
        """Take note of an answer that has ended with ``tokens`` tokens."""
        recent = self._by_adapter.pop(adapter, None) or _Recent()
        self._by_adapter[adapter] = recent
        if len(self._by_adapter) > _MOST_ADAPTERS:
            self._by_adapter.popitem(last=False)
        recent.add(tokens)
        self._all.add(tokens)


class _Recent:
    """Two sketches in turn: when the newer one is full it takes the place of the older, which is forgotten."""

    def __init__(self) -> None:
        self._older = kll_ints_sketch(_RANK_ERROR_K)
        self._newer = kll_ints_sketch(_RANK_ERROR_K)
        self._median: int | None = None

    @property
    def answers(self) -> int:
        return int(self._older.n + self._newer.n)

    def add(self, tokens: int) -> None:
        if self._newer.n >= _SKETCH_ANSWERS:
            self._older, self._newer = self._newer, kll_ints_sketch(_RANK_ERROR_K)
        self._newer.update(tokens)
        self._median = None

    def median(self) -> int | None:
        """Return the median of what is remembered; kept until the next answer. None without any."""
        if self._median is None and self.answers:
            both = kll_ints_sketch(_RANK_ERROR_K)
            both.merge(self._older)
            both.merge(self._newer)
            self._median = int(both.get_quantile(0.5))
        return self._median
