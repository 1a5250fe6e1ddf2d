"""Runs a recording again on a virtual clock, and compares its plans and its times with a profile."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from lorikeet.config import Settings
from lorikeet.core.clock import VirtualClock
from lorikeet.core.executor import ExecutorError
from lorikeet.core.messages import Abort, DropAdapter, ExportRequest, ImportKv, RegisterAdapters, Submit
from lorikeet.core.plan import SequenceStart, StepPlan, StepResult, Tier, Token, Transfer, TransferDone
from lorikeet.costs.transfers import TransferModel
from lorikeet.engine.build import assemble
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import Planned, PlanRan, Received, Record, Recording, RequestExported, Transferred
from lorikeet.memory.blocks import BlockError
from lorikeet.presets import Preset
from lorikeet.worker.modelled import GroupEnds, ModelledExecutor, ModelledTimes, Times


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
class RecordedTurn:
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
    ran: PlanRan | None = None

    @property
    def steps_run(self) -> int:
        """Steps of its plan that ran."""
        return self.ran.result.steps_run if self.ran is not None and self.planned.plan.sequences else 0

    @property
    def began_s(self) -> float:
        """When the engine first looked at the clock in it."""
        return self.transferred[0].at_s if self.transferred else self.planned.at_s


def turns(records: Iterable[Record]) -> Iterator[RecordedTurn]:
    """Yield the turns of a recording. Messages after the last plan belong to none."""
    received: list[Received] = []
    transferred: list[Transferred] = []
    turn: RecordedTurn | None = None
    for record in records:
        match record:
            case PlanRan():
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
                turn, received, transferred = RecordedTurn(record, received, transferred), [], []
    if turn is not None:
        yield turn


def replay(recording: Recording) -> Replay:
    """Run a recording again until a plan differs, or to its end.

    Raises:
        RecordingError: it cannot be read.
        ConfigError: its row is not known here.
    """
    clock, playback = VirtualClock(), RecordedTimes()
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
        case RegisterAdapters(refs):
            engine.register_adapters(refs)
        case DropAdapter(digest):
            engine.drop_adapter(digest)
        case RequestExported(request_id):
            engine.export_request(request_id)
        case ExportRequest(request_id):
            engine.export_with_kv(request_id)
        case ImportKv():
            engine.import_kv(received.message)


class _LeftRecording(Exception):
    """The replayed plan is another."""


class _RecordingEnds(Exception):
    """What the plan brought is not known."""


class RecordedTimes:
    """The recorded times, transfers and tokens of one turn after the other.

    It is the ``PlanTimes``, the ``Link`` and the ``TokenChoice`` of a modelled executor.
    """

    _turn: RecordedTurn
    _plan: StepPlan | None
    _tokens: dict[str, tuple[Token, ...] | None]

    def __init__(self) -> None:
        self._transferred: deque[Transferred] = deque()

    def run(self, turn: RecordedTurn, engine: Engine) -> Difference | None:
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


class TimedWork(StrEnum):
    """What a time was taken by."""

    DECODE = "decode"
    """A step in which every sequence computes one token."""
    PREFILL = "prefill"
    """A step in which none does."""
    MIXED = "mixed"
    LOAD = "load"
    """Reading an adapter's files, and copying it on if it goes to the device by way of the host."""
    FETCH = "fetch"
    """Copying from the host to the device."""
    STORE = "store"
    """Copying from the device to the host."""


def compare_times(
    turns: Iterable[RecordedTurn], preset: Preset, transfers: TransferModel
) -> dict[TimedWork, list[tuple[float, float]]]:
    """Return pairs of recorded and modelled seconds, of each plan's mean step and of each transfer.

    Prefills that the host assists are left out: how their layers arrived is not recorded.

    Args:
        turns: of a recording from its begin.
        preset: the recorded one.
        transfers: what they cost an engine with the recorded settings, by the profile of the recorded machine and
            model.

    Raises:
        ProfileError: the profile lacks something that the recording needs.
    """
    times = ModelledTimes(transfers, preset, loop_each_step=False)
    under_way: dict[int, Transfer] = {}
    pairs: dict[TimedWork, list[tuple[float, float]]] = {kind: [] for kind in TimedWork}
    for turn in turns:
        for done in (done for taken in turn.transferred for done in taken.transfers):
            transfer = under_way.pop(done.transfer_id)
            if done.error is None and done.duration_s:
                pairs[_kind_of_transfer(transfer)].append((done.duration_s, transfers.path(transfer).alone_s))
        plan = turn.planned.plan
        under_way |= {transfer.transfer_id: transfer for transfer in plan.transfers}
        if turn.ran is None:
            times.note(plan)
            continue
        result = turn.ran.result
        modelled = modelled_as_run(times, plan, result)
        if modelled.steps:
            pairs[_kind(plan)].append((result.duration_s / modelled.steps, modelled.seconds / modelled.steps))
    return pairs


def modelled_as_run(times: ModelledTimes, plan: StepPlan, result: StepResult) -> Times:
    """Return what a plan takes by a cost model, for as many steps as ran; none if the host assisted it.

    Raises:
        ProfileError: the profile lacks something that the plan needs.
    """
    if plan.assisted:
        times.note(plan)
        return Times(0, 0.0, 0.0)
    return times.steps_s(msgspec.structs.replace(plan, repeat=result.steps_run), math.inf, lambda _: ())


def _kind_of_transfer(transfer: Transfer) -> TimedWork:
    if transfer.source is Tier.SOURCE:
        return TimedWork.LOAD
    return TimedWork.FETCH if transfer.target is Tier.DEVICE else TimedWork.STORE


def _kind(plan: StepPlan) -> TimedWork:
    decodes = sum(step.tokens == 1 and step.start > 0 for step in plan.sequences)
    return TimedWork.DECODE if decodes == len(plan.sequences) else TimedWork.MIXED if decodes else TimedWork.PREFILL


_SHOWN = 100
"""Characters of a value that are shown."""

_MISSING = "—"


class FieldPair(NamedTuple):
    """One field of two plans, as text; ``differs`` if they are not the same."""

    name: str
    recorded: str
    replayed: str
    differs: bool


def plan_fields(recorded: StepPlan, replayed: StepPlan) -> Iterator[FieldPair]:
    """Yield every field of two plans; one that differs as the smallest parts of it that do."""
    for name in recorded.__struct_fields__:
        left, right = getattr(recorded, name), getattr(replayed, name)
        if left == right:
            yield FieldPair(name, _text(left), _text(right), differs=False)
        else:
            yield from _differing(name, left, right)


def _differing(name: str, left: Any, right: Any) -> Iterator[FieldPair]:
    if left == right:
        return
    if isinstance(left, msgspec.Struct) and type(left) is type(right):
        for field in left.__struct_fields__:
            yield from _differing(f"{name}.{field}", getattr(left, field), getattr(right, field))
    elif isinstance(left, tuple) and isinstance(right, tuple):
        for index, (one, other) in enumerate(zip_longest(left, right, fillvalue=_MISSING)):
            yield from _differing(f"{name}[{index}]", one, other)
    else:
        yield FieldPair(name, _text(left), _text(right), differs=True)


def _text(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    count = f"{len(value)}: " if isinstance(value, tuple | list) else ""
    return count + (text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
