"""Finds the model that a request names: loads adapters on demand, makes mixtures, and leases versions."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import msgspec

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.chat import AdapterChat
from lorikeet.adapters.mixture import Part
from lorikeet.adapters.task import AdapterTask
from lorikeet.chat.mixtures import PREFIX, Mixtures, name_of, spelling
from lorikeet.core.ids import AdapterName
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.threads import in_daemon_thread
from lorikeet.serving.adapter_loader import AdapterLoader
from lorikeet.serving.leases import AdapterLeases, Lease, VersionChanged
from lorikeet.serving.served_models import ResolvedModel, ServedModels, check_use
from lorikeet.tenants.keys import Access

_INDEX = re.compile("[0-9]{1,10}")
_SHOWN_CHARS = 200
_ATTEMPTS = 3
"""Tries to make a mixture before another request's takes its place."""


class ModelResolver:
    """Finds the models that requests name.

    Args:
        models: names of the base model and the registered adapters.
        catalog: the registered adapters.
        loader: loads adapters that are not registered.
        mixtures: makes mixtures of adapters.

    Attributes:
        leases: the versions that requests use.
        unpaused: cleared while generation is paused.
    """

    def __init__(
        self, models: ServedModels, catalog: AdapterCatalog, loader: AdapterLoader, mixtures: Mixtures
    ) -> None:
        self.models = models
        self.catalog = catalog
        self.loader = loader
        self.mixtures = mixtures
        self.leases = AdapterLeases(catalog)
        self.unpaused = asyncio.Event()
        self.unpaused.set()

    async def resolve(
        self, model: str | None, lora_path: str | None = None, *, access: Access, generates: bool = True
    ) -> ResolvedModel:
        """Return the model that a request names; an adapter that is not registered is loaded, if there is a source.

        Args:
            model, lora_path: the names.
            access: the sender's rights.
            generates: whether the request must wait while generation is paused. It then gets the version that its
                adapter has after that.

        Raises:
            ApiError: as ``ServedModels.resolve`` and ``AdapterLoader.load``.
        """
        if generates:
            await self.unpaused.wait()
        mixture = self.models.mixture(model)
        if mixture is not None:
            if lora_path:
                raise bad_request("model names a mixture, so lora_path cannot name an adapter.", "lora_path")
            prefix, parts = mixture
            named = [(await self._named(part, access), weight) for part, weight in parts]
            text = model or "" if named == parts else prefix + spelling(named)
            return await self._mixed(text, [part for part in named if part[1]], access)
        if self.loader.is_enabled:
            for name in self.models.missing(model, lora_path):
                if not access.may_use(name):  # it is not looked for
                    if name in await self.unloaded_names(access):
                        check_use(access, (name,), name)
                    break
                await self.loader.load(name)
        target = self.models.resolve(model, lora_path, access)
        if target.adapter is not None:
            self.loader.use(target.name)
        return target

    async def lease(
        self, model: str | None, lora_path: str | None = None, *, access: Access, generates: bool = True
    ) -> tuple[ResolvedModel, Lease]:
        """Resolve a model as :meth:`resolve`, and lease its version. The caller must close the lease.

        Raises:
            ApiError: as :meth:`resolve`.
        """
        while True:
            target = await self.resolve(model, lora_path, access=access, generates=generates)
            with suppress(VersionChanged):  # another thread has just replaced it
                return target, self.leases.take(target.adapter)

    async def unloaded_names(self, access: Access) -> list[str]:
        """Return the names that would be loaded from the folder that is served, and that may be seen."""
        if not self.loader.is_enabled:
            return []
        names = await in_daemon_thread(self.loader.names)
        return [name for name in names if access.may_see(name) and not self.models.is_base(name)]

    async def adapter_names(self, access: Access) -> list[str]:
        """Return the names of the adapters that a sender may see, in the order of ``GET /v1/adapters``."""
        names = {*filter(access.may_see, self.catalog.names()), *await self.unloaded_names(access)}
        return sorted(names)

    async def _named(self, part: str, access: Access) -> str:
        """Return the adapter's name for llama.cpp's index of one, and any other text as it is.

        Mixtures, which come and go, are not counted. An adapter whose name is a number goes first.

        Raises:
            ApiError: 404, there is no such index.
        """
        if not _INDEX.fullmatch(part):
            return part
        names = [name for name in await self.adapter_names(access) if not name.startswith(PREFIX)]
        if part in names:
            return part
        if int(part) >= len(names):
            raise ApiError(404, f"There is no adapter {part}: /v1/adapters lists {len(names)}, from 0.", param="lora")
        return names[int(part)]

    async def _mixed(self, text: str, mixture: Sequence[tuple[str, float]], access: Access) -> ResolvedModel:
        """Return a mixture, which is made if it is not there.

        Its conversations are those of its adapters if they are the same for all of them, else the base model's.
        """
        if not mixture:
            return self.models.resolve(self.models.base, None, access)
        targets = [await self.resolve(name, access=access, generates=False) for name, _ in mixture]
        parts = []
        for (name, weight), target in zip(mixture, targets, strict=True):
            is_mixture = target.name.startswith(PREFIX)
            if target.adapter is None or is_mixture or target.chat.task.invocation_token_ids:
                raise bad_request(f"{name!r} is no adapter that can be mixed.", "model")
            parts.append((target.adapter, weight))
        chat = targets[0].chat if all(target.chat == targets[0].chat for target in targets) else AdapterChat()
        for _ in range(_ATTEMPTS):
            with ExitStack() as leases:
                for adapter, _ in parts:
                    leases.enter_context(self.leases.take(adapter))
                name = await self._made(text, parts)
            record = self.models.record(name)
            if record is not None:
                named = msgspec.structs.replace(record.ref, name=AdapterName(text))
                return ResolvedModel(text, named, msgspec.structs.replace(chat, task=AdapterTask()))
            self.mixtures.lost(name)  # somebody has removed it
        raise ApiError(409, f"The mixture `{text}` has just changed; send the request again.")

    async def _made(self, text: str, parts: Sequence[Part]) -> str:
        """Return the name under which a mixture is registered. Errors call it as the client wrote it."""
        try:
            return await self.mixtures.get(parts)
        except ApiError as error:
            own = name_of(parts)
            shown = text[:_SHOWN_CHARS]
            said = error.message.replace(f"adapter {own!r}", f"mixture {shown!r}").replace(own, shown)
            raise ApiError(error.status, said, param="model", type=error.type) from error
