"""The one message channel between an API process and an engine process.

Messages are encoded with MessagePack. Both ends run the same version of Lorikeet; ``EngineReady`` carries it.
"""

from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterRef
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


class ExportRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a request that goes on elsewhere, and hand over its KV as ``RequestExported``. Unknown ids are ignored."""

    request_id: RequestId


class ImportKv(msgspec.Struct, frozen=True, tag=True):
    """KV that another engine has computed, for a request that follows.

    Attributes:
        adapter: the version that it was computed under; None for the base model.
        keys: of its blocks, the first of a sequence.
        blocks: what they hold, of an engine with the same settings.
    """

    adapter: AdapterRef | None
    keys: tuple[bytes, ...]
    blocks: tuple[bytes, ...]


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter version as soon as no request runs under it; answered by ``AdapterEvicted``."""

    digest: AdapterDigest


class RegisterAdapters(msgspec.Struct, frozen=True, tag=True):
    """Versions that requests may come for: they may be read into the host tier and prefetched."""

    adapters: tuple[AdapterRef, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop at once."""


ToEngine = Submit | Abort | ExportRequest | ImportKv | RegisterAdapters | DropAdapter | Shutdown


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Where start-up is: ``stage`` in words, ``done`` of ``total`` units."""

    stage: str
    done: int
    total: int


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready.

    Attributes:
        version: Lorikeet's version.
        geometry: sizes of the whole model.
        total_blocks: blocks in the device arena.
        block_size: tokens of KV in a block.
        block_bytes: bytes of a block on one rank.
        max_model_len: longest sequence that it serves.
        max_adapter_blocks: largest adapter that it serves.
        kernels: which kernel backend computes.
        boot_id, at_s: of its machine, and now on its clock.
        notes: lines for the start-up log.
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


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one turn added to an answer. (request, attempt, index) names a token for ever, so old ones can be told.

    Attributes:
        request_id, attempt: whose.
        index: of the first of them in the answer.
        tokens: in their order, one or more.
    """

    request_id: RequestId
    attempt: int
    index: int
    tokens: tuple[Token, ...]


class TierBytes(msgspec.Struct, frozen=True):
    """What a tier holds; the parts add up to ``total``.

    Attributes:
        total: its arena.
        free: nobody leases it.
        adapters: weights, used or not.
        kv_running: KV of running sequences (on the device).
        kv_cached: KV that no running sequence needs there.
        inflight: part of a transfer.
    """

    total: int
    free: int
    adapters: int
    kv_running: int
    kv_cached: int
    inflight: int


class RouteStats(msgspec.Struct, frozen=True):
    """Transfers from one tier to another so far: how many, their bytes, failed ones, seconds of reading and copying."""

    transfers: int
    bytes: int
    failed: int
    busy_s: float


class DecisionTimes(msgspec.Struct, frozen=True):
    """Ticks of the swapper that decided something, on this machine's clock."""

    count: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0


class MemoryStats(msgspec.Struct, frozen=True):
    """What the memory tells about itself. Counts are since the start.

    Attributes:
        device, host: the tiers.
        host_adapters: adapters in the host tier.
        packing_waste_bytes: of device blocks of adapters, what holds no weights.
        invalid_kv_bytes: KV on the device that no sequence needs and none can use, since its adapter or earlier KV is
            not there.
        invalid_kv_share: that as a share of all KV on the device that no sequence needs, averaged over time.
        adapter_queries, adapter_hits: requests with an adapter, and those that found it on the device on arrival.
        kv_queries_tokens: prompt tokens of all requests on arrival.
        kv_hits_tokens, kv_host_hits_tokens: those whose KV was on the device then, and those found on the host only.
        transfers: by ``source-target``.
        prefetched, prefetched_used: adapters and blocks of KV brought before anybody wanted them, and those of them
            that were used before they left.
        decisions: time spent deciding.
        nodes: adapters and blocks of KV that the tree knows.
        metadata_bytes: that the tree itself takes.
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
    """How batches ran. Counts are since the start.

    Attributes:
        merged: the adapter that the last step ran merged, None if none.
        switches, switch_s: changes of it, and the time they took.
        merged_steps: steps with one.
        assisted_steps: steps with prefills that the host assisted.
    """

    merged: AdapterDigest | None = None
    switches: int = 0
    switch_s: float = 0.0
    merged_steps: int = 0
    assisted_steps: int = 0


class QueueStats(msgspec.Struct, frozen=True):
    """What an admission queue tells that has classes. Figures by class begin with the smallest requests.

    Attributes:
        waiting: requests of each class.
        quota_tokens: room of each class, in tokens of KV.
        held_tokens: of it, what requests hold.
        refreshes: how often classes and quotas were found anew, since the start.
        bypassed: requests admitted before an older one whose adapter lacked room.
        squashed: those of them that were sent back, since they had not ended in time.
        joined: requests tried before all others, since others ran under their adapter.
    """

    waiting: tuple[int, ...]
    quota_tokens: tuple[int, ...]
    held_tokens: tuple[int, ...]
    refreshes: int
    bypassed: int
    squashed: int
    joined: int


class AssistCounters(NamedTuple):
    """What has happened in assisted steps since the start.

    Attributes:
        host_layers, device_layers: layers of adapters on their way, by who has computed what they add.
        host_layers_after_arrival: of the former, those that had arrived when it was decided.
        rescued_slices: of host layers, slices that the rank has computed itself.
        lost_workers: workers that have ended unasked.
    """

    host_layers: int
    device_layers: int
    host_layers_after_arrival: int
    rescued_slices: int
    lost_workers: int


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges, taken after a step.

    Attributes:
        at_s: when.
        steps: steps run so far.
        running: sequences that hold blocks and can run.
        waiting: all other requests.
        waiting_for_adapter, waiting_for_kv: those of them that hold blocks, and wait for the transfer of their
            adapter, or only for that of KV that was found on the host.
        ahead_of_adapter: those that wait for their adapter though their prefill is done, assisted by the host.
        free_blocks, cached_blocks, kv_blocks, adapter_blocks, inflight_blocks: blocks by use; with
            ``total_blocks`` they satisfy free + cached + kv + adapter + inflight = total, where ``kv`` counts
            blocks that running sequences hold and ``cached`` KV blocks that nobody holds.
        total_blocks: blocks in the arena.
        kv_limit_blocks: those that KV may ever take.
        resident_adapters: digest → blocks of the adapters on the device.
        running_adapters, waiting_adapters: digests of running and of queued requests.
        prefix_queries_tokens, prefix_hits_tokens: tokens looked up in and found in cached KV so far.
        preemptions: so far.
        step_tokens: tokens computed by the last step.
        memory: what the memory tells.
        modes: how batches ran.
        queue: of the admission queue, None if it has no classes.
        assist: of host workers, None if there are none.
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
    step_tokens: int
    memory: MemoryStats
    ahead_of_adapter: int = 0
    modes: ModeStats = ModeStats()
    queue: QueueStats | None = None
    assist: AssistCounters | None = None


class ExportedKv(msgspec.Struct, frozen=True):
    """A request that was let go is gone, and this is the KV of its first blocks, as far as it could be had.

    Attributes:
        request_id: of the request.
        keys, blocks: see ``ImportKv``.
    """

    request_id: RequestId
    keys: tuple[bytes, ...]
    blocks: tuple[bytes, ...]


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that one turn of the loop has to tell.

    Tokens of a request come together, and before its ``Finished`` or ``RequestExported``.
    """

    tokens: tuple[TokenOutput, ...]
    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]
    stats: EngineStats | None = None
    exported_kv: tuple[ExportedKv, ...] = ()


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; ``message`` is for the user."""

    message: str


FromEngine = Progress | EngineReady | StepOutputs | Fatal
