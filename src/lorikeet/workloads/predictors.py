"""Predicts answer lengths in simulations: an oracle with a set accuracy, and the history of answers."""

import random
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from lorikeet.scheduling.prediction.history import LengthHistory
from lorikeet.workloads.workload import OptionError, WorkloadRequest

_CLASSES = 5


class NoisyOracle:
    """Predicts the true length with a given probability.

    Otherwise the oracle predicts the length of a random answer from another quintile. It represents proxy models that
    predict percentile classes, so a wrong prediction is another class (Chameleon spec, section 8). The draws of each
    request are seeded by its id. So all systems get the same predictions for a workload, in any order, and a more
    accurate oracle is right wherever a less accurate oracle is.

    Args:
        accuracy: probability of the true length, 0 to 1.
        outputs: lengths of all answers, in tokens, from which wrong predictions are drawn.
        seed: seed of all draws.

    Raises:
        ValueError: the accuracy is not a probability, or ``lengths`` is empty.
    """

    def __init__(self, accuracy: float, outputs: Sequence[int], seed: int = 0) -> None:
        if not 0 <= accuracy <= 1:
            raise ValueError(f"an accuracy of {accuracy:g} is not between 0 and 1")
        if not outputs:
            raise ValueError("an oracle needs the lengths of the answers")
        self._accuracy = accuracy
        self._seed = seed
        self._sorted = sorted(outputs)
        self._cuts = [self._sorted[len(outputs) * part // _CLASSES] for part in range(1, _CLASSES)]

    def predict(self, request_id: str, tokens: int) -> int:
        """Return the predicted length of the answer to ``request_id``, whose true length is ``tokens``.

        If all answers are in one quintile, because their lengths are equal, the true length is returned.
        """
        draws = random.Random(f"{self._seed} {request_id}")
        if draws.random() < self._accuracy:
            return tokens
        begin, end = self._quintile(tokens)
        outside = len(self._sorted) - (end - begin)
        if not outside:
            return tokens
        place = draws.randrange(outside)
        return self._sorted[place if place < begin else place + end - begin]

    def _quintile(self, tokens: int) -> tuple[int, int]:
        """Return the range of sorted lengths in the same class as ``tokens``.

        A class includes its lower cut, so that equal lengths are never in two classes.
        """
        number = bisect_right(self._cuts, tokens)
        begin = bisect_left(self._sorted, self._cuts[number - 1]) if number else 0
        end = bisect_left(self._sorted, self._cuts[number]) if number < len(self._cuts) else len(self._sorted)
        return begin, end


class Predictor(ABC):
    """Predicts the length of each answer when its request arrives, and learns from the answers that end."""

    @abstractmethod
    def predict(self, request: WorkloadRequest, index: int) -> int | None:
        """Return the predicted length of an answer in tokens; None if unknown.

        The answer belongs to the ``index``-th request of the workload.
        """

    def ended(self, request: WorkloadRequest, tokens: int) -> None:  # noqa: B027 - most do not learn
        """Learn the length of a finished answer."""


class OraclePredictor(Predictor):
    """Predicts by a ``NoisyOracle`` that identifies a request by its index in the workload.

    Args:
        accuracy: probability of the true length.
        workload: provides the lengths.
        seed: seed of all draws.
    """

    def __init__(self, accuracy: float, workload: Sequence[WorkloadRequest], seed: int) -> None:
        self._oracle = NoisyOracle(accuracy, [request.output_tokens for request in workload], seed)

    def predict(self, request: WorkloadRequest, index: int) -> int:
        """Return the prediction of the oracle."""
        return self._oracle.predict(str(index), request.output_tokens)


class HistoryPredictor(Predictor):
    """Predicts by a ``LengthHistory`` that starts empty and learns from the answers that end."""

    def __init__(self) -> None:
        self._history = LengthHistory()

    def predict(self, request: WorkloadRequest, index: int) -> int | None:
        """Return the prediction for the request's adapter; None if unknown."""
        return self._history.predict(request.adapter)

    def ended(self, request: WorkloadRequest, tokens: int) -> None:
        """Learn the length of a finished answer."""
        self._history.add(request.adapter, tokens)


def make_predictor(text: str, workload: Sequence[WorkloadRequest], seed: int = 0) -> Predictor | None:
    """Return the predictor called ``oracle:0.8`` (right four times in five), ``history`` or ``none``.

    Raises:
        OptionError: the predictor is unknown.
    """
    name, colon, accuracy = text.partition(":")
    if text == "none":
        return None
    if text == "history":
        return HistoryPredictor()
    if name == "oracle" and colon:
        try:
            return OraclePredictor(float(accuracy), workload, seed)
        except ValueError as error:
            raise OptionError(f"predictor {text!r}: {error}") from error
    raise OptionError(f"predictor {text!r} is not none, history or an oracle such as oracle:0.8")
