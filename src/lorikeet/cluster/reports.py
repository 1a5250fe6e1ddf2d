"""What replicas tell of themselves now and then.

A replica that has other clients tells all its requests (:class:`Report`). A server that somebody else started has only
counts (:class:`Gauges`), and an engine of one's own needs no more, since it tells every event (:mod:`.hearing`).
"""

import msgspec

from lorikeet.cluster.asked import Asked
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class Held(msgspec.Struct, frozen=True):
    """A request that is at a replica.

    Attributes:
        asked: as it was sent there.
        output_tokens: generated since.
        is_prefilled: it has yielded a token since it was queued last.
    """

    asked: Asked
    output_tokens: int = 0
    is_prefilled: bool = False


class Ended(msgspec.Struct, frozen=True):
    """A request that has left a replica; ``is_complete`` unless it was aborted or failed."""

    request_id: RequestId
    is_complete: bool = True


class Report(msgspec.Struct, frozen=True):
    """All that is at a replica, at one moment.

    Attributes:
        replica: which.
        epoch: its incarnation.
        number: rises with every report and gauge of an incarnation.
        running, queued: its requests, whoever sent them.
        ended: since the last report.
        free_tokens: room for KV that could be lent now, if all left that may leave.
        resident: adapters on its device.
    """

    replica: ReplicaId
    epoch: int
    number: int
    running: tuple[Held, ...]
    queued: tuple[Held, ...]
    ended: tuple[Ended, ...]
    free_tokens: float
    resident: frozenset[AdapterDigest]


class Gauges(msgspec.Struct, frozen=True):
    """Counts at a replica, at one moment.

    Attributes:
        replica, epoch, number: as of :class:`Report`.
        requests: running and queued ones, whoever sent them.
        free_tokens: as of :class:`Report`; None if it does not tell.
        resident: as of :class:`Report`; None if it does not tell.
    """

    replica: ReplicaId
    epoch: int
    number: int
    requests: int
    free_tokens: float | None = None
    resident: frozenset[AdapterDigest] | None = None
