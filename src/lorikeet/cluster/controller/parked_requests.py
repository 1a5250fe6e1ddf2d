"""Holds the requests of adopted replicas, whose clients have lost their server, until the clients come back."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.request import Request

PARKED_S = 60.0
"""Seconds for which a parked request waits for its client."""

_MAY_DIFFER = (
    "request_id",
    "arrival_s",
    "adapter",
    "priority",
    "slo",
    "predicted_tokens",
    "attempt",
    "exports",
    "output_token_ids",
    "background",
    "tenant_weight",
    "session",
)
"""Fields on which an answer does not depend; of the adapter, its content is compared."""


class ParkedRequest(NamedTuple):
    """Holds a request with the tokens that it had, and the replica with its KV."""

    request: Request
    replica: ReplicaId
    until_s: float


class ParkedRequests:
    """Finds a parked request by the id that its client sends again.

    The id alone is not enough: prompt, adapter version, sampling and tenant must be the same, so nobody gets another
    client's answer. Requests for log probabilities, vectors or embeddings start anew, since their tokens are not all.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parked: dict[tuple[str, str], ParkedRequest] = {}

    def __len__(self) -> int:
        """Return the number of parked requests."""
        return len(self._parked)

    def count_at(self, replica: ReplicaId) -> int:
        """Return the number of parked requests whose KV is at a replica."""
        return sum(each.replica == replica for each in self._parked.values())

    def add(self, requests: Iterable[Request], replica: ReplicaId) -> None:
        """Park the requests of a replica."""
        self._forget_old()
        until_s = self._clock() + PARKED_S
        for request in requests:
            self._parked[_key(request.request_id)] = ParkedRequest(request, replica, until_s)

    def take(self, request: Request) -> ParkedRequest | None:
        """Return the parked request that a client repeats, and forget it; None if it is new or differs."""
        if not self._parked:
            return None
        self._forget_old()
        parked = self._parked.pop(_key(request.request_id), None)
        return parked if parked is not None and _is_same(parked.request, request) else None

    def _forget_old(self) -> None:
        now = self._clock()
        self._parked = {key: each for key, each in self._parked.items() if each.until_s > now}


def resumed(request: Request, parked: Request) -> Request:
    """Return a repeated request with the tokens and the seed of the parked one."""
    return msgspec.structs.replace(
        request, sampling=parked.sampling, output_token_ids=parked.output_token_ids, exports=parked.exports
    )


def _key(request_id: RequestId) -> tuple[str, str]:
    """Return the client's id and the number of the choice; see ``serving.requests``."""
    given, _, choice = request_id.rpartition("-")
    return given.rpartition("-")[0], choice


def _is_same(parked: Request, request: Request) -> bool:
    special = (request.sampling.logprobs, request.sampling.prompt_logprobs, request.pooling, request.prompt_embeds)
    if request.output_token_ids or special != (None, None, None, None) or parked.digest != request.digest:
        return False
    allowed = {name: getattr(request, name) for name in _MAY_DIFFER}
    sampling = msgspec.structs.replace(parked.sampling, seed=request.sampling.seed)  # It may be drawn at random.
    return msgspec.structs.replace(parked, sampling=sampling, **allowed) == request
