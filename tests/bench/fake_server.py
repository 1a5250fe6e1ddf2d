"""An OpenAI-compatible server of a few lines, in a thread, whose models misbehave as their names say."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.support.quick_server import QuickServer
from tests.support.waiting import until

NAMES = {"base": None, "a": "base", "b": "base", "other": "another base"}


class FakeServer:
    """Answers every request with the word ``x`` as often as it is asked for.

    The models ``busy``, ``broken``, ``cut`` and ``silent`` refuse, fail in the middle, end early, or never answer.

    Args:
        wait_for: no answer begins before so many requests are there.

    Attributes:
        bodies: of all requests.
        keys: their ``Authorization``.
        tenants: their ``X-Tenant``.
        encodings: their ``Accept-Encoding``.
        most_at_once: requests that were being answered at the same time.
        url: where it listens, once it runs.
    """

    def __init__(self, wait_for: int = 1) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.tenants: list[str | None] = []
        self.encodings: list[str | None] = []
        self.most_at_once = 0
        self.url = ""
        self._wait_for = wait_for
        self._active = 0
        self._arrived = asyncio.Condition()

    def app(self) -> FastAPI:
        """The routes."""
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": name, "parent": parent} for name, parent in NAMES.items()]}

        @app.post("/v1/completions")
        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization"))
            self.tenants.append(request.headers.get("x-tenant"))
            self.encodings.append(request.headers.get("accept-encoding"))
            async with self._arrived:
                self._arrived.notify_all()
                await self._arrived.wait_for(lambda: len(self.bodies) >= self._wait_for)
            if body["model"] == "busy":
                return JSONResponse({"error": {"message": "come back later"}}, 429)
            if body["model"] == "silent":
                await until(request.is_disconnected, "the client hangs up")
            return StreamingResponse(self._answer(body, chat="messages" in body), media_type="text/event-stream")

        return app

    async def _answer(self, body: dict[str, Any], *, chat: bool) -> AsyncIterator[bytes]:
        self._active += 1
        self.most_at_once = max(self.most_at_once, self._active)
        try:
            for number in range(1, body["max_tokens"] + 1):
                await asyncio.sleep(0)
                yield _event(_choice("x", "length" if number == body["max_tokens"] else None, chat=chat))
                if body["model"] == "broken":
                    yield _event({"error": {"message": "out of luck"}})
                    return
                if body["model"] == "cut":
                    return
            usage = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": body["max_tokens"]}
            yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self._active -= 1


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _choice(text: str, finish_reason: str | None, *, chat: bool) -> dict[str, Any]:
    content = {"delta": {"content": text}} if chat else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": finish_reason, **content}]}


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Run it on a free port, in a thread of its own."""
    config = uvicorn.Config(server.app(), lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    uvicorn_server = QuickServer(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=uvicorn_server.run, args=([listener],))
        thread.start()
        try:
            yield server
        finally:
            uvicorn_server.stop()
            thread.join()
