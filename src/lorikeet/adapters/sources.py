"""Fetches the files of an adapter from a source: a folder, or any URL that fsspec reads.

At run time everyone with an admin key may name a source, so it must be inside the allowed folder or below an allowed
URL. Sources on the command line are trusted, since the user who starts the server can read its files anyway.
"""

import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from lorikeet.adapters.description import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError, AdapterNotFound, AdapterStoreError
from lorikeet.adapters.peft_config import MAX_CONFIG_BYTES
from lorikeet.adapters.reader import list_shards
from lorikeet.config import AdapterSettings
from lorikeet.core.extras import install_command

_CHUNK_BYTES = 4 * 2**20
_URL_LIMIT_S = 600.0
"""Time limit for all files of a URL; a very slow server would otherwise block a thread and the adapter's name."""
_CREDENTIALS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/]*@")
_LOCAL_SCHEMES = ("file", "local")


def fetch(source: str, settings: AdapterSettings, into: Path, trusted: bool = False) -> None:
    """Copy ``adapter_config.json`` and ``adapter_model.safetensors`` from ``source`` into the folder ``into``.

    If the weights are sharded, their index and the files that it names are copied instead.

    Args:
        source: a folder (relative to ``adapter_dir``, or to the working directory if trusted) or a URL
            (``hf://org/repo``, ``s3://bucket/folder``, ...).
        settings: the allowed folder and URLs, and the size limit.
        into: an existing folder.
        trusted: whether the source comes from the command line; then only the size limit applies.

    Raises:
        AdapterNotFound: the source or one of its files does not exist.
        AdapterStoreError: the copy cannot be written.
        AdapterError: the source is not allowed, too large or cannot be read.
    """
    scheme, separator, rest = source.partition("://")
    if not separator or scheme.lower() in _LOCAL_SCHEMES:
        folder = _local_folder(rest if separator else source, settings, trusted)
        allowed = None if trusted else _allowed_folder(settings)

        def copy(name: str, limit_bytes: int) -> None:
            with _open_local(folder, name, allowed) as stream:
                _copy(stream, into / name, limit_bytes, source)

        _copy_all(copy, into, source, settings.max_bytes)
        return
    if not trusted:
        _check_allowed(source, settings.allowed_sources)
    _fetch_url(source, into, settings.max_bytes)


def _copy_all(copy: Callable[[str, int], None], into: Path, source: str, max_bytes: int) -> None:
    """Copy the files of an adapter.

    Args:
        copy: copies the file of a name into ``into``, if it is not larger than so many bytes.
        into: see ``fetch``.
        source: see ``fetch``.
        max_bytes: limit of all weights files together.
    """
    copy(CONFIG_FILE, MAX_CONFIG_BYTES)
    try:
        copy(WEIGHTS_FILE, max_bytes)
    except AdapterNotFound:
        try:
            copy(INDEX_FILE, MAX_CONFIG_BYTES)
        except AdapterNotFound:
            pass
        else:
            _copy_shards(copy, into, source, max_bytes)
            return
        raise


def _copy_shards(copy: Callable[[str, int], None], into: Path, source: str, max_bytes: int) -> None:
    try:
        names = list_shards(into)
    except AdapterStoreError:
        raise
    except AdapterError as error:
        raise AdapterError(f"{source}: {error}") from error
    left_bytes = max_bytes
    for name in names:
        copy(name, left_bytes)
        left_bytes -= (into / name).stat().st_size


def without_credentials(source: str) -> str:
    """Return a source without credentials (user and password, or a token) in its URL."""
    return _CREDENTIALS.sub(r"\1…@", source)


def _local_folder(path: str, settings: AdapterSettings, trusted: bool) -> Path:
    if trusted:
        try:
            return Path(path).expanduser()
        except RuntimeError as error:  # the home folder of an unknown user
            raise AdapterError(f"{path}: {error}") from error
    if not settings.adapter_dir:
        raise AdapterError(f"{path}: local folders are not allowed; start the server with --adapter-dir")
    if ".." in Path(path).parts or "\0" in path:
        raise AdapterError(f"{path}: '..' is not allowed in a path")
    allowed = _allowed_folder(settings)
    try:
        folder = (allowed / path).resolve()
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    if not folder.is_relative_to(allowed):
        raise AdapterError(f"{path}: outside the folder from which adapters may be loaded (--adapter-dir)")
    return folder


def _allowed_folder(settings: AdapterSettings) -> Path:
    try:
        return Path(settings.adapter_dir).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"--adapter-dir {settings.adapter_dir}: {error}") from error


