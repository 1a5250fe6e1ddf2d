"""Answers OpenAI's files and batches at a router: each file stays at one backend, which also runs its batches.

The router keeps no table that another router would lack. The backend of an id is found by a call to all backends, and
remembered. Lists are merged.
"""

import asyncio
import re
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lorikeet.core.ids import ReplicaId
from lorikeet.http.answer_stream import error_text
from lorikeet.http.errors import ApiError, bad_request, hide_paths
from lorikeet.http.threads import in_daemon_thread
from lorikeet.router.adapter_routes import json_response
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.apis import Reply
from lorikeet.router.backends import Backend, BackendRefused, Feature
from lorikeet.router.connections import BackendConnectionError, BackendResponse, FileBody, Headers, plain_reason
from lorikeet.router.proxy import RouterParts, is_withheld, passed_headers

MAX_FILE_BYTES = 2**30
"""Most bytes of an upload; backends have limits of their own, which are lower."""
FILES = "/v1/files"
BATCHES = "/v1/batches"
_UPLOADS = 4
"""Files that are received at the same time; others wait to be read."""
_IN_MEMORY_BYTES = 2**20
_MOST_PLACES = 100_000
"""Ids whose backends are remembered."""
_MOST_MODELS = 10_000
"""Models that the lines of a file may name."""
_LOOK_EVERY_S = 5.0
"""Seconds between two looks at a batch whose adapters stay loaded."""
_LARGEST_PAGE = {FILES: 10_000, BATCHES: 100}
_USUAL_PAGE = {FILES: 10_000, BATCHES: 20}
_ID = re.compile(r"[\w-]{1,200}", re.ASCII)
_NO_STORAGE = (501, 404)
"""Statuses of servers that keep no files: a Lorikeet whose folder another one has, and a server without the route."""
_ENDED = ("completed", "failed", "expired", "cancelled")
"""Statuses of batches that have ended."""
_TRY_NEXT = (429, 501, 503, 507)
"""Statuses after which another backend may store a file."""


class _NewBatch(msgspec.Struct):
    input_file_id: str


class _LineBody(msgspec.Struct, frozen=True):
    model: str = ""


class _Line(msgspec.Struct, frozen=True):
    body: _LineBody = _LineBody()


_LINE = msgspec.json.Decoder(_Line)


