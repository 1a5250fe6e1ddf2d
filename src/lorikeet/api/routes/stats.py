"""Serves ``/v1/stats``: the present load of the server and its adapters, as JSON and as server-sent events.

The console (``/ui``) and ``lorikeet top`` show the same object.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends
from starlette.responses import Response

from lorikeet import __version__
from lorikeet.adapters.catalog import AdapterRecord
from lorikeet.api.dependencies import ServiceDep
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import EngineStats
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.observe.live_stats import (
    BASE,
    HISTORY_EVERY_S,
    RECENT_S,
    AdapterHistory,
    LoadHistory,
    RecentRequest,
    memory_by_tier,
    percentiles,
)
from lorikeet.observe.sort_by import SortBy
from lorikeet.observe.stats_stream import StatsQuery, StatsStreamQuery, stats_response
from lorikeet.observe.traffic import AdapterTraffic
from lorikeet.observe.waits import CAUSES, ORDER, PARTS, WAITS, parts_of
from lorikeet.serving.requests import Sender
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import Access


@dataclass
class AdapterFigures:
    """Figures of one adapter, or of the base model.

    Attributes:
        name: the adapter's name.
        traffic, history: counts of its requests.
        load: its latest load.
        record: its record; None for the base model and for an adapter that has not been loaded.
        device_bytes, on_host: its place in memory.
        now_s: present time, on the clock of requests.
        is_base: whether the figures are the base model's.
    """

    name: str
    traffic: AdapterTraffic
    history: AdapterHistory
    load: LoadHistory
    record: AdapterRecord | None
    device_bytes: int
    on_host: bool
    now_s: float
    is_base: bool = False

    def __post_init__(self) -> None:
        self.recent = self.history.recent(self.now_s)
        unanswered = [each for each in self.history.open.values() if each.timings.first_token_s is None]
        self.unanswered = sorted(unanswered, key=lambda each: each.timings.arrival_s)
        answered = [each for each in self.recent if each.ttft_s is not None]
        waiting = [parts_of(each.timings, self.now_s) for each in self.unanswered]
        measured = [each.parts for each in answered] + waiting or [each.parts for each in self.recent]
        self.parts_s = tuple(sum(part) / len(measured) for part in zip(*measured, strict=True)) if measured else None
        self.ttft = percentiles(each.ttft_s for each in answered if each.ttft_s is not None)

    @property
    def tier(self) -> str:
        """Tier of the weights: ``device``, ``host`` or ``files``."""
        return "device" if self.device_bytes or self.is_base else "host" if self.on_host else "files"

    @property
    def oldest_s(self) -> float:
        """Age of the oldest request without a first token."""
        return self.now_s - self.unanswered[0].timings.arrival_s if self.unanswered else 0.0

    @property
    def slowness_s(self) -> float:
        """P90 of TTFT, or the age of the oldest request without a token if that is longer."""
        return max(float(self.ttft["p90"]) if self.ttft else 0.0, self.oldest_s)

    @property
    def waits_s(self) -> float:
        """Mean time before prefill."""
        return sum(self.parts_s[:3]) if self.parts_s else 0.0

    @property
    def hit_share(self) -> float | None:
        """Share of requests that found the adapter on the device."""
        asked = self.history.hits + self.history.misses
        return self.history.hits / asked if asked else None

    @property
    def saved_s(self) -> float:
        """Seconds that all mechanisms have saved."""
        return sum(self.history.saved_s.values())

    def why(self) -> str:
        """Return a sentence on the longest wait of its requests; empty without recent requests."""
        if self.load.error is not None:
            return f"Its latest load failed: {self.load.error}"
        if self.parts_s is None or not (total_s := sum(self.parts_s)):
            return ""
        largest_s, part = max(zip(self.parts_s, PARTS, strict=True), key=lambda each: each[0])
        share = f"{100 * largest_s / total_s:.0f} % of the time to the first token is"
        match part:
            case "queue":
                cause = max(self.history.queue_s, key=lambda each: self.history.queue_s[each], default=ORDER)
                return f"{share} the queue, mostly for {CAUSES.get(cause, cause)}."
            case "adapter":
                took = f"; the latest load took {self.load.seconds:.3g} s" if self.load.loads else ""
                return f"{share} the transfer of its adapter to the device{took}."
            case "kv":
                return f"{share} the transfer of its KV from the host."
        return f"{share} prefill."

    def as_json(self) -> dict[str, Any]:
        """Return the figures for one line of a list."""
        total = self.traffic.total
        history = self.history
        gaps = percentiles(each.itl_s for each in self.recent if each.itl_s is not None)
        return {
            "name": self.name,
            "is_base": self.is_base,
            "digest": None if self.record is None else self.record.digest,
            "rank": None if self.record is None else self.record.max_rank,
            "tier": self.tier,
            "device_bytes": self.device_bytes,
            "requests": total.requests,
            "requests_per_s": round(history.finished.per_s(), 3),
            "requests_running": self.traffic.running,
            "requests_unanswered": len(self.unanswered),
            "oldest_unanswered_s": round(self.oldest_s, 3),
            "requests_failed": total.failed,
            "requests_aborted": total.aborted,
            "requests_refused": history.refused,
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "generation_tokens": total.completion_tokens,
            "hits": history.hits,
            "misses": history.misses,
            "ttft_s": self.ttft,
            "parts_s": None
            if self.parts_s is None
            else {name: round(part, 6) for name, part in zip(PARTS, self.parts_s, strict=True)},
            "itl_s": gaps,
            "slowness_s": round(self.slowness_s, 6),
            "queue_s": {cause: round(seconds, 6) for cause, seconds in history.queue_s.items()},
            "saved_s": {mechanism: round(seconds, 6) for mechanism, seconds in history.saved_s.items()},
            "loads": self.load.loads,
            "latest_load_s": round(self.load.seconds, 6) if self.load.loads else None,
            "load_error": self.load.error,
            "why": self.why(),
        }

    def details(self, sender: Sender) -> dict[str, Any]:
        """Return the figures, and the latest errors and requests that ``sender`` may see, the newest first."""
        live_errors = [each for each in self.history.errors if each.request_id is None or sender.may_see(each.tenant)]
        recent = [each for each in self.recent if sender.may_see(each.tenant)]
        return {
            **self.as_json(),
            "errors": [
                {"unix_s": each.unix_s, "request_id": each.request_id, "message": each.message}
                for each in reversed(live_errors)
            ],
            "recent": [_ended(each, self.now_s) for each in reversed(recent)],
        }


def _ended(each: RecentRequest, now_s: float) -> dict[str, Any]:
    return {
        "request_id": each.request_id,
        "ended_ago_s": round(now_s - each.ended_s, 3),
        "finish_reason": each.reason,
        "input_tokens": each.prompt_tokens,
        "output_tokens": each.completion_tokens,
        "ttft_s": None if each.ttft_s is None else round(each.ttft_s, 6),
        "parts_s": {name: round(part, 6) for name, part in zip(PARTS, each.parts, strict=True)},
        "itl_s": None if each.itl_s is None else round(each.itl_s, 6),
        "itl_max_s": None if each.itl_max_s is None else round(each.itl_max_s, 6),
        "e2e_s": round(each.e2e_s, 6),
        "hit": each.hit,
    }


_ORDERS: Mapping[SortBy, Callable[[AdapterFigures], Any]] = {
    SortBy.SLOWNESS: lambda each: each.slowness_s,
    SortBy.TRAFFIC: lambda each: (each.history.finished.per_s(), each.traffic.total.requests),
    SortBy.WAITS: lambda each: each.waits_s,
    SortBy.RESIDENCY: lambda each: each.device_bytes,
    SortBy.TIER: lambda each: ("files", "host", "device").index(each.tier),
    SortBy.HITS: lambda each: -1.0 if each.hit_share is None else each.hit_share,
    SortBy.ERRORS: lambda each: (each.traffic.total.failed + (each.load.error is not None), each.history.refused),
    SortBy.SAVED: lambda each: each.saved_s,
    SortBy.NAME: lambda each: each.name,
}


class _Residency:
    """Tiers of adapters, summed over all replicas."""

    def __init__(self, service: Service) -> None:
        block_bytes = service.client.engine_info.block_bytes
        self.device_bytes: dict[AdapterDigest, int] = {}
        self.on_host: set[AdapterDigest] = set()
        for each in service.observer.live.engine_stats():
            self.on_host.update(each.hosted_adapters)
            for digest, blocks in each.resident_adapters.items():
                self.device_bytes[digest] = self.device_bytes.get(digest, 0) + blocks * block_bytes


def figures_of(service: Service, record: AdapterRecord, where: _Residency | None = None) -> AdapterFigures:
    """Return the figures of an adapter; ``where`` is read if it is None."""
    live = service.observer.live
    where = where or _Residency(service)
    return AdapterFigures(
        record.name,
        service.observer.usage.peek(record.name),
        live.peek(record.name),
        live.loads.get(record.digest, LoadHistory()),
        record,
        where.device_bytes.get(record.digest, 0),
        record.digest in where.on_host,
        live.now_s(),
    )


def _all_figures(service: Service, part: str) -> tuple[list[AdapterFigures], int]:
    """Return the figures of the models whose names contain ``part``, and the number of all adapters.

    The models are the base model, the registered adapters, and the adapters that a request would load.
    """
    live = service.observer.live
    usage = service.observer.usage
    base = service.models.base
    where = _Residency(service)
    now_s = live.now_s()
    records = service.catalog.list()
    found = []
    if part in base.lower():
        history = live.peek(BASE)
        found.append(AdapterFigures(base, usage.base, history, LoadHistory(), None, 0, False, now_s, is_base=True))
    found += [figures_of(service, each, where) for each in records if part in each.name.lower()]
    registered = {each.name for each in records}
    unloaded = [name for name in live.unloaded if name not in registered]
    found += [
        AdapterFigures(name, usage.peek(name), live.peek(name), LoadHistory(), None, 0, False, now_s)
        for name in unloaded
        if part in name.lower()
    ]
    return found, len(records) + len(unloaded)


_LIST_EVERY_S = 10.0


async def _list_unloaded(service: Service) -> None:
    """List the adapters that a request would load; a recent list is reused, since this reads a folder."""
    live = service.observer.live
    if live.now_s() - live.unloaded_at_s > _LIST_EVERY_S:
        live.unloaded_at_s = live.now_s()
        live.unloaded = await service.resolver.unloaded_names(Access())


def snapshot(service: Service, query: StatsQuery) -> dict[str, Any]:
    """Return the body of ``/v1/stats``."""
    live = service.observer.live
    live.sample()
    stats = live.engine_stats()
    now_s = live.now_s()
    usage = service.observer.usage
    recent = live.recent()
    everything = usage.all_adapters.plus(usage.base.total)
    answered = [each for each in recent if each.ttft_s is not None]
    sums = [sum(part) / len(answered) for part in zip(*(each.parts for each in answered), strict=True)]
    rows, total, matching = _rows(service, query)
    return {
        "object": "stats",
        "unix_s": live.unix_s(now_s),
        "uptime_s": round(now_s - live.started_s, 1),
        "version": __version__,
        "model": service.models.base,
        "status": "draining" if service.gate.draining else service.engine_status,
        "recent_s": RECENT_S,
        "requests": {
            "accepted": service.gate.active,
            "running": sum(each.running for each in stats),
            "waiting": sum(each.waiting for each in stats),
            "waiting_by": _waiting(stats),
            "waiting_words": WAITS,
            "finished": everything.requests,
            "failed": everything.failed,
            "aborted": everything.aborted,
        },
        "per_s": {
            "requests": round(live.finished.per_s(), 3),
            "prompt_tokens": round(live.prompt_tokens.per_s(), 2),
            "generation_tokens": round(live.completion_tokens.per_s(), 2),
        },
        "ttft_s": percentiles(each.ttft_s for each in answered if each.ttft_s is not None),
        "parts_s": {name: round(part, 6) for name, part in zip(PARTS, sums, strict=True)} if sums else None,
        "itl_s": percentiles(live.recent_gaps_s()),
        "hits": {
            "adapter_queries": sum(each.memory.adapter_queries for each in stats),
            "adapter_hits": sum(each.memory.adapter_hits for each in stats),
            "kv_query_tokens": sum(each.memory.kv_queries_tokens for each in stats),
            "kv_hit_tokens": sum(each.memory.kv_hits_tokens for each in stats),
            "kv_host_hit_tokens": sum(each.memory.kv_host_hits_tokens for each in stats),
        },
        "preemptions": sum(each.preemptions for each in stats),
        "memory": memory_by_tier(stats),
        "adapters_total": total,
        "adapters_matching": matching,
        "adapters": rows,
        **({"history_every_s": HISTORY_EVERY_S, "history": list(live.history)} if query.history else {}),
    }


def _waiting(stats: Iterable[EngineStats]) -> dict[str, int]:
    """Return waiting requests by cause: in the queue, or for a transfer after they have their blocks."""
    waiting = dict.fromkeys(WAITS, 0)
    for each in stats:
        waiting["adapter"] += each.waiting_for_adapter
        waiting["kv"] += each.waiting_for_kv
        for cause, count in each.queued.items():
            waiting[cause] = waiting.get(cause, 0) + count
    return waiting


def _rows(service: Service, query: StatsQuery) -> tuple[list[dict[str, Any]], int, int]:
    """Return the adapters to show, the number of all adapters, and the number of matching models."""
    matching, total = _all_figures(service, query.match.lower())
    key = _ORDERS[query.sort]
    pick = heapq.nsmallest if query.ascending else heapq.nlargest
    shown = pick(query.adapters, matching, key=key)
    pinned = service.resolver.loader.pinned
    return [{**each.as_json(), "pinned": each.name in pinned} for each in shown], total, len(matching)


ROUTES = Routes(note="load, times and memory now, adapter by adapter: see [Statistics](#statistics)")
QueryDep = Annotated[StatsQuery, Depends()]


@ROUTES.add(Route("GET /v1/stats", Callers.ADMINS))
async def stats(service: ServiceDep, query: QueryDep) -> Response:
    """Return the present load, latencies, memory and adapters."""
    return await stats_response(partial(_look, service), query)


@ROUTES.add(Route("GET /v1/stats/stream", Callers.ADMINS))
async def stream(service: ServiceDep, query: Annotated[StatsStreamQuery, Depends()]) -> Response:
    """Send the statistics as server-sent events every ``interval_s``; only the first has the history."""
    return service.stats_streams.response(partial(_look, service), query)


async def _look(service: Service, query: StatsQuery) -> dict[str, Any]:
    await _list_unloaded(service)
    return snapshot(service, query)
