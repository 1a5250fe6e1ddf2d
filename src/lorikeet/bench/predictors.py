"""Who predicts the lengths of answers in a workload that is run in this process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lorikeet.bench.choices import ChoiceError
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.scheduling.prediction.history import History
from lorikeet.scheduling.prediction.oracle import Oracle


class Predictor(ABC):
    """Predicts each answer when its request arrives, and is told of answers as they end."""

    @abstractmethod
    def predict(self, request: WorkloadRequest, index: int) -> int | None:
        """Return the tokens that the answer to the request at ``index`` of the workload may have; None if unknown."""

    def ended(self, request: WorkloadRequest, tokens: int) -> None:  # noqa: B027 - most do not learn
        """An answer has ended with so many tokens."""


class OraclePredictor(Predictor):
    """See ``Oracle``; a request is known by its place in the workload.

    Args:
        accuracy: probability of the true length.
        workload: whose lengths are those that there are.
        seed: of all draws.
    """

    def __init__(self, accuracy: float, workload: Sequence[WorkloadRequest], seed: int) -> None:
        self._oracle = Oracle(accuracy, [request.output_tokens for request in workload], seed)

    def predict(self, request: WorkloadRequest, index: int) -> int:
        """See ``Predictor``."""
        return self._oracle.predict(str(index), request.output_tokens)


class HistoryPredictor(Predictor):
    """See ``History``; it begins with nothing and learns from the answers as they end."""

    def __init__(self) -> None:
        self._history = History()

    def predict(self, request: WorkloadRequest, index: int) -> int | None:
        """See ``Predictor``."""
        return self._history.predict(request.adapter)

    def ended(self, request: WorkloadRequest, tokens: int) -> None:
        """See ``Predictor``."""
        self._history.add(request.adapter, tokens)


def make_predictor(text: str, workload: Sequence[WorkloadRequest], seed: int = 0) -> Predictor | None:
    """Return the predictor called ``oracle:0.8`` (right four times in five), ``history`` or ``none``.

    Raises:
        ChoiceError: none is called so.
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
            raise ChoiceError(f"predictor {text!r}: {error}") from error
    raise ChoiceError(f"predictor {text!r} is not none, history or an oracle such as oracle:0.8")
