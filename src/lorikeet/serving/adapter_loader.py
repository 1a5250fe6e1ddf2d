"""Loads adapters when a request first names them: from the folder of ``--adapter-dir``, and from resolvers."""

import asyncio
import os
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lorikeet.adapters.description import CONFIG_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.registry import check_name
from lorikeet.config import AdapterDirMode, AdapterSettings
from lorikeet.http.errors import ApiError, bad_request, model_not_found
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread

_REMEMBERED_S = 30.0
"""Seconds for which a name that cannot be loaded is not looked for again. New folders are found after a second."""
_REMEMBERED_FOLDER_S = 1.0
_MAX_REMEMBERED = 10_000


_VERSIONED = re.compile(r".+@[0-9a-f]{8,64}")
"""A name that means a version of another adapter."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".npz", ".pt", ".pth")


class LeftOut(NamedTuple):
    """A folder that looks like an adapter but is not served.

    Attributes:
        name: the folder's name.
        reason: the reason why the folder is not served.
    """

    name: str
    reason: str


class _Refusal(NamedTuple):
    until_s: float
    error: ApiError


class AdapterLoader:
    """Loads adapters by name. Several requests that name the same adapter at the same time share one load.

    Args:
        settings: the folder of adapters and the resolvers.
        load: registers an adapter by its name and source.
        unload: removes an adapter if it is still registered.
        now: returns the present time in seconds.

    Attributes:
        is_enabled: whether the settings name a folder or a resolver.
        used_s: the last use of each adapter that this loader has loaded, in seconds.
        pinned: names that do not expire. Their versions are evicted last.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        load: Callable[[str, str], Awaitable[object]],
        unload: Callable[[str], Awaitable[object]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = settings.adapter_dir if settings.adapter_dir_mode is AdapterDirMode.SERVE else ""
        self._folder = Path(folder).expanduser() if folder and settings.enabled else None
        self._resolvers = settings.resolvers if settings.enabled else ()
        self._ttl_s = settings.ttl_s
        self._load = load
        self._unload = unload
        self._now = now
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._refused: OrderedDict[str, _Refusal] = OrderedDict()
        self.used_s: dict[str, float] = {}
        self.pinned: set[str] = set()
        self._expiring: asyncio.Task[None] | None = None
        self.is_enabled = self._folder is not None or bool(self._resolvers)

    async def load(self, name: str) -> None:
        """Load an adapter that is not registered.

        Raises:
            ApiError: 404 if no source has the adapter; otherwise the error of ``load``. For a while, further calls
                raise the same error without searching the sources again.
        """
        refusal = self._refused.get(name)
        if refusal is not None and self._now() < refusal.until_s:
            raise refusal.error
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._find(name))
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        await asyncio.shield(task)  # A client that hangs up does not end the load for other requests.

    def use(self, name: str) -> None:
        """Record that a request uses an adapter."""
        if name in self.used_s:
            self.used_s[name] = self._now()

    def pin(self, name: str, is_pinned: bool) -> None:
        """Pin or unpin an adapter. A pinned adapter does not expire."""
        if is_pinned:
            self.pinned.add(name)
        else:
            self.pinned.discard(name)

    def forget(self, name: str) -> None:
        """Keep an adapter from expiring, like an adapter that a client has registered."""
        self.used_s.pop(name, None)
        self._refused.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of the adapters in the served folder. Lists the folder without reading files."""
        if self._folder is None:
            return []
        return sorted(name for name in self._entries() if not _why_no_name(name) and self._is_adapter(name))

    def left_out(self) -> list[LeftOut]:
        """Return the folders that look like adapters but are not served. Reads no files."""
        found = [LeftOut(name, self._why_left_out(name)) for name in sorted(self._entries())]
        return [each for each in found if each.reason]

    def why_refused(self, name: str) -> str:
        """Return the error of an adapter's last load; empty if the load succeeded or was never tried."""
        refusal = self._refused.get(name)
        return "" if refusal is None else refusal.error.message

    def _entries(self) -> list[str]:
        """Return the names of the served folder's entries, without hidden ones."""
        if self._folder is None:
            return []
        try:
            return [entry.name for entry in os.scandir(self._folder) if not entry.name.startswith(".")]
        except OSError as error:
            log.warning("the folder of adapters cannot be read", folder=str(self._folder), reason=str(error))
            return []

    def _why_missing(self, name: str) -> str:
        """Return why the folder of a name is not served; empty if the folder does not exist."""
        return self._why_left_out(name) if name in self._entries() else ""

    def _why_left_out(self, name: str) -> str:
        """Return why a folder is not served; empty if it is served or does not look like an adapter."""
        assert self._folder is not None
        if self._is_adapter(name):
            return _why_no_name(name)
        try:
            files = os.listdir(self._folder / name)
        except NotADirectoryError:
            return ""
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return f"it has weights and no {CONFIG_FILE}" if any(each.endswith(_WEIGHTS) for each in files) else ""

    async def close(self) -> None:
        """Cancel the running loads and the expiry of adapters."""
        tasks = [*self._loading.values(), *([self._expiring] if self._expiring is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self, name: str) -> None:
        try:
            await self._find_in(await in_daemon_thread(lambda: self._sources(name)), name)
        except ApiError as error:
            if error.status < 429:
                known_s = _REMEMBERED_S if self._resolvers else _REMEMBERED_FOLDER_S
                self._refused[name] = _Refusal(self._now() + known_s, error)
                if len(self._refused) > _MAX_REMEMBERED:
                    self._refused.popitem(last=False)
            raise
        self._refused.pop(name, None)
        self.used_s[name] = self._now()
        if self._ttl_s and self._expiring is None:
            self._expiring = asyncio.create_task(self._expire())

    async def _find_in(self, sources: Iterable[str], name: str) -> None:
        reason = ""
        for source in sources:
            try:
                await self._load(name, source)
            except ApiError as error:
                if error.status != 404:
                    raise
                if source == name:  # The folder exists but lacks a file.
                    reason = error.message
            else:
                return
        if not reason and (left_out := await in_daemon_thread(lambda: self._why_missing(name))):
            reason = f"The adapter {name!r} is not served: {left_out}."
        raise bad_request(reason, "model") if reason else model_not_found(name)

    def _sources(self, name: str) -> list[str]:
        """Return the sources to try for a name.

        Names with ``@revision`` are not resolved: on a public hub anyone can create a revision by opening a pull
        request.
        """
        if _why_no_name(name):
            return []
        here = [name] if self._folder is not None and self._is_adapter(name) else []
        resolvers = () if "@" in name else self._resolvers
        return here + [f"{prefix.rstrip('/')}/{name}" for prefix in resolvers]

    def _is_adapter(self, name: str) -> bool:
        assert self._folder is not None
        return (self._folder / name / CONFIG_FILE).is_file()

    async def _expire(self) -> None:
        """Remove adapters that were unused for longer than the time to live."""
        while self.used_s:
            oldest_s = min(self.used_s.values())
            await asyncio.sleep(max(self._ttl_s / 10, oldest_s + self._ttl_s - self._now()))
            for name, used_s in [*self.used_s.items()]:
                if name not in self.pinned and self._now() - used_s >= self._ttl_s:
                    del self.used_s[name]
                    await self._unload(name)
        self._expiring = None


def _why_no_name(name: str) -> str:
    """Return why a folder's name cannot be an adapter's name; empty if it can."""
    try:
        check_name(name, set())
    except AdapterError as error:
        return str(error)
    if _VERSIONED.fullmatch(name):
        return f"{name!r} means a version of {name.rpartition('@')[0]!r}"
    return ""
