"""The one message channel between an API process and an engine process.

Messages are encoded with MessagePack. Both ends run the same version of Lorikeet; ``Hello`` carries it.
"""

import msgspec

from lorikeet.core.events import AdapterEvent, RequestEvent
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import Token
from lorikeet.core.request import Request


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start or resume a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request; its blocks are free at the next step. Unknown ids are ignored."""

    request_id: RequestId


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter version as soon as no request runs under it; answered by ``AdapterEvicted``."""

    digest: AdapterDigest


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop at once."""


ToEngine = Submit | Abort | DropAdapter | Shutdown


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Where start-up is: ``stage`` in words, ``done`` of ``total`` units."""

    stage: str
    done: int
    total: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready.

    Attributes:
        version: Lorikeet's version.
        geometry: sizes of the whole model.
        total_blocks: blocks in the device arena.
        block_tokens: tokens of KV in a block.
        block_bytes: bytes of a block on one rank.
        max_model_tokens: longest sequence that it serves.
        max_adapter_blocks: largest adapter that it serves.
        kernels: which kernel backend computes.
        notes: lines for the start-up log.
    """

    version: str
    geometry: ModelGeometry
    total_blocks: int
    block_tokens: int
    block_bytes: int
    max_model_tokens: int
    max_adapter_blocks: int
    kernels: str
    notes: tuple[str, ...] = ()


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one request. (request, attempt, index) names it for ever, so duplicates can be dropped."""

    request_id: RequestId
    attempt: int
    index: int
    token: Token


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges, taken after a step.

    Attributes:
        at_s: when.
        steps: steps run so far.
        running: sequences that hold blocks.
        waiting: requests in the admission queue.
        waiting_for_adapter: those of them whose adapter is being transferred, or waits for its turn.
        free_blocks, cached_blocks, kv_blocks, adapter_blocks, inflight_blocks: blocks by use; with
            ``total_blocks`` they satisfy free + cached + kv + adapter + inflight = total, where ``kv`` counts
            blocks that running sequences hold and ``cached`` KV blocks that nobody holds.
        total_blocks: blocks in the arena.
        resident_adapters: digest → blocks of the adapters on the device.
        running_adapters, waiting_adapters: digests of running and of queued requests.
        prefix_queries_tokens, prefix_hits_tokens: tokens looked up in and found in cached KV so far.
        preemptions: so far.
        step_tokens: tokens computed by the last step.
    """

    at_s: float
    steps: int
    running: int
    waiting: int
    waiting_for_adapter: int
    free_blocks: int
    cached_blocks: int
    kv_blocks: int
    adapter_blocks: int
    inflight_blocks: int
    total_blocks: int
    resident_adapters: dict[AdapterDigest, int]
    running_adapters: tuple[AdapterDigest, ...]
    waiting_adapters: tuple[AdapterDigest, ...]
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    step_tokens: int


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that one turn of the loop has to tell. Tokens of a request precede its ``Finished``."""

    tokens: tuple[TokenOutput, ...]
    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]
    stats: EngineStats | None = None


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; ``message`` is for the user."""

    message: str


FromEngine = Progress | Hello | StepOutputs | Fatal
