"""Loads adapters when a request first names them: from the folder that is served, and from resolvers."""

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
    """A folder that looks like an adapter's and is not served.

    Attributes:
        name: the folder's name.
        reason: why it is not served.
    """

    name: str
    reason: str


class _Refusal(NamedTuple):
    until_s: float
    error: ApiError


class AdapterLoader:
    """Loads adapters by name, each once however many requests ask for it at the same time.

    Args:
        settings: the folder that is served, and the resolvers.
        load: registers an adapter, given its name and source.
        unload: removes one again, if it is still there.
        now: returns seconds.

    Attributes:
        is_enabled: whether there is a folder or a resolver to load adapters from.
        used_s: when each adapter that was loaded here was last used.
        pinned: names that are not removed for not being used, and whose versions are evicted last.
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
            ApiError: 404 if no source has it, else as ``load`` raises it. The same is raised for a while without
                looking again.
        """
        refusal = self._refused.get(name)
        if refusal is not None and self._now() < refusal.until_s:
            raise refusal.error
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._find(name))
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        await asyncio.shield(task)  # a client that hangs up does not end it for the others

    def use(self, name: str) -> None:
        """Note that a request uses an adapter."""
        if name in self.used_s:
            self.used_s[name] = self._now()

    def pin(self, name: str, is_pinned: bool) -> None:
        """Keep an adapter however long it is not used, or no longer."""
        if is_pinned:
            self.pinned.add(name)
        else:
            self.pinned.discard(name)

    def forget(self, name: str) -> None:
        """Treat a name as one that an adapter route has added: it is kept."""
        self.used_s.pop(name, None)
        self._refused.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of the adapters in the folder that is served; reads the folder, but none of their files."""
        if self._folder is None:
            return []
        return sorted(name for name in self._entries() if not _why_no_name(name) and self._is_adapter(name))

    def left_out(self) -> list[LeftOut]:
        """Return the folders beside the adapters that are not served; reads no file, as :meth:`names`."""
        found = [LeftOut(name, self._why_left_out(name)) for name in sorted(self._entries())]
        return [each for each in found if each.reason]

    def why_refused(self, name: str) -> str:
        """Return why an adapter could not be loaded when it was last tried; empty if it was not tried or is loaded."""
        refusal = self._refused.get(name)
        return "" if refusal is None else refusal.error.message

    def _entries(self) -> list[str]:
        """Return the names in the folder that is served; hidden ones are not meant to be adapters."""
        if self._folder is None:
            return []
        try:
            return [entry.name for entry in os.scandir(self._folder) if not entry.name.startswith(".")]
        except OSError as error:
            log.warning("the folder of adapters cannot be read", folder=str(self._folder), reason=str(error))
            return []

    def _why_missing(self, name: str) -> str:
        """Return why the folder of a name is not served; empty if there is none."""
        return self._why_left_out(name) if name in self._entries() else ""

    def _why_left_out(self, name: str) -> str:
        """Return why a folder is not served; empty if it is, or if it does not look like an adapter's."""
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
        """End what runs."""
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
                if source == name:  # the folder is there, and a file is missing
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
        """Remove adapters that were not used for the time to live."""
        while self.used_s:
            oldest_s = min(self.used_s.values())
            await asyncio.sleep(max(self._ttl_s / 10, oldest_s + self._ttl_s - self._now()))
            for name, used_s in [*self.used_s.items()]:
                if name not in self.pinned and self._now() - used_s >= self._ttl_s:
                    del self.used_s[name]
                    await self._unload(name)
        self._expiring = None


def _why_no_name(name: str) -> str:
    """Return why a folder's name cannot be an adapter's; empty if it can."""
    try:
        check_name(name, set())
    except AdapterError as error:
        return str(error)
    if _VERSIONED.fullmatch(name):
        return f"{name!r} means a version of {name.rpartition('@')[0]!r}"
    return ""
