"""Replays a recording on a virtual clock and compares plans, and compares recorded times with a profile's."""

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
from lorikeet.core.messages import Abort, DropAdapter, ExportRequest, ImportKv, PinAdapters, RegisterAdapters, Submit
from lorikeet.core.plan import SequenceStart, StepPlan, StepResult, Tier, Token, Transfer, TransferDone
from lorikeet.costs.transfer_model import TransferModel
from lorikeet.engine.build import assemble
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import Planned, PlanRan, Received, Record, Recording, RequestExported, Transferred
from lorikeet.memory.blocks import BlockError
from lorikeet.presets import Preset
from lorikeet.worker.modelled import GroupEnds, ModelledExecutor, ModelledTimes, PlanDuration


class Difference(NamedTuple):
    """The first plan in which a replay differs from its recording.

    Attributes:
        recorded: the recorded plan, which is empty if the engine ran nothing.
        replayed: the replayed plan; None if the replay failed before it made one.
        problem: the error in that case; otherwise empty.
    """

    recorded: StepPlan
    replayed: StepPlan | None
    problem: str = ""


class Replay(NamedTuple):
    """The result of a replay.

    Attributes:
        plans: number of identical plans, without empty plans.
        steps: number of steps of these plans.
        seconds: seconds from the first to the last record, on the recorded clock.
        difference: the first difference; None if there was none.
    """

    plans: int
    steps: int
    seconds: float
    difference: Difference | None


@dataclass
class RecordedTurn:
    """One turn of the loop, and the messages that the engine received before it.

    Attributes:
        planned: the turn's plan.
        received: the messages, the oldest first.
        transferred: finished transfers that the turn applied, with the times.
        ran: the plan's result; None if the plan was empty, or if the recording ends before the result.
    """

    planned: Planned
    received: list[Received] = field(default_factory=list)
    transferred: list[Transferred] = field(default_factory=list)
    ran: PlanRan | None = None

    @property
    def steps_run(self) -> int:
        """Number of the plan's steps that ran."""
        return self.ran.result.steps_run if self.ran is not None and self.planned.plan.sequences else 0

    @property
    def began_s(self) -> float:
        """Time at which the turn first read the clock."""
        return self.transferred[0].at_s if self.transferred else self.planned.at_s


def turns(records: Iterable[Record]) -> Iterator[RecordedTurn]:
    """Yield the turns of a recording. Messages after the last plan are left out."""
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
                turn = RecordedTurn(record, received, transferred)
                received = []
                transferred = []
    if turn is not None:
        yield turn


def replay(recording: Recording) -> Replay:
    """Replay a recording until a plan differs, or to its end.

    Raises:
        RecordingError: the recording cannot be read.
        ConfigError: this version has no preset of the recorded name.
    """
    clock = VirtualClock()
    recorded = RecordedTimes()
    executor = ModelledExecutor(clock, recorded, recorded, recorded)
    engine = assemble(Settings(engine=recording.header.engine), executor, recording.header.sizes, clock).engine
    plans = steps = 0
    first_s: float | None = None
    for turn in turns(recording):
        first_s = turn.began_s if first_s is None else first_s
        for message in turn.received:
            clock.wait_until(message.at_s)
            _send(engine, message)
        clock.wait_until(turn.began_s)
        difference = recorded.run(turn, engine)
        if difference is not None:
            return Replay(plans, steps, clock.now() - first_s, difference)
        plans += not turn.planned.plan.is_empty
        steps += turn.steps_run
    return Replay(plans, steps, clock.now() - (first_s or 0.0), None)


def _send(engine: Engine, received: Received) -> None:
    match received.message:
        case Submit(request):
            engine.submit(request)
        case Abort(request_id):
            engine.abort(request_id)
        case RegisterAdapters(refs):
            engine.register_adapters(refs)
        case PinAdapters(digests):
            engine.pin_adapters(digests)
        case DropAdapter(digest):
            engine.drop_adapter(digest)
        case RequestExported(request_id):
            engine.export_request(request_id)
        case ExportRequest(request_id):
            engine.export_with_kv(request_id)
        case ImportKv():
            engine.import_kv(received.message)


class _PlanDiffers(Exception):
    """Raised when the replayed plan differs from the recorded plan."""


class _RecordingEnds(Exception):
    """Raised when the recording ends before the result of a plan."""


