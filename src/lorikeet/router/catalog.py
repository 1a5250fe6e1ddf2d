"""Which models clients may ask a router for, and on which backends its adapters are placed."""

import asyncio
import time
from collections.abc import Iterable
from itertools import count
from typing import Any

from msgspec.structs import replace

from lorikeet.api.errors import ApiError, model_not_found
from lorikeet.cluster.placement.orchestrator import AdapterInfo
from lorikeet.cluster.placement.service import PlacementClient, PlacementService
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import ReplicaId
from lorikeet.router.adapters import RoutedAdapter, as_new_version
from lorikeet.router.backend_router import BackendRouter

AWAY_S = 60.0
"""Adapters keep their places on a backend that is away for less: it may have them still, and comes back as it was."""


class ModelCatalog:
    """See the module.

    Args:
        backend_router: hears of adapters and placements.
        adapters: that clients may ask for at first.
        placements: who places adapters.
        period_s: between two placements.

    Attributes:
        adapters: by name; to read.
    """

    def __init__(
        self,
        backend_router: BackendRouter,
        adapters: Iterable[RoutedAdapter],
        placements: PlacementService,
        period_s: float,
    ) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self._backend_router = backend_router
        self._placer = PlacementClient(placements, period_s, backend_router.swap)
        self._created = int(time.time())
        self._numbers = count(1)
        self._tasks = BackgroundTasks()
        self._there = set(backend_router.backends)
        """Backends to place on."""
        self._leaving: dict[ReplicaId, asyncio.TimerHandle] = {}
        """Those of them that do not take requests, until they have been away for too long."""
        for adapter in self.adapters.values():
            backend_router.know(adapter)

    async def start(self) -> None:
        """Place on all backends, also those that may come soon; and anew after every period, and when they change."""
        self._backend_router.on_change = self._note_change
        self._note_change()
        await self._know(self.adapters.values())
        self._tasks.run(self._placer.run())

    async def close(self) -> None:
        """Place no longer."""
        self._backend_router.on_change = lambda: None
        for timer in self._leaving.values():
            timer.cancel()
        await self._tasks.close()

    # --- names ---------------------------------------------------------------------------------------

    def base_cards(self) -> list[dict[str, Any]]:
        """Return the cards of the base model, as a backend gives them; empty until one has been there."""
        backends = sorted(self._backend_router.backends.values(), key=lambda backend: not backend.is_up)
        return next((backend.base_cards for backend in backends if backend.base_cards), [])

    def cards(self) -> list[dict[str, Any]]:
        """Return a card for every model, those of the base first."""
        bases = self.base_cards()
        base = bases[0] if bases else {"object": "model", "owned_by": "lorikeet"}
        own = {"created": self._created, "parent": base.get("id")}
        return bases + [{**base, **own, "id": each.name, "root": each.source} for each in self.adapters.values()]

    def find(self, model: str) -> RoutedAdapter | None:
        """Return the adapter that a name means, None for the base model.

        Raises:
            ApiError: 404 for an unknown name, 503 while no backend has told the names of the base.
        """
        if model in self.adapters:
            return self.adapters[model]
        bases = self.base_cards()
        if not model or any(card["id"] == model for card in bases):
            return None
        if not bases:
            why = f"No backend has been there yet{self._backend_router.troubles()}."
            raise ApiError(503, why, headers={"Retry-After": "1"})
        raise model_not_found(model)

    async def add(self, adapter: RoutedAdapter) -> None:
        """Let clients ask for an adapter. One of the same name is replaced; its requests go on with what they have."""
        before = self.adapters.get(adapter.name)
        if before is not None:
            if not adapter.size_bytes:  # its files cannot be read here, so they may be others at the same source
                adapter = as_new_version(adapter, next(self._numbers))
            adapter = replace(adapter, replaces=before.replaces or before.digest != adapter.digest)
        self.adapters[adapter.name] = adapter
        self._backend_router.know(adapter)
        await self._know([adapter])
        if before is not None and before.digest != adapter.digest:
            await self._retire(before)

    async def remove(self, name: str) -> None:
        """Let clients ask for it no longer; backends unload it when its requests have ended.

        Raises:
            KeyError: there is none of that name.
        """
        await self._retire(self.adapters.pop(name))

    # --- placement -----------------------------------------------------------------------------------

    def arrived(self, adapter: RoutedAdapter, prompt_tokens: int) -> None:
        """A request has come."""
        self._placer.arrived(adapter.digest, prompt_tokens)

    def answered(self, adapter: RoutedAdapter, output_tokens: int) -> None:
        """A request has its whole answer."""
        self._placer.answered(adapter.digest, output_tokens)

    async def _know(self, adapters: Iterable[RoutedAdapter]) -> None:
        await self._placer.register(
            [AdapterInfo(adapter.digest, adapter.rank, adapter.size_bytes) for adapter in adapters]
        )

    async def _retire(self, adapter: RoutedAdapter) -> None:
        self._backend_router.retire(adapter)
        await self._placer.drop(adapter.digest)
        current = self.adapters.get(adapter.name)
        if current is None or current.digest != adapter.digest:
            self._backend_router.drop(adapter)

    def _note_change(self) -> None:
        """A backend has come or gone, takes no more requests, or takes them again."""
        came = False
        for replica, backend in self._backend_router.backends.items():
            if not backend.is_open:
                if replica in self._there and replica not in self._leaving:
                    loop = asyncio.get_running_loop()
                    self._leaving[replica] = loop.call_later(AWAY_S, self._is_gone, replica)
            elif (timer := self._leaving.pop(replica, None)) is not None:
                timer.cancel()
            elif replica not in self._there:
                self._there.add(replica)
                came = True
        if came:
            self._place_anew()

    def _is_gone(self, replica: ReplicaId) -> None:
        """A backend has been away for too long."""
        del self._leaving[replica]
        self._there.discard(replica)
        self._place_anew()

    def _place_anew(self) -> None:
        if there := [replica for replica in self._backend_router.backends if replica in self._there]:
            self._tasks.run(self._placer.set_replicas(there))