@contextmanager
def _open_local(folder: Path, name: str, allowed: Path | None) -> Iterator[BinaryIO]:
    """Open a regular file; symbolic links must not lead out of ``allowed``, a resolved folder (None: anywhere)."""
    try:
        file = (folder / name).resolve(strict=True)
        if allowed is not None and not file.is_relative_to(allowed):
            raise AdapterError(f"{folder / name}: a link that leads outside the allowed folder")
        # O_NONBLOCK: opening a named pipe must not block before fstat can detect it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise AdapterNotFound(f"{folder}: there is no such folder (on the Hub it is hf://org/repo)") from error
        raise AdapterNotFound(f"{folder}: {name} is not there{_other_formats(os.listdir(folder))}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        raise AdapterError(f"{folder / name}: cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterError(f"{folder / name}: not a regular file")
        # A parent folder may have become a link since it was resolved, so check the path of the opened file.
        if allowed is not None and not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(allowed):
            raise AdapterError(f"{folder / name}: became a link that leads outside while it was opened")
        with open(descriptor, "rb", closefd=False) as stream:
            yield stream
    finally:
        os.close(descriptor)


def _check_allowed(source: str, allowed_sources: tuple[str, ...]) -> None:
    """Check that an allowed URL is a prefix of ``source``, segment by segment.

    Raises:
        AdapterError: none is, or the URL contains parts that could circumvent the check.
    """
    segments = _segments(source)
    if any(part in ("..", ".", "") for part in segments[1:]) or "::" in source or any(c in source for c in "\\%?#\0"):
        raise AdapterError(f"{source}: '..', empty parts, '::', escapes and queries are not allowed in a URL")
    for prefix in allowed_sources:
        allowed = _segments(prefix)
        if len(allowed) > 1 and segments[: len(allowed)] == allowed:
            # On the Hub everyone can open a pull request with arbitrary files, and its commits are revisions.
            if segments[0] == "hf" and any("@" in part for part in segments[len(allowed) :]):
                raise AdapterError(f"{source}: revisions are not allowed, unless an allowed source names them")
            return
    allowed_text = ", ".join(map(without_credentials, allowed_sources)) or "none"
    raise AdapterError(f"{source}: not below an allowed source (--allow-source; allowed: {allowed_text})")


def _segments(url: str) -> list[str]:
    scheme, _, rest = url.partition("://")
    return [scheme.lower(), *rest.rstrip("/").split("/")] if rest.strip("/") else [scheme.lower()]


def _fetch_url(source: str, into: Path, max_bytes: int) -> None:
    until_s = time.monotonic() + _URL_LIMIT_S
    try:
        # Without the instance cache, since a cached listing could hide a new upload.
        files, root = fsspec.core.url_to_fs(source, skip_instance_cache=True)

        def copy(name: str, limit_bytes: int) -> None:
            path = f"{root.rstrip('/')}/{name}"
            if not files.exists(path):
                listing = [Path(str(found)).name for found in files.ls(root, detail=False)]
                raise AdapterNotFound(f"{source}: {name} is not there{_other_formats(listing)}")
            size = cast("int | None", files.info(path).get("size"))
            if size is not None and size > limit_bytes:
                raise AdapterError(f"{source}: {name} has {size} bytes, at most {limit_bytes} are allowed")
            with files.open(path, "rb") as stream:
                _copy(stream, into / name, limit_bytes, source, until_s)

        _copy_all(copy, into, source, max_bytes)
    except AdapterError:
        raise
    except FileNotFoundError as error:
        raise AdapterNotFound(f"{source}: there is no such folder or repository: {error}") from error
    except ImportError as error:  # fsspec imports each file system's package when it is first used
        hint = f"run `{install_command('s3')}`" if source.startswith(("s3:", "s3a:")) else str(error)
        raise AdapterError(f"{source}: a package is not installed: {hint}") from error
    except Exception as error:  # fsspec file systems raise errors of their own, some of which are not OSErrors
        raise AdapterError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error


def _copy(stream: Any, to: Path, limit_bytes: int, source: str, until_s: float = math.inf) -> None:
    copied = 0
    try:
        with to.open("wb") as target:
            while chunk := _read(stream, to.name, source):
                copied += len(chunk)
                if copied > limit_bytes:
                    raise AdapterError(f"{source}: {to.name} is larger than the allowed {limit_bytes} bytes")
                if time.monotonic() > until_s:
                    raise AdapterError(f"{source}: not read within {_URL_LIMIT_S:.0f} s")
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise AdapterStoreError(f"{source}: {to.name} cannot be copied to the adapter store: {error}") from error


def _read(stream: Any, name: str, source: str) -> bytes:
    try:
        return cast(bytes, stream.read(_CHUNK_BYTES))
    except OSError as error:
        raise AdapterError(f"{source}: {name} cannot be read: {error}") from error


def _other_formats(names: list[str]) -> str:
    others = sorted(name for name in names if name.startswith("adapter_model.") and name != WEIGHTS_FILE)
    return f"; {', '.join(others)} is ignored, since only safetensors is supported" if others else ""
