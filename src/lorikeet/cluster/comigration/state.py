"""What co-migration is told of the cluster, what may be set, and what it answers."""

from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class Movable(NamedTuple):
    """A request that is somewhere, waiting or running.

    Attributes:
        request_id: whose it is.
        adapter: which it needs; None: the base model, which is everywhere.
        replica: where it is.
        memory_bytes: of its KV.
        execution_s: what it is expected to take: the mean of its adapter's requests (``Averages``).
        move_s: what moving it now would take an idle replica (``MoveTimes``).
        carries_kv: its KV would be taken along; else it is computed again.
        moved_s: what its earlier moves have taken.
        on_host: its KV has been swapped out. Only the full problem tells the two memories apart.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    replica: ReplicaId
    memory_bytes: int
    execution_s: float
    move_s: float = 0.0
    moved_s: float = 0.0
    on_host: bool = False
    carries_kv: bool = False


class ReplicaLoad(NamedTuple):
    """A replica as the monitor sees it.

    Attributes:
        replica: which.
        device_bytes: device memory for adapters and KV: what the base weights leave.
        free_bytes: of these, held by nobody.
        queue_delay_s: how long its oldest waiting request has waited.
        reserved_bytes: part of ``device_bytes`` set aside for copies of adapters; requests and their adapters may not
            count on it.
        host_bytes: host memory for swapped KV. Only the full problem has a limit there.
        running: requests in its steps, all of which wait for the prefill of one that moves there.
    """

    replica: ReplicaId
    device_bytes: int
    free_bytes: int
    queue_delay_s: float
    reserved_bytes: int = 0
    host_bytes: int = 0
    running: int = 0

    @property
    def usable_bytes(self) -> int:
        """Device memory without what is reserved."""
        return self.device_bytes - self.reserved_bytes


class CoMigrationSettings(NamedTuple):
    """What may be set. The paper prints none of these values: they are ours.

    Attributes:
        free_share: a replica with less of its memory free than this is short of memory.
        queue_delay_s: one whose oldest waiting request has waited longer is short of time.
        selected: how many of the most loaded replicas take part, and how many of the least loaded.
        affinity: what an adapter with requests on a replica costs it, as a share of the mean execution time.
        swap_bytes_per_s: between host and device.
        margin: a plan is applied only if it takes so large a share off the present value.
        gap: the solver may stop so close to the best choice of adapters, as a share of its value.
        time_limit_s: for each of the solver's runs, of which there are two.
        full: solve the full problem, with its two memories and whole requests, instead of the relaxed one.
        literal: weigh all replicas with the printed migration factor, which does not tell staying from moving.
    """

    free_share: float = 0.10
    queue_delay_s: float = 5.0
    selected: int = 2
    affinity: float = 0.1
    swap_bytes_per_s: float = 25e9
    margin: float = 0.05
    gap: float = 0.10
    time_limit_s: float = 0.050
    full: bool = False
    literal: bool = False


class Outcome(StrEnum):
    """What a review came to."""

    CALM = "calm"
    """No replica is short of anything."""
    NO_BETTER = "no-better"
    """No plan takes enough off the present value."""
    UNSOLVED = "unsolved"
    """The solver had no proven solution in time, or there is none; everything stays."""
    PLANNED = "planned"
    """There is something to move."""


class Move(NamedTuple):
    """One request that leaves.

    Attributes:
        request_id: whose it is.
        adapter: which it needs, None: the base model.
        source, target: from where to where.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    source: ReplicaId
    target: ReplicaId


class Plan(NamedTuple):
    """What to do.

    Attributes:
        outcome: why there is, or is not, anything to do.
        moves: requests that leave; all others stay.
        before_s, after_s: running time of the busiest of the selected replicas, as things are and by the plan; equal
            if there is none, 0 where nobody looked.
    """

    outcome: Outcome
    moves: tuple[Move, ...] = ()
    before_s: float = 0.0
    after_s: float = 0.0
