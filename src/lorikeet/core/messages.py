"""Messages between an API process and an engine process.

They are encoded with MessagePack. Both ends run the same version of Lorikeet, which ``EngineReady`` carries.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, RequestEvent
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import Pooled, PromptLogprobs, Token
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.core.request import Request


class EngineInput(msgspec.Struct, frozen=True):
    """The line on the standard input of an engine process, as JSON.

    Attributes:
        settings: all settings; see ``config.for_engines``.
        channel_key: key of the API process's end of the channel, in ZeroMQ's text form; empty for a channel that is
            not encrypted. It is a secret: who has it may connect.
    """

    settings: msgspec.Raw = msgspec.Raw(b"{}")
    channel_key: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start or resume a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request; its blocks are free at the next step. Unknown ids are ignored."""

    request_id: RequestId


class ExportRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a request that is resumed elsewhere; answered by ``ExportedKv``. Unknown ids are ignored."""

    request_id: RequestId


class ImportKv(msgspec.Struct, frozen=True, tag=True):
    """KV that another engine has computed, for a request that will be submitted.

    Attributes:
        adapter: the version it was computed with; None for the base model.
        keys: block hashes, of the first blocks of a sequence.
        blocks: bytes of each block, from an engine with the same settings.
    """

    adapter: AdapterRef | None
    keys: tuple[bytes, ...]
    blocks: tuple[bytes, ...]


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter version once no request uses it; answered by ``AdapterEvicted`` with ``dropped``."""

    digest: AdapterDigest


class RegisterAdapters(msgspec.Struct, frozen=True, tag=True):
    """Versions for which requests may arrive. They may be read into the host tier and prefetched."""

    adapters: tuple[AdapterRef, ...]


class PinAdapters(msgspec.Struct, frozen=True, tag=True):
    """All versions that are evicted last; they replace the present ones."""

    digests: tuple[AdapterDigest, ...]


class SetPaused(msgspec.Struct, frozen=True, tag=True):
    """Run no steps, or go on. A paused engine takes messages, and answers them when it goes on."""

    paused: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop immediately."""


LOADING_WEIGHTS = "loading weights"
"""The stage of ``Progress`` in which the base model's weights are read."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start: ``stage`` for the user, ``done`` of ``total`` units."""

    stage: str
    done: int
    total: int


class BaseInfo(msgspec.Struct, frozen=True):
    """The base model, as an engine has loaded it.

    Attributes:
        architecture: class in its config.
        implementation: name of the code that computes it, as in ``/health`` and the log.
        vocab_size: number of logits.
        eos_token_ids: end-of-sequence tokens; empty if the checkpoint has none.
        dtype: dtype of weights, KV and adapters.
        embed_size: numbers of a token's embedding, if prompts may be embeddings; else 0.
    """

    architecture: str
    implementation: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    embed_size: int = 0


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready to serve.

    Attributes:
        version: Lorikeet's version.
        geometry: sizes of the whole model.
        total_blocks: blocks in the device arena.
        block_size: tokens of KV in a block.
        block_bytes: bytes of a block on one rank.
        max_model_len: longest sequence that it serves.
        max_adapter_blocks: largest adapter that it serves.
        kernels: name of the kernel backend.
        boot_id: boot id of its machine, which identifies its clock.
        notes: lines for the start-up log.
        weights: form of the linear weights, in words; empty if nothing is computed.
        base: the model; None in tests without one.
        local_geometry: sizes of one rank's share, with which adapters are packed; None: the whole model's.
    """

    version: str
    geometry: ModelGeometry
    total_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    max_adapter_blocks: int
    kernels: str
    boot_id: str
    at_s: float
    notes: tuple[str, ...] = ()
    weights: str = ""
    base: BaseInfo | None = None
    local_geometry: ModelGeometry | None = None


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that one turn of the loop sampled for a request.

    (request, attempt, index) identifies a token for good, so that stale and repeated tokens can be recognised.

    Attributes:
        request_id, attempt: the request and its attempt.
        index: index of the first of these tokens in the answer.
        tokens: one or more, in order.
    """

    request_id: RequestId
    attempt: int
    index: int
    tokens: tuple[Token, ...]


class TierBytes(msgspec.Struct, frozen=True):
    """Bytes of a tier by use. The parts add up to ``total``.

    Attributes:
        total: size of the arena.
        free: not allocated.
        adapters: adapter weights, used or not.
        kv_running: KV of running sequences (device only).
        kv_cached: KV that no running sequence uses.
        inflight: blocks of transfers in flight.
    """

    total: int
    free: int
    adapters: int
    kv_running: int
    kv_cached: int
    inflight: int


