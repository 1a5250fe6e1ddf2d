"""Fetches the files of an adapter from a source: a folder, or any URL that fsspec reads.

At run time everyone with an admin key may name a source, so a source must be inside the allowed folder or below an
allowed URL. Sources on the command line are trusted, since the user who starts the server can read its files anyway.
"""

import math
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from lorikeet.adapters.chat_files import CHAT_FILES
from lorikeet.adapters.description import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError, AdapterNotFound, AdapterStoreError
from lorikeet.adapters.folder_hints import inner_adapters, other_formats
from lorikeet.adapters.peft_config import MAX_CONFIG_BYTES
from lorikeet.adapters.reader import list_shards
from lorikeet.adapters.url_reader import (
    ReadOutcome,
    UrlRead,
    check_below,
    copy_stream,
    read_url,
    segments,
)
from lorikeet.config import AdapterSettings

MAX_SOURCE_CHARS = 2048
"""Longest source; Linux takes paths of up to 4096 bytes, the folder before it included."""

_LOCAL_SCHEMES = ("file", "local")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
"""A repository on the Hub as vLLM's users write it: ``org/repo`` or ``org/repo@revision``."""


def locate(source: str, settings: AdapterSettings, trusted: bool = False) -> str:
    """Return a source's URL on the Hub if it reads ``org/repo`` and no folder has this name; else the source itself.

    vLLM, lora-syncer and AIBrix name repositories without ``hf://``.

    Args:
        source: A folder, a URL or ``org/repo``.
        settings: The allowed folder and URLs.
        trusted: Whether the source comes from the command line. Otherwise the repository must be below an allowed URL.
    """
    if not _HUB_NAME.fullmatch(source) or ".." in source:
        return source
    try:
        if (trusted or settings.adapter_dir) and _local_folder(source, settings, trusted).exists():
            return source
        if not trusted:
            check_below(source, f"hf://{source}", settings.allowed_sources)
    except (AdapterError, OSError):
        return source
    return f"hf://{source}"


