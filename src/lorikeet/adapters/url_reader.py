"""Reads the files of an adapter from a URL, in a separate process that can be ended at any time.

A server that sends a byte now and then would block a thread for days, and file system packages cannot be interrupted
during a read. Started as ``python -m lorikeet.adapters.url_reader``: the first line of its standard input is a
:class:`UrlRead` as JSON, and its only output is a :class:`ReadOutcome`. The process ends with the process that started
it, since its input is closed then.
"""

import base64
import math
import os
import resource
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, cast
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import fsspec
import msgspec

from lorikeet.adapters.description import LENGTH_BYTES, MAX_HEADER_BYTES
from lorikeet.adapters.errors import AdapterError, AdapterNotFound, AdapterStoreError
from lorikeet.adapters.folder_hints import other_formats
from lorikeet.adapters.source_plugin import AdapterSource, source_of
from lorikeet.core.text import install_command

_CHUNK_BYTES = 4 * 2**20
_MAX_REDIRECTS = 5
_SOCKET_TIMEOUT_S = 60.0
_MAX_MEMORY_BYTES = 4 * 2**30
"""Address space of the process: a listing or an error page may be of any size."""


class UrlRead(msgspec.Struct, frozen=True):
    """The request of a reader of URLs.

    Attributes:
        source: URL of the folder.
        into: an existing folder for the files.
        max_bytes: maximum size of each file in bytes, by name.
        allowed: URL prefixes below which redirects may lead; None for anywhere.
        optional: names of files that may be missing.
    """

    source: str
    into: str
    max_bytes: dict[str, int]
    allowed: tuple[str, ...] | None
    optional: tuple[str, ...] = ()


class ReadOutcome(msgspec.Struct, frozen=True):
    """The outcome of a read: the kind of error (None without one), and its text."""

    error: Literal["failed", "not found", "store"] | None = None
    message: str = ""

    def check(self) -> None:
        """Raise the error of the outcome, if there is one.

        Raises:
            AdapterNotFound, AdapterStoreError, AdapterError: see :func:`read_url`.
        """
        match self.error:
            case "failed":
                raise AdapterError(self.message)
            case "not found":
                raise AdapterNotFound(self.message)
            case "store":
                raise AdapterStoreError(self.message)


def read_url(read: UrlRead, until_s: float = math.inf) -> None:
    """Copy the files of a URL into a folder.

    Args:
        read: the request.
        until_s: time on the monotonic clock at which to give up. It is checked between two reads.

    Raises:
        AdapterNotFound: the source or one of its files does not exist.
        AdapterStoreError: the copy cannot be written.
        AdapterError: the source cannot be read, redirects to a forbidden URL, or is too large or too slow.
    """
    source = read.source
    try:
        scheme = urlsplit(source).scheme.lower()
        if scheme in ("http", "https"):
            _read_http(read, until_s)
        elif scheme == "oci":  # fsspec means Oracle's storage by it
            from lorikeet.adapters.oci import OciSource  # an optional package

            _read_plugin(OciSource(), read, until_s)
        elif (plugin := source_of(scheme)) is not None:
            _read_plugin(plugin, read, until_s)
        else:
            _read_files(read, until_s)
    except AdapterError:
        raise
    except FileNotFoundError as error:
        status = _refusal(error)
        if status is not None:  # The Hub gives the same answer for private and for missing repositories.
            raise AdapterError(
                f"{source}: refused with status {status}: it is private or does not exist; the server may need "
                f"credentials for it (HF_TOKEN for hf://)"
            ) from error
        raise AdapterNotFound(f"{source}: there is no such folder or repository: {error}") from error
    except ImportError as error:  # fsspec imports each file system's package when it is first used
        hints = {"s3": install_command("s3"), "s3a": install_command("s3"), "oci": install_command("oci")}
        command = hints.get(urlsplit(source).scheme.lower())
        hint = f"run `{command}`" if command else str(error)
        raise AdapterError(f"{source}: a package is not installed: {hint}") from error
    except Exception as error:  # File systems raise other errors too, not only OSErrors.
        raise AdapterError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error


