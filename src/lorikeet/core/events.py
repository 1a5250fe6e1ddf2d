"""Events of a request's life and of adapters, and the timings of a request computed from its events.

Metrics, the request log and the simulator derive from these events alone.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from lorikeet.core.ids import AdapterDigest, RequestId


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Queued(msgspec.Struct, frozen=True, tag=True):
    """The engine took the request into its admission queue; this begins all that it tells of the attempt."""

    request_id: RequestId
    at_s: float
    attempt: int = 0


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The request received all its blocks.

    Attributes:
        request_id: whose.
        at_s: when.
        cached_tokens: of its tokens that were found in KV, on either tier.
        waits_for_adapter, waits_for_kv: what must be transferred before it can run; the events below tell the end.
    """

    request_id: RequestId
    at_s: float
    cached_tokens: int
    waits_for_adapter: bool = False
    waits_for_kv: bool = False


class AdapterArrived(msgspec.Struct, frozen=True, tag=True):
    """The adapter that an admitted request waited for is on the device."""

    request_id: RequestId
    at_s: float


class KvArrived(msgspec.Struct, frozen=True, tag=True):
    """The KV that an admitted request waited for is on the device."""

    request_id: RequestId
    at_s: float


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """Prefill ended and the first token of this attempt exists."""

    request_id: RequestId
    at_s: float


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """Blocks ran out, or KV did not arrive; the request was exported and queued again."""

    request_id: RequestId
    at_s: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request ended.

    Attributes:
        request_id: which.
        at_s: when.
        reason: why.
        stop_token_id: the token that stopped it.
        error: what went wrong.
        impossible: it can never be served as it was asked; else what went wrong is not the request's fault.
    """

    request_id: RequestId
    at_s: float
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    impossible: bool = False


RequestEvent = Queued | Admitted | AdapterArrived | KvArrived | FirstToken | Preempted | Finished


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """An adapter's weights reached the device (``error`` None) or failed to."""

    digest: AdapterDigest
    at_s: float
    seconds: float
    error: str | None = None


class AdapterEvicted(msgspec.Struct, frozen=True, tag=True):
    """An adapter's blocks were given up.

    Attributes:
        digest: the version.
        at_s: when.
        freed_bytes: of its blocks and those of its KV.
        dropped: because it was asked for, not to make room.
    """

    digest: AdapterDigest
    at_s: float
    freed_bytes: int
    dropped: bool = False


AdapterEvent = AdapterLoaded | AdapterEvicted


@dataclass
class RequestTimings:
    """Instants on the monotonic clock, None until they happen.

    The parts of TTFT follow one another (ELORA spec, R28): in the queue until blocks are received, then until the
    adapter is there, then what KV takes beyond that, then prefill.

    Attributes:
        arrival_s: the server accepted the request.
        queued_s: the engine first queued it.
        admitted_s: it first received blocks.
        first_token_s: its first token existed.
        finished_s: it ended.
        adapter_wait_s: time from its first blocks until its adapter was there.
        kv_wait_s: time after that until its KV was there too.
        waits_for_adapter: it could not run before its adapter was there; else its prefill was assisted meanwhile.
        cached_tokens: prompt tokens found in KV at the first admission.
        preemptions: how often it gave its blocks back.
    """

    arrival_s: float
    queued_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    adapter_wait_s: float = 0.0
    kv_wait_s: float = 0.0
    waits_for_adapter: bool = False
    cached_tokens: int = 0
    preemptions: int = 0

    def apply(self, event: RequestEvent) -> None:
        """Take one event in. First occurrences count; later ones do not overwrite them."""
        first_time = self.preemptions == 0 and self.first_token_s is None
        match event:
            case Queued():
                self.queued_s = event.at_s if self.queued_s is None else self.queued_s
            case Admitted():
                if self.admitted_s is None:
                    self.admitted_s, self.cached_tokens = event.at_s, event.cached_tokens
                    self.waits_for_adapter = event.waits_for_adapter
            case AdapterArrived() if first_time and self.waits_for_adapter and self.admitted_s is not None:
                self.adapter_wait_s = event.at_s - self.admitted_s
                self.kv_wait_s = max(0.0, self.kv_wait_s - self.adapter_wait_s)
            case KvArrived() if first_time and self.admitted_s is not None:
                self.kv_wait_s = event.at_s - self.admitted_s - self.adapter_wait_s
            case FirstToken():
                self.first_token_s = event.at_s if self.first_token_s is None else self.first_token_s
            case Preempted():
                self.preemptions += 1
            case Finished():
                self.finished_s = event.at_s
