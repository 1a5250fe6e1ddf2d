"""Sends the requests of a workload to an OpenAI-compatible server when they are due, and times the answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple

import aiohttp
import msgspec

from lorikeet.bench.load_report import RequestResult
from lorikeet.http.answer_stream import AnswerStream, EventLines, error_text
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.workload import WorkloadRequest

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_KEEP_ALIVE_S = 4.0
"""Seconds for which idle connections are kept: less than the 5 s after which uvicorn, and so vLLM, closes them."""


class LoadTarget(msgspec.Struct, frozen=True):
    """Describes the server and the format of its requests.

    Attributes:
        url: address of the server.
        base: served name of the base model, for requests without an adapter.
        endpoint: one of ``ENDPOINTS``.
        api_key: sent as a bearer token; empty for none.
        adapter_as: format of ``model`` for an adapter, with ``{base}`` and ``{adapter}``.
        text: whether prompts are words instead of token ids. Chat always uses words.
        ignore_eos: whether to request answers of exactly the planned length.
        usage_per_event: whether to request token counts in every event.
        temperature: the sampling temperature.
        timeout_s: seconds after which a request counts as failed.
        tenant_header: header with a request's tenant, where the workload names one; empty for none.
    """

    url: str
    base: str
    endpoint: str = "completions"
    api_key: str = ""
    adapter_as: str = "{adapter}"
    text: bool = False
    ignore_eos: bool = True
    usage_per_event: bool = False
    temperature: float = 0.0
    timeout_s: float = 600.0
    tenant_header: str = ""

    def model(self, request: WorkloadRequest) -> str:
        """Return the ``model`` of ``request``."""
        if request.adapter is None:
            return self.base
        return self.adapter_as.format(base=self.base, adapter=request.adapter)

    def body(self, index: int, request: WorkloadRequest, prompts: Prompts) -> dict[str, Any]:
        """Return the body of ``request``, the ``index``-th of its workload."""
        body: dict[str, Any] = {
            "model": self.model(request),
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.usage_per_event:
            body["stream_options"]["continuous_usage_stats"] = True
        if self.ignore_eos:
            body["ignore_eos"] = True
        if request.priority:
            body["priority"] = request.priority
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompts.words(index, request)}]
        else:
            body["prompt"] = (prompts.words if self.text else prompts.token_ids)(index, request)
        return body

    def headers(self, request: WorkloadRequest) -> dict[str, str]:
        """Return the headers that are sent with ``request``."""
        # Compression is off, because pieces of the answer must be readable as they arrive.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.tenant_header and request.tenant:
            headers[self.tenant_header] = request.tenant
        return headers


class LoadDriveResult(NamedTuple):
    """Holds the result of one run of a workload.

    Attributes:
        exchanges: records of all requests, in the order of their arrival.
        cpu_share: CPU time of this client per second of the run. Near 1, the client was the bottleneck.
    """

    exchanges: list[RequestResult]
    cpu_share: float


def drive(
    requests: Sequence[WorkloadRequest],
    target: LoadTarget,
    prompts: Prompts,
    concurrency: int = 0,
    on_end: Callable[[RequestResult], None] = lambda exchange: None,
) -> LoadDriveResult:
    """Send every request when it is due, whether or not earlier ones have been answered.

    Args:
        requests: the workload.
        target: the server.
        prompts: maker of the prompts.
        concurrency: largest number of requests in flight; 0 for no limit. A due request waits for a free slot.
        on_end: called after each answer or failure.
    """
    in_order = sorted(requests, key=lambda request: request.arrival_s)
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    exchanges = asyncio.run(_drive(in_order, target, prompts, concurrency, on_end))
    return LoadDriveResult(exchanges, (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s))


async def _drive(
    requests: Sequence[WorkloadRequest],
    target: LoadTarget,
    prompts: Prompts,
    concurrency: int,
    on_end: Callable[[RequestResult], None],
) -> list[RequestResult]:
    gate: AbstractAsyncContextManager[Any] = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    tasks: list[asyncio.Task[RequestResult]] = []
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            trust_env=True,
        ) as http,
        asyncio.TaskGroup() as group,
    ):
        sender = _Sender(http, target, gate, on_end)
        for index, request in enumerate(requests):
            # The body is encoded before the request is due, so that encoding does not delay the request.
            body = msgspec.json.encode(target.body(index, request, prompts))
            await asyncio.sleep(max(0.0, request.arrival_s - sender.now_s()))
            tasks.append(group.create_task(sender.send(request, body)))
    return [task.result() for task in tasks]


class _Sender:
    """Sends single requests. Its clock starts when it is created."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        target: LoadTarget,
        gate: AbstractAsyncContextManager[Any],
        on_end: Callable[[RequestResult], None],
    ) -> None:
        self._http = http
        self._target = target
        self._gate = gate
        self._on_end = on_end
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._start_s

    async def send(self, request: WorkloadRequest, body: bytes) -> RequestResult:
        """Send one request and read its answer to the end. A failure is part of the record."""
        woken_s = self.now_s()
        async with self._gate:
            sent_s = self.now_s()
            answer = AnswerStream()
            failure = await self._stream(body, self._target.headers(request), answer)
            kind, message = failure if failure is not None else (None, "")
            exchange = RequestResult(
                adapter=request.adapter,
                due_s=request.arrival_s,
                sent_s=sent_s,
                ended_s=self.now_s(),
                held_s=sent_s - woken_s,
                token_times_s=tuple(answer.token_times_s),
                input_tokens=request.input_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
                output_tokens=answer.output_tokens,
                asked_tokens=request.output_tokens,
                cached_tokens=answer.cached_tokens,
                error=kind,
                message=message,
                slo=request.slo,
            )
        self._on_end(exchange)
        return exchange

    async def _stream(self, body: bytes, headers: dict[str, str], answer: AnswerStream) -> tuple[str, str] | None:
        """Read one answer. Return the kind and the message of an error."""
        url = self._target.url.rstrip("/") + ENDPOINTS[self._target.endpoint]
        try:
            async with (
                asyncio.timeout(self._target.timeout_s),
                self._http.post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return f"HTTP {response.status}", error_text(await response.read())
                events = EventLines()
                async for piece in response.content.iter_any():
                    now_s = self.now_s()
                    for data in events.feed(piece):
                        answer.take(data, now_s)
        except TimeoutError:
            return "timeout", f"no whole answer within {self._target.timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            return "ConnectError", str(error)
        except aiohttp.ClientError as error:
            return type(error).__name__, str(error)
        except msgspec.DecodeError as error:
            return "unreadable event", str(error)
        if answer.error is not None:
            return "error in the stream", answer.error
        return None if answer.finished else ("cut off", "the stream ended without an end mark")
