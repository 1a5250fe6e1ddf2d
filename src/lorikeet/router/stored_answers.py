"""Records which backend keeps each answer of ``/v1/responses``, so that later requests are sent there."""

from collections import OrderedDict
from typing import NamedTuple

from lorikeet.core.ids import ReplicaId

_MOST = 100_000
"""Number of answers that are remembered, the newest; each takes about 200 bytes."""


class _Place(NamedTuple):
    tenant: str
    replica: ReplicaId


class StoredAnswers:
    """Holds the backends and tenants of stored answers. A restart of the router loses them."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def put(self, answer_id: str, tenant: str, replica: ReplicaId) -> None:
        """Record that a backend has begun an answer for a tenant."""
        self._places[answer_id] = _Place(tenant, replica)
        while len(self._places) > _MOST:
            self._places.popitem(last=False)

    def find(self, answer_id: str, tenant: str) -> ReplicaId | None:
        """Return the backend that keeps a tenant's answer; None if unknown."""
        place = self._places.get(answer_id)
        return None if place is None or place.tenant != tenant else place.replica
