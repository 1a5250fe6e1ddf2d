"""Holds an engine's requests and measured step times, and predicts delays from them."""

from lorikeet.core.ids import RequestId
from lorikeet.core.objective import Objective
from lorikeet.scheduling.objective import DelayWeights
from lorikeet.scheduling.state import Sequence, StepTimeEstimator
from lorikeet.scheduling.step_costs import Utilization


class EngineLoad:
    """Holds the sequences of an engine and its measured step times, and predicts steps and delays from them.

    The load is created before the memory and the scheduler. The scheduler changes the load. The memory's policies and
    the planner of assisted prefills read it.

    Args:
        objective: what requests without limits count by.

    Attributes:
        sequences: all sequences by request, waiting and running.
        running: running sequences; the last sequence is preempted first.
        step_times: estimator of the duration of steps.
    """

    def __init__(self, objective: Objective = Objective.MIXED) -> None:
        self.sequences: dict[RequestId, Sequence] = {}
        self.running: list[Sequence] = []
        self.step_times = StepTimeEstimator()
        self._utilization = Utilization()
        self._weights = DelayWeights(objective)
        self._are_equal = self._weights.are_equal(None)
        self._weighed: float | None = None
        self._now_s = 0.0

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to ``sequences``."""
        self.sequences[sequence.request_id] = sequence
        self._are_equal = self._are_equal and self._weights.are_equal(sequence.request.slo)

    def note_busy(self, now: float, steps: int, busy_s: float) -> None:
        """Add the steps that end now, and their total duration."""
        self._utilization.note(now, steps, busy_s)
        self._now_s = now
        self._weighed = None

    @property
    def fixed_step_s(self) -> float:
        """Seconds that one more step costs in addition to its tokens."""
        return self.step_times.step_s(0, 0)

    @property
    def least_step_s(self) -> float:
        """Expected seconds of a step with one token."""
        return self.step_times.step_s(0, 1)

    def prefill_s(self, tokens: float) -> float:
        """Return the expected seconds by which this many prompt tokens lengthen a step."""
        return self.step_times.prefill_s(tokens)

    def delay_per_lost_second(self, excluded: int = 0) -> float:
        """Return the total seconds by which all requests are delayed if the engine loses a second.

        Requests count by the objective and by their limits (``DelayWeights``). See ``Utilization``.

        Args:
            excluded: number of waiting requests to leave out, because the caller already counts their delay.
        """
        weights = self._weights
        delay_s = self._utilization.delay_of_a_second(self.fixed_step_s)
        if self._are_equal:
            answers = sum([sequence.is_decoding for sequence in self.running])
            waiting = max(0, len(self.sequences) - answers - excluded)
            return max(weights.least, (weights.of_waiting * waiting + weights.of_answering * answers) * delay_s)
        if self._weighed is None:  # once a step, because every request is weighed by itself
            self._weighed = weights.sum(self.sequences.values(), self._now_s)
        return max(0.0, self._weighed - excluded * weights.of_waiting) * delay_s