class BatchRoutes:
    """Answers the routes of files and batches.

    Args:
        parts: parts of the router.
        why_shared: why backends could not tell the files of different clients apart; empty if they can. Then the routes
            answer 501.
    """

    def __init__(self, parts: RouterParts, why_shared: str = "") -> None:
        self._parts = parts
        self._why_shared = why_shared
        self._uploads = asyncio.Semaphore(_UPLOADS)
        self._places: OrderedDict[str, ReplicaId] = OrderedDict()

    # --- routes --------------------------------------------------------------------------------------

    async def upload(self, http: Request) -> Response:
        """Store a file at the backend with the fewest requests, or at the next one that takes it."""
        keepers = self._keepers(http)
        async with self._uploads:
            with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as spool:
                size = 0
                async for piece in http.stream():
                    spool.write(piece)
                    size += len(piece)
                return await self._stored(http, keepers, FileBody(spool, size))

    async def _stored(self, http: Request, keepers: list[Backend], body: FileBody) -> Response:
        loads = self._parts.backend_router.loads()
        keepers.sort(key=lambda each: (not each.is_open, loads.get(each.replica, 0.0)))
        answer: Response | None = None
        for backend in keepers:
            try:
                reply = await backend.call("POST", FILES, passed_headers(http, backend), body)
            except BackendConnectionError as error:
                answer = answer or ApiError(502, f"{backend.replica}: {plain_reason(error)}.").response()
                continue
            if reply.status == 200:
                self._remember(_read_record(reply.text).id, backend)
            answer = _answer(reply)
            if reply.status not in _TRY_NEXT:
                break
        assert answer is not None
        return answer

    async def list_files(self, http: Request) -> Response:
        """Return a page of the files of all backends."""
        return await self._list(FILES, http)

    async def list_batches(self, http: Request) -> Response:
        """Return a page of the batches of all backends, the newest first."""
        return await self._list(BATCHES, http)

    async def of_file(self, http: Request) -> Response:
        """Return the metadata of a file, or delete it."""
        return await self._forward(http, FILES, http.path_params["file_id"])

    async def of_batch(self, http: Request) -> Response:
        """Return the state of a batch, or cancel it."""
        return await self._forward(http, BATCHES, http.path_params["batch_id"])

    async def content(self, http: Request) -> Response:
        """Send the content of a file as it arrives."""
        backend = await self._keeper(http, FILES, http.path_params["file_id"])
        reply = await self._open(backend, http.url.path, passed_headers(http, backend))
        if reply.status != 200:
            return _answer(Reply(reply.status, await reply.read()))
        answer = StreamingResponse(_pieces(reply))
        answer.raw_headers = [each for each in reply.headers if not is_withheld(each[0])]
        return answer

    async def create_batch(self, http: Request) -> Response:
        """Start a batch where its file is, after loading the adapters there that its lines name."""
        content = await http.body()
        try:
            file_id = msgspec.json.decode(content, type=_NewBatch).input_file_id
        except msgspec.DecodeError as error:
            raise bad_request(f"The body does not fit this route: {error}.") from error
        backend = await self._keeper(http, FILES, file_id, "input_file_id")
        headers = passed_headers(http, backend)
        adapters = self._adapters(await self._models(backend, file_id, headers))
        backend_router = self._parts.backend_router
        backend_router.keep_loaded(backend, adapters)
        batch_id = ""
        try:
            await asyncio.gather(*(backend_router.load(backend, adapter) for adapter in adapters))
            reply = await backend.call("POST", BATCHES, headers, content)
            batch_id = _read_record(reply.text).id if reply.status == 200 else ""
        except BackendRefused as error:
            raise ApiError(400 if error.status < 500 else 502, hide_paths(str(error))) from error
        except BackendConnectionError as error:
            raise ApiError(502, f"{backend.replica}: {plain_reason(error)}.") from error
        finally:
            if not batch_id:
                backend_router.keep_no_longer(backend, adapters)
        if batch_id:
            self._remember(batch_id, backend)
            self._parts.tasks.run(self._keep_until_ended(backend, batch_id, headers, adapters))
        return _answer(reply)

    # --- a batch's adapters --------------------------------------------------------------------------

    async def _models(self, backend: Backend, file_id: str, headers: Headers) -> set[str]:
        """Return the models that the lines of a file name.

        Raises:
            ApiError: the backend does not send the file, or it names too many models.
        """
        reply = await self._open(backend, f"{FILES}/{file_id}/content", headers)
        models = set[str]()
        rest = b""
        try:
            if reply.status != 200:
                raise ApiError(reply.status, error_text(await reply.read()), param="input_file_id")
            async for piece in _pieces(reply):
                lines, end, rest = (rest + piece).rpartition(b"\n")
                if end:
                    models |= await in_daemon_thread(partial(_named_in, lines))
                if len(models) > _MOST_MODELS:
                    raise bad_request(f"input_file_id: its lines name over {_MOST_MODELS} models.", "input_file_id")
        except BackendConnectionError as error:
            raise ApiError(502, f"{backend.replica}: {plain_reason(error)}.") from error
        finally:
            reply.close()
        return models | _named_in(rest)

    def _adapters(self, models: Collection[str]) -> list[RoutedAdapter]:
        """Return the adapters that lines need. Lines with unknown models get errors of their own from the backend.

        Raises:
            ApiError: 400, a line names a split, which the backend does not know.
        """
        catalog = self._parts.catalog
        adapters: dict[str, RoutedAdapter] = {}
        for model in sorted(models):
            if catalog.without_base(model) in catalog.splits:
                why = f"`{model[:200]}` is a split of this router, which backends do not know; name a version of it."
                raise bad_request(f"input_file_id: {why}", "input_file_id")
            with suppress(ApiError):
                target = catalog.find(model)
                found = target.mixed if target.adapter is None else (target.adapter, *target.mixed)
                adapters |= {adapter.name: adapter for adapter in found}
        return [*adapters.values()]

    async def _keep_until_ended(
        self, backend: Backend, batch_id: str, headers: Headers, adapters: list[RoutedAdapter]
    ) -> None:
        """Keep the adapters of a batch loaded until it has ended, or its backend is gone."""
        backend_router = self._parts.backend_router
        while adapters and backend.replica in backend_router.backends:
            await asyncio.sleep(_LOOK_EVERY_S)
            reply = await _asked(backend, f"{BATCHES}/{batch_id}", headers)
            if reply.status == 404 or (reply.status == 200 and _read_record(reply.text).status in _ENDED):
                break  # A restarted backend continues its batches, so any other answer decides nothing.
        backend_router.keep_no_longer(backend, adapters)

    # --- where files are -----------------------------------------------------------------------------

    def _keepers(self, http: Request) -> list[Backend]:
        """Return the backends that are up and keep files.

        Raises:
            ApiError: 501, backends keep none, or could not tell clients apart, or the router could not count the lines
                of a tenant's batch; 503, none that keeps files is up.
        """
        if http.state.access.key is not None:
            raise ApiError(
                501,
                "A router with --tenants does not count the lines of batches: send them to a Lorikeet that shares the "
                "registry, or start the router with --pass-client-keys instead.",
            )
        if self._why_shared:
            raise ApiError(501, self._why_shared)
        backends = [each for each in self._parts.backend_router.backends.values() if each.has(Feature.FILES)]
        if not backends and self._parts.backend_router.has_come.is_set():
            raise ApiError(501, f"No backend of this router {Feature.FILES}; Lorikeet does.")
        up = [each for each in backends if each.is_up]
        if not up:
            raise ApiError(503, f"No backend that {Feature.FILES} is up.", headers={"Retry-After": "1"})
        return up

    async def _keeper(self, http: Request, path: str, record_id: str, param: str = "") -> Backend:
        """Return the backend that has a file or batch of the sender.

        Raises:
            ApiError: 404, no backend has it; 503, the backend that has it, or may have it, is down.
        """
        keepers = self._keepers(http)
        backends = self._parts.backend_router.backends
        known = backends.get(self._places.get(record_id, ReplicaId("")))
        if known is not None:
            if not known.is_up:
                raise ApiError(503, f"{known.replica} keeps it, and is down.", headers={"Retry-After": "5"})
            return known
        kind = "file" if path == FILES else "batch"
        unknown = ApiError(404, f"There is no {kind} {record_id[:100]!r}.", param=param or f"{kind}_id")
        if _ID.fullmatch(record_id) is None:
            raise unknown
        target = f"{path}/{record_id}"
        replies = await asyncio.gather(*(_asked(each, target, passed_headers(http, each)) for each in keepers))
        away = [each.replica for each in backends.values() if each.has(Feature.FILES) and not each.is_up]
        for backend, reply in zip(keepers, replies, strict=True):
            if reply.status == 200:
                self._remember(record_id, backend)
                return backend
            if reply.status >= 500 and reply.status not in _NO_STORAGE:
                away.append(backend.replica)
        if away:
            why = f"No backend that answers has the {kind} {record_id[:100]!r}; {', '.join(away)} may have it."
            raise ApiError(503, why, headers={"Retry-After": "5"})
        refusal = next((reply for reply in replies if 400 <= reply.status < 500 and reply.status != 404), None)
        if refusal is not None:
            raise ApiError(refusal.status, error_text(refusal.text))
        raise unknown

    def _remember(self, record_id: str, backend: Backend) -> None:
        self._places[record_id] = backend.replica
        self._places.move_to_end(record_id)
        while len(self._places) > _MOST_PLACES:
            self._places.popitem(last=False)

    async def _forward(self, http: Request, path: str, record_id: str) -> Response:
        """Send the client's request about a file or batch to its backend."""
        backend = await self._keeper(http, path, record_id)
        try:
            reply = await backend.call(http.method, http.url.path, passed_headers(http, backend), await http.body())
        except BackendConnectionError as error:
            raise ApiError(502, f"{backend.replica}: {plain_reason(error)}.") from error
        if reply.status == 404 or (reply.status == 200 and http.method == "DELETE"):
            self._places.pop(record_id, None)
        return _answer(reply)

    async def _open(self, backend: Backend, path: str, headers: Headers) -> BackendResponse:
        try:
            return await backend.open("GET", path, headers, is_stream=True)
        except BackendConnectionError as error:
            raise ApiError(502, f"{backend.replica}: {plain_reason(error)}.") from error

    # --- lists ---------------------------------------------------------------------------------------

    async def _list(self, path: str, http: Request) -> Response:
        """Return a page of the merged lists of all backends. ``left_out`` names the backends that do not answer.

        Ids sort by time of creation, so lists are merged by ids.

        Raises:
            ApiError: the first refusal of a backend, such as that of a query that is not valid.
        """
        keepers = self._keepers(http)
        query = dict(http.query_params)
        after = query.pop("after", "")
        largest = _LARGEST_PAGE[path]
        limit = query.pop("limit", str(_USUAL_PAGE[path]))
        if not limit.isdecimal() or not 1 <= int(limit) <= largest:
            raise bad_request(f"limit: must be a number from 1 to {largest}.", "limit")
        most = int(limit)
        is_ascending = query.get("order") == "asc"

        async def all_of(backend: Backend) -> _Records | Reply:
            """Return the backend's records up to the end of the page."""
            found: list[dict[str, Any]] = []
            asked = {**query, "limit": str(largest) if after else limit}
            while True:
                reply = await _asked(backend, f"{path}?{urlencode(asked)}", passed_headers(http, backend))
                if reply.status != 200:
                    return reply
                page = msgspec.json.decode(reply.text)
                found += page["data"]
                beyond = sum((each["id"] > after) if is_ascending else (each["id"] < after) for each in found)
                if not page["has_more"] or not after or beyond > most:
                    return _Records(found, page["has_more"])
                asked["after"] = page["last_id"]

        lists = await asyncio.gather(*(all_of(backend) for backend in keepers))
        records: list[dict[str, Any]] = []
        has_more = False
        backends = self._parts.backend_router.backends.values()
        left_out = [str(each.replica) for each in backends if each.has(Feature.FILES) and not each.is_up]
        for backend, found in zip(keepers, lists, strict=True):
            if isinstance(found, _Records):
                records += found.records
                has_more = has_more or found.has_more
                for each in found.records:
                    self._remember(each["id"], backend)
            elif found.status >= 500 and found.status != 501:
                left_out.append(str(backend.replica))
            elif found.status not in _NO_STORAGE:
                return _answer(found)
        records.sort(key=lambda each: str(each["id"]), reverse=not is_ascending)
        begin = next((at + 1 for at, each in enumerate(records) if each["id"] == after), None) if after else 0
        if begin is None:
            raise bad_request(f"after: {after[:100]!r} is not in the list.", "after")
        page = records[begin : begin + most]
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": has_more or len(records) > begin + most,
                **({"left_out": left_out} if left_out else {}),
            }
        )


