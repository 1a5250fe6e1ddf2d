"""Stores files and batches in a folder that one server owns.

``ID.json`` describes a file or a batch, ``ID.data`` is the content of a file. The output and error files of a running
batch have only data. See docs/decisions/batches.md.
"""

import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from lorikeet.config import BatchSettings
from lorikeet.core.text import format_size
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.logs import log
from lorikeet.serving.batches.lines import FileSummary, check_requests

_ID_BYTES = 16
_COPY_BYTES = 2**20
_LOCK = "lock"
_INCOMING = "incoming-"
_NOT_PLAIN = re.compile(r"[^\w.-]+")

RUNNING = ("in_progress", "cancelling", "finalizing")
"""Statuses of batches that have not ended."""


class StoredFile(msgspec.Struct, tag="file"):
    """A stored file.

    Attributes:
        id: the file's id.
        tenant: the owner.
        filename: the name at the upload.
        purpose: ``batch`` or ``batch_output``.
        bytes: size of the content.
        created_at, expires_at: Unix seconds.
        requests: number of requests in the file.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int
    requests: FileSummary | None = None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchJob(msgspec.Struct, tag="batch"):
    """A stored batch. Fields without a line below are the fields of OpenAI's batch object.

    Attributes:
        tenant: the batch's owner.
        total, completed, failed: numbers of requests. The last two are counted while the batch runs and stored at its
            end.
        output_file_id, error_file_id: ids that are chosen at the batch's creation. A file without lines is not stored.
        output_keep_s: seconds for which these files are kept.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    total: int
    output_file_id: str
    error_file_id: str
    output_keep_s: int
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "in_progress"
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether the batch has not ended."""
        return self.status in RUNNING

    @property
    def ended_at(self) -> int | None:
        """Unix time of the batch's end; None while the batch runs."""
        return self.completed_at or self.expired_at or self.cancelled_at

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("type", "tenant", "total", "completed", "failed", "output_keep_s"):
            told.pop(name, None)
        ended = not self.is_running
        return told | {
            "object": "batch",
            "errors": None,
            "failed_at": None,
            "output_file_id": self.output_file_id if ended and self.completed else None,
            "error_file_id": self.error_file_id if ended and self.failed else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }


_RECORD: msgspec.json.Decoder[StoredFile | BatchJob] = msgspec.json.Decoder(StoredFile | BatchJob)
_Record = TypeVar("_Record", StoredFile, BatchJob)


class StorageTaken(RuntimeError):
    """Another server owns the folder."""


