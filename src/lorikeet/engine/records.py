"""What a recording holds: all that an engine's plans depend on, in the order in which its loop met it."""

from typing import Protocol

import msgspec

from lorikeet.config import EngineSettings
from lorikeet.core.events import AdapterEvent, RequestEvent
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import Abort, BringKv, DropAdapter, KnowAdapters, LetGo, Submit
from lorikeet.core.plan import StepPlan, StepResult, TransferDone
from lorikeet.engine.executor import EngineSizes


class Header(msgspec.Struct, frozen=True):
    """The first record: which engine it was.

    Attributes:
        version: Lorikeet's version.
        engine: its settings, the row by its full name.
        sizes: of its executor.
    """

    version: str
    engine: EngineSettings
    sizes: EngineSizes


class Exported(msgspec.Struct, frozen=True, tag=True):
    """A request was taken out, to go on elsewhere or later."""

    request_id: RequestId


Message = Submit | Abort | LetGo | BringKv | KnowAdapters | DropAdapter | Exported
"""Of ``BringKv`` only what plans depend on, the keys: a replay needs no bytes."""


class Received(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine was told something.

    Attributes:
        at_s: the engine's clock, as in all records.
        message: what.
    """

    at_s: float
    message: Message


class Transferred(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine took finished transfers in, failed ones among them."""

    at_s: float
    transfers: tuple[TransferDone, ...]


class Planned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine is about to run a plan. One is written for every turn of the loop; an empty plan is not run.

    Attributes:
        at_s: the time that it was planned with.
        until_s: argument of ``Engine.step``.
        plan: what was decided.
    """

    at_s: float
    until_s: float | None
    plan: StepPlan


class Ran(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The plan of the record before has run; ``at_s`` is the time that its result was committed with."""

    at_s: float
    result: StepResult


class Told(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The events that a turn of the loop brought."""

    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]


Record = Received | Transferred | Planned | Ran | Told


class Recorder(Protocol):
    """Is told of everything as it happens."""

    def note(self, record: Record) -> None:
        """Keep a record."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


class NoRecorder:
    """Keeps nothing."""

    def note(self, record: Record) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing is held."""
