"""OpenTelemetry traces as a collector gets them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lorikeet.core.events import Admitted, RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.tracing import RequestTraces, open_exporter
from tests.observe.tenant_requests import sequence
from tests.support.api_server import Running
from tests.support.chat_requests import CHAT, body

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[Span]]]:
    """A collector's address, and the spans that it got."""
    spans: list[Span] = []

    async def receive(request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(span for each in sent.resource_spans for scope in each.scope_spans for span in scope.spans)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1/traces", spans
    finally:
        await runner.cleanup()


def attributes(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_requests_parts_are_spans_of_its_clients_trace(server: Running) -> None:
    async with collector() as (url, spans):
        traces = server.service.observer.traces = RequestTraces("base", open_exporter(url))
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "traced"}
        await server.http.post(CHAT, json=body(model="formal"), headers=headers)
        page = await server.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        await server.http.post(CHAT, json=body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        server.engine.refusal = "it is broken"
        await server.http.post(CHAT, json=body())
        await asyncio.to_thread(traces.close)
    whole, broken = (span for span in spans if span.name.startswith("generate "))
    assert (whole.name, whole.trace_id.hex(), whole.parent_span_id.hex()) == ("generate formal", TRACE, PARENT)
    said = attributes(whole)
    assert said["gen_ai.request.model"] == "formal"
    assert str(said["lorikeet.request_id"]).startswith("traced-")
    assert said["gen_ai.usage.input_tokens"] == len(server.engine.submitted[0].prompt_token_ids)
    parts = sorted(
        (span for span in spans if span.parent_span_id == whole.span_id), key=lambda span: span.start_time_unix_nano
    )
    assert {span.name for span in parts} <= {"queue", "adapter", "kv", "prefill", "decode"}
    assert {"queue", "decode"} <= {span.name for span in parts}
    assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano
    for before, after in pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert broken.status.code == Status.STATUS_CODE_ERROR
    assert "it is broken" in broken.status.message
    assert broken.trace_id.hex() != TRACE
    assert f'trace_id="{TRACE}"' in page.text


def test_a_request_aborted_while_its_adapter_is_in_transfer_has_no_prefill() -> None:
    exporter = InMemorySpanExporter()
    traces = RequestTraces("base", exporter)
    timings = RequestTimings(10.0)
    timings.apply(Admitted(RequestId("r"), 11.0, 0, waits_for_adapter=True))
    traces.traced(EndedRequest(sequence("r", "formal"), timings, 0, "abort", 16.0))
    traces.close()
    spans = exporter.get_finished_spans()
    took_s = {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in spans}
    assert took_s == pytest.approx({"generate formal": 6.0, "queue": 1.0, "adapter": 5.0}, abs=1e-3)
