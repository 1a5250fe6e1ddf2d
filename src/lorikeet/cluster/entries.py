"""What the fleet remembers of each replica and each request."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.loads import Loads, Ranks
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class ReplicaInfo(msgspec.Struct, frozen=True):
    """What is known of a replica when it joins.

    Attributes:
        replica: which.
        epoch: its incarnation; raised when it is started again.
        total_tokens: tokens of KV that it has room for, infinity if unknown.
        max_batch: most requests in a step.
        kv_token_bytes: of a token of KV, over all ranks; 0 if unknown: adapters then take no room.
    """

    replica: ReplicaId
    epoch: int = 0
    total_tokens: float = float("inf")
    max_batch: int = 256
    kv_token_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class Member:
    """A replica of the fleet.

    Attributes:
        info: as it joined.
        index: its place in all arrays.
        is_open: it may be sent requests.
        number: of the last report.
        requests: those that are there, in the order in which they came.
        resident: adapters on its device, as it told.
        wanted: requests by adapter.
        ranks, queued_ranks: of all and of queued requests.
    """

    info: ReplicaInfo
    index: int
    is_open: bool = True
    number: int = -1
    requests: dict[RequestId, None] = field(default_factory=dict)
    resident: set[AdapterDigest] = field(default_factory=set)
    wanted: Counter[AdapterDigest] = field(default_factory=Counter)
    ranks: Ranks = field(default_factory=Ranks)
    queued_ranks: Ranks = field(default_factory=Ranks)


@dataclass(slots=True, eq=False)
class Entry:
    """A request at a replica.

    Attributes:
        asked: as it was sent.
        replica: where it is.
        execution_s: time that it is expected to run for; never changes, so that sums over entries stay right.
        is_running: it has been admitted.
        is_prefilled: it has yielded a token since it was queued last.
        output_tokens: generated there.
        admitted_s: when it was admitted first, on the replica's clock.
    """

    asked: Asked
    replica: Member
    execution_s: float
    is_running: bool = False
    is_prefilled: bool = False
    output_tokens: int = 0
    admitted_s: float | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are expected and not yet generated."""
        return max(0, self.asked.expected_tokens - self.output_tokens)

    def count(self, loads: Loads, sign: int) -> None:
        """Put it into all counters (``sign`` 1), or take it out (-1)."""
        replica, rank = self.replica, self.asked.rank
        index, tokens = replica.index, sign * (self.asked.known_tokens + self.output_tokens)
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
        # An empty queue is exactly that: sums of seconds are not exact, and ties between idle replicas matter.
        loads.queued_s[index] = loads.queued_s[index] + sign * self.execution_s if loads.queued[index] else 0.0
        (replica.queued_ranks.add if sign > 0 else replica.queued_ranks.remove)(rank)
        loads.set_queued_ranks(index, replica.queued_ranks)
