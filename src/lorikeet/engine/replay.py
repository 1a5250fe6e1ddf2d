"""Runs a recording again: the same engine on a virtual clock, the modelled executor with the recorded times.

What differs from the recorded run is everything that a simulation replaces: arithmetic, threads and the real clock.
What is left has to decide the same.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet.config import Settings
from lorikeet.core.clock import VirtualClock
from lorikeet.core.messages import Abort, BringKv, DropAdapter, KnowAdapters, LetGo, Submit
from lorikeet.core.plan import SequenceStart, StepPlan, Token, Transfer, TransferDone
from lorikeet.engine.build import assemble
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.loop import Engine
from lorikeet.engine.modelled import GroupEnds, ModelledExecutor, Times
from lorikeet.engine.recording import Recording
from lorikeet.engine.records import Exported, Planned, Ran, Received, Record, Transferred
from lorikeet.memory.blocks import BlockError


class Difference(NamedTuple):
    """Where a replay left its recording.

    Attributes:
        recorded: the plan of the recording; an empty one if the engine ran nothing.
        replayed: the plan of the replay; None if it failed before it had one.
        problem: what went wrong then, else empty.
    """

    recorded: StepPlan
    replayed: StepPlan | None
    problem: str = ""


class Replay(NamedTuple):
    """What a replay found.

    Attributes:
        plans: identical ones, empty ones not counted.
        steps: that they ran.
        seconds: from the first to the last record, on the recorded clock.
        difference: the first one, None if there was none.
    """

    plans: int
    steps: int
    seconds: float
    difference: Difference | None


@dataclass
class Turn:
    """One turn of the loop, and what the engine was told before it.

    Attributes:
        planned: its plan.
        received: messages, oldest first.
        transferred: transfers that it took in, with the times.
        ran: what the plan brought; None if it was empty or the recording ends before its end.
    """

    planned: Planned
    received: list[Received] = field(default_factory=list)
    transferred: list[Transferred] = field(default_factory=list)
    ran: Ran | None = None

    @property
    def steps_run(self) -> int:
        """Steps of its plan that ran."""
        return self.ran.result.steps_run if self.ran is not None and self.planned.plan.sequences else 0

    @property
    def began_s(self) -> float:
        """When the engine first looked at the clock in it."""
        return self.transferred[0].at_s if self.transferred else self.planned.at_s


def turns(records: Iterable[Record]) -> Iterator[Turn]:
    """Yield the turns of a recording. Messages after the last plan belong to none."""
    received: list[Received] = []
    transferred: list[Transferred] = []
    turn: Turn | None = None
    for record in records:
        match record:
            case Ran():
                assert turn is not None, "a result without a plan"
                turn.ran = record
                continue
            case Received():
                received.append(record)
            case Transferred():
                transferred.append(record)
            case Planned():
                if turn is not None:
                    yield turn
                turn, received, transferred = Turn(record, received, transferred), [], []
    if turn is not None:
        yield turn


def replay(recording: Recording) -> Replay:
    """Run a recording again until a plan differs, or to its end.

    Raises:
        RecordingError: it cannot be read.
        ConfigError: its row is not known here.
    """
    clock, playback = VirtualClock(), Playback()
    executor = ModelledExecutor(clock, playback, playback, playback)
    engine = assemble(Settings(engine=recording.header.engine), executor, recording.header.sizes, clock).engine
    plans = steps = 0
    first_s: float | None = None
    for turn in turns(recording):
        first_s = turn.began_s if first_s is None else first_s
        for message in turn.received:
            clock.wait_until(message.at_s)
            _tell(engine, message)
        clock.wait_until(turn.began_s)
        difference = playback.run(turn, engine)
        if difference is not None:
            return Replay(plans, steps, clock.now() - first_s, difference)
        plans += not turn.planned.plan.is_empty
        steps += turn.steps_run
    return Replay(plans, steps, clock.now() - (first_s or 0.0), None)


def _tell(engine: Engine, received: Received) -> None:
    match received.message:
        case Submit(request):
            engine.submit(request)
        case Abort(request_id):
            engine.abort(request_id)
        case KnowAdapters(refs):
            engine.know_adapters(refs)
        case DropAdapter(digest):
            engine.drop_adapter(digest)
        case Exported(request_id):
            engine.export_request(request_id)
        case LetGo(request_id):
            engine.let_go(request_id)
        case BringKv():
            engine.bring_kv(received.message)


class _LeftRecording(Exception):
    """The replayed plan is another."""


class _RecordingEnds(Exception):
    """What the plan brought is not known."""


class Playback:
    """The recorded times, transfers and tokens of one turn after the other.

    It is the ``PlanTimes``, the ``Link`` and the ``TokenChoice`` of a modelled executor.
    """

    _turn: Turn
    _plan: StepPlan | None
    _tokens: dict[str, tuple[Token, ...] | None]

    def __init__(self) -> None:
        self._transferred: deque[Transferred] = deque()

    def run(self, turn: Turn, engine: Engine) -> Difference | None:
        """Let an engine take a turn; return what is different from the recorded one."""
        self._turn, self._plan = turn, None
        self._transferred.extend(turn.transferred)
        recorded = turn.planned.plan
        try:
            engine.step(turn.planned.until_s)
        except _RecordingEnds:
            return None
        except _LeftRecording:
            return Difference(recorded, self._plan)
        except (BlockError, ExecutorError, KeyError) as error:  # of a recording that was changed
            return Difference(recorded, self._plan, f"{type(error).__name__}: {error}")
        if not engine.is_busy and not recorded.is_empty:
            return Difference(recorded, StepPlan(recorded.step))
        return None

    # --- PlanTimes -----------------------------------------------------------------------------------

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> Times:
        """See ``PlanTimes``: the recorded steps and seconds, if it is the recorded plan."""
        self._plan = plan
        if plan != self._turn.planned.plan:
            raise _LeftRecording
        if self._turn.ran is None:
            raise _RecordingEnds
        result, failed = self._turn.ran.result, set(self._turn.ran.result.failed)
        self._tokens = {
            step.request_id: None if step.request_id in failed else tokens
            for step, tokens in zip(plan.sequences, result.tokens, strict=True)
        }
        # In this order of additions the clock comes to exactly the recorded time.
        after_s = self._turn.ran.at_s - (self._turn.planned.at_s + result.duration_s)
        return Times(result.steps_run, result.duration_s, after_s, result.switch_s, result.next_runs)

    # --- Link ----------------------------------------------------------------------------------------

    def begin(self, transfer: Transfer, now: float) -> None:
        """See ``Link``: when it ends is recorded where it ends."""

    def promote(self, transfer_ids: Collection[int], now: float) -> None:
        """See ``Link``: the recorded ends know of it."""

    def next_s(self) -> float | None:
        """See ``Link``."""
        return self._transferred[0].at_s if self._transferred else None

    def group_ends_s(self, transfer_id: int, now: float) -> Sequence[float]:
        """See ``Link``: nobody asks, as recorded steps have their times."""
        return ()

    def take_done(self, now: float) -> list[TransferDone]:
        """See ``Link``."""
        done: list[TransferDone] = []
        while self._transferred and self._transferred[0].at_s <= now:
            done += self._transferred.popleft().transfers
        return done

    # --- TokenChoice ---------------------------------------------------------------------------------

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...] | None:
        """See ``TokenChoice``."""
        return self._tokens[start.request_id]
