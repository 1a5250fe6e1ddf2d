"""A backend that answers by script, over real HTTP: each next word is a function of model and text so far."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from zlib import crc32

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware

from lorikeet.http.model_routes import MODEL_ROUTES
from lorikeet.http.routes import Forwarding
from tests.support.quick_server import QuickServer

FORWARDED = [path for row in MODEL_ROUTES if row.forwarding is not Forwarding.BY_RESPONSE for path in row.paths]
"""Paths whose bodies name a model."""
LOOP_PATHS = (
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache"),
    *("/abort_requests", "/get_world_size", "/server_info"),
)
"""Paths that training loops call."""


def words(model: str, text: str, count: int) -> str:
    """Return what a model says after a text: the same whether it is asked at once or in parts."""
    said = ""
    for _ in range(count):
        said += f" w{crc32(f'{model}|{text}{said}'.encode()) % 997}"
    return said


def chat_text(messages: list[dict[str, str]], *, is_open: bool = False) -> str:
    """Return a conversation as text; ``is_open`` where the answer continues its last message."""
    text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
    return text if is_open else text + "[assistant]"


class ScriptedBackend:
    """Speaks as much of vLLM's API as a router needs.

    Attributes:
        adapters: name → path of those that are loaded.
        calls: adapters loaded and unloaded so far, as ``+name`` and ``-name``.
        bodies: of all completions and chat completions.
        request_ids, keys, pages: that came with them; pages as the headers by which browsers tell of one.
        open: while cleared, no word is said and no adapter loaded.
        dies_after: the connection of the next answer breaks after so many words.
        fails_with: status of all completions, with a message; None to answer.
        busy: so many of the next completions are answered with 429, and with ``busy_headers``.
        stream_error: the next stream ends with this event after one word.
        counts: whether it counts tokens along.
        holds_heads: no answer begins until ``go_on`` is set.
        redirects_to: where completions are redirected to; None to answer.
        computed: tokens, as its metrics count them; None to count none.
        pauses_at: no answer says more words than that until ``go_on`` is set.
        paused: answers that have come so far.
        waiting: requests of others, as it counts them.
        bad_paths: that it cannot load.
        lists: whether it lists the adapters that it has.
        health: status of ``/health``.
        sleeps: whether its health is that of a Lorikeet whose engine sleeps.
        is_occupied: its connections all answer requests, and ``/health`` gets no answer.
        word_s: seconds after each word of a stream.
        key: without which it does not tell its models; None for none.
        owner: who its models are owned by; a Lorikeet mixes adapters.
        stored: ids of answers of other routes.
        loop_calls: calls of training loops so far: path and query, and the body.
        loop_answers: answers to them by path; an empty object for others.
        loop_status: status of the answers.
        allows: whose web pages it says may use it; None for nobody.
        streaming: answers under way.
        hung_up: clients that left before the end.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.adapters: dict[str, str] = {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.request_ids: list[str] = []
        self.keys: list[str | None] = []
        self.pages: list[list[str]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.dies_after: int | None = None
        self.fails_with: int | None = None
        self.busy = 0
        self.busy_headers: dict[str, str] = {}
        self.stream_error: dict[str, Any] | None = None
        self.counts = True
        self.holds_heads = False
        self.redirects_to: str | None = None
        self.computed: int | None = None
        self.pauses_at: int | None = None
        self.paused = 0
        self.waiting: float | str = 0.0
        self.go_on = asyncio.Event()
        self.bad_paths: set[str] = set()
        self.lists = True
        self.health = 200
        self.sleeps = False
        self.is_occupied = False
        self.word_s = 0.0
        self.key: str | None = None
        self.owner = "vllm"
        self.allows: str | None = None
        self.stored: set[str] = set()
        self.loop_calls: list[tuple[str, bytes]] = []
        self.loop_answers: dict[str, dict[str, Any]] = {}
        self.loop_status = 200
        self.streaming = self.hung_up = 0
        self.port = 0
        self._server: QuickServer | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the port that it had before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), lifespan="off", log_level="critical", access_log=False)
        self._server = QuickServer(config)
        self._serving = asyncio.create_task(self._server._serve([listener]))
        await self._server.is_up.wait()

    async def kill(self) -> None:
        """Break all connections and listen no longer; what was loaded is lost."""
        if self._server is None or self._serving is None:
            return
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.stop(break_off=True)
        await self._serving
        self._server = None
        self.adapters.clear()

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.add_middleware(CORSMiddleware, allow_origins=("*",))  # vLLM's default
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/v1/load_lora_adapter", self._load, methods=["POST"])
        app.add_api_route("/v1/unload_lora_adapter", self._unload, methods=["POST"])
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self._complete, methods=["POST"])
        for path in FORWARDED:
            if not path.endswith("completions") and path != "/tokenize":
                app.add_api_route(path, self._answer, methods=["POST"])
        for path in ("/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items"):
            app.add_api_route(path, self._stored, methods=["GET", "POST", "DELETE"])
        for path in LOOP_PATHS:
            app.add_api_route(path, self._answer_loop, methods=["GET", "POST"])
        return app

    async def _answer_loop(self, http: Request) -> Response:
        self.loop_calls.append((f"{http.url.path}?{http.url.query}".rstrip("?"), await http.body()))
        self.keys.append(http.headers.get("authorization"))
        if self.loop_status >= 400:
            return _error(self.loop_status, "not now")
        return JSONResponse(self.loop_answers.get(http.url.path, {}))

    async def _answer(self, http: Request) -> Response:
        """Answer any route in its own words; a stream has three named events, and breaks after ``dies_after``."""
        body = await http.json()
        self.bodies.append(body)
        self.keys.append(http.headers.get("authorization"))
        if body["model"] != "base" and body["model"] not in self.adapters:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if (previous := body.get("previous_response_id")) and previous not in self.stored:
            return _error(404, f"{previous} is not here")
        answer = {"id": f"resp_{self.name}_{len(self.bodies)}", "from": self.name, "path": http.url.path}
        self.stored.add(answer["id"])
        usage = {"input_tokens": 3, "output_tokens": 4}
        if not body.get("stream"):
            return JSONResponse({**answer, "model": body["model"], "usage": usage})
        kind = "message" if http.url.path == "/v1/messages" else "response"
        last = "message_stop" if kind == "message" else "response.completed"
        dies_after = self.dies_after

        async def events() -> AsyncIterator[bytes]:
            for at, name in enumerate((f"{kind}.created", f"{kind}.delta", last)):
                if at == dies_after:
                    raise ConnectionAbortedError
                event: dict[str, Any] = {"type": name, "response": answer}
                if kind == "message" and at < 2:  # as Anthropic counts: the prompt at the start, the answer at the end
                    event |= [{"message": {"usage": usage | {"output_tokens": 1}}}, {"usage": {"output_tokens": 4}}][at]
                elif kind == "response" and name == last:
                    event["response"] = {**answer, "usage": usage}
                yield f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()
                await asyncio.sleep(0)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _stored(self, http: Request) -> Response:
        if http.path_params["id"] not in self.stored:
            return _error(404, "not here")
        asked = f"{http.method} {http.url.path}?{http.url.query}".rstrip("?")
        return JSONResponse({"from": self.name, "asked": asked}, headers={"X-Own": "1"})

    async def _health(self) -> Response:
        if self.is_occupied:
            await asyncio.Event().wait()
        if self.sleeps:
            return JSONResponse({"status": "asleep"}, self.health)
        return Response(status_code=self.health)

    async def _metrics(self) -> Response:
        lines = ["# HELP vllm:num_requests_running", f'vllm:num_requests_running{{engine="0"}} {self.streaming}.0']
        lines += [
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}',
            'vllm:num_requests_waiting_by_reason{reason="x"} 50.0',
        ]
        if self.computed is not None:
            lines.append(f'vllm:generation_tokens_total{{engine="0"}} {self.computed}.0')
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _models(self, http: Request) -> Any:
        if self.key is not None and http.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        base = {"id": "base", "object": "model", "root": "/models/base", "parent": None, "owned_by": self.owner}
        cards: list[dict[str, Any]] = [base]
        shown = self.adapters if self.lists else {}
        cards += [{"id": name, "root": path, "parent": "base"} for name, path in shown.items()]
        return {"object": "list", "data": cards}

    async def _tokenize(self, http: Request) -> dict[str, Any]:
        body = await http.json()
        assert body["add_special_tokens"] is False
        return {"tokens": list(body["prompt"].encode())}

    async def _load(self, http: Request) -> Response:
        body = await http.json()
        name, path = body["lora_name"], body["lora_path"]
        self.calls.append(f"+{name}")
        await self.open.wait()
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if path in self.bad_paths:
            return _error(400, f"no tensors in {path}")
        self.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, http: Request) -> Response:
        name = (await http.json())["lora_name"]
        self.calls.append(f"-{name}")
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return PlainTextResponse("Success")

    async def _complete(self, http: Request) -> Response:
        body = await http.json()
        self.bodies.append(body)
        self.request_ids.append(http.headers["x-request-id"])
        self.keys.append(http.headers.get("authorization"))
        self.pages.append([name for name in ("origin", "sec-fetch-site") if name in http.headers])
        if self.holds_heads:
            await self.go_on.wait()
        if self.redirects_to is not None:
            return Response(status_code=307, headers={"Location": self.redirects_to})
        if self.fails_with is not None:
            return _error(self.fails_with, "it is as it is")
        if self.busy:
            self.busy -= 1
            return _error(429, "busy", {"Retry-After": "0", **self.busy_headers})
        names = {part.partition("*")[0] for part in body["model"].split("+")}
        if body["model"] != "base" and not names <= self.adapters.keys():
            return _error(404, f"The model `{body['model']}` does not exist.")
        is_chat = http.url.path.endswith("chat/completions")
        if is_chat:
            text = chat_text(body["messages"], is_open=body.get("continue_final_message", False))
        else:
            (prompt,) = body["prompt"] if body["prompt"][:1] == ["once"] else [body["prompt"]]
            text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
        if body.get("stream"):
            return StreamingResponse(self._stream(http, body, text, is_chat), media_type="text/event-stream")
        await self.open.wait()
        said = words(body["model"], text, body["max_tokens"])
        content = {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        usage = {"prompt_tokens": len(text), "completion_tokens": body["max_tokens"]}
        headers = None if self.allows is None else {"Access-Control-Allow-Origin": self.allows}
        return JSONResponse({"id": "whole", "choices": [{"index": 0, **content}], "usage": usage}, headers=headers)

    async def _stream(self, http: Request, body: dict[str, Any], text: str, is_chat: bool) -> AsyncIterator[bytes]:
        head = {"id": f"{self.name}-{len(self.bodies)}", "created": len(self.bodies), "model": body["model"]}
        options = body.get("stream_options") or {}
        dies_after, self.dies_after = self.dies_after, None
        error, self.stream_error = self.stream_error, None
        said = ""

        def event(choices: list[dict[str, Any]], tokens: int) -> bytes:
            usage = {"prompt_tokens": len(text), "completion_tokens": tokens, "total_tokens": len(text) + tokens}
            counted = self.counts and (options.get("continuous_usage_stats") or not choices)
            value = {**head, "choices": choices, **({"usage": usage} if counted else {})}
            return b"data: " + json.dumps(value).encode() + b"\n\n"

        def choice(word: str, reason: str | None) -> dict[str, Any]:
            content = {"delta": {"content": word}} if is_chat else {"text": word}
            return {"index": 0, **content, "finish_reason": reason}

        self.streaming += 1
        try:
            if is_chat:
                yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
            for index in range(body["max_tokens"]):
                await self.open.wait()
                if index == self.pauses_at:
                    self.paused += 1
                    await self.go_on.wait()
                if index == dies_after:
                    raise ConnectionAbortedError
                if error is not None and index:
                    yield b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
                    return
                word = words(body["model"], text + said, 1)
                said += word
                yield event([choice(word, "length" if index + 1 == body["max_tokens"] else None)], index + 1)
                await asyncio.sleep(self.word_s)
            if options.get("include_usage"):
                yield event([], body["max_tokens"])
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.hung_up += 1
            raise
        finally:
            self.streaming -= 1


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "X", "param": None, "code": status}}, status, headers)
