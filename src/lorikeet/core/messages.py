"""Messages between an API process and an engine process.

Messages are encoded with MessagePack. Both ends must run the same version of Lorikeet, which ``EngineReady`` carries.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, RequestEvent
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId, RequestId
from lorikeet.core.plan import Pooled, PromptLogprobs, Token
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.core.request import Request


class EngineInput(msgspec.Struct, frozen=True):
    """The line on the standard input of an engine process, as JSON.

    Attributes:
        settings: all settings, see ``config.for_engines``.
        channel_key: key of the API process's end of the channel, in ZeroMQ's text form. Empty for a channel without
            encryption. The key is a secret, since everyone with the key may connect.
        replica: the replica's id.
        waits_for_pool: whether the engine, once its weights are loaded, waits for ``AllocatePool``.
    """

    settings: msgspec.Raw = msgspec.Raw(b"{}")
    channel_key: str = ""
    replica: ReplicaId = ReplicaId("0")
    waits_for_pool: bool = False


class Reattach(msgspec.Struct, frozen=True):
    """A later line on the standard input of an engine process, as JSON: another API process takes the engine over.

    Attributes:
        address: address of the new channel.
        channel_key: key of the new channel; see ``EngineInput``.
    """

    address: str
    channel_key: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start or resume a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request. Its blocks are free at the next step. Unknown ids are ignored."""

    request_id: RequestId


class ExportRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a request that another engine resumes. The answer is ``ExportedKv``. Unknown ids are ignored."""

    request_id: RequestId


class ImportKv(msgspec.Struct, frozen=True, tag=True):
    """KV that another engine has computed, for a request that will be submitted.

    Attributes:
        adapter: adapter version with which the KV was computed; None for the base model.
        keys: hashes of the first blocks of a sequence.
        blocks: bytes of each block, from an engine with the same settings.
    """

    adapter: AdapterRef | None
    keys: tuple[bytes, ...]
    blocks: tuple[bytes, ...]


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter version once no request uses it. The answer is ``AdapterEvicted`` with ``dropped``."""

    digest: AdapterDigest


class RegisterAdapters(msgspec.Struct, frozen=True, tag=True):
    """Register versions for which requests may arrive, so that the engine may read them ahead and prefetch them."""

    adapters: tuple[AdapterRef, ...]


class PinAdapters(msgspec.Struct, frozen=True, tag=True):
    """Set the versions that are evicted last. They replace the present set."""

    digests: tuple[AdapterDigest, ...]


class NameAdapters(msgspec.Struct, frozen=True, tag=True):
    """The names of all adapter versions, for events of KV; they replace the present ones."""

    names: dict[AdapterName, AdapterDigest]
    epoch: str = ""


class SetPaused(msgspec.Struct, frozen=True, tag=True):
    """Pause or resume the engine. A paused engine receives messages, and answers after it was resumed."""

    paused: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop the engine immediately."""


class AllocatePool(msgspec.Struct, frozen=True, tag=True):
    """Allocate the pool of KV and adapters. Only an engine that waits for it gets this message."""


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True):
    """A report of an engine that has loaded its weights, and waits for ``AllocatePool``."""


class Parked(msgspec.Struct, frozen=True, tag=True):
    """The requests that an engine ran for an earlier API process, sent after ``EngineReady`` to the next one.

    The engine no longer runs them; their adapters and KV are still in its memory.
    """

    requests: tuple[Request, ...]


LOADING_WEIGHTS = "loading weights"
"""The stage of ``Progress`` in which the base model's weights are read."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The progress of the engine's start: a ``stage`` in words for the user, with ``done`` of ``total`` units."""

    stage: str
    done: int
    total: int


class BaseInfo(msgspec.Struct, frozen=True):
    """The description of the base model that an engine has loaded.

    Attributes:
        architecture: class name in the model's config.
        implementation: name of the code that computes the model, as in ``/health`` and the log.
        vocab_size: number of logits.
        eos_token_ids: end-of-sequence tokens; empty if the checkpoint has none.
        dtype: dtype of weights, KV and adapters.
        embed_size: size of a token's embedding, if prompts may be embeddings; else 0.
        takes_images: whether prompts may have images.
        images_refused: why they may not; empty if they may.
    """

    architecture: str
    implementation: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    embed_size: int = 0
    takes_images: bool = False
    images_refused: str = ""


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready to serve.

    Attributes:
        version: Lorikeet's version.
        geometry: sizes of the whole model.
        total_blocks: number of blocks in the device arena.
        block_size: tokens of KV in a block.
        block_bytes: bytes of a block on one rank.
        max_model_len: number of tokens of the longest sequence that the engine serves.
        max_adapter_blocks: number of blocks of the largest adapter that the engine serves.
        kernels: name of the kernel backend.
        boot_id: boot id of the engine's machine, which identifies the clock.
        notes: lines for the start-up log.
        weights: description of the form of the linear weights; empty if the engine computes nothing.
        base: the base model; None in tests without one.
        local_geometry: sizes of one rank's share, with which adapters are packed. None for the whole model's sizes.
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

    (request, attempt, index) identifies a token uniquely, so that stale and repeated tokens can be recognised.

    Attributes:
        request_id, attempt: the request and its attempt.
        index: index of the first of these tokens in the answer.
        tokens: one or more tokens, in order.
    """

    request_id: RequestId
    attempt: int
    index: int
    tokens: tuple[Token, ...]


