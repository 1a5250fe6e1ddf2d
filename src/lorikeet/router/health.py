"""Polls the health of all backends."""

import asyncio
from collections.abc import Mapping

from lorikeet.api.logs import log
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend, BackendRefused
from lorikeet.router.connections import NoSocket, ServerLost, plain_reason

HEALTH_S = 1.0
"""Backends are asked how they are so often."""
TIMEOUT_S = 60.0
"""A backend hangs if for so long nothing of any answer has come that is waited for."""
MODELS_EVERY = 5
"""With one of so many of these calls, which models they have."""


class HealthMonitor:
    """Tells a backend_router who is there.

    Args:
        backend_router: of the backends.
        adapters: those that clients may ask for now, by name.
        health_s: time between two calls to a backend.
        timeout_s: a backend of which no answer comes for so long hangs; 0 for never.
    """

    def __init__(
        self,
        backend_router: BackendRouter,
        adapters: Mapping[str, RoutedAdapter],
        health_s: float = HEALTH_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._backend_router = backend_router
        self._adapters = adapters
        self._health_s = health_s
        self._suspected = {replica: asyncio.Event() for replica in backend_router.backends}
        self._tasks = BackgroundTasks()

    async def start(self) -> None:
        """Ask everybody once; go on with that beside the requests."""
        backends = self._backend_router.backends.values()
        await asyncio.gather(*(self._look(backend, wants_models=True) for backend in backends))
        for backend in backends:
            self._tasks.run(self._watch(backend))

    async def close(self) -> None:
        """Ask no longer."""
        await self._tasks.close()

    def suspect(self, backend: Backend) -> None:
        """Something went wrong with a backend: ask it at once."""
        self._suspected[backend.replica].set()

    async def _watch(self, backend: Backend) -> None:
        suspected, calls = self._suspected[backend.replica], 0
        while True:
            try:
                async with asyncio.timeout(self._health_s):
                    await suspected.wait()
            except TimeoutError:
                calls += 1
            suspected.clear()
            await self._look(backend, wants_models=calls % MODELS_EVERY == 0)

    async def _look(self, backend: Backend, *, wants_models: bool) -> None:
        """Ask a backend once; what nobody foresaw is no reason to ask it never again."""
        try:
            await self._check(backend, wants_models=wants_models)
        except Exception:
            log.exception("a backend could not be looked after", backend=backend.url)

    async def _check(self, backend: Backend, *, wants_models: bool) -> None:
        backend_router = self._backend_router
        try:
            health = await backend.check()
            if wants_models or not backend.is_up or (health.is_open and not backend.is_open):
                await backend.list_models()
        except NoSocket as error:
            log.warning("backend cannot be asked", backend=backend.url, reason=str(error))
            return
        except (ServerLost, TimeoutError, BackendRefused) as error:
            why, told = str(error) or type(error).__name__, plain_reason(error)
            if not backend.is_up and told != backend.trouble:
                log.warning("backend not there", backend=backend.url, reason=why)
            if backend.is_up:
                backend.failed("health", why)
            backend.trouble = told
            backend_router.down(backend, why)
            return
        if backend.is_up and backend.hangs(self._timeout_s):
            backend.trouble = f"nothing of its answers came for {self._timeout_s:g} s"
            backend.failed("hangs", backend.trouble)
            backend.rest()
            backend_router.down(backend, backend.trouble)
        if backend.is_resting:
            return
        if health.is_open and not backend.is_up:
            backend_router.up(backend, self._adapters.values())
        elif health.is_open and not backend.is_open:
            backend_router.reopen(backend)
        elif backend.is_open and not health.is_open:
            backend_router.drain(backend)
        elif not backend.is_up:
            backend.trouble = "it takes no requests"
        if backend.is_up and health.requests is not None:
            backend_router.gauge(backend, health.requests)
