"""Keeps the models that a router serves, and places its adapters on backends."""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, NamedTuple

from msgspec.structs import replace

from lorikeet.adapters.sources import shown_source
from lorikeet.cluster.placement.orchestrator import AdapterInfo
from lorikeet.cluster.placement.service import PlacementClient, PlacementService
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import ReplicaId
from lorikeet.core.splits import Split, why_invalid
from lorikeet.http.errors import ApiError, bad_request, model_not_found
from lorikeet.http.model_routes import AUTO_MODEL
from lorikeet.http.tenancy import check_use
from lorikeet.http.vllm_adapter_answers import invalid_input
from lorikeet.router.adapters import RoutedAdapter, as_new_version
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Feature
from lorikeet.tenants.keys import OPERATOR, Access

_VERSIONED = re.compile("(.+)@([0-9a-f]{8,64})")
"""An adapter's name, and the beginning of the digest that the router's ``/v1/adapters`` lists."""

AWAY_S = 60.0
"""Seconds for which a backend that is down stays in the placement: it may come back with its adapters."""


class Target(NamedTuple):
    """The model of a request.

    Attributes:
        model: the name for the backends.
        adapter: the adapter that decides the backend; None for the base model.
        mixed: further adapters that a mixture needs at the backend.
        feature: a feature that the backend needs; None for none.
    """

    model: str
    adapter: RoutedAdapter | None = None
    mixed: tuple[RoutedAdapter, ...] = ()
    feature: Feature | None = None