class TierBytes(msgspec.Struct, frozen=True):
    """The bytes of a tier by use.

    The parts add up to ``total``.

    Attributes:
        total: size of the arena.
        free: bytes that are not allocated.
        adapters: bytes of adapter weights, in use or not.
        kv_running: bytes of running sequences' KV (device only).
        kv_cached: bytes of KV that no running sequence uses.
        inflight: bytes of the blocks of transfers in flight.
    """

    total: int
    free: int
    adapters: int
    kv_running: int
    kv_cached: int
    inflight: int


class RouteStats(msgspec.Struct, frozen=True):
    """Counters of transfers from one tier to another since the start: number, bytes, failures and seconds of work."""

    transfers: int
    bytes: int
    failed: int
    busy_s: float


class DecisionTimes(msgspec.Struct, frozen=True):
    """Durations of swapper ticks that made a decision, in seconds of real time."""

    count: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0


class SnapshotStats(msgspec.Struct, frozen=True):
    """Counters and gauges of snapshots, the kept copies of sequences' states.

    Attributes:
        device_bytes, host_bytes: size of the snapshots on each tier. They are part of the tier's KV.
        state_bytes: size of one state, and so of one snapshot.
        taken: number of snapshots taken since the start.
        used: number of sequences since the start that began from a snapshot.
    """

    device_bytes: int
    host_bytes: int
    state_bytes: int
    taken: int
    used: int


class MemoryStats(msgspec.Struct, frozen=True):
    """Counters and gauges of the memory.

    Counts are since the start.

    Attributes:
        device, host: bytes of each tier.
        host_adapters: number of adapters in the host tier.
        packing_waste_bytes: bytes of adapters' device blocks that hold no weights.
        invalid_kv_bytes: bytes of cached KV on the device that no request can use, because its adapter or earlier KV is
            missing.
        invalid_kv_share: share of such KV in all cached KV on the device, averaged over time.
        adapter_queries, adapter_hits: number of requests with an adapter, and number of those whose adapter was on the
            device on arrival.
        kv_queries_tokens: number of prompt tokens of all requests on arrival.
        kv_hits_tokens, kv_host_hits_tokens: number of such tokens with KV on the device, and with KV only on the host.
        transfers: transfers by route, ``source-target``.
        prefetched, prefetched_used: number of adapters and KV blocks that were prefetched, and number of those that
            were used before their eviction.
        decisions: durations of the swapper's decisions.
        nodes: number of adapters and KV blocks in the dependency tree.
        metadata_bytes: size of the tree's data structures.
        snapshots: statistics of snapshots; None if no layer has a state.
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
    snapshots: SnapshotStats | None = None


class ModeStats(msgspec.Struct, frozen=True):
    """Counters of the steps' batching modes since the start.

    Attributes:
        merged: the adapter that was merged in the last step; None without one.
        switches, switch_s: number of changes of the merged adapter, and the seconds that they took.
        merged_steps: number of steps with a merged adapter.
        assisted_steps: number of steps with assisted prefills.
    """

    merged: AdapterDigest | None = None
    switches: int = 0
    switch_s: float = 0.0
    merged_steps: int = 0
    assisted_steps: int = 0


class QueueStats(msgspec.Struct, frozen=True):
    """Gauges and counters of an admission queue with size classes.

    Lists by class start with the smallest requests.

    Attributes:
        waiting: number of waiting requests of each class.
        quota_tokens: quota of each class, in tokens of KV.
        held_tokens: part of the quota in use, in tokens of KV.
        refreshes: number of recomputations of classes and quotas.
        bypassed: number of requests admitted before an older request whose adapter did not fit.
        squashed: number of bypassing requests that were preempted because they had not ended in time.
        joined: number of requests tried first because others ran with their adapter.
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
        host_layers, device_layers: number of layers of adapters in flight whose LoRA delta the host or the device
            computed.
        host_layers_after_arrival: number of host layers that had arrived on the device when the host was chosen.
        rescued_slices: number of slices of host layers that the rank computed itself because a worker was lost.
        lost_workers: number of workers that ended unexpectedly.
    """

    host_layers: int
    device_layers: int
    host_layers_after_arrival: int
    rescued_slices: int
    lost_workers: int


class GuardStats(msgspec.Struct, frozen=True):
    """State of a guarded part, such as the order of admission (``core.guard``).

    Attributes:
        is_on: whether the part acts; otherwise its alternative does.
        regret_s: seconds that requests have waited longer than with the other choice since the last switch, fading.
        switches: number of switches since the start.
        on_s, off_s: seconds that requests would have waited since the start with the part always on, and always off,
            as its shadow counts them.
    """

    is_on: bool
    regret_s: float
    switches: int
    on_s: float
    off_s: float


STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the classes in ``EngineStats.steps_by_tokens``."""


