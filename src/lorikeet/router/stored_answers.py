"""Answers of ``/v1/responses`` that a backend keeps: which one, so that later requests find them there."""

from collections import OrderedDict
from typing import NamedTuple

from lorikeet.core.ids import ReplicaId

_MOST = 100_000
"""Of them, the newest, the router knows; some 200 bytes each."""


class _Place(NamedTuple):
    tenant: str
    replica: ReplicaId


class StoredAnswers:
    """Where answers are kept, and whose they are. A router that is started anew knows none."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def put(self, answer_id: str, tenant: str, replica: ReplicaId) -> None:
        """A backend has begun an answer for a tenant."""
        self._places[answer_id] = _Place(tenant, replica)
        while len(self._places) > _MOST:
            self._places.popitem(last=False)

    def find(self, answer_id: str, tenant: str) -> ReplicaId | None:
        """Return the backend that keeps a tenant's answer; None if that is not known."""
        place = self._places.get(answer_id)
        return None if place is None or place.tenant != tenant else place.replica