class ModelCatalog:
    """Holds the adapters by name, and updates their placement.

    Args:
        backend_router: router that gets adapters and placements.
        adapters: adapters that clients may name from the start.
        placements: places adapters.
        period_s: time between two placements, in seconds.
        splits: names whose requests are split between adapters from the start.

    Attributes:
        adapters: adapters by name; read only.
        splits: names whose requests are split between adapters, with their shares; read only.
    """

    def __init__(
        self,
        backend_router: BackendRouter,
        adapters: Iterable[RoutedAdapter],
        placements: PlacementService,
        period_s: float,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self.splits: dict[str, Split] = {}
        self._backend_router = backend_router
        self._placer = PlacementClient(placements, period_s, backend_router.set_placement)
        self._created = int(time.time())
        self._numbers = count(1)
        self._tasks = BackgroundTasks()
        self._placed_on = set(backend_router.backends)
        """Backends that the placement uses."""
        self._away: dict[ReplicaId, asyncio.TimerHandle] = {}
        """Timers of backends that take no requests: when one ends, its backend leaves the placement."""
        for adapter in self.adapters.values():
            backend_router.add_adapter(adapter)
        for name, split in (splits or {}).items():
            self.set_split(name, split)

    async def start(self) -> None:
        """Place adapters on all backends, up or not; then again after every period and when backends change."""
        self._backend_router.on_change = self._note_change
        self._note_change()
        await self._register(self.adapters.values())
        self._tasks.run(self._placer.run())

    async def close(self) -> None:
        """Stop placing adapters."""
        self._backend_router.on_change = lambda: None
        for timer in self._away.values():
            timer.cancel()
        await self._tasks.close()

    # --- names ---------------------------------------------------------------------------------------

    def base_cards(self) -> list[dict[str, Any]]:
        """Return the base model's cards from a backend; empty until a backend has been up."""
        backends = sorted(self._backend_router.backends.values(), key=lambda backend: not backend.is_up)
        cards = next((backend.base_cards for backend in backends if backend.base_cards), [])
        own = [card for card in cards if card["id"] not in self.adapters]
        return [card | {"root": _shown_root(str(card.get("root") or card["id"]))} for card in own]

    def is_base(self, name: str) -> bool:
        """Return whether a name is that of the base model at a backend."""
        return name in self._base_names()

    def cards(self, access: Access = OPERATOR) -> list[dict[str, Any]]:
        """Return a card for every model that a sender may see, with the base model first."""
        return [card for card in self._cards() if access.may_see(card["id"])]

    def _cards(self) -> list[dict[str, Any]]:
        bases = self.base_cards()
        base = bases[0] if bases else {"object": "model", "owned_by": "lorikeet"}
        own = {"created": self._created, "parent": base.get("id")}
        adapters = self.adapters.values()
        cards = bases + [{**base, **own, "id": each.name, "root": shown_source(each.source)} for each in adapters]
        others = [*self.splits]
        if AUTO_MODEL not in self.adapters and AUTO_MODEL not in self.splits and self.has(Feature.AUTO):
            others.append(AUTO_MODEL)
        return cards + [{**base, **own, "id": name, "root": name} for name in others]

    def find(self, model: str, access: Access = OPERATOR) -> Target:
        """Return the model of a name: ``adapter``, ``base:adapter``, ``adapter@version``, a mixture, or ``auto``.

        Args:
            model: the name.
            access: the sender's rights. Models that the sender may not see are treated as unknown.

        Raises:
            ApiError: 404 for an unknown name, 403 for a model that the sender may see but not use, 503 while no backend
                has listed the base model.
        """
        if model in self.adapters:
            check_use(access, (model,), model)
            return Target(model, self.adapters[model])
        bases = self._base_names()
        if not model or model in bases:
            if access.key is not None:
                check_use(access, bases, model or min(bases, default="the base model"))
            return Target(model)
        if not bases:
            why = f"No backend has been available yet{self._backend_router.backend_errors()}."
            raise ApiError(503, why, headers={"Retry-After": "1"})
        if model == AUTO_MODEL:
            return self._auto(access)
        name = self.without_base(model)
        if "*" not in name and "+" not in name:
            adapter = self._one(name, model, access)
            return Target(adapter.name, adapter)
        parts = [part.partition("*") for part in name.split("+")]
        first, *others = adapters = [self._one(each.strip(), model, access) for each, _, _ in parts]
        named = (each.name + by + weight for each, (_, by, weight) in zip(adapters, parts, strict=True))
        return Target("+".join(named), first, tuple(others), Feature.MIXTURES)

    def _auto(self, access: Access) -> Target:
        """Return the target of ``auto``, by which a backend chooses among the adapters that it has."""
        if access.key is not None:
            why = " A backend would choose among all adapters, also those that this key may not use."
            raise model_not_found(AUTO_MODEL, why)
        if not self.has(Feature.AUTO):
            if not all(backend.is_up for backend in self._backend_router.backends.values()):
                why = "No backend that chooses adapters by prompts is up."
                raise ApiError(503, why, headers={"Retry-After": "1"})
            why = " Backends choose adapters by prompts if they are Lorikeets with --auto-model; none of these is."
            raise model_not_found(AUTO_MODEL, why)
        return Target(AUTO_MODEL, feature=Feature.AUTO)

    def has(self, feature: Feature) -> bool:
        """Return whether a backend has a feature."""
        return any(backend.has(feature) for backend in self._backend_router.backends.values())

    def without_base(self, model: str) -> str:
        """Return the part after ``base:``; any other name unchanged."""
        if model in self.adapters or ":" not in model:
            return model
        return next(
            (model.removeprefix(f"{base}:") for base in self._base_names() if model.startswith(f"{base}:")), model
        )

    def _base_names(self) -> set[str]:
        return {card["id"] for backend in self._backend_router.backends.values() for card in backend.base_cards}

    def _one(self, name: str, asked: str, access: Access) -> RoutedAdapter:
        """Return the adapter of ``name``, which may end with ``@`` and the beginning of its digest."""
        if name in self.adapters:
            check_use(access, (name,), asked)
            return self.adapters[name]
        found = _VERSIONED.fullmatch(name)
        adapter = None if found is None else self.adapters.get(found[1])
        if found is None or adapter is None:
            raise model_not_found(asked)
        check_use(access, (adapter.name,), asked)
        version = self.version(adapter)
        if not version.startswith(found[2]):
            raise model_not_found(asked, f" `{adapter.name}` is now the version {version[:12]}.")
        return adapter

    def version(self, adapter: RoutedAdapter) -> str:
        """Return the digest by which clients name the version of an adapter.

        It is that of Lorikeet backends, from the files or from a backend that has it. If neither has come, it is the
        router's own.
        """
        holders = (each for each in self._backend_router.backends.values() if each.holds(adapter))
        listed = (each.listed_versions.get(adapter.name, "") for each in holders)
        return adapter.version or next(filter(None, listed), adapter.digest)

    def version_of(self, name: str, key: str) -> str:
        """Return the version that answers a request of a split: the first in the key's order that still exists.

        Raises:
            ApiError: 404, all versions have been removed.
        """
        split = self.splits[name]
        for version in split.ranked(name, key):
            if version in self.adapters:
                return version
        raise ApiError(404, f"No version of `{name}` exists any more; it names {', '.join(split.versions)}.")

    def set_split(self, name: str, split: Split) -> None:
        """Split the requests of a name between adapters.

        Raises:
            ApiError: 400 if the name or a share is not valid, 404 for an adapter that does not exist.
        """
        if any(card["id"] == name for card in self.base_cards()):
            raise invalid_input(f"A split cannot have the name of the base model, {name!r}.")
        if reason := why_invalid(name, split.versions, split.shadow):
            raise bad_request(reason, "versions")
        for each in {**split.versions, **split.shadow}:
            if each in self.splits:
                raise ApiError(404, f"`{each}` is a split itself; name adapters.", param="versions")
            if each not in self.adapters:
                raise ApiError(404, f"The adapter `{each}` does not exist.", param="versions")
        self.splits[name] = split

    def remove_split(self, name: str) -> None:
        """Remove a split; its adapters stay."""
        del self.splits[name]

    async def add(self, adapter: RoutedAdapter) -> None:
        """Serve an adapter. It replaces an adapter of the same name, whose running requests keep the old version."""
        before = self.adapters.get(adapter.name)
        if before is not None:
            if not adapter.size_bytes:  # The router cannot read the adapter's files, so their content may have changed.
                adapter = as_new_version(adapter, next(self._numbers))
            adapter = replace(adapter, replaces=before.replaces or before.digest != adapter.digest)
        self.adapters[adapter.name] = adapter
        self._backend_router.add_adapter(adapter)
        await self._register([adapter])
        if before is not None and before.digest != adapter.digest:
            await self._retire(before)

    async def remove(self, name: str) -> None:
        """Stop serving an adapter. Backends unload it after its running requests have ended.

        Raises:
            KeyError: no adapter has that name.
        """
        await self._retire(self.adapters.pop(name))

    # --- placement -----------------------------------------------------------------------------------

    def on_request(self, adapter: RoutedAdapter, prompt_tokens: int) -> None:
        """Count a new request in the demand for placements."""
        self._placer.arrived(adapter.digest, prompt_tokens)

    def on_answer(self, adapter: RoutedAdapter, output_tokens: int) -> None:
        """Count the tokens of a whole answer in the demand for placements."""
        self._placer.answered(adapter.digest, output_tokens)

    async def _register(self, adapters: Iterable[RoutedAdapter]) -> None:
        await self._placer.register(
            [AdapterInfo(adapter.digest, adapter.rank, adapter.size_bytes) for adapter in adapters]
        )

    async def _retire(self, adapter: RoutedAdapter) -> None:
        self._backend_router.retire_adapter(adapter)
        await self._placer.drop(adapter.digest)
        current = self.adapters.get(adapter.name)
        if current is None or current.digest != adapter.digest:
            self._backend_router.drop_adapter(adapter)

    def _note_change(self) -> None:
        """Update the placement after a backend came up, went down, closed or opened again."""
        is_new = False
        for replica in self._placed_on - self._backend_router.backends.keys():
            if (timer := self._away.pop(replica, None)) is not None:
                timer.cancel()
            self._placed_on.discard(replica)
            is_new = True
        for replica, backend in self._backend_router.backends.items():
            if not backend.is_open:
                if replica in self._placed_on and replica not in self._away:
                    loop = asyncio.get_running_loop()
                    self._away[replica] = loop.call_later(AWAY_S, self._on_away_too_long, replica)
            elif (timer := self._away.pop(replica, None)) is not None:
                timer.cancel()
            elif replica not in self._placed_on:
                self._placed_on.add(replica)
                is_new = True
        if is_new:
            self._place_again()

    def _on_away_too_long(self, replica: ReplicaId) -> None:
        """Remove a backend that has been down for too long from the placement."""
        del self._away[replica]
        self._placed_on.discard(replica)
        self._place_again()

    def _place_again(self) -> None:
        if replicas := [replica for replica in self._backend_router.backends if replica in self._placed_on]:
            self._tasks.run(self._placer.set_replicas(replicas))


def _shown_root(root: str) -> str:
    """Return the root of a base model for clients: a folder's name without its path, or a hub id unchanged."""
    return shown_source(root) if root.startswith(("/", "~", ".")) else root
