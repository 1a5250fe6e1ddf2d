"""Keeps the statistics of a router, in the form of a server's ``/v1/stats``.

A router knows the begin, first token and end of requests, and the adapters of its backends. Figures from inside a
backend (parts of TTFT, memory, hits) are in the backend's ``/v1/stats``, and empty or 0 in the router's.
"""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lorikeet import __version__
from lorikeet.client.state import ReplicaState
from lorikeet.core.ids import RequestId
from lorikeet.observe.live_stats import (
    BASE,
    HISTORY_EVERY_S,
    MOST_ADAPTERS,
    MOST_HISTORY,
    RECENT_S,
    REQUESTS_PER_ADAPTER,
    Rate,
    memory_by_tier,
    percentiles,
)
from lorikeet.observe.sort_by import SortBy
from lorikeet.observe.stats_stream import StatsQuery, StatsStreams
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.metrics import OUTCOMES, router_state
from lorikeet.router.proxied_request import ProxiedRequest

_MOST_RECENT = 2048


class _FirstToken(NamedTuple):
    """The first token of a stream: the end time of its request, and the TTFT."""

    ended_s: float
    ttft_s: float


class _Requests:
    """Counts the requests of one adapter, or of the base model.

    Attributes:
        open: arrival times of the running requests.
        unanswered: number of running requests without a token.
        first_tokens: first tokens of the latest streams.
        outcomes: number of ended requests by outcome, including refused requests. All other counts exclude refused
            requests.
        finished: rate of ended requests per second.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open: dict[RequestId, float] = {}
        self.unanswered: dict[RequestId, float] = {}
        self.first_tokens = deque[_FirstToken](maxlen=REQUESTS_PER_ADAPTER)
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.prompt_tokens = self.completion_tokens = 0
        self.finished = Rate(clock)

    @property
    def ended(self) -> int:
        """Number of ended requests, without refused ones."""
        return sum(self.outcomes.values()) - self.outcomes["refused"]

    def oldest_s(self, now_s: float) -> float:
        """Return the seconds for which the oldest request without a token has waited."""
        return max((now_s - began_s for began_s in self.unanswered.values()), default=0.0)


class RouterStats:
    """Holds the latest requests of a router by adapter.

    Args:
        backend_router, catalog: backends and models of the router.
        clock: returns the monotonic time in seconds.

    Attributes:
        is_ending: whether the router drains, which ends streams of statistics.
        streams: open streams of statistics.
    """

    def __init__(
        self, backend_router: BackendRouter, catalog: ModelCatalog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend_router = backend_router
        self._catalog = catalog
        self._clock = clock
        self._unix_minus_clock_s = time.time() - clock()
        self._started_s = clock()
        self._adapters: OrderedDict[str, _Requests] = OrderedDict()
        self._total = _Requests(clock)
        self._total.first_tokens = deque(maxlen=_MOST_RECENT)
        self._prompt_rate = Rate(clock)
        self._answer_rate = Rate(clock)
        self._ttft_s: dict[RequestId, float] = {}
        self._history = deque[dict[str, Any]](maxlen=MOST_HISTORY)
        self.is_ending = False
        self.streams = StatsStreams(lambda: self.is_ending)

    def begin(self, request: ProxiedRequest) -> None:
        """Count a request that has arrived."""
        now_s = self._clock()
        for each in self._both(request):
            each.open[request.request_id] = each.unanswered[request.request_id] = now_s

    def first_token(self, request: ProxiedRequest) -> None:
        """Record that the first piece of a stream was sent. Later calls do nothing."""
        began_s = self._total.unanswered.get(request.request_id)
        if began_s is not None:
            self._ttft_s[request.request_id] = self._clock() - began_s
            for each in self._both(request):
                each.unanswered.pop(request.request_id, None)

    def end(self, request: ProxiedRequest, outcome: str, completion_tokens: int) -> None:
        """Count an ended request. ``outcome`` is one of ``OUTCOMES``."""
        ttft_s = self._ttft_s.pop(request.request_id, None)
        both = self._both(request)
        for each in both:
            each.open.pop(request.request_id, None)
            each.unanswered.pop(request.request_id, None)
            each.outcomes[outcome] += 1
        if outcome == "refused":
            return
        self._prompt_rate.add(request.prompt_tokens)
        self._answer_rate.add(completion_tokens)
        for each in both:
            each.prompt_tokens += request.prompt_tokens
            each.completion_tokens += completion_tokens
            each.finished.add()
            if ttft_s is not None:
                each.first_tokens.append(_FirstToken(self._clock(), ttft_s))

    def _both(self, request: ProxiedRequest) -> tuple[_Requests, _Requests]:
        """Return the counts of all requests, and of the requests for this request's adapter."""
        name = BASE if request.adapter is None else request.adapter.name
        known = self._adapters.get(name)
        if known is None:
            known = self._adapters[name] = _Requests(self._clock)
        self._adapters.move_to_end(name)
        while len(self._adapters) > MOST_ADAPTERS and not next(iter(self._adapters.values())).open:
            self._adapters.popitem(last=False)
        return self._total, known

    async def snapshot(self, query: StatsQuery) -> dict[str, Any]:
        """Return the body of ``/v1/stats``."""
        now_s = self._clock()
        total = self._total
        state = router_state(self._backend_router)
        bases = self._catalog.base_cards()
        rows = [row for row in self._rows(bases, now_s) if query.match.lower() in row["name"].lower()]
        pick = heapq.nsmallest if query.ascending else heapq.nlargest
        sample = {
            "unix_s": round(now_s + self._unix_minus_clock_s, 3),
            "generation_tokens_per_s": round(self._answer_rate.per_s(), 2),
            "requests_per_s": round(total.finished.per_s(), 3),
            "running": sum(each.running for each in state.replicas),
            "waiting": sum(each.waiting for each in state.replicas) + state.unrouted,
            "memory": memory_by_tier(()),
        }
        if not self._history or sample["unix_s"] - self._history[-1]["unix_s"] >= HISTORY_EVERY_S:
            self._history.append(sample)
        return {
            "object": "stats",
            "is_router": True,
            "unix_s": sample["unix_s"],
            "uptime_s": round(now_s - self._started_s, 1),
            "version": __version__,
            "model": bases[0]["id"] if bases else "",
            "status": "draining"
            if self.is_ending
            else "ready"
            if any(each.is_open for each in state.replicas)
            else "no backend",
            "recent_s": RECENT_S,
            "requests": {
                "accepted": len(total.open),
                "running": sample["running"],
                "waiting": sample["waiting"],
                "waiting_by": {},
                "waiting_words": {},
                "finished": total.ended,
                "failed": total.outcomes["failed"],
                "aborted": total.outcomes["left"],
            },
            "per_s": {
                "requests": sample["requests_per_s"],
                "prompt_tokens": round(self._prompt_rate.per_s(), 2),
                "generation_tokens": sample["generation_tokens_per_s"],
            },
            "ttft_s": _recent(total, now_s),
            "backends": [_backend(each) for each in state.replicas],
            "parts_s": None,
            "itl_s": None,
            "hits": {},
            "preemptions": 0,
            "memory": sample["memory"],
            "adapters_total": len(self._catalog.adapters),
            "adapters_matching": len(rows),
            "adapters": pick(query.adapters, rows, key=_ORDERS[query.sort]),
            **({"history_every_s": HISTORY_EVERY_S, "history": list(self._history)} if query.history else {}),
        }

    def _rows(self, bases: list[dict[str, Any]], now_s: float) -> Iterator[dict[str, Any]]:
        if bases:
            yield self._row(bases[0]["id"], self._adapters.get(BASE), now_s) | {"is_base": True, "tier": "device"}
        for name, adapter in self._catalog.adapters.items():
            backends = [each for each in self._backend_router.backends.values() if name in each.adapters]
            yield self._row(name, self._adapters.get(name), now_s) | {
                "digest": self._catalog.version(adapter),
                "rank": adapter.rank,
                "tier": "device" if backends else "files",
                "device_bytes": adapter.size_bytes * len(backends),
                "backends": [each.replica for each in backends],
                "load_error": None if backends else self._backend_router.last_refusal(adapter),
            }

    def _row(self, name: str, requests: _Requests | None, now_s: float) -> dict[str, Any]:
        known = requests or _Requests(self._clock)
        ttft = _recent(known, now_s)
        oldest_s = known.oldest_s(now_s)
        return {
            "name": name,
            "is_base": False,
            "digest": None,
            "rank": None,
            "tier": "files",
            "device_bytes": 0,
            "backends": [],
            "requests": known.ended,
            "requests_per_s": round(known.finished.per_s(), 3),
            "requests_running": len(known.open),
            "requests_unanswered": len(known.unanswered),
            "oldest_unanswered_s": round(oldest_s, 3),
            "requests_failed": known.outcomes["failed"],
            "requests_aborted": known.outcomes["left"],
            "requests_refused": known.outcomes["refused"],
            "prompt_tokens": known.prompt_tokens,
            "cached_tokens": 0,
            "generation_tokens": known.completion_tokens,
            "hits": 0,
            "misses": 0,
            "ttft_s": ttft,
            "parts_s": None,
            "itl_s": None,
            "slowness_s": round(max(float(ttft["p90"]) if ttft else 0.0, oldest_s), 6),
            "queue_s": {},
            "saved_s": {},
            "loads": 0,
            "latest_load_s": None,
            "load_error": None,
            "why": "",
            "pinned": False,
        }


_ORDERS: Mapping[SortBy, Callable[[dict[str, Any]], Any]] = {
    SortBy.SLOWNESS: lambda row: row["slowness_s"],
    SortBy.TRAFFIC: lambda row: (row["requests_per_s"], row["requests"]),
    SortBy.WAITS: lambda row: row["slowness_s"],
    SortBy.RESIDENCY: lambda row: row["device_bytes"],
    SortBy.TIER: lambda row: row["tier"] == "device",
    SortBy.HITS: lambda row: 0,
    SortBy.ERRORS: lambda row: (row["requests_failed"] + (row["load_error"] is not None), row["requests_refused"]),
    SortBy.SAVED: lambda row: 0,
    SortBy.NAME: lambda row: row["name"],
}


def _backend(state: ReplicaState) -> dict[str, Any]:
    return {
        "id": state.id,
        "status": "open" if state.is_open else "draining" if state.alive else "down",
        "why": state.trouble,
        "running": state.running,
        "waiting": state.waiting,
        "adapters": state.held,
    }


def _recent(requests: _Requests, now_s: float) -> dict[str, float | int] | None:
    return percentiles(each.ttft_s for each in requests.first_tokens if each.ended_s > now_s - RECENT_S)
