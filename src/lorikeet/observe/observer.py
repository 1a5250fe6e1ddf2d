"""Records the outputs and the end of every request in metrics, per-adapter counts and the request log.

All of them derive from the same timings.
"""

import time
from typing import TYPE_CHECKING

from lorikeet.client.client import RequestHandle
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import RequestTimings
from lorikeet.core.request import Slo
from lorikeet.http.tenancy import record_usage
from lorikeet.http.trace_context import trace_headers
from lorikeet.observe.length_prediction import AnswerLengthPredictor
from lorikeet.observe.live_stats import LiveStats
from lorikeet.observe.metrics import AdapterUsage, RequestCounts, RequestMetrics, nanoseconds, ttft_bucket
from lorikeet.observe.request_log import RequestLog
from lorikeet.observe.request_records import RequestRecords
from lorikeet.observe.shedding import TtftForecast
from lorikeet.observe.slo_targets import attainment, missed
from lorikeet.tenants.ledger import Ledger

if TYPE_CHECKING:
    from lorikeet.observe.tracing import RequestTraces

_MOST_EXEMPLAR = 64
"""Characters of an id in an exemplar. OpenMetrics allows 128 for all its labels."""


class RequestObserver:
    """Where requests are recorded.

    Args:
        metrics: histograms and counters.
        usage: counts per adapter.
        tenants: counts per tenant.
        request_log: None if there is none.
        lengths: learns from the lengths of answers.
        forecast: learns how fast requests are admitted; None without shedding.
        live: keeps the latest requests of each adapter.
        traces: makes their spans; None for none.
        ledger: adds up what tenants use; None without tenants.

    Attributes:
        records: of the latest requests.
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
    ) -> None:
        self.metrics = metrics
        self.usage = usage
        self.tenants = tenants
        self.request_log = request_log
        self.lengths = lengths
        self.forecast = forecast
        self.live = live
        self.traces = traces
        self.ledger = ledger
        self.records = RequestRecords()

    def watch(self, handle: RequestHandle) -> "RequestWatch":
        """Start recording a request that was just submitted."""
        return RequestWatch(self, handle)

    def refused(self, adapter: AdapterRef | None, slo: Slo | None, tenant: str, requests: int, *, shed: bool) -> None:
        """Count ``requests`` that were refused because too many are running, or ``shed`` by the forecast."""
        self.metrics.count_refused(requests, shed=shed)
        self.live.refused(adapter, requests)
        counts = missed(slo, requests)
        counts.refused, counts.shed = requests, requests if shed else 0
        self.usage.of(None if adapter is None else adapter.name).add(counts)
        self.tenants.of(tenant or None).add(counts)


class RequestWatch:
    """Records one request: its outputs, and once its end; of a background request no latencies."""

    def __init__(self, observer: RequestObserver, handle: RequestHandle) -> None:
        self._observer = observer
        self._handle = handle
        self._last_output_s: float | None = None
        self._trace_headers = trace_headers.get()
        self._record = observer.records.begin(handle.request, handle.timings)
        self._live = observer.live.begin(handle.request, handle.timings)
        self._is_background = handle.request.background
        self._forecast = None if self._is_background else observer.forecast
        if self._forecast is not None:
            self._forecast.on_submitted(handle.request, handle.timings)
        adapter = handle.request.adapter
        self._usage = observer.usage.of(None if adapter is None else adapter.name)
        self._tenant = observer.tenants.of(handle.request.tenant or None)
        self._usage.running += 1
        self._tenant.running += 1
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
        gap_s = None if self._last_output_s is None or self._is_background else now_s - self._last_output_s
        self._observer.metrics.outputs.add(tokens, gap_s)
        self._observer.live.output(self._live, tokens, gap_s)
        self._last_output_s = now_s

    def finished(self, completion_tokens: int, reason: str, error: str = "") -> None:
        """Record the end.

        Args:
            completion_tokens: generated in all.
            reason: the finish reason; ``abort`` if the client disconnected, ``error`` if the request failed.
            error: what the client was told then.
        """
        request, timings = self._handle.request, self._handle.timings
        ended_s = timings.finished_s if timings.finished_s is not None else time.monotonic()
        ttft_s = None if self._is_background else first_token_latency_s(timings)
        counts = RequestCounts(
            requests=1,
            aborted=reason == "abort",
            failed=reason == "error",
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=timings.cached_tokens,
            completion_tokens=completion_tokens,
            ttft_count=ttft_s is not None,
            ttft_ns=nanoseconds(ttft_s or 0.0),
            ttft_buckets=ttft_bucket(ttft_s),
            e2e_ns=nanoseconds(ended_s - timings.arrival_s),
            adapter_wait_ns=nanoseconds(timings.adapter_wait_s),
            kv_wait_ns=nanoseconds(timings.kv_wait_s),
        )
        self._record.finished(completion_tokens, reason, ended_s, error)
        self._observer.live.end(self._live, request, completion_tokens, reason, error, ended_s)
        counts.add(attainment(request.slo, timings, completion_tokens, reason, ended_s))
        for usage in (self._usage, self._tenant):
            usage.add(counts)
            usage.running -= 1
        if self._forecast is not None:
            self._forecast.on_ended(request)
        if request.pooling is None:
            self._observer.lengths.on_ended(request, completion_tokens, reason)
        exemplar = {"request_id": request.request_id[:_MOST_EXEMPLAR]}
        if (traces := self._observer.traces) is not None:
            trace_id = traces.ended(self._trace_headers, request, timings, completion_tokens, reason, error, ended_s)
            exemplar |= {"trace_id": trace_id} if trace_id else {}
        self._observer.metrics.observe_request(
            timings,
            len(request.prompt_token_ids),
            completion_tokens,
            reason,
            ended_s,
            latencies=not self._is_background,
            exemplar=exemplar,
        )
        if self._observer.ledger is not None:
            record_usage(self._observer.ledger, request, timings, completion_tokens, reason)
        if self._observer.request_log is not None:
            text = None if self._text is None else "".join(self._text)
            self._observer.request_log.write(request, timings, completion_tokens, reason, ended_s, text)


def first_token_latency_s(timings: RequestTimings) -> float | None:
    """Return the TTFT in seconds: arrival to first token; None if there was none."""
    return None if timings.first_token_s is None else timings.first_token_s - timings.arrival_s