class RouteStats(msgspec.Struct, frozen=True):
    """Transfers from one tier to another since the start: their number, bytes, failures, and seconds of work."""

    transfers: int
    bytes: int
    failed: int
    busy_s: float


class DecisionTimes(msgspec.Struct, frozen=True):
    """Duration of swapper ticks that made a decision, in seconds of real time."""

    count: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0


class MemoryStats(msgspec.Struct, frozen=True):
    """Counters and gauges of the memory. Counts are since the start.

    Attributes:
        device, host: bytes of each tier.
        host_adapters: number of adapters in the host tier.
        packing_waste_bytes: bytes of adapters' device blocks that hold no weights.
        invalid_kv_bytes: cached KV on the device that no request can use, because its adapter or earlier KV is not
            there.
        invalid_kv_share: the same as a share of all cached KV on the device, averaged over time.
        adapter_queries, adapter_hits: requests with an adapter, and how many found it on the device on arrival.
        kv_queries_tokens: prompt tokens of all requests on arrival.
        kv_hits_tokens, kv_host_hits_tokens: those whose KV was on the device then, and those with KV on the host only.
        transfers: by route, ``source-target``.
        prefetched, prefetched_used: adapters and KV blocks that were prefetched, and those of them that were used
            before they were evicted.
        decisions: time spent in decisions of the swapper.
        nodes: adapters and KV blocks in the dependency tree.
        metadata_bytes: size of the tree itself.
    """

    device: TierBytes
    host: TierBytes
    host_adapters: int
    packing_waste_bytes: int
    invalid_kv_bytes: int
    invalid_kv_share: float
    adapter_queries: int
    adapter_hits: int
    kv_queries_tokens: int
    kv_hits_tokens: int
    kv_host_hits_tokens: int
    transfers: dict[str, RouteStats]
    prefetched: int
    prefetched_used: int
    decisions: DecisionTimes
    nodes: int
    metadata_bytes: int


class ModeStats(msgspec.Struct, frozen=True):
    """Batching modes of the steps. Counts are since the start.

    Attributes:
        merged: the adapter that was merged in the last step, None if none.
        switches, switch_s: number of changes of the merged adapter, and their seconds.
        merged_steps: steps with a merged adapter.
        assisted_steps: steps with assisted prefills.
    """

    merged: AdapterDigest | None = None
    switches: int = 0
    switch_s: float = 0.0
    merged_steps: int = 0
    assisted_steps: int = 0


class QueueStats(msgspec.Struct, frozen=True):
    """Gauges and counters of an admission queue with size classes. Lists by class start with the smallest requests.

    Attributes:
        waiting: waiting requests of each class.
        quota_tokens: quota of each class, in tokens of KV.
        held_tokens: part of the quota in use.
        refreshes: how often classes and quotas were recomputed.
        bypassed: requests admitted before an older one whose adapter did not fit.
        squashed: bypassing requests that were preempted because they had not ended in time.
        joined: requests tried first because others ran with their adapter.
    """

    waiting: tuple[int, ...]
    quota_tokens: tuple[int, ...]
    held_tokens: tuple[int, ...]
    refreshes: int
    bypassed: int
    squashed: int
    joined: int


class AssistCounters(NamedTuple):
    """Counters of assisted steps since the start.

    Attributes:
        host_layers, device_layers: layers of adapters in flight whose LoRA delta the host or the device computed.
        host_layers_after_arrival: host layers that had arrived on the device when the host was chosen.
        rescued_slices: slices of host layers that the rank computed itself because a worker was lost.
        lost_workers: workers that ended unexpectedly.
    """

    host_layers: int
    device_layers: int
    host_layers_after_arrival: int
    rescued_slices: int
    lost_workers: int


STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the classes in ``EngineStats.steps_by_tokens``."""


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges of an engine, taken after a step.

    Attributes:
        at_s: when they were taken.
        steps: steps run since the start.
        running: sequences that hold blocks and can run.
        waiting: all other requests.
        waiting_for_adapter, waiting_for_kv: admitted requests that wait for the transfer of their adapter, or only for
            KV that was found on the host.
        ahead_of_adapter: requests whose assisted prefill is done but whose adapter has not arrived.
        free_blocks, cached_blocks, kv_blocks, adapter_blocks, inflight_blocks: blocks by use; with
            ``total_blocks`` they satisfy free + cached + kv + adapter + inflight = total, where ``kv`` counts
            blocks that running sequences hold and ``cached`` counts KV blocks that no sequence holds.
        total_blocks: blocks in the arena.
        kv_limit_blocks: most blocks that KV may take.
        resident_adapters: digest → blocks of the adapters on the device.
        running_adapters, waiting_adapters: digests of running and of queued requests.
        prefix_queries_tokens, prefix_hits_tokens: tokens looked up in the prefix cache, and found, since the start.
        preemptions: since the start.
        steps_by_tokens: number of steps since the start by the tokens that each computed: at most the first of
            ``STEP_TOKENS_BOUNDS``, above it and at most the second, …, above the last.
        computed_tokens: tokens computed by all of them.
        memory: statistics of the memory.
        modes: statistics of the batching modes.
        queue: statistics of the admission queue; None if it has no classes.
        assist: counters of host workers; None if there are none.
        costs: measured costs of steps, without loads (see ``MemoryStats.transfers``); None before enough is known.
        hosted_adapters: digests of the adapters in the host tier.
        queued: requests without blocks by what they wait for, in the lower-case names of ``WaitReason``; ``order``
            for requests that were not refused, but are behind others.
        drafted_tokens, kept_tokens: tokens drafted since the start, and how many of them were right.
    """

    at_s: float
    steps: int
    running: int
    waiting: int
    waiting_for_adapter: int
    waiting_for_kv: int
    free_blocks: int
    cached_blocks: int
    kv_blocks: int
    adapter_blocks: int
    inflight_blocks: int
    total_blocks: int
    kv_limit_blocks: int
    resident_adapters: dict[AdapterDigest, int]
    running_adapters: tuple[AdapterDigest, ...]
    waiting_adapters: tuple[AdapterDigest, ...]
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    steps_by_tokens: tuple[int, ...]
    computed_tokens: int
    memory: MemoryStats
    ahead_of_adapter: int = 0
    modes: ModeStats = ModeStats()
    queue: QueueStats | None = None
    assist: AssistCounters | None = None
    costs: ReplicaCosts | None = None
    hosted_adapters: tuple[AdapterDigest, ...] = ()
    queued: dict[str, int] = {}
    drafted_tokens: int = 0
    kept_tokens: int = 0


class ExportedKv(msgspec.Struct, frozen=True):
    """The KV of an exported request: as many of its first blocks as could be copied.

    Attributes:
        request_id: the request.
        keys, blocks: for ``ImportKv`` at another engine.
    """

    request_id: RequestId
    keys: tuple[bytes, ...]
    blocks: tuple[bytes, ...]


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one turn of the engine loop.

    The tokens of a request are in one item. They are handled before its ``Finished`` event and its ``ExportedKv``, and
    after its prompt log probabilities and its vector, which a resumed request may repeat.
    """

    tokens: tuple[TokenOutput, ...]
    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]
    stats: EngineStats | None = None
    exported_kv: tuple[ExportedKv, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[Pooled, ...] = ()


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; ``message`` is for the user."""

    message: str


HEARTBEAT_EVERY_S = 1.0
"""Interval of :class:`Heartbeat`."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The sender runs. Both ends send it, so that the other one also notices messages that were lost before it.

    An engine process sends it while it starts, during a long step, and while there is nothing to do.

    Attributes:
        turn_s: how long the current turn of the engine's loop has taken so far; 0 outside a turn.
    """

    turn_s: float


ToEngine = (
    Submit
    | Abort
    | ExportRequest
    | ImportKv
    | RegisterAdapters
    | PinAdapters
    | DropAdapter
    | SetPaused
    | Heartbeat
    | Shutdown
)
FromEngine = Progress | EngineReady | StepOutputs | Heartbeat | Fatal


Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class MessagesLost(RuntimeError):
    """Messages of the other end are missing. Its state is no longer known, so the engine must be replaced."""


class MessageCodec(Generic[Outgoing, Incoming]):
    """Encodes and decodes the messages of one end of a channel, numbered from 0 in each direction.

    ZeroMQ delivers in order. But when a connection between machines breaks and is made again, messages may be lost, and
    neither end would know. The numbers show it.

    Args:
        incoming: type of the messages of the other end.
    """

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(tuple[int, incoming])
        self._sent = self._received = 0

    def encode(self, message: Outgoing) -> bytes:
        """Return the next message as bytes."""
        number = self._sent
        self._sent = self._sent + 1
        return self._encoder.encode((number, message))

    def decode(self, data: bytes) -> Incoming | None:
        """Return a message; None if it has been received before.

        Raises:
            MessagesLost: messages before it are missing.
            msgspec.DecodeError: it is not a message.
        """
        number, message = self._decoder.decode(data)
        if number < self._received:
            return None
        if number > self._received:
            raise MessagesLost(f"{number - self._received} messages are missing before number {number}")
        self._received += 1
        decoded: Incoming = message
        return decoded
