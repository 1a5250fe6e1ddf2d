"""Sends OpenTelemetry traces by OTLP over HTTP: a span for each request, with its parts as children.

Spans are made at the end of a request, from the same times as the metrics. A client's trace continues: the header
``traceparent`` names the parent span (W3C Trace Context). Attributes follow the conventions for generative AI. Only
``--otlp-traces-endpoint`` imports this module.
"""

import time
from dataclasses import replace

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lorikeet import __version__
from lorikeet.core.events import RequestTimings
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.waits import PARTS, cause_of, parts_of


class RequestTraces:
    """Makes the spans of requests.

    Args:
        model_name: the base model's name.
        exporter: sends the spans; see :func:`open_exporter`.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        self._model_name = model_name
        resource = Resource.create({"service.name": "lorikeet", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lorikeet")
        self._headers = TraceContextTextMapPropagator()
        self._unix_minus_monotonic_s = time.time() - time.monotonic()

    def traced(self, ended: EndedRequest) -> EndedRequest:
        """Make the spans of an ended request, and return the request with the id of its trace.

        The id is empty if the client or the sampler wants no trace.
        """
        request = ended.request
        timings = ended.timings
        headers = ended.trace_headers
        parent = self._headers.extract({"traceparent": headers.parent, "tracestate": headers.state})
        model = ended.adapter or self._model_name
        span = self._tracer.start_span(
            f"generate {model}",
            parent,
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": model,
                "gen_ai.response.finish_reasons": [ended.reason],
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.output_tokens": ended.completion_tokens,
                "lorikeet.request_id": request.request_id,
                "lorikeet.cached_tokens": timings.cached_tokens,
                "lorikeet.preemptions": timings.preemptions,
            },
            start_time=self._unix_ns(timings.arrival_s),
        )
        if ended.error:
            span.set_status(Status(StatusCode.ERROR, ended.error))
        if span.is_recording():
            here = set_span_in_context(span)
            for name, begin_s, end_s in _parts(timings, ended.ended_s):
                why = {"lorikeet.cause": cause_of(timings)} if name == "queue" else {}
                child = self._tracer.start_span(name, here, attributes=why, start_time=self._unix_ns(begin_s))
                child.end(self._unix_ns(end_s))
        span.end(self._unix_ns(ended.ended_s))
        context = span.get_span_context()
        return replace(ended, trace_id=format_trace_id(context.trace_id) if context.trace_flags.sampled else "")

    def close(self) -> None:
        """Send all queued spans."""
        self._provider.shutdown()

    def _unix_ns(self, at_s: float) -> int:
        return round((at_s + self._unix_minus_monotonic_s) * 1e9)


def open_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter that sends spans to an address such as ``http://collector:4318/v1/traces``."""
    return OTLPSpanExporter(endpoint=endpoint)


def _parts(timings: RequestTimings, ended_s: float) -> list[tuple[str, float, float]]:
    """Return the parts of a request that it has reached and that took time, with their begin and end."""
    parts = []
    begin_s = timings.arrival_s
    for name, part_s in zip(PARTS, parts_of(timings, ended_s), strict=True):
        parts.append((name, begin_s, begin_s + part_s))
        begin_s += part_s
    if timings.first_token_s is not None:
        parts.append(("decode", begin_s, ended_s))
    return [(name, begin_s, end_s) for name, begin_s, end_s in parts if end_s > begin_s]
