"""Clients that hang up, and one that neither reads nor hangs up."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response
from starlette.types import Message

from lorikeet.http.streaming import CancelOnDisconnect, EventStream
from tests.support.api_server import Start
from tests.support.chat_requests import CHAT, body
from tests.support.metrics_pages import page, value
from tests.support.waiting import until


class _Client:
    """A client that stays until ``gone`` is set; what it has been sent."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


async def test_disconnect_cancels_the_work() -> None:
    client = _Client()
    ends = []

    async def make() -> Response:
        client.gone.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        raise AssertionError

    answer = CancelOnDisconnect(make, lambda: ends.append("closed"))
    await answer({"type": "http"}, client.receive, client.send)
    assert ends == ["cancelled", "closed"]
    assert client.status == 499


async def test_a_stream_to_a_client_that_hangs_up_ends() -> None:
    client = _Client()
    ends = []

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        client.gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def make() -> Response:
        return EventStream(events())

    await CancelOnDisconnect(make, lambda: ends.append("closed"))({"type": "http"}, client.receive, client.send)
    assert ends == ["cancelled", "closed"]
    assert [message.get("body") for message in client.sent] == [None, b"data: 1\n\n"]


async def test_timeout_of_the_work_is_not_treated_as_a_disconnect() -> None:
    client = _Client()
    ends = []

    async def make() -> Response:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await CancelOnDisconnect(make, lambda: ends.append("closed"))({"type": "http"}, client.receive, client.send)
    assert ends == ["closed"]
    assert client.sent == []


async def test_disconnect_after_the_answer_changes_nothing() -> None:
    client = _Client()
    ends = []

    async def make() -> Response:
        client.gone.set()
        return Response(b"whole")

    await CancelOnDisconnect(make, lambda: ends.append("closed"))({"type": "http"}, client.receive, client.send)
    await asyncio.sleep(0)  # for whoever watched
    assert ends == ["closed"]
    assert client.status == 200


async def test_client_that_stops_reading_is_dropped_after_the_timeout() -> None:
    closed = []
    sent = []
    never = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    async def make() -> Response:
        return EventStream(events(), until_s=asyncio.get_running_loop().time())

    async def receive() -> Message:
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await never.wait()

    await CancelOnDisconnect(make, lambda: closed.append(True))({"type": "http"}, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    assert closed == [True]


@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
async def test_the_sender_has_a_little_longer_than_the_request(start: Start, timeout_s: float) -> None:
    async with start(request_timeout_s=timeout_s) as server:
        server.engine.open.clear()
        asking = asyncio.create_task(server.http.post(CHAT, json=body()))
        await until(lambda: server.service.generations, "a generation is under way")
        (generation,) = server.service.generations
        now_s = asyncio.get_running_loop().time()
        if timeout_s:
            assert generation.read_until_s is not None
            assert generation.read_until_s > now_s + timeout_s
        else:
            assert generation.read_until_s is None
        server.engine.open.set()
        assert (await asking).status_code == 200


async def test_requests_that_the_server_ended_count_as_errors(start: Start) -> None:
    async with start(request_timeout_s=0.05) as server:
        server.engine.open.clear()
        assert (await server.http.post(CHAT, json=body())).status_code == 504
        samples = await page(server)
        assert value(samples, "vllm:request_success_total", finished_reason="error") == 1
        assert value(samples, "vllm:request_success_total", finished_reason="abort") == 0