def copy_stream(stream: Any, to: Path, max_bytes: int, source: str, until_s: float = math.inf) -> int:
    """Copy a stream to a new file, flush the file to disk, and return its size.

    Raises:
        AdapterStoreError: the file cannot be written.
        AdapterError: the stream cannot be read, is larger than ``max_bytes`` or was not read by ``until_s``.
    """
    copied = 0
    try:
        to.parent.mkdir(exist_ok=True)  # Some files are in a subfolder.
        with to.open("wb") as target:
            while chunk := _read(stream, to.name, source):
                if not copied:
                    _check_start(to.name, chunk, max_bytes)
                copied += len(chunk)
                if copied > max_bytes:
                    raise AdapterError(f"{source}: {to.name} is larger than the allowed {max_bytes} bytes")
                if time.monotonic() > until_s:
                    raise AdapterError(f"{source}: not read within the time limit")
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise AdapterStoreError(f"{source}: {to.name} cannot be copied to the adapter store: {error}") from error
    return copied


def _check_start(name: str, start: bytes, max_bytes: int) -> None:
    """Refuse weights whose header is too long before copying them. The reader process checks everything else."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if name.endswith(".safetensors") and MAX_HEADER_BYTES < length <= max_bytes:
        raise AdapterError(f"{name}: its header has {length} bytes, at most {MAX_HEADER_BYTES} are read")


def check_below(source: str, url: str, allowed: tuple[str, ...]) -> None:
    """Check that an allowed URL is a prefix of ``url``, segment by segment.

    Args:
        source: the source, for the error message.
        url: the source's URL, or the URL of a redirect.
        allowed: the allowed prefixes.

    Raises:
        AdapterError: no prefix matches, or the URL contains parts that could circumvent the check.
    """
    parts = segments(url)
    if any(part in ("..", ".", "") for part in parts[1:]) or "::" in url or any(c in url for c in "\\%?#\0"):
        raise AdapterError(f"{source}: '..', empty parts, '::', escapes and queries are not allowed in a URL")
    for prefix in allowed:
        names = segments(prefix)
        if len(names) > 1 and parts[: len(names)] == names:
            # On the Hub everyone can open a pull request with arbitrary files, and its commits are revisions.
            if parts[0] == "hf" and any("@" in part for part in parts[len(names) :]):
                raise AdapterError(f"{source}: revisions are not allowed, unless an allowed source names them")
            return
    where = "" if url == source else f"redirects to {without_credentials(url)}, which is "
    shown = ", ".join(map(without_credentials, allowed)) or "none"
    raise AdapterError(f"{source}: {where}not below an allowed source (--allow-source; allowed: {shown})")


def segments(url: str) -> list[str]:
    """Return a URL's scheme in lower case, its host, and the parts of its path."""
    scheme, _, rest = url.partition("://")
    return [scheme.lower(), *rest.rstrip("/").split("/")] if rest.strip("/") else [scheme.lower()]


def without_credentials(url: str) -> str:
    """Return a URL without user and password or token."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    is_named = bool(separator) and "@" in host and scheme[:1].isalpha()
    return f"{scheme}://…@{host.rpartition('@')[2]}{slash}{path}" if is_named else url


def _read_files(read: UrlRead, until_s: float) -> None:
    """Read a URL with fsspec."""
    source = read.source
    # The instance cache is off, since a cached listing could hide a new upload.
    files, root = fsspec.core.url_to_fs(source, skip_instance_cache=True)
    for name, max_bytes in read.max_bytes.items():
        path = f"{root.rstrip('/')}/{name}"
        if not files.exists(path):
            if name in read.optional:
                continue
            listing = [Path(str(found)).name for found in files.ls(root, detail=False)]
            raise AdapterNotFound(f"{source}: {name} is not there{other_formats(listing)}")
        _check_size(source, name, cast("int | None", files.info(path).get("size")), max_bytes)
        with files.open(path, "rb") as stream:
            copy_stream(stream, Path(read.into) / name, max_bytes, source, until_s)


def _read_plugin(plugin: AdapterSource, read: UrlRead, until_s: float) -> None:
    """Read a URL with the plug-in for its scheme."""
    for name, max_bytes in read.max_bytes.items():
        try:
            stream = plugin.open(read.source, name)
        except FileNotFoundError as error:
            if name in read.optional:
                continue
            raise AdapterNotFound(f"{read.source}: {name} is not there: {error}") from error
        with stream:
            copy_stream(stream, Path(read.into) / name, max_bytes, read.source, until_s)


def _read_http(read: UrlRead, until_s: float) -> None:
    for name, max_bytes in read.max_bytes.items():
        try:
            with _open_http(read, name) as (stream, size):
                _check_size(read.source, name, size, max_bytes)
                copied = copy_stream(stream, Path(read.into) / name, max_bytes, read.source, until_s)
        except AdapterNotFound:
            if name not in read.optional:
                raise
            continue
        if size is not None and copied != size:
            raise AdapterError(f"{read.source}: {name} ended after {copied} of {size} bytes")


def _check_size(source: str, name: str, size: int | None, max_bytes: int) -> None:
    if size is not None and size > max_bytes:
        raise AdapterError(f"{source}: {name} has {size} bytes, at most {max_bytes} are allowed")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse to follow redirects automatically, since each must be checked first."""


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


