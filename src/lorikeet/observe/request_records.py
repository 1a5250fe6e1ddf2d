"""Keeps the latest requests with the decisions made for them, for ``GET /v1/requests``."""

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any

from lorikeet.core.events import RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.waits import decision_json, waits_json

MOST_RECORDS = 4096
"""Requests that are remembered; each takes a few KiB. Those that ended first are forgotten first."""

_ID_PREFIXES = ("chatcmpl-", "cmpl-")
"""How the ids of answers begin; the rest is that of their request."""


class RequestRecord:
    """The record of one sequence: its times so far, and its end.

    Args:
        request: the submitted request, whose tokens are not kept.
        timings: times of its events, which are filled while it runs.
        clock_s: wall time minus monotonic time, in seconds.
    """

    def __init__(self, request: Request, timings: RequestTimings, clock_s: float) -> None:
        self.tenant = request.tenant
        self._request_id = request.request_id
        self._model = None if request.adapter is None else request.adapter.name
        self._prompt_tokens = len(request.prompt_token_ids)
        self._timings = timings
        self._clock_s = clock_s
        self._end: dict[str, Any] = {}

    def on_ended(self, ended: EndedRequest) -> None:
        """Record the end of the sequence, with the client's error message if it failed."""
        self._end = {
            "finish_reason": ended.reason,
            "output_tokens": ended.completion_tokens,
            "e2e_s": round(ended.e2e_s, 6),
            **({"error": ended.error} if ended.error else {}),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the sequence's state, times and decisions as JSON."""
        arrival_s = self._timings.arrival_s
        return self.summary() | {"decisions": [decision_json(each, arrival_s) for each in self._timings.decisions]}

    def summary(self) -> dict[str, Any]:
        """Return the sequence's state and times as JSON."""
        timings = self._timings
        return {
            "id": self._request_id,
            "status": "finished" if self._end else "running",
            "adapter": self._model,
            "arrival_unix_s": round(timings.arrival_s + self._clock_s, 6),
            "input_tokens": self._prompt_tokens,
            **waits_json(timings),
            **self._end,
        }


class RequestRecords:
    """Keeps the latest requests of all tenants. A tenant finds only its own.

    Args:
        most: number of sequences to keep.
    """

    def __init__(self, most: int = MOST_RECORDS) -> None:
        self._most = most
        self._records = OrderedDict[RequestId, RequestRecord]()
        self._of_request: dict[str, list[RequestId]] = {}
        self._clock_s = time.time() - time.monotonic()

    def begin(self, request: Request, timings: RequestTimings) -> RequestRecord:
        """Start the record of a submitted sequence."""
        record = self._records[request.request_id] = RequestRecord(request, timings, self._clock_s)
        self._of_request.setdefault(_client_id(request.request_id), []).append(request.request_id)
        while len(self._records) > self._most:
            self._forget(self._records.popitem(last=False)[0])
        return record

    def find(self, request_id: str, may_see: Callable[[str], bool]) -> list[RequestRecord]:
        """Return the sequences of a request; empty for an unknown request.

        Args:
            request_id: id of the client's request, of its answer, or of one sequence.
            may_see: returns whether the sender may see requests of a tenant.
        """
        for prefix in _ID_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        one = RequestId(request_id)
        ids = [one] if one in self._records else self._of_request.get(request_id, [])
        return [record for record in map(self._records.__getitem__, ids) if may_see(record.tenant)]

    def latest(self, most: int, may_see: Callable[[str], bool]) -> list[RequestRecord]:
        """Return at most ``most`` sequences that the sender may see, the newest first.

        Args:
            most: largest number of sequences to return.
            may_see: returns whether the sender may see requests of a tenant.
        """
        newest_first = reversed(self._records.values())
        return list(islice((record for record in newest_first if may_see(record.tenant)), most))

    def _forget(self, request_id: RequestId) -> None:
        key = _client_id(request_id)
        self._of_request[key].remove(request_id)
        if not self._of_request[key]:
            del self._of_request[key]


def _client_id(request_id: RequestId) -> str:
    """Return the id of the client's request: the id of a sequence without the suffix."""
    return request_id.rsplit("-", 2)[0]
