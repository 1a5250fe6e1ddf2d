"""A client that neither reads nor hangs up."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from lorikeet.server.disconnect import EventStream
from tests.server.conftest import Start
from tests.server.test_chat import CHAT, body
from tests.server.test_metrics import page, value


async def test_a_client_that_stops_reading_loses_its_place_after_the_time_out() -> None:
    closed, sent, never = [], [], asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    async def receive() -> Message:
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await never.wait()

    stream = EventStream(events(), lambda: closed.append(True), until_s=asyncio.get_running_loop().time())
    await stream({"type": "http"}, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    assert closed == [True]


@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
async def test_the_sender_has_a_little_longer_than_the_request(start: Start, timeout_s: float) -> None:
    async with start(request_timeout_s=timeout_s) as server:
        server.engine.open.clear()
        asking = asyncio.create_task(server.http.post(CHAT, json=body()))
        while not server.service.generations:
            await asyncio.sleep(0.005)
        (generation,) = server.service.generations
        now_s = asyncio.get_running_loop().time()
        if timeout_s:
            assert generation.sent_until_s is not None
            assert generation.sent_until_s > now_s + timeout_s
        else:
            assert generation.sent_until_s is None
        server.engine.open.set()
        assert (await asking).status_code == 200


async def test_requests_that_the_server_ended_count_as_errors(start: Start) -> None:
    async with start(request_timeout_s=0.05) as server:
        server.engine.open.clear()
        assert (await server.http.post(CHAT, json=body())).status_code == 504
        samples = await page(server)
        assert value(samples, "vllm:request_success_total", finished_reason="error") == 1
        assert value(samples, "vllm:request_success_total", finished_reason="abort") == 0
