"""The requests of an engine and its measured step times, and the delays that they predict."""

from lorikeet.core.ids import RequestId
from lorikeet.costs.replica_estimates import ANSWER_SHARE
from lorikeet.scheduling.state import Sequence, StepTimeEstimator
from lorikeet.scheduling.step_costs import Utilization


class EngineLoad:
    """Holds the sequences of an engine and its measured step times, and predicts steps and delays from them.

    It is created before the memory and the scheduler. The scheduler changes it; the memory's policies and the planner
    of assisted prefills read it.

    Attributes:
        sequences: all sequences by request, waiting and running.
        running: the running sequences; the last is preempted first.
        step_times: estimates how long steps take.
    """

    def __init__(self) -> None:
        self.sequences: dict[RequestId, Sequence] = {}
        self.running: list[Sequence] = []
        self.step_times = StepTimeEstimator()
        self._utilization = Utilization()

    def note_busy(self, now: float, steps: int, busy_s: float) -> None:
        """Add the steps that end now, and how long they took together."""
        self._utilization.note(now, steps, busy_s)

    @property
    def fixed_step_s(self) -> float:
        """Seconds that one more step costs beside its tokens."""
        return self.step_times.step_s(0, 0)

    def prefill_s(self, tokens: float) -> float:
        """Return the expected seconds by which this many prompt tokens lengthen a step."""
        return self.step_times.prefill_s(tokens)

    def delay_per_lost_second(self, excluded: int = 0) -> float:
        """Return by how many seconds all requests together are delayed if the engine loses a second.

        A request that has its first token counts as ``ANSWER_SHARE``. See ``Utilization``.

        Args:
            excluded: number of waiting requests that do not count, since the caller compares their own delay already.
        """
        answers = sum([sequence.is_decoding for sequence in self.running])
        waiting = max(0, len(self.sequences) - answers - excluded)
        return (waiting + ANSWER_SHARE * answers) * self._utilization.delay_of_a_second(self.fixed_step_s)