class RecordedTimes:
    """Gives a modelled executor the recorded times, transfers and tokens, turn by turn.

    Implements ``PlanTimes``, ``TransferLink`` and ``TokenChoice``.
    """

    _turn: RecordedTurn
    _plan: StepPlan | None
    _tokens: dict[str, tuple[Token, ...] | str]

    def __init__(self) -> None:
        self._transferred: deque[Transferred] = deque()

    def run(self, turn: RecordedTurn, engine: Engine) -> Difference | None:
        """Run one turn of an engine, and return its difference from the recorded turn; None if both are equal."""
        self._turn = turn
        self._plan = None
        self._transferred.extend(turn.transferred)
        recorded = turn.planned.plan
        try:
            engine.step(turn.planned.until_s)
        except _RecordingEnds:
            return None
        except _PlanDiffers:
            return Difference(recorded, self._plan)
        except (BlockError, ExecutorError, KeyError) as error:  # The recording was edited.
            return Difference(recorded, self._plan, f"{type(error).__name__}: {error}")
        if not engine.is_busy and not recorded.is_empty:
            return Difference(recorded, StepPlan(recorded.step))
        return None

    # --- PlanTimes -----------------------------------------------------------------------------------

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> PlanDuration:
        """Return the recorded steps and seconds. The plan must equal the recorded plan."""
        self._plan = plan
        if plan != self._turn.planned.plan:
            raise _PlanDiffers
        if self._turn.ran is None:
            raise _RecordingEnds
        result = self._turn.ran.result
        self._tokens = {
            step.request_id: result.failed.get(step.request_id, tokens)
            for step, tokens in zip(plan.sequences, result.tokens, strict=True)
        }
        # Adding the times in this order brings the clock to exactly the recorded time.
        after_s = self._turn.ran.at_s - (self._turn.planned.at_s + result.duration_s)
        return PlanDuration(result.steps_run, result.duration_s, after_s, result.switch_s, result.next_runs)

    # --- TransferLink --------------------------------------------------------------------------------

    def begin(self, transfer: Transfer, now: float) -> None:
        """Do nothing, since the end of each transfer is recorded."""

    def promote(self, transfer_ids: Collection[int], now: float) -> None:
        """Do nothing, since the recorded ends include the effect of promotions."""

    def next_s(self) -> float | None:
        """Return the time at which the next transfer ends; None if the turns so far have no further end."""
        return self._transferred[0].at_s if self._transferred else None

    def group_ends_s(self, transfer_id: int, now: float) -> Sequence[float]:
        """Return no times. Recorded steps have their own times, so this is never called."""
        return ()

    def take_done(self, now: float) -> list[TransferDone]:
        """Return the recorded transfers that have ended by ``now``."""
        done: list[TransferDone] = []
        while self._transferred and self._transferred[0].at_s <= now:
            done += self._transferred.popleft().transfers
        return done

    # --- TokenChoice ---------------------------------------------------------------------------------

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...] | str:
        """Return the recorded tokens of a sequence, or the reason why it got none."""
        return self._tokens[start.request_id]


class TimedWork(StrEnum):
    """Kinds of work with separate times."""

    DECODE = "decode"
    """A step in which every sequence computes one token."""
    PREFILL = "prefill"
    """A step in which no sequence decodes."""
    MIXED = "mixed"
    """A step with decodes and prefills."""
    LOAD = "load"
    """Reading an adapter's files, and copying the adapter to the device if the device is the target."""
    FETCH = "fetch"
    """Copying from the host to the device."""
    STORE = "store"
    """Copying from the device to the host."""


def compare_times(
    turns: Iterable[RecordedTurn], preset: Preset, transfers: TransferModel
) -> dict[TimedWork, list[tuple[float, float]]]:
    """Return pairs of (recorded, modelled) seconds for the mean step of each plan, and for each transfer.

    Plans with assisted prefills are left out, since the arrival of layers is not recorded.

    Args:
        turns: the turns of a recording, from the start.
        preset: the recorded preset.
        transfers: costs of transfers with the recorded settings, from the profile of the recorded machine and model.

    Raises:
        ProfileError: the profile lacks something that the recording needs.
    """
    times = ModelledTimes(transfers, preset, loop_each_step=False)
    inflight: dict[int, Transfer] = {}
    pairs: dict[TimedWork, list[tuple[float, float]]] = {kind: [] for kind in TimedWork}
    for turn in turns:
        for done in (done for taken in turn.transferred for done in taken.transfers):
            transfer = inflight.pop(done.transfer_id)
            if done.error is None and done.duration_s:
                pairs[_kind_of_transfer(transfer)].append((done.duration_s, transfers.path(transfer).alone_s))
        plan = turn.planned.plan
        inflight |= {transfer.transfer_id: transfer for transfer in plan.transfers}
        if turn.ran is None:
            times.note(plan)
            continue
        result = turn.ran.result
        modelled = modelled_as_run(times, plan, result)
        if modelled.steps:
            pairs[_kind(plan)].append((result.duration_s / modelled.steps, modelled.seconds / modelled.steps))
    return pairs


def modelled_as_run(times: ModelledTimes, plan: StepPlan, result: StepResult) -> PlanDuration:
    """Return the modelled times of the steps of a plan that ran.

    A plan with assisted prefills counts as zero steps.

    Raises:
        ProfileError: the profile lacks something that the plan needs.
    """
    if plan.assisted:
        times.note(plan)
        return PlanDuration(0, 0.0, 0.0)
    return times.steps_s(msgspec.structs.replace(plan, repeat=result.steps_run), math.inf, lambda _: ())


def _kind_of_transfer(transfer: Transfer) -> TimedWork:
    if transfer.source is Tier.SOURCE:
        return TimedWork.LOAD
    return TimedWork.FETCH if transfer.target is Tier.DEVICE else TimedWork.STORE


def _kind(plan: StepPlan) -> TimedWork:
    decodes = sum(step.known_tokens == 1 and step.start > 0 for step in plan.sequences)
    return TimedWork.DECODE if decodes == len(plan.sequences) else TimedWork.MIXED if decodes else TimedWork.PREFILL


_MAX_SHOWN = 100
"""Longer values are cut to this many characters."""

_MISSING = "—"


class FieldPair(NamedTuple):
    """One field of two plans as text, and whether the values differ."""

    name: str
    recorded: str
    replayed: str
    differs: bool


def plan_fields(recorded: StepPlan, replayed: StepPlan) -> Iterator[FieldPair]:
    """Yield every field of two plans. If a field differs, only its smallest differing parts are yielded."""
    for name in recorded.__struct_fields__:
        left = getattr(recorded, name)
        right = getattr(replayed, name)
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
    return count + (text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
