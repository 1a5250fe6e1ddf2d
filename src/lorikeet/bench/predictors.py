"""An oracle that is right as often as it is told to be."""

import random
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from lorikeet.bench.workload import OptionError, WorkloadRequest
from lorikeet.scheduling.prediction.history import LengthHistory

_CLASSES = 5


class NoisyOracle:
    """Knows the true length, and says so with a set probability.

    Else it says the length of a random other answer, from another quintile: the proxy models that it stands for
    predict classes of percentiles, so a miss is another class (Chameleon spec, section 8). Every request has draws of
    its own, seeded by its id: whichever systems run a workload, and in whatever order, they see the same predictions,
    and what a less accurate oracle gets right a more accurate one does, too.

    Args:
        accuracy: probability of the true length, 0 to 1.
        outputs: lengths of all answers, in tokens; the distribution that others are drawn from.
        seed: of all draws.

    Raises:
        ValueError: the accuracy is no probability, or there are no lengths.
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
        """Return the predicted length of the answer to ``request_id``, which will have ``tokens`` tokens.

        Where all answers lie in one quintile (all are equally long), that is the true length.
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
        """Return where the lengths of the same class as ``tokens`` begin and end among all.

        A class holds its lower cut, so that equal lengths are never in two classes.
        """
        number = bisect_right(self._cuts, tokens)
        begin = bisect_left(self._sorted, self._cuts[number - 1]) if number else 0
        end = bisect_left(self._sorted, self._cuts[number]) if number < len(self._cuts) else len(self._sorted)
        return begin, end


class Predictor(ABC):
    """Predicts each answer when its request arrives, and is told of answers as they end."""

    @abstractmethod
    def predict(self, request: WorkloadRequest, index: int) -> int | None:
        """Return the tokens that the answer to the request at ``index`` of the workload may have; None if unknown."""

    def ended(self, request: WorkloadRequest, tokens: int) -> None:  # noqa: B027 - most do not learn
        """An answer has ended with so many tokens."""


class OraclePredictor(Predictor):
    """See ``NoisyOracle``; a request is known by its place in the workload.

    Args:
        accuracy: probability of the true length.
        workload: whose lengths are those that there are.
        seed: of all draws.
    """

    def __init__(self, accuracy: float, workload: Sequence[WorkloadRequest], seed: int) -> None:
        self._oracle = NoisyOracle(accuracy, [request.output_tokens for request in workload], seed)

    def predict(self, request: WorkloadRequest, index: int) -> int:
        """See ``Predictor``."""
        return self._oracle.predict(str(index), request.output_tokens)


class HistoryPredictor(Predictor):
    """See ``LengthHistory``; it begins with nothing and learns from the answers as they end."""

    def __init__(self) -> None:
        self._history = LengthHistory()

    def predict(self, request: WorkloadRequest, index: int) -> int | None:
        """See ``Predictor``."""
        return self._history.predict(request.adapter)

    def ended(self, request: WorkloadRequest, tokens: int) -> None:
        """See ``Predictor``."""
        self._history.add(request.adapter, tokens)


def make_predictor(text: str, workload: Sequence[WorkloadRequest], seed: int = 0) -> Predictor | None:
    """Return the predictor called ``oracle:0.8`` (right four times in five), ``history`` or ``none``.

    Raises:
        OptionError: none is called so.
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