@contextmanager
def _open_http(read: UrlRead, name: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """Open a file of the source, and yield the file with its announced size, if any. Every redirect is checked."""
    source = read.source
    first = urlsplit(read.source)
    url = f"{source.rstrip('/')}/{name}"
    for _ in range(_MAX_REDIRECTS + 1):
        parts = urlsplit(url)
        headers = {"Accept-Encoding": "identity", "User-Agent": "lorikeet"}
        if (parts.scheme, parts.netloc) == (first.scheme, first.netloc):
            headers |= _authorization(parts)
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        try:
            answer = _OPENER.open(urllib.request.Request(plain, headers=headers), timeout=_SOCKET_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                # Storage that forbids listing answers requests for missing files with a refusal.
                if error.code in (404, 410) or (error.code in (401, 403) and name in read.optional):
                    raise AdapterNotFound(f"{source}: {name} is not there (status {error.code})") from error
                target = error.headers.get("Location")
                if error.code not in (301, 302, 303, 307, 308) or target is None:
                    raise AdapterError(f"{source}: {name}: refused with status {error.code} {error.reason}") from error
            url = urljoin(url, target)
            _check_redirect(read, url)
        else:
            with answer:
                size = answer.headers.get("Content-Length", "")
                yield answer, int(size) if size.isdecimal() else None
            return
    raise AdapterError(f"{source}: {name}: more than {_MAX_REDIRECTS} redirects")


def _check_redirect(read: UrlRead, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise AdapterError(f"{read.source}: redirects to {without_credentials(url)}, which is not on the web")
    if read.allowed is not None:  # Servers may sign links, so queries are allowed.
        check_below(read.source, parts._replace(query="").geturl(), read.allowed)


def _authorization(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _refusal(error: BaseException | None) -> int | None:
    """Return the status 401 or 403 of the HTTP answer that caused an error; None if the cause was another."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            return int(status)
        error = error.__cause__ or error.__context__
    return None


def _read(stream: Any, name: str, source: str) -> bytes:
    try:
        return cast(bytes, stream.read(_CHUNK_BYTES))
    except OSError as error:
        raise AdapterError(f"{source}: {name} cannot be read: {error}") from error


def main() -> None:
    """Read the URL of the request in the first line of the input, and write the outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The process that started this one decides when it ends.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Packages may print to the standard output.
    read = msgspec.json.decode(sys.stdin.buffer.readline(), type=UrlRead)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome = ReadOutcome()
    try:
        read_url(read)
    except AdapterNotFound as error:
        outcome = ReadOutcome("not found", str(error))
    except AdapterStoreError as error:
        outcome = ReadOutcome("store", str(error))
    except AdapterError as error:
        outcome = ReadOutcome("failed", str(error)[:_MAX_MESSAGE])
    os.write(output, msgspec.json.encode(outcome))
    os._exit(0)  # The process ends without waiting for threads of packages.


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


_MAX_MESSAGE = 2000
"""Characters of an error; it is written to a pipe that is read at the end."""


if __name__ == "__main__":
    main()
