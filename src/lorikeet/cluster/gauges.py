"""Counts that a replica tells of itself now and then."""

import msgspec

from lorikeet.core.ids import AdapterDigest, ReplicaId


class Gauges(msgspec.Struct, frozen=True):
    """Counts at a replica, at one moment.

    Attributes:
        replica: which.
        epoch: its incarnation.
        number: rises with every gauge of an incarnation.
        requests: running and queued ones, whoever sent them.
        free_tokens: room for KV that could be lent now, if all left that may leave; None if it does not tell.
        resident: adapters on its device; None if it does not tell.
    """

    replica: ReplicaId
    epoch: int
    number: int
    requests: int
    free_tokens: float | None = None
    resident: frozenset[AdapterDigest] | None = None
