"""What co-migration is told, made from what routing knows."""

from collections.abc import Mapping
from typing import NamedTuple

from lorikeet.cluster.comigration.state import Movable, ReplicaLoad
from lorikeet.cluster.comigration.times import MoveTimes, sent_s
from lorikeet.cluster.entries import Entry, Member
from lorikeet.cluster.fleet import Fleet
from lorikeet.core.ids import AdapterDigest, RequestId


class Observed(NamedTuple):
    """The arguments of ``CoMigration.review``."""

    replicas: list[ReplicaLoad]
    requests: list[Movable]
    adapter_bytes: dict[AdapterDigest, int]


def observe(
    fleet: Fleet,
    sent_s: Mapping[RequestId, float],
    moved_s: Mapping[RequestId, float],
    times: MoveTimes,
    now: float,
    reserved_share: float = 0.0,
) -> Observed:
    """Return the replicas that may be sent requests and whose memory is known, and the requests there.

    Args:
        fleet: what routing knows; its room is as the replicas' last gauges told.
        sent_s: when each request was handed to the replica where it is. Others are left out: their adapter is on its
            way to the replica, say.
        moved_s: what the earlier moves of requests took, of those that have moved.
        times: what moving a request takes.
        now: the present time.
        reserved_share: of each replica's memory, set aside for copies of adapters.
    """
    observed = Observed([], [], {})
    for member in fleet.members():
        if not member.is_open or not member.info.kv_token_bytes:
            continue
        entries = [entry for entry in map(fleet.entry, member.requests) if entry and entry.asked.request_id in sent_s]
        observed.replicas.append(_load(fleet, member, entries, sent_s, now, reserved_share))
        for entry in entries:
            observed.requests.append(_movable(fleet, entry, moved_s, times))
            if entry.asked.adapter is not None:
                observed.adapter_bytes[entry.asked.adapter] = entry.asked.adapter_bytes
    return observed


def _load(
    fleet: Fleet,
    member: Member,
    entries: list[Entry],
    sent_s: Mapping[RequestId, float],
    now: float,
    reserved_share: float,
) -> ReplicaLoad:
    """Return a replica as it is; who was preempted there counts as running, since it has had its turn."""
    token_bytes, loads = member.info.kv_token_bytes, fleet.loads
    device_bytes = int(member.info.total_tokens * token_bytes)
    free_tokens = float(loads.room_tokens[member.index] - loads.held_tokens[member.index])
    waiting_s = [sent_s[entry.asked.request_id] for entry in entries if entry.admitted_s is None]
    return ReplicaLoad(
        replica=member.info.replica,
        device_bytes=device_bytes,
        free_bytes=int(max(0.0, free_tokens) * token_bytes),
        queue_delay_s=now - min(waiting_s, default=now),
        reserved_bytes=int(reserved_share * device_bytes),
        running=int(loads.running[member.index]),
    )


def _movable(fleet: Fleet, entry: Entry, moved_s: Mapping[RequestId, float], times: MoveTimes) -> Movable:
    asked, tokens = entry.asked, entry.asked.known_tokens + entry.output_tokens
    has_kv = entry.admitted_s is not None
    return Movable(
        request_id=asked.request_id,
        adapter=asked.adapter,
        replica=entry.replica.info.replica,
        memory_bytes=int(tokens * entry.replica.info.kv_token_bytes),
        execution_s=fleet.averages.execution_s(asked.adapter),
        move_s=times.move_s(tokens) if has_kv else sent_s(tokens, times.link_bytes_per_s),
        carries_kv=has_kv and times.carries(tokens),
        moved_s=moved_s.get(asked.request_id, 0.0),
    )
