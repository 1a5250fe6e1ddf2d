"""Servers that speak as much of the APIs of SGLang, llama.cpp, Ollama, TGI, LoRAX and others as a router needs.

Each refuses what the real one refuses, and answers with what decides about an answer: base and adapter.
"""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.quick_server import serving


class OtherServer:
    """A server of one base model.

    Attributes:
        bodies: of all completions.
        loaded: adapters that it has, by name.
        page: of ``/metrics``; empty for none.
    """

    owner = "someone"
    health = "/health"
    base = "base"

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.loaded: dict[str, Any] = {}
        self.page = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        config = uvicorn.Config(Starlette(routes=self.routes()), lifespan="off", log_level="critical", access_log=False)
        async with serving(config, break_off=True) as url:
            yield url

    def routes(self) -> list[Route]:
        return [
            Route(self.health, self._ok),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]

    async def _ok(self, http: Request) -> Response:
        return JSONResponse({})

    async def _metrics(self, http: Request) -> Response:
        return PlainTextResponse(self.page, 200 if self.page else 404)

    def models(self) -> list[str]:
        return [self.base]

    async def _models(self, http: Request) -> Response:
        cards = [{"id": name, "object": "model", "owned_by": self.owner} for name in self.models()]
        return JSONResponse({"object": "list", "data": cards})

    def said(self, body: dict[str, Any]) -> str | None:
        """Return what decides about an answer; None if there is no such model."""
        raise NotImplementedError

    async def _complete(self, http: Request) -> Response:
        body = await http.json()
        self.bodies.append(body)
        if (said := self.said(body)) is None:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        if not body.get("stream"):
            return JSONResponse({"choices": [{"index": 0, "text": said, "finish_reason": "length"}]})
        chunk = {"choices": [{"index": 0, "text": said, "finish_reason": "length"}]}
        return StreamingResponse(iter([f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]))


class Sglang(OtherServer):
    owner = "sglang"
    most = 100
    """Adapters that it takes."""

    def routes(self) -> list[Route]:
        load, unload = "/load_lora_adapter", "/unload_lora_adapter"
        post = ["POST"]
        return [*super().routes(), Route(load, self._load, methods=post), Route(unload, self._unload, methods=post)]

    async def _load(self, http: Request) -> Response:
        body = await http.json()
        if body["lora_path"].endswith("bad"):
            return JSONResponse({"success": False, "error_message": "rank 64 exceeds max_lora_rank"}, 400)
        if len(self.loaded) >= self.most:
            return JSONResponse({"success": False, "error_message": "max_loaded_loras"}, 400)
        self.loaded[body["lora_name"]] = body["lora_path"]
        return JSONResponse({"success": True, "loaded_adapters": self.loaded})

    async def _unload(self, http: Request) -> Response:
        del self.loaded[(await http.json())["lora_name"]]
        return JSONResponse({"success": True, "loaded_adapters": self.loaded})

    def said(self, body: dict[str, Any]) -> str | None:
        adapter = body.get("lora_path")
        is_known = body["model"] == self.base and (adapter is None or adapter in self.loaded)
        return f"{self.base}+{adapter}" if is_known else None


class LlamaCpp(OtherServer):
    """Started with ``--lora /adapters/pirate.gguf --lora /adapters/formal.gguf``."""

    owner = "llamacpp"
    base = "/models/base.gguf"
    files = ("/adapters/pirate.gguf", "/adapters/formal.gguf")

    def routes(self) -> list[Route]:
        return [*super().routes(), Route("/lora-adapters", self._list)]

    async def _list(self, http: Request) -> Response:
        listed: list[dict[str, Any]] = [{"id": at, "path": path, "scale": 0.0} for at, path in enumerate(self.files)]
        return JSONResponse(listed)

    def said(self, body: dict[str, Any]) -> str | None:
        scales = {each["id"]: each["scale"] for each in body["lora"]}
        # Adapters that are not listed are off, but an empty list is no list, and all are on from the start.
        chosen = [each.split("/")[-1] for at, each in enumerate(self.files) if scales.get(at, 0.0 if scales else 1.0)]
        return "+".join(["base", *(chosen or ["None"])]).removesuffix(".gguf")


class Ollama(OtherServer):
    owner = "library"
    health = "/api/version"
    base = "base:latest"

    def __init__(self) -> None:
        super().__init__()
        self.blobs: set[str] = set()

    def routes(self) -> list[Route]:
        return [
            *super().routes(),
            Route("/api/blobs/{digest}", self._blob, methods=["HEAD", "POST"]),
            Route("/api/create", self._create, methods=["POST"]),
            Route("/api/delete", self._delete, methods=["DELETE"]),
        ]

    async def _blob(self, http: Request) -> Response:
        digest = http.path_params["digest"]
        if http.method == "HEAD":
            return Response(status_code=200 if digest in self.blobs else 404)
        if digest != "sha256:" + hashlib.sha256(await http.body()).hexdigest():
            return Response(status_code=400)
        self.blobs.add(digest)
        return Response(status_code=201)

    async def _create(self, http: Request) -> Response:
        body = await http.json()
        if not set(body["adapters"].values()) <= self.blobs or body["stream"] is not False:
            return JSONResponse({"error": "no such blob"}, 400)
        self.loaded[body["model"]] = (body["from"], sorted(body["adapters"]))
        return JSONResponse({"status": "success"})

    async def _delete(self, http: Request) -> Response:
        del self.loaded[(await http.json())["model"]]
        return Response()

    def models(self) -> list[str]:
        return [self.base, *(f"{name}:latest" for name in self.loaded)]

    def said(self, body: dict[str, Any]) -> str | None:
        if body["model"] == self.base:
            return "base+None"
        return f"base+{body['model']}" if body["model"] in self.loaded else None


class Tgi(OtherServer):
    """Started with ``LORA_ADAPTERS=pirate,formal``."""

    def said(self, body: dict[str, Any]) -> str | None:
        named = {"tgi": "base+None", "pirate": "base+pirate", "formal": "base+formal"}
        return named.get(body["model"])


class Lorax(OtherServer):
    """Takes any source as a model, and lists no models at all."""

    def routes(self) -> list[Route]:
        return [each for each in super().routes() if each.path != "/v1/models"]

    def said(self, body: dict[str, Any]) -> str | None:
        return "base+" + ("None" if body["model"] == self.base else body["model"].split("/")[-1])


class Listed(OtherServer):
    """Any other one, which has adapters as models from its start."""

    def models(self) -> list[str]:
        return [self.base, "pirate", "formal"]

    def said(self, body: dict[str, Any]) -> str | None:
        return {"base": "base+None"}.get(body["model"], f"base+{body['model']}")
