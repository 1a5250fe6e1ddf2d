"""What a router sees of all replicas: who is where, how loaded they are, and which adapters they have.

Every request that was sent somewhere has one entry, at one replica, and every counter is a sum over these entries: an
entry is taken out of the counters before it changes and put in again after. So a request counts once, whatever is heard
of it, in whatever order. One that was sent and of which nothing has been heard counts as queued.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.averages import Averages
from lorikeet.cluster.entries import Entry, Member, ReplicaInfo
from lorikeet.cluster.gauges import Gauges
from lorikeet.cluster.loads import Flags, Indices, Loads, Numbers
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class Fleet:
    """See the module. Replicas have indices in the order in which they joined; ties between them go to the lowest.

    What is heard from a replica about a request that is not there (any longer), or from an incarnation that is gone, is
    ignored: it was on its way when the request ended or moved.

    Args:
        averages: over finished requests.

    Attributes:
        loads: counters by replica; read them through the fleet, arrays are replaced.
        averages: see above.
        open: indices of the replicas that may be sent requests.
        open_index: of each such replica.
        changes: rises when replicas join, leave or drain.
    """

    def __init__(self, averages: Averages | None = None) -> None:
        self.loads = Loads()
        self.averages = averages or Averages()
        self.open: Indices = np.zeros(0, np.intp)
        self.open_index: dict[ReplicaId, int] = {}
        self.changes = 0
        self._replicas: list[Member] = []
        self._by_id: dict[ReplicaId, Member] = {}
        self._entries: dict[RequestId, Entry] = {}
        self._holders: dict[AdapterDigest, set[Member]] = {}

    # --- replicas ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of replicas, drained ones included."""
        return len(self._replicas)

    def infos(self) -> list[ReplicaInfo]:
        """Return all replicas by index."""
        return [replica.info for replica in self._replicas]

    def info(self, index: int) -> ReplicaInfo:
        """Return one replica."""
        return self._replicas[index].info

    def __contains__(self, replica_id: ReplicaId) -> bool:
        """Whether a replica is there."""
        return replica_id in self._by_id

    def members(self) -> Sequence[Member]:
        """Return what is remembered of each replica, by index; to read."""
        return self._replicas

    def join(self, info: ReplicaInfo) -> None:
        """Take a replica in.

        Raises:
            ValueError: it is there; an earlier incarnation has to :meth:`leave` first.
        """
        if info.replica in self._by_id:
            raise ValueError(f"Replica {info.replica} is there and has not left")
        replica = Member(info, len(self._replicas))
        self._replicas.append(replica)
        self._by_id[info.replica] = replica
        self.loads.append(info.total_tokens, info.max_batch, info.kv_token_bytes)
        self._note_open()

    def leave(self, replica_id: ReplicaId) -> list[RequestId]:
        """Drop a replica that is gone; return the requests there, in order, to go elsewhere.

        Raises:
            KeyError: it is not there.
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
        self._note_open()
        return list(replica.requests)

    def drain(self, replica_id: ReplicaId) -> None:
        """Send a replica no more requests."""
        self._by_id[replica_id].is_open = False
        self._note_open()

    def reopen(self, replica_id: ReplicaId) -> None:
        """Send a replica requests again; those that are there stay.

        Raises:
            KeyError: it is not there.
        """
        self._by_id[replica_id].is_open = True
        self._note_open()

    def _note_open(self) -> None:
        self.open_index = {replica.info.replica: replica.index for replica in self._replicas if replica.is_open}
        self.open = np.array(list(self.open_index.values()), np.intp)
        self.changes += 1

    # --- requests ------------------------------------------------------------------------------------

    def dispatched(self, asked: Asked, replica_id: ReplicaId) -> None:
        """A request was sent to a replica; if it was at another, it is there no longer.

        Raises:
            KeyError: the replica is not there.
        """
        replica = self._by_id[replica_id]
        self.withdraw(asked.request_id)
        self._add(Entry(asked, replica, self.averages.execution_s(asked.adapter)))

    def admitted(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """It left the queue."""
        if (entry := self._find(replica_id, request_id)) is not None:
            if entry.admitted_s is None:
                entry.admitted_s = now
            self._set(entry, True, entry.is_prefilled, entry.output_tokens)

    def preempted(self, replica_id: ReplicaId, request_id: RequestId) -> None:
        """It is queued again, and must be prefilled again."""
        if (entry := self._find(replica_id, request_id)) is not None:
            self._set(entry, False, False, entry.output_tokens)

    def generated(self, replica_id: ReplicaId, request_id: RequestId, tokens: int = 1) -> None:
        """It yielded so many more tokens."""
        if (entry := self._find(replica_id, request_id)) is None:
            return
        if not (entry.is_running and entry.is_prefilled):
            self._set(entry, entry.is_running, True, entry.output_tokens + tokens)
            return
        index, before = entry.replica.index, entry.remaining_tokens
        entry.output_tokens += tokens
        self.loads.held_tokens[index] += tokens
        self.loads.decode_tokens[index] += entry.remaining_tokens - before

    def ended(self, replica_id: ReplicaId, request_id: RequestId, now: float, *, is_complete: bool = True) -> None:
        """It left the replica; ``is_complete`` unless it was aborted, failed, or goes on elsewhere."""
        if (entry := self._find(replica_id, request_id)) is not None:
            if is_complete:
                before = entry.asked.generated_tokens  # elsewhere, for a time that nobody has noted
                ran_s = None if entry.admitted_s is None or before else now - entry.admitted_s
                self.averages.finished(entry.asked.adapter, before + entry.output_tokens, ran_s)
            self.withdraw(request_id)

    def withdraw(self, request_id: RequestId) -> None:
        """A request is nowhere; nothing is learned from it."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        replica, adapter = entry.replica, entry.asked.adapter
        del replica.requests[request_id]
        if adapter is not None:
            replica.wanted[adapter] -= 1
            if not replica.wanted[adapter]:
                del replica.wanted[adapter]
            self._check_holder(replica, adapter)
        entry.count(self.loads, -1)
        self._note_idle(replica)

    def where(self, request_id: RequestId) -> ReplicaId | None:
        """Return where a request is; None if it is nowhere."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.replica.info.replica

    def entry(self, request_id: RequestId) -> Entry | None:
        """Return what is remembered of a request that is somewhere; to read."""
        return self._entries.get(request_id)

    # --- adapters ------------------------------------------------------------------------------------

    def loaded(self, replica_id: ReplicaId, adapter: AdapterDigest) -> None:
        """A replica has an adapter on its device."""
        if (replica := self._by_id.get(replica_id)) is not None:
            replica.resident.add(adapter)
            self._holders.setdefault(adapter, set()).add(replica)

    def evicted(self, replica_id: ReplicaId, adapter: AdapterDigest) -> None:
        """It has it no longer."""
        if (replica := self._by_id.get(replica_id)) is not None:
            replica.resident.discard(adapter)
            self._check_holder(replica, adapter)

    def is_warm(self, adapter: AdapterDigest | None) -> Flags:
        """Return by replica whether an adapter is there, or on its way for a request; the base model always is."""
        if adapter is None:
            return np.ones(len(self), np.bool_)
        warm = np.zeros(len(self), np.bool_)
        for replica in self._holders.get(adapter, ()):
            warm[replica.index] = True
        return warm

    def needed_tokens(self, asked: Asked, is_warm: Flags) -> Numbers:
        """Return by replica the room that a request takes at first: its known tokens, and its adapter if not there."""
        return asked.known_tokens + ~is_warm * (asked.adapter_bytes * self.loads.tokens_per_byte)

    # --- what replicas tell --------------------------------------------------------------------------

    def gauges(self, gauges: Gauges) -> bool:
        """Take in counts. Return False if they are ignored, being of the past.

        Those sent from here are taken to be among the requests counted, so that none counts twice; requests of others
        are undercounted by as many as are on their way.
        """
        replica = self._by_id.get(gauges.replica)
        if replica is None or gauges.epoch != replica.info.epoch or gauges.number <= replica.number:
            return False
        replica.number = gauges.number
        self._note_others(replica, max(0, gauges.requests - len(replica.requests)))
        self._note_memory(replica, gauges.free_tokens, gauges.resident)
        return True

    def _note_others(self, replica: Member, others: int) -> None:
        self.loads.requests[replica.index] += others - self.loads.others[replica.index]
        self.loads.others[replica.index] = others

    def _note_memory(
        self, replica: Member, free_tokens: float | None, resident: Iterable[AdapterDigest] | None
    ) -> None:
        if free_tokens is not None:
            self.loads.room_tokens[replica.index] = free_tokens + self.loads.held_tokens[replica.index]
            self._note_idle(replica)
        if resident is not None:
            before, replica.resident = replica.resident, set(resident)
            for adapter in replica.resident - before:
                self._holders.setdefault(adapter, set()).add(replica)
            for adapter in before - replica.resident:
                self._check_holder(replica, adapter)

    # --- entries -------------------------------------------------------------------------------------

    def _find(self, replica_id: ReplicaId, request_id: RequestId) -> Entry | None:
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.replica.info.replica == replica_id else None

    def _add(self, entry: Entry) -> None:
        replica, adapter = entry.replica, entry.asked.adapter
        self._entries[entry.asked.request_id] = entry
        replica.requests[entry.asked.request_id] = None
        if adapter is not None:
            replica.wanted[adapter] += 1
            self._holders.setdefault(adapter, set()).add(replica)
        entry.count(self.loads, 1)

    def _note_idle(self, replica: Member) -> None:
        if not self.loads.requests[replica.index]:
            self.loads.room_tokens[replica.index] = replica.info.total_tokens

    def _set(self, entry: Entry, is_running: bool, is_prefilled: bool, output_tokens: int) -> None:
        entry.count(self.loads, -1)
        entry.is_running, entry.is_prefilled, entry.output_tokens = is_running, is_prefilled, output_tokens
        entry.count(self.loads, 1)

    def _check_holder(self, replica: Member, adapter: AdapterDigest) -> None:
        if adapter not in replica.resident and adapter not in replica.wanted:
            self._drop_holder(adapter, replica)

    def _drop_holder(self, adapter: AdapterDigest, replica: Member) -> None:
        holders = self._holders.get(adapter, set())
        holders.discard(replica)
        if not holders:
            self._holders.pop(adapter, None)
