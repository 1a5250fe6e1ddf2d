"""Serves OpenAI's files and batches: ``/v1/files`` and ``/v1/batches``."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes.info import UNSUPPORTED
from lorikeet.chat.protocol import Body
from lorikeet.http.errors import ApiError, bad_request, hide_paths
from lorikeet.http.logs import log
from lorikeet.http.model_routes import BATCHABLE_PATHS
from lorikeet.http.routes import BodySize, Callers, Route, Routes
from lorikeet.http.threads import in_daemon_thread
from lorikeet.serving.batches.lines import LineError
from lorikeet.serving.batches.storage import BatchJob, StoredFile, window_s

FORM_BYTES = 64 * 1024
"""Most bytes of a form beside its file."""
_LONGEST_FILENAME = 256
_MAX_FILES = 10_000
_MAX_BATCHES = 100
_LEAST_KEPT_S = 3600
_MOST_KEPT_S = 30 * 86400

ROUTES = Routes(note="OpenAI's: see [Batches](#batches)")
Order = Literal["asc", "desc"]


# --- files ----------------------------------------------------------------------------------------


@ROUTES.add(Route("POST /v1/files", Callers.KEYS, BodySize.FILE))
async def upload(http: Request, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Store a file of requests after checking each line."""
    storage = await service.batches.open()
    announced = http.headers.get("content-length", "")
    storage.check_space(max(0, int(announced) - FORM_BYTES) if announced.isdigit() else 0)
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "Only 'multipart/form-data' is allowed as Content-Type.")
    async with service.batches.uploads, http.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES) as form:
        file = form.get("file")
        purpose = form.get("purpose")
        if not isinstance(file, UploadFile):
            raise bad_request("file: must be a file.", "file")
        if purpose != "batch":
            raise bad_request("purpose: only batch is supported.", "purpose")
        keep_s = _form_keep_s(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        name = (file.filename or "file")[:_LONGEST_FILENAME]
        try:
            stored = await in_daemon_thread(partial(storage.add, sender.tenant, name, file.file, keep_s))
        except LineError as error:
            raise bad_request(f"file: {error}.", "file") from error
        except OSError as error:
            raise _not_stored(error) from error
    return stored.as_json()


@ROUTES.add(Route("GET /v1/files", Callers.KEYS))
async def list_files(
    service: ServiceDep,
    sender: SenderDep,
    purpose: str = "",
    limit: Annotated[int, Query(ge=1, le=_MAX_FILES)] = _MAX_FILES,
    after: str = "",
    order: Order = "desc",
) -> dict[str, Any]:
    """Return a page of files, sorted by time."""
    storage = await service.batches.open()
    storage.drop_old()
    files = [file for file in storage.files(sender.tenant) if purpose in ("", file.purpose)]
    return _page(files if order == "desc" else files[::-1], limit, after)


@ROUTES.add(Route("GET /v1/files/{file_id}", Callers.KEYS))
async def retrieve_file(file_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return the metadata of a file."""
    return (await service.batches.open()).file(sender.tenant, file_id).as_json()


@ROUTES.add(Route("GET /v1/files/{file_id}/content", Callers.KEYS))
async def file_content(file_id: str, service: ServiceDep, sender: SenderDep) -> Response:
    """Return the content of a file."""
    storage = await service.batches.open()
    file = storage.file(sender.tenant, file_id)
    return FileResponse(storage.data_path(file.id), media_type="application/jsonl", filename=file.filename)


@ROUTES.add(Route("DELETE /v1/files/{file_id}", Callers.KEYS))
async def delete_file(file_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Delete a file that no unfinished batch needs."""
    storage = await service.batches.open()
    async with service.batches.changes:
        storage.delete(sender.tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


# --- batches --------------------------------------------------------------------------------------


class ExpiresAfter(Body):
    """Time at which output expires, in a body."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=_LEAST_KEPT_S, le=_MOST_KEPT_S)]


class NewBatch(Body):
    """Body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


@ROUTES.add(Route("POST /v1/batches", Callers.KEYS))
async def create_batch(body: NewBatch, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Start a batch, which answers the requests of a file."""
    batches = service.batches
    storage = await batches.open()
    _check_endpoint(body.endpoint)
    seconds = window_s(body.completion_window, storage.settings.keep_s)
    keep_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    async with batches.changes:
        source = storage.file(sender.tenant, body.input_file_id, "input_file_id")
        if source.requests is None:
            raise bad_request("input_file_id: the file contains answers, not requests.", "input_file_id")
        for url, line in source.requests.urls.items():
            if url != body.endpoint:
                raise bad_request(
                    f"line {line} of the file has the url {url[:100]!r}, not {body.endpoint}.", "endpoint"
                )
        create = partial(
            storage.create,
            sender.tenant,
            source,
            body.endpoint,
            body.completion_window,
            seconds,
            body.metadata,
            keep_s,
        )
        try:
            batch = await in_daemon_thread(create)
        except OSError as error:
            raise _not_stored(error) from error
        batches.runner.add(batch)
    return batch.as_json()


@ROUTES.add(Route("GET /v1/batches", Callers.KEYS))
async def list_batches(
    service: ServiceDep,
    sender: SenderDep,
    limit: Annotated[int, Query(ge=1, le=_MAX_BATCHES)] = 20,
    after: str = "",
) -> dict[str, Any]:
    """Return a page of batches, the newest first."""
    storage = await service.batches.open()
    storage.drop_old()
    return _page(storage.batches(sender.tenant), limit, after)


@ROUTES.add(Route("GET /v1/batches/{batch_id}", Callers.KEYS))
async def retrieve_batch(batch_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return the state of a batch."""
    return (await service.batches.open()).batch(sender.tenant, batch_id).as_json()


@ROUTES.add(Route("POST /v1/batches/{batch_id}/cancel", Callers.KEYS))
async def cancel_batch(batch_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Stop a batch. Its answers stay; requests without an answer get errors."""
    batches = service.batches
    batch = (await batches.open()).batch(sender.tenant, batch_id)
    if not batch.is_running:
        raise ApiError(409, f"The batch is {batch.status} already.", param="batch_id")
    if batch.status != "cancelling":
        try:
            await batches.runner.cancel(batch)
        except OSError as error:
            raise _not_stored(error) from error
    return batch.as_json()


def _check_endpoint(endpoint: str) -> None:
    """Check that a batch can answer requests of a route.

    Raises:
        ApiError: 501, the error of an unsupported route, or 400, the route is not batchable.
    """
    if endpoint in UNSUPPORTED:
        raise ApiError(501, UNSUPPORTED[endpoint], param="endpoint")
    if endpoint not in BATCHABLE_PATHS:
        raise bad_request(f"endpoint: {endpoint[:100]!r} must be one of {', '.join(BATCHABLE_PATHS)}.", "endpoint")


def _form_keep_s(anchor: object, seconds: object) -> int | None:
    """Return the seconds of a form's ``expires_after``.

    Raises:
        ApiError: 400, the field is not valid.
    """
    if seconds is None:
        return None
    keep_s = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10 else 0
    if anchor not in (None, "created_at") or not _LEAST_KEPT_S <= keep_s <= _MOST_KEPT_S:
        allowed = f"seconds after created_at, from {_LEAST_KEPT_S} to {_MOST_KEPT_S}"
        raise bad_request(f"expires_after: must be {allowed}.", "expires_after")
    return keep_s


def _page(records: Sequence[StoredFile | BatchJob], limit: int, after: str) -> dict[str, Any]:
    """Return one page of a list.

    Raises:
        ApiError: 400, ``after`` is not in the list.
    """
    begin = next((at + 1 for at, record in enumerate(records) if record.id == after), None) if after else 0
    if begin is None:
        raise bad_request(f"after: {after[:100]!r} is not in the list.", "after")
    page = [record.as_json() for record in records[begin : begin + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(records) > begin + limit,
    }


def _not_stored(error: OSError) -> ApiError:
    log.error("a file or a batch could not be stored", error=str(error))
    return ApiError(507, f"The file or batch could not be stored: {hide_paths(error.strerror or str(error))}.")
