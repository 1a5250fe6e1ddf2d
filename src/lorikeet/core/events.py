"""Events of a request's life and of adapters, and the timings of a request computed from its events.

Metrics, the request log and the simulator derive from these events alone.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from lorikeet.core.ids import AdapterDigest, RequestId


class FinishReason(StrEnum):
    """The reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Queued(msgspec.Struct, frozen=True, tag=True):
    """The request entered the engine's admission queue. It is the first event of the attempt."""

    request_id: RequestId
    at_s: float
    attempt: int = 0


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The request was admitted and its blocks were allocated.

    Attributes:
        request_id: the request.
        at_s: time of the event.
        cached_tokens: number of the request's tokens with cached KV on the device or the host.
        waits_for_adapter, waits_for_kv: whether the request waits for a transfer, until ``AdapterArrived`` or
            ``KvArrived``.
        waited_for: reason of the request's last refusal in the queue; empty if the first try succeeded.
    """

    request_id: RequestId
    at_s: float
    cached_tokens: int
    waits_for_adapter: bool = False
    waits_for_kv: bool = False
    waited_for: str = ""


class AdapterArrived(msgspec.Struct, frozen=True, tag=True):
    """The adapter that an admitted request waited for is on the device."""

    request_id: RequestId
    at_s: float


class KvArrived(msgspec.Struct, frozen=True, tag=True):
    """The KV that an admitted request waited for is on the device."""

    request_id: RequestId
    at_s: float


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prefill ended and the first token of this attempt was sampled."""

    request_id: RequestId
    at_s: float


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """The request was exported and queued again, because blocks ran out or KV could not be loaded."""

    request_id: RequestId
    at_s: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request ended.

    Attributes:
        request_id: the request.
        at_s: time of the event.
        reason: why the request ended.
        stop_token_id: the token that ended the answer.
        error: error text, for ``FinishReason.ERROR``.
        impossible: whether the request itself can never be served. Otherwise the error is not the request's fault.
    """

    request_id: RequestId
    at_s: float
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    impossible: bool = False


class Mechanism(StrEnum):
    """The mechanisms that may save time, named like in ``lorikeet:seconds_saved_total``."""

    PREFIX_REUSE = "prefix_reuse"
    """KV of the prompt was cached, and was not computed again."""
    ADAPTER_CACHE = "adapter_cache"
    """The adapter was on the device already, or on the host instead of in files."""
    PREFETCH = "prefetch"
    """An adapter or KV was loaded before a request waited for it."""
    ASSIST = "assist"
    """Host cores computed LoRA while the adapter was being loaded."""
    MERGING = "merging"
    """Steps ran with the adapter merged into the base weights."""
    ORDER = "order"
    """A request was admitted before older requests that take longer."""
    PLACEMENT = "placement"
    """The chosen replica serves the request at a lower cost to all requests than the mean replica."""
    GUARD = "guard"
    """A part of the engine was switched on or off before the request was admitted (``core.guard``)."""


class Decided(msgspec.Struct, frozen=True, tag=True):
    """A mechanism made a decision for a request.

    Attributes:
        request_id: the request.
        at_s: time at which the saving is known.
        mechanism: the mechanism that decided.
        saved_s: seconds of waiting that the decision saves over all requests, by the measured costs of steps and
            transfers. Negative if it cost time.
        why: a short explanation.
    """

    request_id: RequestId
    at_s: float
    mechanism: Mechanism
    saved_s: float
    why: str


RequestEvent = Queued | Admitted | AdapterArrived | KvArrived | FirstToken | Decided | Preempted | Finished


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """An adapter's weights were loaded to the device, or the load failed (``error`` is set)."""

    digest: AdapterDigest
    at_s: float
    seconds: float
    error: str | None = None


class AdapterEvicted(msgspec.Struct, frozen=True, tag=True):
    """An adapter's device blocks were freed.

    Attributes:
        digest: the adapter's version.
        at_s: time of the event.
        freed_bytes: bytes of the adapter's blocks and KV.
        dropped: whether the adapter was dropped on request (``DropAdapter``) instead of evicted to free memory.
    """

    digest: AdapterDigest
    at_s: float
    freed_bytes: int
    dropped: bool = False


AdapterEvent = AdapterLoaded | AdapterEvicted


MOST_DECISIONS = 32
"""Decisions that are kept of a request; a request that moves often has more."""


@dataclass
class RequestTimings:
    """The times of a request's events on the monotonic clock.

    Each is None until the event happens.

    The parts of TTFT are consecutive (ELORA spec, R28): queueing until admission, waiting for the adapter, further
    waiting for KV, and prefill.

    Attributes:
        arrival_s: time at which the server accepted the request.
        queued_s: time at which an engine first queued it.
        admitted_s: time of the first admission.
        first_token_s: time at which the first token was sampled.
        finished_s: time at which the request ended.
        adapter_wait_s: seconds from admission until the adapter was on the device.
        kv_wait_s: further seconds until the KV was on the device too.
        waits_for_adapter: whether the request waited for its adapter. Otherwise its prefill was assisted during the
            load.
        cached_tokens: prompt tokens found in KV at the first admission.
        preemptions: number of preemptions.
        waited_for: the last reason why the request stayed in the queue.
        chosen: why the server chose the model; empty if the request named it.
        decisions: the latest decisions for the request.
        saved_s: seconds that each mechanism saved.
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
    waited_for: str = ""
    chosen: str = ""
    decisions: deque[Decided] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))
    saved_s: dict[Mechanism, float] = field(default_factory=dict)

    def apply(self, event: RequestEvent) -> None:
        """Apply one event. Only the first event of each kind counts, since a resumed request repeats them."""
        first_time = self.preemptions == 0 and self.first_token_s is None
        match event:
            case Queued():
                self.queued_s = event.at_s if self.queued_s is None else self.queued_s
            case Admitted():
                if self.admitted_s is None:
                    self.admitted_s = event.at_s
                    self.cached_tokens = event.cached_tokens
                    self.waits_for_adapter = event.waits_for_adapter
                    self.waited_for = event.waited_for
            case AdapterArrived() if first_time and self.waits_for_adapter and self.admitted_s is not None:
                self.adapter_wait_s = event.at_s - self.admitted_s
                self.kv_wait_s = max(0.0, self.kv_wait_s - self.adapter_wait_s)
            case KvArrived() if first_time and self.admitted_s is not None:
                self.kv_wait_s = event.at_s - self.admitted_s - self.adapter_wait_s
            case FirstToken():
                self.first_token_s = event.at_s if self.first_token_s is None else self.first_token_s
            case Decided():
                self.decisions.append(event)
                if event.mechanism is not Mechanism.GUARD:  # a switch saves nothing by itself
                    self.saved_s[event.mechanism] = self.saved_s.get(event.mechanism, 0.0) + event.saved_s
            case Preempted():
                self.preemptions += 1
            case Finished():
                self.finished_s = event.at_s
