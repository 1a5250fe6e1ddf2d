"""Records outputs and ends of requests in metrics, counts by adapter and tenant, the request log and traces.

All these records use the same timings.
"""

import time
from typing import TYPE_CHECKING

from lorikeet.client.client import RequestHandle
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.provenance import Provenance
from lorikeet.core.request import Slo
from lorikeet.http.trace_context import trace_headers
from lorikeet.observe.ended_request import EndedRequest, EndObserver
from lorikeet.observe.length_prediction import AnswerLengthPredictor
from lorikeet.observe.live_stats import LiveStats
from lorikeet.observe.metrics import RequestMetrics
from lorikeet.observe.request_log import RequestLog
from lorikeet.observe.request_records import RequestRecords
from lorikeet.observe.shedding import TtftForecast
from lorikeet.observe.slo_targets import attainment, missed
from lorikeet.observe.traffic import AdapterTraffic, AdapterUsage, RequestCounts, nanoseconds, ttft_bucket
from lorikeet.tenants.ledger import Ended, Ledger

if TYPE_CHECKING:
    from lorikeet.observe.tracing import RequestTraces


class RequestObserver:
    """Records all requests of a server.

    Args:
        metrics: histograms and counters.
        usage: counts by adapter.
        tenants: counts by tenant.
        request_log: the request log; None without a log.
        lengths: learns from the lengths of answers.
        forecast: learns the rate of admissions; None without shedding.
        live: keeps the latest requests of each adapter.
        traces: makes the spans of requests; None without traces.
        ledger: adds up the usage of tenants; None without tenants.
        exporters: plug-ins that get every ended request.
        base_digest: hex SHA-256 of the base.

    Attributes:
        records: the latest requests, with the decisions made for them.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        usage: AdapterUsage,
        tenants: AdapterUsage,
        request_log: RequestLog | None,
        lengths: AnswerLengthPredictor,
        forecast: TtftForecast | None,
        live: LiveStats,
        traces: "RequestTraces | None" = None,
        ledger: Ledger | None = None,
        exporters: tuple[EndObserver, ...] = (),
        base_digest: str = "",
    ) -> None:
        self.base_digest = base_digest
        self.metrics = metrics
        self.usage = usage
        self.tenants = tenants
        self.request_log = request_log
        self.lengths = lengths
        self.forecast = forecast
        self.live = live
        self.traces = traces
        self.records = RequestRecords()
        ledger_observer = None if ledger is None else LedgerObserver(ledger)
        of_all: tuple[EndObserver | None, ...] = (lengths, metrics, ledger_observer, request_log, *exporters)
        self.of_all_requests = tuple(each for each in of_all if each is not None)

    def watch(self, handle: RequestHandle) -> "RequestWatch":
        """Start to record a newly submitted request."""
        return RequestWatch(self, handle)

    def refused(self, adapter: AdapterRef | None, slo: Slo | None, tenant: str, requests: int, *, shed: bool) -> None:
        """Count ``requests`` that were refused because too many were running, or that the forecast ``shed``."""
        self.metrics.count_refused(requests, shed=shed)
        self.live.refused(adapter, requests)
        counts = missed(slo, requests)
        counts.refused = requests
        counts.shed = requests if shed else 0
        self.usage.of(None if adapter is None else adapter.name).add(counts)
        self.tenants.of(tenant or None).add(counts)


class RequestWatch:
    """Records the outputs and the end of one request. A background request has no latencies."""

    def __init__(self, observer: RequestObserver, handle: RequestHandle) -> None:
        request = handle.request
        self._handle = handle
        self._fingerprint = Provenance(observer.base_digest, request.digest or "").fingerprint
        self._outputs = observer.metrics.outputs
        self._traces = observer.traces
        self._live_stats = observer.live
        self._live = observer.live.begin(request, handle.timings)
        self._last_output_s: float | None = None
        self._trace_headers = trace_headers.get()
        self._forecast = None if request.background else observer.forecast
        if self._forecast is not None:
            self._forecast.on_submitted(request, handle.timings)
        adapter = observer.usage.of(None if request.adapter is None else request.adapter.name)
        record = observer.records.begin(request, handle.timings)
        traffic = RunningTraffic(adapter, observer.tenants.of(request.tenant or None))
        forecasts = () if self._forecast is None else (self._forecast,)
        self._observers: tuple[EndObserver, ...] = (
            record,
            self._live,
            traffic,
            *forecasts,
            *observer.of_all_requests,
        )
        log = observer.request_log
        self._text: list[str] | None = [] if log is not None and log.wants_text else None

    def output(self, tokens: int, text: str) -> None:
        """Record an output of ``tokens`` tokens that added ``text``."""
        if self._text is not None:
            self._text.append(text)
        if not tokens:
            return
        now_s = time.monotonic()
        if self._last_output_s is None and self._forecast is not None:
            self._forecast.on_first_token(self._handle.timings)
        gap_s = None
        if self._last_output_s is not None and not self._handle.request.background:
            gap_s = now_s - self._last_output_s
        self._outputs.add(tokens, gap_s)
        self._live_stats.output(self._live, tokens, gap_s)
        self._last_output_s = now_s

    def finished(self, completion_tokens: int, reason: str, error: str = "") -> None:
        """Record the end of the request.

        Args:
            completion_tokens: number of generated tokens.
            reason: the finish reason; ``abort`` if the client disconnected, ``error`` if the request failed.
            error: the error message for the client; empty without an error.
        """
        timings = self._handle.timings
        ended = EndedRequest(
            self._handle.request,
            timings,
            completion_tokens,
            reason,
            timings.finished_s if timings.finished_s is not None else time.monotonic(),
            error,
            text=None if self._text is None else "".join(self._text),
            trace_headers=self._trace_headers,
            fingerprint=self._fingerprint,
        )
        if self._traces is not None:
            ended = self._traces.traced(ended)
        for each in self._observers:
            each.on_ended(ended)


class RunningTraffic:
    """Counts one request as running, and later as ended, for its adapter and its tenant."""

    def __init__(self, *traffic: AdapterTraffic) -> None:
        self._traffic = traffic
        for each in traffic:
            each.running += 1

    def on_ended(self, ended: EndedRequest) -> None:
        """Count the request as ended."""
        timings = ended.timings
        ttft_s = None if ended.request.background else ended.ttft_s
        counts = RequestCounts(
            requests=1,
            aborted=ended.reason == "abort",
            failed=ended.reason == "error",
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=timings.cached_tokens,
            completion_tokens=ended.completion_tokens,
            ttft_count=ttft_s is not None,
            ttft_ns=nanoseconds(ttft_s or 0.0),
            ttft_buckets=ttft_bucket(ttft_s),
            e2e_ns=nanoseconds(ended.e2e_s),
            adapter_wait_ns=nanoseconds(timings.adapter_wait_s),
            kv_wait_ns=nanoseconds(timings.kv_wait_s),
        )
        counts.add(attainment(ended))
        for each in self._traffic:
            each.add(counts)
            each.running -= 1


class LedgerObserver:
    """Adds ended requests to the usage of their tenants, with the values of the request log."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_ended(self, ended: EndedRequest) -> None:
        """Add a request that has ended."""
        self._ledger.ended(
            Ended(
                ended.request.tenant,
                ended.adapter or "",
                ended.timings.arrival_s + time.time() - time.monotonic(),
                ended.prompt_tokens,
                ended.timings.cached_tokens,
                ended.completion_tokens,
                is_aborted=ended.reason == "abort",
                has_failed=ended.reason == "error",
            )
        )
