"""Answers the routes of training loops: sends pauses, sleep and resets to all backends, and ends requests."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.http.answer_stream import error_text
from lorikeet.http.errors import ApiError, bad_request, not_supported
from lorikeet.http.logs import log
from lorikeet.http.weight_pushes import push_refused
from lorikeet.router.adapter_routes import json_response, read_body
from lorikeet.router.apis import Reply
from lorikeet.router.backends import Backend
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.connections import BackendConnectionError, Headers, plain_reason
from lorikeet.router.held_calls import PAUSE, RESUME, SCOPE, SLEEP, WAKE, HeldCall, Query, with_query
from lorikeet.router.proxy import ProxyTask, RouterParts, passed_headers


class TrainingRoutes:
    """Answers the routes of training loops.

    Args:
        parts: parts of the router.
    """

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def pause(self, http: Request) -> Response:
        """Pause generation at all backends: all of it, or that of adapters or of a tenant."""
        return json_response(await self._hold(PAUSE, http) or {"status": "paused"})

    async def resume(self, http: Request) -> Response:
        """Resume what a pause with the same query has paused."""
        return json_response(await self._hold(RESUME, http) or {"status": "resumed"})

    async def is_paused(self, http: Request) -> Response:
        """Return whether all backends are paused, for the same query."""
        found = await self._fields("/is_paused", http)
        return json_response({"is_paused": all(each.get("is_paused") is True for each in found)})

    async def sleep(self, http: Request) -> Response:
        """Let all backends give back the memory of their engines."""
        return json_response(await self._hold(SLEEP, http) or {"status": "asleep"})

    async def wake_up(self, http: Request) -> Response:
        """Wake all backends."""
        return json_response(await self._hold(WAKE, http) or {"status": "awake"})

    async def is_sleeping(self, http: Request) -> Response:
        """Return whether a backend sleeps."""
        found = await self._fields("/is_sleeping", http)
        asleep = sorted({part for each in found for part in each.get("asleep", ())})
        return json_response({"is_sleeping": any(each.get("is_sleeping") for each in found), "asleep": asleep})

    async def reset_prefix_cache(self, http: Request) -> Response:
        """Let later requests reuse no present KV at any backend."""
        await self._all("/reset_prefix_cache", http)
        return Response()

    async def world_size(self, http: Request) -> Response:
        """Return the number of ranks of all backends."""
        found = await self._fields("/get_world_size", http)
        return json_response({"world_size": sum(int(each.get("world_size", 1)) for each in found)})

    async def server_info(self, http: Request) -> Response:
        """Return the settings of a backend, which trainers compare with their own."""
        return json_response((await self._fields(http.url.path, http))[0])

    async def finish_session(self, http: Request) -> Response:
        """Accept the end of a trajectory; a session holds nothing here but its place, which is forgotten by itself."""
        session = http.query_params.get("session_id")
        if session is None:
            raise bad_request("session_id: the query must name the session.", "session_id")
        return json_response({"status": "finished", "session_id": session})

    async def refuse_push(self, http: Request) -> Response:
        """Refuse to replace the weights of the base model."""
        raise push_refused()

    async def abort_requests(self, http: Request) -> Response:
        """End requests of the sender with the tokens that they have, wherever they run; ignore unknown ids."""
        body = await read_body(http, _Abort) if await http.body() else _Abort()
        wanted = {_ID_OF_ANSWER.sub("", each) for each in body.request_ids or ()}
        tenant = http.state.tenant

        def is_meant(task: ProxyTask) -> bool:
            return task.tenant == tenant and (not wanted or not wanted.isdisjoint(task.ids))

        found = [task for task in self._parts.running if is_meant(task)]
        aborted = await asyncio.gather(*(self._abort(task, http) for task in found))
        return json_response({"status": "aborted", "aborted": sum(aborted)})

    async def _abort(self, task: ProxyTask, http: Request) -> bool:
        """End a request at its backend; return whether it was sent there."""
        backend = task.backend
        if backend is None:
            return False
        content = msgspec.json.encode({"request_ids": [task.sent_id]})
        await self._call(backend, "POST", "/abort_requests", passed_headers(http, backend), content)
        return True

    async def _hold(self, path: str, http: Request) -> dict[str, Any] | None:
        """Send a call that stays in force; return the first backend's answer, or None if it has no fields."""
        query = tuple(_at_backends(http, self._parts.catalog))
        if any(name in SCOPE for name, _ in query):
            for backend in self._backends():
                if not backend.is_lorikeet:
                    raise not_supported(
                        f"{backend.replica} is no Lorikeet: it cannot pause single adapters or tenants.", query[0][0]
                    )
        replies = await self._all(path, http, query)
        found = [_fields_of(reply) for reply in replies]
        asleep = sorted({part for each in found for part in each.get("asleep", ())})
        headers = passed_headers(http, self._backends()[0])
        self._parts.held.note(HeldCall(path, query, headers), sleeps_on=bool(asleep))
        log.info("sent to all backends", path=path, query=dict(query))
        return found[0] | ({"asleep": asleep} if "asleep" in found[0] else {})

    async def _fields(self, path: str, http: Request) -> list[dict[str, Any]]:
        query = tuple(_at_backends(http, self._parts.catalog))
        return [_fields_of(reply) for reply in await self._all(path, http, query)]

    async def _all(self, path: str, http: Request, query: Query | None = None) -> list[Reply]:
        """Send the client's request to all backends that are up, and return their answers.

        Raises:
            ApiError: 503, no backend is up; otherwise the first refusal, which names its backend.
        """
        content = await http.body()
        target = with_query(path, tuple(http.query_params.multi_items()) if query is None else query)
        calls = (
            self._call(backend, http.method, target, passed_headers(http, backend), content)
            for backend in self._backends()
        )
        found = await asyncio.gather(*calls, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, Reply)]

    async def _call(self, backend: Backend, method: str, path: str, headers: Headers, content: bytes) -> Reply:
        """Send a request to a backend.

        Raises:
            ApiError: the backend refuses it, or cannot be reached; the message names the backend.
        """
        try:
            reply = await backend.call(method, path, headers, content)
        except BackendConnectionError as error:
            raise ApiError(502, f"{backend.replica}: {plain_reason(error)}.") from error
        if reply.status >= 400:
            raise ApiError(reply.status, f"{backend.replica}: {error_text(reply.text)}")
        return reply

    def _backends(self) -> list[Backend]:
        found = [backend for backend in self._parts.backend_router.backends.values() if backend.is_up]
        if not found:
            raise ApiError(503, "No backend is up.", headers={"Retry-After": "1"})
        return found


_ID_OF_ANSWER = re.compile(r"^(?:chatcmpl-|cmpl-|msg_|generate-|resp_)")


class _Abort(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: list[str] | None = None


def _at_backends(http: Request, catalog: ModelCatalog) -> Iterator[tuple[str, str]]:
    """Yield the query with the names that backends know: a split stands for its versions.

    Raises:
        ApiError: 404, an adapter is unknown.
    """
    for name, value in http.query_params.multi_items():
        if name != "adapter":
            yield name, value
            continue
        plain = catalog.without_base(value)
        split = catalog.splits.get(plain)
        versions = [catalog.find(plain).model] if split is None else [*split.versions, *split.shadow]
        for version in versions:
            yield name, version


def _fields_of(reply: Reply) -> dict[str, Any]:
    """Return the JSON object of an answer; empty for another answer, such as vLLM's, which have no body."""
    try:
        fields = msgspec.json.decode(reply.text)
    except msgspec.DecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