def fetch(source: str, settings: AdapterSettings, into: Path, trusted: bool = False) -> None:
    """Copy config, weights and chat files from ``source`` into the folder ``into``.

    Args:
        source: a folder (relative to ``adapter_dir``, or to the working directory if trusted) or a URL
            (``hf://org/repo``, ``s3://bucket/folder``, ...).
        settings: the allowed folder and URLs, and the limits of size and time.
        into: an existing folder.
        trusted: whether the source comes from the command line. If so, only the limits apply.

    Raises:
        AdapterNotFound: the source or one of its files does not exist.
        AdapterStoreError: the copy cannot be written.
        AdapterError: the source is not allowed, too large or cannot be read.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise AdapterError(f"{source[:100]}…: a source has at most {MAX_SOURCE_CHARS} characters, not {len(source)}")
    scheme, separator, rest = source.partition("://")
    if not separator or scheme.lower() in _LOCAL_SCHEMES:
        folder = _local_folder(rest if separator else source, settings, trusted)
        allowed_folder = None if trusted else _allowed_folder(settings)

        def copy(max_bytes: dict[str, int], optional: tuple[str, ...] = ()) -> None:
            for name, limit in max_bytes.items():
                if name in optional and not (folder / name).is_file():
                    continue
                with _open_local(folder, name, allowed_folder) as stream:
                    copy_stream(stream, into / name, limit, source)

    else:
        if not trusted:
            check_below(source, source, settings.allowed_sources)
        allowed = None if trusted else settings.allowed_sources
        limit_s = settings.source_timeout_s or math.inf
        until_s = time.monotonic() + limit_s

        def copy(max_bytes: dict[str, int], optional: tuple[str, ...] = ()) -> None:
            _fetch_url(UrlRead(source, str(into), max_bytes, allowed, optional), until_s, limit_s)

    _copy_all(copy, into, source, settings.max_bytes)


class _Copy(Protocol):
    """Function that copies files, given the size limit of each, and the names of optional files."""

    def __call__(self, max_bytes: dict[str, int], optional: tuple[str, ...] = (), /) -> None: ...


def _copy_all(copy: _Copy, into: Path, source: str, max_bytes: int) -> None:
    """Copy config and weights, or the shards of the weights if there is an index.

    Args:
        copy: function that copies files into ``into``.
        into, source: see ``fetch``.
        max_bytes: size limit of all weights files together.
    """
    try:
        copy({CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: max_bytes, **CHAT_FILES}, tuple(CHAT_FILES))
    except AdapterNotFound as missing:
        if not (into / CONFIG_FILE).exists():
            raise
        try:
            copy({INDEX_FILE: MAX_CONFIG_BYTES})
        except AdapterNotFound:
            raise missing from None
        _copy_shards(copy, into, source, max_bytes)
        copy(CHAT_FILES, tuple(CHAT_FILES))


def _copy_shards(copy: _Copy, into: Path, source: str, max_bytes: int) -> None:
    try:
        names = list_shards(into)
    except AdapterStoreError:
        raise
    except AdapterError as error:
        raise AdapterError(f"{source}: {error}") from error
    left_bytes = max_bytes
    for name in names:
        copy({name: left_bytes})
        left_bytes -= (into / name).stat().st_size


def host_of(source: str) -> str | None:
    """Return scheme and host (or bucket) of a URL; None for a local folder. All sources at a slow host are slow."""
    scheme, separator, rest = source.partition("://")
    scheme = scheme.lower()
    if not separator or scheme in _LOCAL_SCHEMES:
        return None
    host = "" if scheme == "hf" else rest.partition("/")[0].rpartition("@")[2].lower()
    return f"{scheme}://{host}"


def shown_source(source: str) -> str:
    """Return a source in the form shown to clients. For a folder this is only its name, since its path is private."""
    return source.rstrip("/").rpartition("/")[2] if host_of(source) is None else source


def _local_folder(path: str, settings: AdapterSettings, trusted: bool) -> Path:
    if trusted:
        try:
            return Path(path).expanduser()
        except RuntimeError as error:  # The path names the home folder of an unknown user.
            raise AdapterError(f"{path}: {error}") from error
    if not settings.adapter_dir:
        raise AdapterError(
            f"{path}: local folders are not allowed; start the server with --adapter-dir, or with --allow-source "
            "hf://org/ for repositories on the Hub"
        )
    if ".." in Path(path).parts or "\0" in path:
        raise AdapterError(f"{path}: '..' is not allowed in a path")
    allowed = _allowed_folder(settings)
    try:
        folder = (allowed / path).resolve()
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    if not folder.is_relative_to(allowed):
        raise AdapterNotFound(f"{path}: outside the folder from which adapters may be loaded (--adapter-dir)")
    return folder


def _allowed_folder(settings: AdapterSettings) -> Path:
    try:
        return Path(settings.adapter_dir).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"--adapter-dir {settings.adapter_dir}: {error}") from error


@contextmanager
def _open_local(folder: Path, name: str, allowed: Path | None) -> Iterator[BinaryIO]:
    """Open a regular file. Symbolic links must not lead out of ``allowed``, a resolved folder (None: anywhere)."""
    try:
        file = (folder / name).resolve(strict=True)
        if allowed is not None and not file.is_relative_to(allowed):
            raise AdapterError(f"{folder / name}: a link that leads outside the allowed folder")
        # With O_NONBLOCK, opening a named pipe does not block, so that fstat can detect the pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        if not os.path.isdir(folder):
            raise AdapterNotFound(_no_folder(folder, allowed)) from error
        hint = other_formats(os.listdir(folder)) or inner_adapters(folder)
        raise AdapterNotFound(f"{folder}: {name} is not there{hint}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError means circular links.
        raise AdapterError(f"{folder / name}: cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterError(f"{folder / name}: not a regular file")
        # A parent folder may have become a link after it was resolved, so the path of the opened file is checked.
        if allowed is not None and not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(allowed):
            raise AdapterError(f"{folder / name}: became a link that leads outside while it was opened")
        with open(descriptor, "rb", closefd=False) as stream:
            yield stream
    finally:
        os.close(descriptor)


def _no_folder(folder: Path, allowed: Path | None) -> str:
    """Return the error for a missing folder. Inside ``allowed``, the folder's name may have been relative."""
    if allowed is None:
        return f"{folder}: there is no such folder (a repository on the Hub is org/repo or hf://org/repo)"
    return (
        f"there is no folder {str(folder.relative_to(allowed))!r} in the server's --adapter-dir, to which names of "
        "folders are relative; a repository org/repo on the Hub needs --allow-source hf://org/"
    )


def _fetch_url(read: UrlRead, until_s: float, limit_s: float) -> None:
    """Read a URL in a separate process, which is killed when the time is over."""
    source = read.source
    if segments(source)[0] == "memory":  # The variable exists only in this process.
        read_url(read, until_s)
        return
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "lorikeet.adapters.url_reader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        except OSError as error:
            raise AdapterStoreError(f"{source}: no process to read it can be started: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        # This closes the pipes. The reader's input stays open until then, so that the reader ends with this process.
        with process:
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(msgspec.json.encode(read) + b"\n")
                    process.stdin.flush()
                process.wait(max(0.0, until_s - time.monotonic()))
                outcome = msgspec.json.decode(process.stdout.read(), type=ReadOutcome)
            except subprocess.TimeoutExpired:
                raise AdapterError(f"{source}: not read within {limit_s:g} s (--source-timeout)") from None
            except msgspec.DecodeError:
                output.seek(0)
                last_line = output.read()[-500:].decode(errors="replace").strip().rpartition("\n")[2]
                raise AdapterError(f"{source}: cannot be read: {last_line or 'its reader ended'}") from None
            finally:
                process.kill()
    outcome.check()