class ImageStats(msgspec.Struct, frozen=True):
    """Counters of the images of prompts since the start.

    Attributes:
        computed: number of images that the tower computed.
        computed_tokens: number of their tokens.
        reused: number of images whose embeddings were kept when a request needed them.
        tower_s: seconds of steps spent on computing images.
        kept_tokens: number of tokens whose embeddings are kept now.
    """

    computed: int = 0
    computed_tokens: int = 0
    reused: int = 0
    tower_s: float = 0.0
    kept_tokens: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges of an engine, taken after a step.

    Attributes:
        at_s: time at which the gauges were taken.
        steps: number of steps since the start.
        running: number of sequences that hold blocks and can run.
        waiting: number of all other requests.
        waiting_for_adapter, waiting_for_kv: number of admitted requests that wait for the transfer of their adapter, or
            only for KV from the host.
        ahead_of_adapter: number of requests whose assisted prefill is done but whose adapter has not arrived.
        free_blocks, cached_blocks, kv_blocks, adapter_blocks, inflight_blocks: blocks by use; with
            ``total_blocks`` they satisfy free + cached + kv + adapter + inflight = total, where ``kv`` counts
            blocks that running sequences hold and ``cached`` counts KV blocks that no sequence holds.
        total_blocks: number of blocks in the arena.
        kv_limit_blocks: maximum number of blocks that KV may take.
        resident_adapters: number of blocks of each adapter on the device, by digest.
        running_adapters, waiting_adapters: digests of running and of queued requests.
        prefix_queries_tokens, prefix_hits_tokens: number of tokens looked up in the prefix cache, and number found,
            since the start.
        preemptions: number of preemptions since the start.
        steps_by_tokens: number of steps since the start by computed tokens: up to the first of ``STEP_TOKENS_BOUNDS``,
            up to the second, …, above the last.
        computed_tokens: number of tokens computed by all steps.
        memory: statistics of the memory.
        modes: statistics of the batching modes.
        queue: statistics of the admission queue; None if it has no classes.
        assist: counters of host workers; None without host workers.
        costs: measured costs of steps, without loads (see ``MemoryStats.transfers``); None before there are enough
            measurements.
        hosted_adapters: digests of the adapters in the host tier.
        queued: number of requests without blocks by reason, in the lower-case names of ``WaitReason``. ``order`` counts
            requests that were not refused but are behind others.
        drafted_tokens, kept_tokens: number of tokens drafted since the start, and number of those that were right.
        guards: state of each guarded part by name.
        images: counters of images.
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
    guards: dict[str, GuardStats] = {}
    images: ImageStats = ImageStats()


class ExportedKv(msgspec.Struct, frozen=True):
    """The KV of an exported request: its first blocks, up to the first that could not be copied.

    Attributes:
        request_id: the request.
        keys, blocks: for ``ImportKv`` at another engine.
    """

    request_id: RequestId
    keys: tuple[bytes, ...]
    blocks: tuple[bytes, ...]


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one turn of the engine loop.

    The tokens of a request are in one item. The receiver handles a request's tokens before its ``Finished`` event and
    its ``ExportedKv``, and after its prompt log probabilities and its vector, which a resumed request may repeat.
    """

    tokens: tuple[TokenOutput, ...]
    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]
    stats: EngineStats | None = None
    exported_kv: tuple[ExportedKv, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[Pooled, ...] = ()


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start. ``message`` is for the user."""

    message: str


HEARTBEAT_EVERY_S = 1.0
"""Interval of :class:`Heartbeat`."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign that the sender is running.

    Both ends send heartbeats, so that the receiver also notices messages that were lost before.

    An engine process sends heartbeats while it starts, during a long step, and while it is idle.

    Attributes:
        turn_s: seconds that the current turn of the engine's loop has taken so far; 0 outside a turn.
    """

    turn_s: float


ToEngine = (
    Submit
    | Abort
    | ExportRequest
    | ImportKv
    | RegisterAdapters
    | PinAdapters
    | NameAdapters
    | DropAdapter
    | SetPaused
    | AllocatePool
    | Heartbeat
    | Shutdown
)
FromEngine = Progress | WeightsLoaded | EngineReady | Parked | StepOutputs | Heartbeat | Fatal


Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class MessagesLost(RuntimeError):
    """Raised when messages of the other end are missing. Its state is unknown then, so the engine must be replaced."""


class MessageCodec(Generic[Outgoing, Incoming]):
    """Encodes and decodes the messages of one end of a channel, numbered from 0 in each direction.

    ZeroMQ delivers in order. But when a connection between machines breaks and is made again, messages may be lost
    without notice. The numbers reveal the loss.

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
        """Return a decoded message; None if it has been received before.

        Raises:
            MessagesLost: earlier messages are missing.
            msgspec.DecodeError: the bytes are not a message.
        """
        number, message = self._decoder.decode(data)
        if number < self._received:
            return None
        if number > self._received:
            raise MessagesLost(f"{number - self._received} messages are missing before number {number}")
        self._received += 1
        decoded: Incoming = message
        return decoded
