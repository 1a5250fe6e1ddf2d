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
    """The engine took the request into its admission queue."""

    request_id: RequestId
    at_s: float


class AdapterWait(msgspec.Struct, frozen=True, tag=True):
    """The request began (``loaded`` False) or ended (True) waiting for its adapter's transfer, or for its turn."""

    request_id: RequestId
    at_s: float
    loaded: bool


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The request received blocks; ``cached_tokens`` of its tokens were found in KV."""

    request_id: RequestId
    at_s: float
    cached_tokens: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """Prefill ended and the first token of this attempt exists."""

    request_id: RequestId
    at_s: float


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """Blocks ran out; the request was exported and queued again."""

    request_id: RequestId
    at_s: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request ended. ``stop_token_id`` is the token that stopped it, ``error`` what went wrong."""

    request_id: RequestId
    at_s: float
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None


RequestEvent = Queued | AdapterWait | Admitted | FirstToken | Preempted | Finished


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
