"""Clients that stream chat completions, and the server's gauges."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

USES = ("free", "cached", "kv", "adapter", "inflight")


@dataclass
class Stream:
    """What one client received.

    Attributes:
        status: HTTP status; None if no answer came.
        tokens: text and log probability of each token.
        gaps: by how much each token's log probability was the highest.
        text: all content.
        finish_reason: of the last chunk that had one.
        usage: of the usage chunk.
        done: whether the stream ended with its end mark.
        hung_up: whether the client went away before the end.
        error: what went wrong, from the server's event or the connection.
    """

    status: int | None = None
    tokens: list[tuple[str, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    hung_up: bool = False
    error: str | None = None

    def problem(self, tokens: int) -> str | None:
        """Return what is missing from a whole answer of ``tokens`` tokens, None if nothing is."""
        if self.error is not None:
            return self.error
        if self.status != 200 or not self.done:
            return f"status {self.status}, end mark {'seen' if self.done else 'missing'}"
        counted = (self.usage or {}).get("completion_tokens")
        if self.finish_reason != "length" or counted != tokens:
            return f"ended by {self.finish_reason} with {counted} tokens of {tokens}"
        return None


async def stream_chat(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    hang_up_after: int | None = None,
    hang_up_after_s: float | None = None,
    on_chunk: Callable[[Stream], None] = lambda stream: None,
) -> Stream:
    """Stream one answer.

    Args:
        http: with the server's address.
        body: of the request, ``stream`` and usage are added.
        hang_up_after: close the connection after so many chunks; 0 before the first.
        hang_up_after_s: close it after this time, whether or not an answer has begun.
        on_chunk: called after every chunk.
    """
    stream = Stream()
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with (
            asyncio.timeout(hang_up_after_s),
            http.stream("POST", "/v1/chat/completions", json=whole) as response,
        ):
            stream.status = response.status_code
            await _read(stream, response, hang_up_after, on_chunk)
    except TimeoutError:
        stream.hung_up = True
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


async def _read(
    stream: Stream, response: httpx.Response, hang_up_after: int | None, on_chunk: Callable[[Stream], None]
) -> None:
    chunks = 0
    rows = response.aiter_lines()
    while not stream.done and chunks != hang_up_after:
        row = await anext(rows, None)
        if row is None:
            return
        if row.startswith("data: "):
            _take(stream, row.removeprefix("data: "))
            on_chunk(stream)
            chunks += 1
    stream.hung_up = not stream.done


def _take(stream: Stream, data: str) -> None:
    if data == "[DONE]":
        stream.done = True
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = str(event["error"])
        return
    stream.usage = event.get("usage") or stream.usage
    for choice in event["choices"]:
        stream.text += choice["delta"].get("content") or ""
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
        for token in (choice.get("logprobs") or {}).get("content", ()):
            stream.tokens.append((token["token"], token["logprob"]))
            top = sorted((entry["logprob"] for entry in token["top_logprobs"]), reverse=True)
            stream.gaps.append(top[0] - top[1] if len(top) > 1 else 0.0)


async def together(url: str, calls: Sequence[Callable[[httpx.AsyncClient], Awaitable[Stream]]]) -> list[Stream]:
    """Run all calls at once, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        return list(await asyncio.gather(*(call(http) for call in calls)))


@dataclass(frozen=True)
class Gauges:
    """What ``/metrics`` says of all engines together: requests, reuse of KV, blocks by use, restarts."""

    running: int
    waiting: int
    prefix_hits_tokens: int
    blocks: dict[str, int]
    total: int
    restarts: int

    @property
    def referenced(self) -> int:
        """Blocks that something uses."""
        return self.blocks["kv"] + self.blocks["adapter"] + self.blocks["inflight"]

    @property
    def idle(self) -> bool:
        """Whether no request is left, no block is referenced and free + cached is the whole arena."""
        whole = self.blocks["free"] + self.blocks["cached"] == self.total
        return not self.running and not self.waiting and not self.referenced and whole


_COUNTED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_hits_total": "prefix_hits_tokens",
    "lorikeet:engine_restarts_total": "restarts",
}


def read_gauges(url: str) -> Gauges:
    """Scrape the server."""
    found, blocks = Counter[str](), Counter[str]()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            match sample.name:
                case "lorikeet:blocks":
                    blocks[sample.labels["use"]] += int(sample.value)
                case "vllm:cache_config_info":
                    found["total"] += int(sample.labels["num_gpu_blocks"])
                case name if name in _COUNTED:
                    found[_COUNTED[name]] += int(sample.value)
    return Gauges(blocks=dict(blocks), **found)


def wait_until_idle(url: str, within_s: float = 60.0) -> tuple[Gauges, float]:
    """Scrape until nothing is left, or the time is over; return the last gauges and the seconds that it took."""
    start_s = time.monotonic()
    while True:
        gauges, waited_s = read_gauges(url), time.monotonic() - start_s
        if gauges.idle or waited_s > within_s:
            return gauges, waited_s
        time.sleep(0.05)
