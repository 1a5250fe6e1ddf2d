"""Tracks the requests, load and resident adapters of all replicas for routing.

Loads are arrays with one element per replica, so that a policy compares all replicas by array operations. The fleet is
updated by dispatched requests, by the outputs of the engines (:func:`apply_outputs`) and by the gauges that they
report.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.events import AdapterLoaded, Admitted, Finished, FinishReason, Preempted
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import EngineStats, StepOutputs

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


class RankCounts:
    """Tracks the number, the maximum and the sum of the ranks of a changing set of requests.

    Requests without a rank are ignored. The maximum is recomputed only when the last request of the largest rank
    leaves, and only among distinct ranks.
    """

    __slots__ = ("_counts", "largest", "rows", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.rows = 0
        self.largest = 0
        self.total = 0

    def add(self, rank: int) -> None:
        """Add a request with a rank."""
        if rank:
            self._counts[rank] = self._counts.get(rank, 0) + 1
            self.rows += 1
            self.total += rank
            self.largest = max(self.largest, rank)

    def remove(self, rank: int) -> None:
        """Remove a request with a rank."""
        if rank:
            self._counts[rank] -= 1
            self.rows -= 1
            self.total -= rank
            if not self._counts[rank]:
                del self._counts[rank]
                if rank == self.largest:
                    self.largest = max(self._counts, default=0)


class ReplicaLoads:
    """Counts requests, tokens and memory by replica, in the fleet's order.

    Arrays are replaced when a replica joins or leaves.

    Attributes:
        requests: all requests at the replica: running, queued and others.
        running, queued: requests that this process sent.
        others: requests that the replica reports and that other clients sent.
        rows, largest_rank, total_rank: number, maximum and sum of the ranks of running and queued requests with an
            adapter.
        queued_rows, queued_largest_rank, queued_total_rank: number, maximum and sum of the ranks of queued requests
            with an adapter.
        prefill_tokens: tokens of requests that have generated no token since they were queued.
        decode_tokens: expected number of tokens that are not yet generated.
        queued_s: sum of the queued requests' execution times, as expected when they were sent.
        held_tokens: tokens of running requests.
        queued_tokens: tokens of queued requests, which hold no memory yet.
        capacity_tokens: number of tokens that running requests could hold together. Equal to ``total_tokens`` while no
            request runs, because then only evictable cache fills the memory.
        total_tokens: capacity of an empty replica.
        max_batch: largest number of requests in a step.
        kv_token_bytes: bytes of one token's KV; 0 if unknown.
        tokens_per_byte: inverse of ``kv_token_bytes``; 0 if unknown.
        adapters: number of adapters that are resident at the replica or needed by its requests.
    """

    requests: Numbers
    running: Numbers
    queued: Numbers
    others: Numbers
    rows: Numbers
    largest_rank: Numbers
    total_rank: Numbers
    queued_rows: Numbers
    queued_largest_rank: Numbers
    queued_total_rank: Numbers
    prefill_tokens: Numbers
    decode_tokens: Numbers
    queued_s: Numbers
    held_tokens: Numbers
    queued_tokens: Numbers
    capacity_tokens: Numbers
    total_tokens: Numbers
    max_batch: Numbers
    kv_token_bytes: Numbers
    tokens_per_byte: Numbers
    adapters: Numbers

    def __init__(self) -> None:
        self._replace(lambda _: np.zeros(0))

    def append(self, total_tokens: float, max_batch: int, kv_token_bytes: float) -> None:
        """Add an empty replica at the end."""
        self._replace(lambda counter: np.append(counter, 0.0))
        self.capacity_tokens[-1] = self.total_tokens[-1] = total_tokens
        self.max_batch[-1] = max_batch
        self.kv_token_bytes[-1] = kv_token_bytes
        self.tokens_per_byte[-1] = 1 / kv_token_bytes if kv_token_bytes else 0.0

    def delete(self, index: int) -> None:
        """Remove a replica; the following replicas move up by one index."""
        self._replace(lambda counter: np.delete(counter, index))

    def _replace(self, change: Callable[[Numbers], Numbers]) -> None:
        for column in type(self).__annotations__:
            setattr(self, column, change(getattr(self, column, np.zeros(0))))

    @property
    def free_tokens(self) -> Numbers:
        """Capacity in tokens that running requests do not hold and the known tokens of queued requests do not need."""
        return self.capacity_tokens - self.held_tokens - self.queued_tokens

    @property
    def pending_tokens(self) -> Numbers:
        """Number of tokens to prefill and to generate."""
        return self.prefill_tokens + self.decode_tokens

    def set_ranks(self, index: int, ranks: RankCounts) -> None:
        """Set the ranks of all requests of a replica."""
        self.rows[index] = ranks.rows
        self.largest_rank[index] = ranks.largest
        self.total_rank[index] = ranks.total

    def set_queued_ranks(self, index: int, ranks: RankCounts) -> None:
        """Set the ranks of the queued requests of a replica."""
        self.queued_rows[index] = ranks.rows
        self.queued_largest_rank[index] = ranks.largest
        self.queued_total_rank[index] = ranks.total


class ReplicaGauges(msgspec.Struct, frozen=True):
    """Holds the counts that a replica reports at one moment.

    Attributes:
        replica: id of the replica.
        epoch: incarnation of the replica.
        number: number of the report; rises within an incarnation.
        requests: number of running and queued requests, from any client.
        free_tokens: KV capacity that is free or evictable; None if the replica does not report it.
        resident: adapters on the replica's device; None if the replica does not report them.
    """

    replica: ReplicaId
    epoch: int
    number: int
    requests: int
    free_tokens: float | None = None
    resident: frozenset[AdapterDigest] | None = None


ALPHA = 0.02
"""Weight of the newest answer; the average is roughly over the last 50."""

_MAX_ADAPTERS = 65_536
"""Number of versions that are remembered, those with the latest finished requests."""


class RequestAverages:
    """Averages the lengths of answers and the execution times of requests.

    Args:
        output_tokens: assumed length of an answer until the first answer has finished.
        execution_s: assumed time from admission to the end until the first request has finished.

    Attributes:
        output_tokens: exponential average (TOPPINGS' ``avg_resp_len``).
    """

    def __init__(self, output_tokens: float = 128.0, execution_s: float = 1.0) -> None:
        self.output_tokens = output_tokens
        self._seen = 0
        self._execution_s = execution_s
        self._by_adapter = OrderedDict[AdapterDigest | None, tuple[int, float]]()

    def finished(self, adapter: AdapterDigest | None, output_tokens: int, execution_s: float | None) -> None:
        """Add a complete answer.

        ``execution_s`` is None if the time of its admission is unknown. The first 50 answers have equal weights, so
        that the average is useful early.
        """
        self._seen += 1
        weight = max(ALPHA, 1 / self._seen)
        self.output_tokens += weight * (max(1, output_tokens) - self.output_tokens)
        if execution_s is not None:
            count, mean_s = self._by_adapter.pop(adapter, (0, 0.0))
            self._by_adapter[adapter] = count + 1, mean_s + (execution_s - mean_s) / (count + 1)
            if len(self._by_adapter) > _MAX_ADAPTERS:
                self._by_adapter.popitem(last=False)
            self._execution_s += weight * (execution_s - self._execution_s)

    def execution_s(self, adapter: AdapterDigest | None) -> float:
        """Return an adapter's mean over finished requests (dLoRA's L).

        If none has finished, return the average over all adapters.
        """
        entry = self._by_adapter.get(adapter)
        return self._execution_s if entry is None else entry[1]


class ReplicaInfo(msgspec.Struct, frozen=True):
    """Holds the sizes of a replica that joins.

    Attributes:
        replica: id of the replica.
        epoch: incarnation of the replica; rises with every restart.
        total_tokens: KV capacity in tokens; infinity if unknown.
        max_batch: largest number of requests in a step.
        kv_token_bytes: bytes of one token's KV, over all ranks; 0 if unknown. If unknown, adapters count as needing no
            memory.
        name: a name that is the same for every router, such as the address; empty for the id.
    """

    replica: ReplicaId
    epoch: int = 0
    total_tokens: float = float("inf")
    max_batch: int = 256
    kv_token_bytes: float = 0.0
    name: str = ""


@dataclass(slots=True, eq=False)
class FleetReplica:
    """Tracks a replica of the fleet.

    Attributes:
        info: sizes of the replica.
        index: index of the replica in all arrays.
        is_open: whether requests may be sent to the replica.
        number: number of the replica's last report.
        requests: requests of the replica, in the order of their arrival.
        resident: adapters on the replica's device, as reported.
        wanted: number of requests by adapter.
        ranks, queued_ranks: ranks of all requests and of queued requests.
    """

    info: ReplicaInfo
    index: int
    is_open: bool = True
    number: int = -1
    requests: dict[RequestId, None] = field(default_factory=dict)
    resident: set[AdapterDigest] = field(default_factory=set)
    wanted: Counter[AdapterDigest] = field(default_factory=Counter)
    ranks: RankCounts = field(default_factory=RankCounts)
    queued_ranks: RankCounts = field(default_factory=RankCounts)


@dataclass(slots=True, eq=False)
class FleetRequest:
    """A request at a replica.

    Attributes:
        request: the request as it was sent to the replica.
        replica: replica of the request.
        execution_s: expected execution time, which never changes, so that sums over requests stay consistent.
        is_running: whether the request has been admitted.
        is_prefilled: whether the request has generated a token since it was last queued.
        output_tokens: number of tokens generated at this replica.
        admitted_s: time of the first admission, on the replica's clock.
    """

    request: RoutingRequest
    replica: FleetReplica
    execution_s: float
    is_running: bool = False
    is_prefilled: bool = False
    output_tokens: int = 0
    admitted_s: float | None = None

    @property
    def remaining_tokens(self) -> int:
        """Expected number of tokens that are not yet generated."""
        return max(0, self.request.expected_tokens - self.output_tokens)

    def count(self, loads: ReplicaLoads, sign: int) -> None:
        """Add the request to all counters (``sign`` 1), or remove it (-1)."""
        replica = self.replica
        rank = self.request.rank
        index = replica.index
        tokens = sign * (self.request.known_tokens + self.output_tokens)
        loads.requests[index] += sign
        loads.decode_tokens[index] += sign * self.remaining_tokens
        if not self.is_prefilled:
            loads.prefill_tokens[index] += tokens
        (replica.ranks.add if sign > 0 else replica.ranks.remove)(rank)
        loads.set_ranks(index, replica.ranks)
        if self.is_running:
            loads.running[index] += sign
            loads.held_tokens[index] += tokens
            return
        loads.queued[index] += sign
        loads.queued_tokens[index] += tokens
        # An empty queue resets the sum, because sums of floats are not exact and ties between idle replicas matter.
        loads.queued_s[index] = loads.queued_s[index] + sign * self.execution_s if loads.queued[index] else 0.0
        (replica.queued_ranks.add if sign > 0 else replica.queued_ranks.remove)(rank)
        loads.set_queued_ranks(index, replica.queued_ranks)


class Fleet:
    """Tracks the state of all replicas.

    Replicas have indices in the order in which they joined; ties between them go to the lowest index. Events of an
    earlier incarnation, or of a request that is not at the replica, are ignored. Such events were in flight when the
    request ended or moved.

    Args:
        averages: averages over finished requests.

    Attributes:
        loads: counters by replica. Read them through the fleet, because arrays are replaced.
        averages: averages over finished requests.
        open: indices of the replicas to which requests may be sent.
        open_index: index of each open replica, by id.
        changes: counter that rises when replicas join, leave or drain.
    """

    def __init__(self, averages: RequestAverages | None = None) -> None:
        self.loads = ReplicaLoads()
        self.averages = averages or RequestAverages()
        self.open: Indices = np.zeros(0, np.intp)
        self.open_index: dict[ReplicaId, int] = {}
        self.changes = 0
        self._replicas: list[FleetReplica] = []
        self._by_id: dict[ReplicaId, FleetReplica] = {}
        self._entries: dict[RequestId, FleetRequest] = {}
        self._holders: dict[AdapterDigest, set[FleetReplica]] = {}

    # --- replicas ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of replicas, including drained replicas."""
        return len(self._replicas)

    def infos(self) -> list[ReplicaInfo]:
        """Return all replicas by index."""
        return [replica.info for replica in self._replicas]

    def info(self, index: int) -> ReplicaInfo:
        """Return one replica."""
        return self._replicas[index].info

    def __contains__(self, replica_id: ReplicaId) -> bool:
        """Return whether a replica is in the fleet."""
        return replica_id in self._by_id

    def members(self) -> Sequence[FleetReplica]:
        """Return the state of each replica by index, read-only."""
        return self._replicas

    def join(self, info: ReplicaInfo) -> None:
        """Add a replica.

        Raises:
            ValueError: the replica is present; its earlier incarnation must :meth:`leave` first.
        """
        if info.replica in self._by_id:
            raise ValueError(f"Replica {info.replica} has joined already")
        replica = FleetReplica(info, len(self._replicas))
        self._replicas.append(replica)
        self._by_id[info.replica] = replica
        self.loads.append(info.total_tokens, info.max_batch, info.kv_token_bytes)
        self._update_open()

    def leave(self, replica_id: ReplicaId) -> list[RequestId]:
        """Remove a replica that is gone; return its requests in order, which must be routed again.

        Raises:
            KeyError: unknown replica.
        """
        replica = self._by_id.pop(replica_id)
        for adapter in replica.resident | set(replica.wanted):
            self._drop_holder(adapter, replica)
        for request_id in replica.requests:
            del self._entries[request_id]
        del self._replicas[replica.index]
        for index, other in enumerate(self._replicas):
            other.index = index
        self.loads.delete(replica.index)
        self._update_open()
        return list(replica.requests)

    def drain(self, replica_id: ReplicaId) -> None:
        """Stop sending requests to a replica."""
        self._by_id[replica_id].is_open = False
        self._update_open()

    def reopen(self, replica_id: ReplicaId) -> None:
        """Resume sending requests to a replica.

        Raises:
            KeyError: unknown replica.
        """
        self._by_id[replica_id].is_open = True
        self._update_open()

    def _update_open(self) -> None:
        self.open_index = {replica.info.replica: replica.index for replica in self._replicas if replica.is_open}
        self.open = np.array(list(self.open_index.values()), np.intp)
        self.changes += 1

    # --- requests ------------------------------------------------------------------------------------

    def dispatched(self, request: RoutingRequest, replica_id: ReplicaId) -> None:
        """Record that a request was sent to a replica, and remove it from its earlier one.

        Raises:
            KeyError: unknown replica.
        """
        replica = self._by_id[replica_id]
        self.withdraw(request.request_id)
        self._add(FleetRequest(request, replica, self.averages.execution_s(request.adapter)))

    def admitted(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """Record that a request left the queue."""
        if (entry := self._find(replica_id, request_id)) is not None:
            if entry.admitted_s is None:
                entry.admitted_s = now
            self._set(entry, True, entry.is_prefilled, entry.output_tokens)

    def started(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """Record that a request left the queue and has generated its first token."""
        if (entry := self._find(replica_id, request_id)) is not None:
            if entry.admitted_s is None:
                entry.admitted_s = now
            self._set(entry, True, True, entry.output_tokens + 1)

    def preempted(self, replica_id: ReplicaId, request_id: RequestId) -> None:
        """Record that a request was preempted, so that it is queued and must be prefilled again."""
        if (entry := self._find(replica_id, request_id)) is not None:
            self._set(entry, False, False, entry.output_tokens)

    def generated(self, replica_id: ReplicaId, request_id: RequestId, tokens: int = 1) -> None:
        """Record that a request has generated tokens."""
        self.generated_together(replica_id, [(request_id, tokens)])

    def generated_together(self, replica_id: ReplicaId, counts: Iterable[tuple[RequestId, int]]) -> None:
        """Record the number of tokens that each of several requests of a replica has generated."""
        replica = self._by_id.get(replica_id)
        if replica is None:
            return
        entries = self._entries
        held = 0
        decode = 0
        for request_id, tokens in counts:
            entry = entries.get(request_id)
            if entry is None or entry.replica is not replica:
                continue
            if not (entry.is_running and entry.is_prefilled):
                self._set(entry, entry.is_running, True, entry.output_tokens + tokens)
                continue
            left = entry.request.expected_tokens - entry.output_tokens
            entry.output_tokens += tokens
            held += tokens
            if left > 0:
                decode -= tokens if tokens < left else left
        if held:
            self.loads.held_tokens[replica.index] += held
            self.loads.decode_tokens[replica.index] += decode

    def ended(self, replica_id: ReplicaId, request_id: RequestId, now: float, *, is_complete: bool = True) -> None:
        """Record that a request left a replica.

        ``is_complete`` is False if it was aborted, failed, or continues elsewhere.
        """
        if (entry := self._find(replica_id, request_id)) is not None:
            if is_complete:
                before = entry.request.generated_tokens  # The request ran at other replicas for an unknown time.
                ran_s = None if entry.admitted_s is None or before else now - entry.admitted_s
                self.averages.finished(entry.request.adapter, before + entry.output_tokens, ran_s)
            self.withdraw(request_id)

    def withdraw(self, request_id: RequestId) -> None:
        """Remove a request from its replica without updating the averages."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        replica = entry.replica
        adapter = entry.request.adapter
        del replica.requests[request_id]
        if adapter is not None:
            replica.wanted[adapter] -= 1
            if not replica.wanted[adapter]:
                del replica.wanted[adapter]
            self._check_holder(replica, adapter)
        entry.count(self.loads, -1)
        self._reset_if_idle(replica)

    def where(self, request_id: RequestId) -> ReplicaId | None:
        """Return the replica of a request; None if it has none."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.replica.info.replica

    def entry(self, request_id: RequestId) -> FleetRequest | None:
        """Return the state of a request at its replica, read-only; None if it has none."""
        return self._entries.get(request_id)

    # --- adapters ------------------------------------------------------------------------------------

    def loaded(self, replica_id: ReplicaId, adapter: AdapterDigest) -> None:
        """Record that an adapter was loaded to the device of a replica."""
        if (replica := self._by_id.get(replica_id)) is not None:
            replica.resident.add(adapter)
            self._add_holder(adapter, replica)

    def evicted(self, replica_id: ReplicaId, adapter: AdapterDigest) -> None:
        """Record that an adapter was evicted from the device of a replica."""
        if (replica := self._by_id.get(replica_id)) is not None:
            replica.resident.discard(adapter)
            self._check_holder(replica, adapter)

    def is_warm(self, adapter: AdapterDigest | None) -> Flags:
        """Return by replica whether an adapter is resident or needed. The base model is always resident."""
        if adapter is None:
            return np.ones(len(self), np.bool_)
        warm = np.zeros(len(self), np.bool_)
        for replica in self._holders.get(adapter, ()):
            warm[replica.index] = True
        return warm

    def needed_tokens(self, request: RoutingRequest, is_warm: Flags) -> Numbers:
        """Return by replica the capacity that a request needs initially, in tokens.

        The capacity is the number of known tokens, plus the size of the adapter if it is not resident.
        """
        return request.known_tokens + ~is_warm * (request.adapter_bytes * self.loads.tokens_per_byte)

    # --- gauges --------------------------------------------------------------------------------------

    def gauges(self, gauges: ReplicaGauges) -> bool:
        """Apply the counts of a replica. Return False if the counts are outdated and were ignored.

        The report is assumed to include all requests that this process sent, so that no request counts twice. Requests
        of other clients are undercounted by the number of requests in flight to the replica.
        """
        replica = self._by_id.get(gauges.replica)
        if replica is None or gauges.epoch != replica.info.epoch or gauges.number <= replica.number:
            return False
        replica.number = gauges.number
        self._set_others(replica, max(0, gauges.requests - len(replica.requests)))
        self._set_memory(replica, gauges.free_tokens, gauges.resident)
        return True

    def _set_others(self, replica: FleetReplica, others: int) -> None:
        self.loads.requests[replica.index] += others - self.loads.others[replica.index]
        self.loads.others[replica.index] = others

    def _set_memory(
        self, replica: FleetReplica, free_tokens: float | None, resident: Iterable[AdapterDigest] | None
    ) -> None:
        if free_tokens is not None:
            self.loads.capacity_tokens[replica.index] = free_tokens + self.loads.held_tokens[replica.index]
            self._reset_if_idle(replica)
        if resident is not None:
            before = replica.resident
            replica.resident = set(resident)
            for adapter in replica.resident - before:
                self._add_holder(adapter, replica)
            for adapter in before - replica.resident:
                self._check_holder(replica, adapter)

    # --- entries -------------------------------------------------------------------------------------

    def _find(self, replica_id: ReplicaId, request_id: RequestId) -> FleetRequest | None:
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.replica.info.replica == replica_id else None

    def _add(self, entry: FleetRequest) -> None:
        replica = entry.replica
        adapter = entry.request.adapter
        self._entries[entry.request.request_id] = entry
        replica.requests[entry.request.request_id] = None
        if adapter is not None:
            replica.wanted[adapter] += 1
            self._add_holder(adapter, replica)
        entry.count(self.loads, 1)

    def _reset_if_idle(self, replica: FleetReplica) -> None:
        if not self.loads.requests[replica.index]:
            self.loads.capacity_tokens[replica.index] = replica.info.total_tokens

    def _set(self, entry: FleetRequest, is_running: bool, is_prefilled: bool, output_tokens: int) -> None:
        entry.count(self.loads, -1)
        entry.is_running = is_running
        entry.is_prefilled = is_prefilled
        entry.output_tokens = output_tokens
        entry.count(self.loads, 1)

    def _check_holder(self, replica: FleetReplica, adapter: AdapterDigest) -> None:
        if adapter not in replica.resident and adapter not in replica.wanted:
            self._drop_holder(adapter, replica)

    def _add_holder(self, adapter: AdapterDigest, replica: FleetReplica) -> None:
        holders = self._holders.setdefault(adapter, set())
        if replica not in holders:
            holders.add(replica)
            self.loads.adapters[replica.index] += 1

    def _drop_holder(self, adapter: AdapterDigest, replica: FleetReplica) -> None:
        holders = self._holders.get(adapter, set())
        if replica in holders:
            holders.discard(replica)
            self.loads.adapters[replica.index] -= 1
        if not holders:
            self._holders.pop(adapter, None)


def replica_gauges(replica: ReplicaId, epoch: int, stats: EngineStats, block_size: int) -> ReplicaGauges:
    """Return an engine's statistics as gauges. KV and adapters that no request needs count as free memory."""
    needed = {*stats.running_adapters, *stats.waiting_adapters}
    idle_blocks = sum(blocks for digest, blocks in stats.resident_adapters.items() if digest not in needed)
    return ReplicaGauges(
        replica=replica,
        epoch=epoch,
        number=round(stats.at_s * 1e6),
        requests=stats.running + stats.waiting,
        free_tokens=(stats.free_blocks + stats.cached_blocks + idle_blocks) * block_size,
        resident=frozenset(stats.resident_adapters),
    )


def apply_outputs(fleet: Fleet, replica: ReplicaId, outputs: StepOutputs) -> None:
    """Apply the events that an engine reported after a step, except its gauges."""
    fleet.generated_together(replica, [(output.request_id, len(output.tokens)) for output in outputs.tokens])
    for event in outputs.events:
        match event:
            case Admitted():
                fleet.admitted(replica, event.request_id, event.at_s)
            case Preempted():
                fleet.preempted(replica, event.request_id)
            case Finished():
                is_complete = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
                fleet.ended(replica, event.request_id, event.at_s, is_complete=is_complete)
            case _:
                pass
    for adapter_event in outputs.adapter_events:
        if not isinstance(adapter_event, AdapterLoaded):
            fleet.evicted(replica, adapter_event.digest)
        elif adapter_event.error is None:
            fleet.loaded(replica, adapter_event.digest)
