"""Keeps the latest requests of a router: where each was sent, why there, and how it ended."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from lorikeet.cluster.routing.base import Choice
from lorikeet.cluster.routing.fleet import Flags, Fleet, Indices, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId

MOST_RECORDS = 4096
"""Requests that are remembered; those that arrived first are forgotten first."""
_MOST_SHOWN = 32
"""Backends of a decision that are shown, those with the best scores."""
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "generate-")
"""How the ids of answers begin; the rest is that of their request."""


class RouteDecision(NamedTuple):
    """What was known of all backends when one was chosen for a request, by the fleet's index.

    Attributes:
        choice: the policy's choice, with the scores that it compared.
        avoided: backends that failed the request, refused its adapter, or had no room.
        replicas: ids of the backends.
        open: indices of the open backends.
        requests: number of requests at each backend.
        pending_tokens: tokens that each backend still has to compute.
        is_warm: whether each backend has the request's adapter.
    """

    choice: Choice
    avoided: frozenset[ReplicaId]
    replicas: tuple[ReplicaId, ...]
    open: Indices
    requests: Numbers
    pending_tokens: Numbers
    is_warm: Flags

    @classmethod
    def of(
        cls, choice: Choice, avoided: frozenset[ReplicaId], request: RoutingRequest, fleet: Fleet
    ) -> "RouteDecision":
        """Return the decision on a request, with the present state of the fleet."""
        return cls(
            choice,
            avoided,
            tuple(info.replica for info in fleet.infos()),
            fleet.open,
            fleet.loads.requests.copy(),
            fleet.loads.pending_tokens,
            fleet.is_warm(request.adapter),
        )

    def candidates(self) -> list[dict[str, Any]]:
        """Return the open backends as JSON, the best first."""
        scores = self.choice.scores
        order = self.open[np.argsort(self.requests[self.open] if scores is None else scores[self.open], kind="stable")]
        return [
            {
                "backend": self.replicas[index],
                "requests": int(self.requests[index]),
                "pending_tokens": int(self.pending_tokens[index]),
                "has_adapter": bool(self.is_warm[index]),
                **({} if scores is None else {"score": round(float(scores[index]), 6)}),
                "avoided": self.replicas[index] in self.avoided,
            }
            for index in order[:_MOST_SHOWN]
        ]

    def why(self, chosen: ReplicaId, has_adapter: bool) -> str:
        """Return the reason for a backend in words.

        Args:
            chosen: the backend that got the request.
            has_adapter: whether the request has an adapter.
        """
        if len(self.open) == 1:
            return "the only open backend"
        if chosen != self.choice.replica:
            return f"the least loaded of those that had not refused it; {self.choice.replica} was the policy's choice"
        if self.avoided and not {self.replicas[index] for index in self.open} - self.avoided - {chosen}:
            return "the only open backend that had not refused it"
        at = self.replicas.index(chosen)
        others = self.open[self.open != at]
        reasons = []
        scores = self.choice.scores
        if scores is not None and (scores[at] < scores[others]).any():
            best = "the best" if (scores[at] <= scores[others]).all() else "a better"
            reasons.append(f"it has {best} score ({self.choice.scored_by})")
        if has_adapter and self.is_warm[at] and not self.is_warm[others].all():
            reasons.append("it has the adapter")
        if (self.requests[at] < self.requests[others]).any() and (self.requests[at] <= self.requests[others]).all():
            reasons.append("it has the fewest requests")
        return ", ".join(reasons) or "the policy's choice among equals"


class Placement(NamedTuple):
    """One attempt to answer a request.

    Attributes:
        at_s: time of the choice, on the monotonic clock.
        backend: the backend.
        decision: why it was chosen; None if its session was there before.
    """

    at_s: float
    backend: ReplicaId
    decision: RouteDecision | None


class RouteRecord:
    """The record of one request.

    Args:
        request_id: id of the client's request.
        tenant: the sender.
        model: name of the model as the client gave it.
        adapter: name of the adapter; None for the base model.
        path: the route.

    Attributes:
        placements: the backends that it was sent to, in order.
        sent_id: id of the last attempt at its backend; empty before it is sent.
    """

    def __init__(self, request_id: str, tenant: str, model: str, adapter: str | None, path: str) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.placements: list[Placement] = []
        self.sent_id = ""
        self._model = model
        self._adapter = adapter
        self._path = path
        self._began_s = time.monotonic()
        self._began_unix_s = time.time()
        self._first_s: float | None = None
        self._end: dict[str, Any] = {}

    def on_first_token(self) -> None:
        """Record the first piece of a stream."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def on_ended(self, outcome: str, output_tokens: int) -> None:
        """Record the end; ``outcome`` is one of ``OUTCOMES``."""
        self._end = {
            "outcome": outcome,
            "output_tokens": output_tokens,
            "e2e_s": round(time.monotonic() - self._began_s, 6),
        }

    def summary(self) -> dict[str, Any]:
        """Return the request's backend, times and end as JSON."""
        return {
            "id": self.request_id,
            "status": "finished" if self._end else "running",
            "model": self._model,
            "adapter": self._adapter,
            "path": self._path,
            "arrival_unix_s": round(self._began_unix_s, 6),
            "backend": self.placements[-1].backend if self.placements else None,
            "ttft_s": None if self._first_s is None else round(self._first_s - self._began_s, 6),
            **self._end,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the same, with all attempts and their reasons."""
        return self.summary() | {"placements": [self._shown(each) for each in self.placements]}

    def _shown(self, placement: Placement) -> dict[str, Any]:
        decision = placement.decision
        shown = {"after_s": round(placement.at_s - self._began_s, 6), "backend": placement.backend}
        if decision is None:
            return shown | {"why": "its session was there before", "scored_by": "", "candidates": []}
        return shown | {
            "why": decision.why(placement.backend, self._adapter is not None),
            "scored_by": decision.choice.scored_by,
            "candidates": decision.candidates(),
        }


class RouteRecords:
    """Keeps the latest requests of all tenants. A tenant finds only its own."""

    def __init__(self) -> None:
        self._records = OrderedDict[str, RouteRecord]()

    def begin(self, record: RouteRecord) -> None:
        """Keep a record. A later request of the same id replaces it."""
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        if len(self._records) > MOST_RECORDS:
            self._records.popitem(last=False)

    def find(self, request_id: str, may_see: Callable[[str], bool]) -> RouteRecord | None:
        """Return the record of a request, by its id or that of its answer; None if the sender may see none."""
        for prefix in _ID_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        ids = (request_id, request_id.rpartition("-")[0], request_id.rsplit("-", 2)[0])
        found = next((self._records[each] for each in ids if each in self._records), None)
        return found if found is not None and may_see(found.tenant) else None

    def latest(self, most: int, may_see: Callable[[str], bool]) -> list[RouteRecord]:
        """Return at most ``most`` records that the sender may see, the newest first."""
        newest: Iterator[RouteRecord] = reversed(self._records.values())
        return list(islice((record for record in newest if may_see(record.tenant)), most))
