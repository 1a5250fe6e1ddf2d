"""Polls the health of all backends."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import ReplicaId
from lorikeet.http.logs import log
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.apis import BackendSpec
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend, BackendRefused
from lorikeet.router.connections import BackendConnectionError, LocalSocketError, plain_reason
from lorikeet.router.discovery import EVERY_S, Discovery
from lorikeet.router.held_calls import HeldCalls

HEALTH_S = 1.0
"""Seconds between two health checks of a backend."""
TIMEOUT_S = 60.0
"""Seconds without a piece of any awaited answer after which a backend hangs."""
MODELS_EVERY = 5
"""Every fifth health check also lists the backend's models."""


class HealthMonitor:
    """Polls backends, and reports to the backend router when one comes up, goes down or drains.

    Args:
        backend_router: router of the backends.
        adapters: the present adapters by name.
        held: pauses and sleeps, which a backend that comes up gets before its first request.
        health_s: seconds between two checks of a backend.
        timeout_s: seconds without any answer after which a backend counts as hung; 0 for never.
    """

    def __init__(
        self,
        backend_router: BackendRouter,
        adapters: Mapping[str, RoutedAdapter],
        held: HeldCalls,
        health_s: float = HEALTH_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._backend_router = backend_router
        self._adapters = adapters
        self._held = held
        self._health_s = health_s
        self._check_now = {replica: asyncio.Event() for replica in backend_router.backends}
        self._tasks = BackgroundTasks()

    async def start(self) -> None:
        """Check all backends once, then continue in the background."""
        backends = self._backend_router.backends.values()
        await asyncio.gather(*(self._check_safely(backend, wants_models=True) for backend in backends))
        for backend in backends:
            self._tasks.run(self._watch(backend))

    def follow(self, discovery: Discovery, make: Callable[[ReplicaId, BackendSpec], Backend]) -> None:
        """Add and remove backends, which ``make`` returns, as a discovery finds them."""
        self._tasks.run(self._follow(discovery, make))

    async def _follow(self, discovery: Discovery, make: Callable[[ReplicaId, BackendSpec], Backend]) -> None:
        numbers = count(len(self._backend_router.backends))
        while True:
            await asyncio.sleep(EVERY_S)
            found = {spec.url: spec for spec in await discovery.find()}
            known = {backend.url: backend for backend in self._backend_router.backends.values()}
            for url, backend in known.items():
                if backend.is_leaving != (url not in found):
                    backend.is_leaving = url not in found
                    self.check_soon(backend)
            for url in found.keys() - known.keys():
                backend = make(ReplicaId(f"backend-{next(numbers)}"), found[url])
                log.info("backend found", backend=url)
                self._check_now[backend.replica] = asyncio.Event()
                self._backend_router.add_backend(backend)
                self._tasks.run(self._watch(backend))
                self.check_soon(backend)

    async def close(self) -> None:
        """Stop checking."""
        await self._tasks.close()

    def check_soon(self, backend: Backend) -> None:
        """Check a backend immediately, because a request to it has failed."""
        if backend.replica in self._check_now:
            self._check_now[backend.replica].set()

    async def _watch(self, backend: Backend) -> None:
        check_now = self._check_now[backend.replica]
        calls = 0
        while True:
            try:
                async with asyncio.timeout(self._health_s):
                    await check_now.wait()
            except TimeoutError:
                calls += 1
            check_now.clear()
            await self._check_safely(backend, wants_models=calls % MODELS_EVERY == 0)
            if backend.is_leaving and not self._backend_router.has_requests(backend):
                del self._check_now[backend.replica]
                await self._backend_router.remove_backend(backend)
                return

    async def _check_safely(self, backend: Backend, *, wants_models: bool) -> None:
        """Check a backend once. Unexpected errors are logged and do not end the checks."""
        try:
            await self._check(backend, wants_models=wants_models)
        except Exception:
            log.exception("health check failed unexpectedly", backend=backend.url)

    async def _check(self, backend: Backend, *, wants_models: bool) -> None:
        backend_router = self._backend_router
        try:
            health = await backend.check()
            if wants_models or not backend.is_up or (health.is_open and not backend.is_open):
                await backend.list_models()
        except LocalSocketError as error:
            log.warning("backend cannot be checked", backend=backend.url, reason=str(error))
            return
        except (BackendConnectionError, TimeoutError, BackendRefused) as error:
            if isinstance(error, TimeoutError) and backend.is_occupied(self._timeout_s):
                return
            why = str(error) or type(error).__name__
            told = plain_reason(error)
            if not backend.is_up and told != backend.last_error:
                log.warning("backend cannot be reached", backend=backend.url, reason=why)
            if backend.is_up:
                backend.failed("health", why)
            backend.last_error = told
            backend_router.on_backend_down(backend, why)
            return
        if self._held or backend.is_asleep or (backend.hangs(self._timeout_s) and await backend.is_paused()):
            backend.watch.heard()  # A paused backend is silent.
        if backend.is_up and backend.hangs(self._timeout_s):
            backend.last_error = f"no piece of its answers arrived for {self._timeout_s:g} s"
            backend.failed("hangs", backend.last_error)
            backend.rest()
            backend_router.on_backend_down(backend, backend.last_error)
        if backend.is_resting:
            return
        if backend.is_leaving:
            health = health._replace(is_open=False)
        if health.is_open and not backend.is_up:
            await self._held.repeat(backend)
            backend_router.on_backend_up(backend, self._adapters.values())
        elif health.is_open and not backend.is_open:
            backend_router.on_backend_reopened(backend)
        elif backend.is_open and not health.is_open:
            backend_router.on_backend_draining(backend)
        elif not backend.is_up:
            backend.last_error = "it takes no requests"
        if backend.is_up and health.requests is not None:
            backend_router.on_backend_load(backend, health.requests)