class _Records(NamedTuple):
    records: list[dict[str, Any]]
    has_more: bool


async def _asked(backend: Backend, path: str, headers: Headers) -> Reply:
    """Return a backend's answer to GET; 502 if it cannot be reached."""
    try:
        return await backend.call("GET", path, headers)
    except BackendConnectionError as error:
        return Reply(502, plain_reason(error).encode())


def _answer(reply: Reply) -> Response:
    return Response(reply.text, reply.status, media_type="application/json")


async def _pieces(reply: BackendResponse) -> AsyncIterator[bytes]:
    """Yield a body as it arrives. A body that breaks off ends the client's connection, too."""
    try:
        while piece := await reply.piece():
            yield piece
    finally:
        reply.close()


def _named_in(lines: bytes) -> set[str]:
    """Return the models that lines name; lines that are not requests name none."""
    models = set[str]()
    for line in lines.splitlines():
        with suppress(msgspec.DecodeError):
            models.add(_LINE.decode(line).body.model)
    return models - {""}


class _Record(msgspec.Struct):
    id: str = ""
    status: str = ""


def _read_record(text: bytes) -> _Record:
    """Return id and status in an answer; empty without them."""
    try:
        return msgspec.json.decode(text, type=_Record)
    except msgspec.DecodeError:
        return _Record()
