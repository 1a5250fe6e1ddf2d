"""Records of a request's life. Metrics, the request log and later the twin derive from these alone."""

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
