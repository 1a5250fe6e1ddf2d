"""Holds an engine's requests and measured step times, and predicts delays from them."""

from lorikeet.core.ids import RequestId
from lorikeet.costs.replica_estimates import ANSWER_SHARE
from lorikeet.scheduling.state import Sequence, StepTimeEstimator
from lorikeet.scheduling.step_costs import Utilization


class EngineLoad:
    """Holds the sequences of an engine and its measured step times, and predicts steps and delays from them.

    The load is created before the memory and the scheduler. The scheduler changes the load. The memory's policies and
    the planner of assisted prefills read it.

    Attributes:
        sequences: all sequences by request, waiting and running.
        running: running sequences; the last sequence is preempted first.
        step_times: estimator of the duration of steps.
    """

    def __init__(self) -> None:
        self.sequences: dict[RequestId, Sequence] = {}
        self.running: list[Sequence] = []
        self.step_times = StepTimeEstimator()
        self._utilization = Utilization()

    def note_busy(self, now: float, steps: int, busy_s: float) -> None:
        """Add the steps that end now, and their total duration."""
        self._utilization.note(now, steps, busy_s)

    @property
    def fixed_step_s(self) -> float:
        """Seconds that one more step costs in addition to its tokens."""
        return self.step_times.step_s(0, 0)

    def prefill_s(self, tokens: float) -> float:
        """Return the expected seconds by which this many prompt tokens lengthen a step."""
        return self.step_times.prefill_s(tokens)

    def delay_per_lost_second(self, excluded: int = 0) -> float:
        """Return the total seconds by which all requests are delayed if the engine loses a second.

        A request that already has its first token counts as ``ANSWER_SHARE``. See ``Utilization``.

        Args:
            excluded: number of waiting requests to leave out, because the caller already counts their delay.
        """
        answers = sum([sequence.is_decoding for sequence in self.running])
        waiting = max(0, len(self.sequences) - answers - excluded)
        return (waiting + ANSWER_SHARE * answers) * self._utilization.delay_of_a_second(self.fixed_step_s)