class BatchStorage:
    """Stores the files and batches of all tenants. A tenant sees only its own.

    The storage opens on first use, or at a start if its folder exists. Methods that write may run in other threads.

    Args:
        settings: folder and limits.
        base: name of the base model, whose files are in a separate folder.
        max_line_bytes: longest line of a file of requests.
        now: returns the present Unix time in seconds.

    Attributes:
        settings: folder and limits.
    """

    def __init__(
        self, settings: BatchSettings, base: str, max_line_bytes: int, now: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.max_line_bytes = max_line_bytes
        self.folder = _folder(settings) / (_NOT_PLAIN.sub("_", base) or "_")
        self._now = now
        self._lock: int | None = None
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, BatchJob] = {}

    # --- the folder ----------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the folder contains files or batches of a server."""
        return self.folder.is_dir()

    def open(self) -> None:
        """Take the folder and read its files and batches; a second call does nothing.

        Raises:
            StorageTaken: another server owns the folder.
            OSError: the folder cannot be created or read.
        """
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StorageTaken(f"another server keeps its batches in {self.folder}") from error
        self._lock = lock
        for path in self.folder.iterdir():
            if path.name.startswith(_INCOMING):
                path.unlink(missing_ok=True)
            elif path.suffix == ".json":
                self._read(path)
        kept = self._files.keys() | {name for batch in self._running() for name in _outputs(batch)}
        for path in self.folder.glob("*.data"):
            if path.stem not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the folder, so that another server may use it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self, path: Path) -> None:
        try:
            record = _RECORD.decode(path.read_bytes())
        except (msgspec.DecodeError, OSError) as error:
            log.error("a file or batch cannot be read", file=path.name, error=str(error))
            return
        if isinstance(record, BatchJob):
            self._batches[record.id] = record
        else:
            self._files[record.id] = record

    def data_path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.folder / f"{file_id}.data"

    def _save(self, record: StoredFile | BatchJob) -> None:
        path = self.folder / f"{record.id}.json"
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    # --- files ---------------------------------------------------------------------------------------

    def check_space(self, size_bytes: int) -> None:
        """Delete expired files, then check that a new file of this size fits.

        Raises:
            ApiError: 413 or 507.
        """
        self.drop_old()
        settings = self.settings
        if size_bytes > settings.max_file_bytes:
            raise ApiError(413, f"file: larger than {format_size(settings.max_file_bytes)}.", param="file")
        if len(self._files) + len(self._batches) >= settings.max_files:
            raise _full(f"{settings.max_files} files and batches are stored")
        if self.used_bytes + size_bytes > settings.storage_bytes:
            raise _full(
                f"there is no space for {format_size(size_bytes)}: {format_size(settings.storage_bytes)} is the limit"
            )

    @property
    def used_bytes(self) -> int:
        """Bytes of all files and of the answers of running batches."""
        files = sum(file.bytes for file in list(self._files.values()))
        return files + sum(self._size(file_id) for batch in self._running() for file_id in _outputs(batch))

    def _size(self, file_id: str) -> int:
        try:
            return self.data_path(file_id).stat().st_size
        except OSError:
            return 0

    def add(self, tenant: str, filename: str, content: BinaryIO, keep_s: int | None) -> StoredFile:
        """Store a file of requests. A large file takes long.

        Raises:
            LineError: a line is not a valid request.
            ApiError: there is no space.
            OSError: the file cannot be written.
        """
        incoming = self.folder / f"{_INCOMING}{secrets.token_hex(_ID_BYTES)}"
        try:
            content.seek(0)
            requests = check_requests(content, self.settings.max_requests, self.max_line_bytes)
            content.seek(0)
            with incoming.open("wb") as target:
                while chunk := content.read(_COPY_BYTES):
                    target.write(chunk)
                target.flush()
                os.fsync(target.fileno())
                size_bytes = target.tell()
            self.check_space(size_bytes)
            record = self._new_file(self._new_id("file-"), tenant, filename, "batch", size_bytes, keep_s)
            record.requests = requests
            incoming.replace(self.data_path(record.id))
            self._save(record)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
        self._files[record.id] = record
        return record

    def _new_id(self, prefix: str) -> str:
        """Return a new id that nobody can guess. Ids sort by time of creation."""
        return f"{prefix}{time.time_ns():016x}{secrets.token_hex(_ID_BYTES)}"

    def _new_file(
        self, file_id: str, tenant: str, filename: str, purpose: str, size_bytes: int, keep_s: int | None
    ) -> StoredFile:
        now = int(self._now())
        most_s = int(self.settings.keep_s)
        expires_at = now + (most_s if keep_s is None else min(keep_s, most_s))
        return StoredFile(file_id, tenant, filename, purpose, size_bytes, now, expires_at)

    def file(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Return a file.

        Raises:
            ApiError: 404, the tenant has no file of this id.
        """
        return _found(self._files, tenant, file_id, "file", param)

    def files(self, tenant: str) -> list[StoredFile]:
        """Return all files of a tenant, the newest first."""
        return _newest_first(self._files.values(), tenant)

    def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404, the tenant has no file of this id; 409, a running batch needs the file.
        """
        record = self.file(tenant, file_id)
        for batch in self._running():
            if batch.input_file_id == file_id:
                raise ApiError(409, f"Batch {batch.id} needs the file; cancel it first.", param="file_id")
        self._delete_file(record)

    def _delete_file(self, record: StoredFile) -> None:
        (self.folder / f"{record.id}.json").unlink(missing_ok=True)
        self.data_path(record.id).unlink(missing_ok=True)
        self._files.pop(record.id, None)

    # --- batches -------------------------------------------------------------------------------------

    def create(
        self,
        tenant: str,
        source: StoredFile,
        endpoint: str,
        window: str,
        window_s: int,
        metadata: dict[str, str] | None,
        output_keep_s: int | None,
    ) -> BatchJob:
        """Store a new batch.

        Args:
            tenant: the batch's owner.
            source: the file of requests.
            endpoint: the route of all requests.
            window: the longest duration of the batch, as text from the client.
            window_s: the longest duration of the batch in seconds.
            metadata: the client's metadata.
            output_keep_s: seconds for which the output is kept; None for the default of the settings.

        Raises:
            ApiError: there is no space.
            OSError: the batch cannot be written.
        """
        assert source.requests is not None
        self.check_space(0)
        now = int(self._now())
        most_s = int(self.settings.keep_s)
        batch = BatchJob(
            id=self._new_id("batch_"),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=source.id,
            completion_window=window,
            total=source.requests.lines,
            output_file_id=self._new_id("file-"),
            error_file_id=self._new_id("file-"),
            output_keep_s=most_s if output_keep_s is None else min(output_keep_s, most_s),
            created_at=now,
            in_progress_at=now,
            expires_at=now + window_s,
            metadata=metadata,
        )
        self._save(batch)
        self._batches[batch.id] = batch
        return batch

    def batch(self, tenant: str, batch_id: str) -> BatchJob:
        """Return a batch.

        Raises:
            ApiError: 404, the tenant has no batch of this id.
        """
        return _found(self._batches, tenant, batch_id, "batch", "batch_id")

    def batches(self, tenant: str) -> list[BatchJob]:
        """Return all batches of a tenant, the newest first."""
        return _newest_first(self._batches.values(), tenant)

    def unfinished(self) -> list[BatchJob]:
        """Return the batches of all tenants that have not ended, the oldest first."""
        return sorted(self._running(), key=lambda batch: batch.id)

    def note(self, batch: BatchJob, status: str) -> None:
        """Store a new status of a batch, with the present time.

        Raises:
            OSError: the batch cannot be written.
        """
        batch.status = status
        if status != "in_progress":
            setattr(batch, f"{status}_at", int(self._now()))
        self._save(batch)

    def finish(self, batch: BatchJob, status: str) -> None:
        """Publish the output and error files of a batch, then store its end.

        Raises:
            OSError: a file cannot be written.
        """
        for file_id, name in zip(_outputs(batch), ("output", "error"), strict=True):
            path = self.data_path(file_id)
            size_bytes = self._size(file_id)
            if not size_bytes:
                path.unlink(missing_ok=True)
                continue
            with path.open("rb") as file:
                os.fsync(file.fileno())
            filename = f"{batch.id}_{name}.jsonl"
            record = self._new_file(file_id, batch.tenant, filename, "batch_output", size_bytes, batch.output_keep_s)
            self._save(record)
            self._files[file_id] = record
        self.note(batch, status)

    def _running(self) -> Iterable[BatchJob]:
        return [batch for batch in list(self._batches.values()) if batch.is_running]

    def drop_old(self) -> None:
        """Delete expired files and batches, except running batches and their files."""
        now = self._now()
        needed = {batch.input_file_id for batch in self._running()}
        for record in list(self._files.values()):
            if record.expires_at <= now and record.id not in needed:
                self._delete_file(record)
        for batch in list(self._batches.values()):
            if batch.ended_at is not None and batch.ended_at + self.settings.keep_s <= now:
                (self.folder / f"{batch.id}.json").unlink(missing_ok=True)
                del self._batches[batch.id]


def _outputs(batch: BatchJob) -> tuple[str, str]:
    return batch.output_file_id, batch.error_file_id


def _folder(settings: BatchSettings) -> Path:
    if settings.dir:
        return Path(settings.dir).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "lorikeet" / "batches"


def _found(records: dict[str, _Record], tenant: str, record_id: str, kind: str, param: str) -> _Record:
    record = records.get(record_id)
    if record is None or record.tenant != tenant:
        raise ApiError(404, f"There is no {kind} {record_id[:100]!r}.", param=param)
    return record


def _newest_first(records: Iterable[_Record], tenant: str) -> list[_Record]:
    mine = [record for record in list(records) if record.tenant == tenant]
    return sorted(mine, key=lambda record: record.id, reverse=True)


def _full(why: str) -> ApiError:
    return ApiError(507, f"The server's storage for batches is full: {why}. Delete files that are not needed.")


_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}


def window_s(text: str, most_s: float) -> int:
    """Return a completion window such as ``24h`` in seconds.

    Raises:
        ApiError: 400, the text is not a duration, or is longer than ``most_s``.
    """
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= most_s:
        raise bad_request(
            f"completion_window: {text[:20]!r} must be a time such as 24h, up to {most_s / 86400:g}d.",
            "completion_window",
        )
    return seconds
