"""Finds the model that a request names: loads adapters on demand, makes mixtures, and leases versions."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import msgspec

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.chat import AdapterChat
from lorikeet.adapters.mixture import Part
from lorikeet.adapters.task import AdapterTask
from lorikeet.chat.mixtures import PREFIX, Mixtures, name_of, spelling
from lorikeet.core.ids import AdapterName
from lorikeet.core.splits import Split
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.model_routes import AUTO_MODEL
from lorikeet.http.tenancy import check_use
from lorikeet.http.threads import in_daemon_thread
from lorikeet.serving.adapter_loader import AdapterLoader
from lorikeet.serving.auto_model import AutoModel
from lorikeet.serving.leases import AdapterLeases, Lease, VersionChanged
from lorikeet.serving.pauses import Pauses
from lorikeet.serving.served_models import ResolvedModel, ServedModels
from lorikeet.serving.splits import SplitNames
from lorikeet.tenants.keys import OPERATOR, Access

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
        auto: chooses the adapters of requests that name none.

    Attributes:
        splits: the names whose requests are split between adapters.
        leases: the versions that requests use.
        pauses: the requests that wait before their model is resolved.
    """

    def __init__(
        self,
        models: ServedModels,
        catalog: AdapterCatalog,
        loader: AdapterLoader,
        mixtures: Mixtures,
        auto: AutoModel,
    ) -> None:
        self.models = models
        self.catalog = catalog
        self.loader = loader
        self.mixtures = mixtures
        self.auto = auto
        self.leases = AdapterLeases(catalog)
        self.splits = SplitNames(catalog)
        self.pauses = Pauses()

    async def resolve(
        self,
        model: str | None,
        lora_path: str | None = None,
        *,
        access: Access,
        generates: bool = True,
        key: str = "",
        prompt: Callable[[], str] | None = None,
    ) -> ResolvedModel:
        """Return the model that a request names. An adapter that is not registered is loaded if a source has it.

        Args:
            model, lora_path: the fields of the body that name the model.
            access: the sender's rights.
            generates: whether the request waits while generation is paused. It then gets the adapter's version after
                the pause.
            key: the user, session or request, which chooses the version of a split.
            prompt: returns the text by which the model ``auto`` is chosen; None for a route without a prompt.

        Raises:
            ApiError: see ``ServedModels.resolve`` and ``AdapterLoader.load``; 400, the route cannot choose a model.
        """
        if generates:
            await self.pauses.wait("", access.actor)
        if self.is_auto(model, lora_path):
            return await self._chosen(prompt, access, generates=generates)
        target = await self._resolved(model, lora_path, access, key)
        while generates and self.pauses.holds(target.name, access.actor):
            await self.pauses.wait(target.name, access.actor)
            target = await self._resolved(model, lora_path, access, key)
        return target

    def is_auto(self, model: str | None, lora_path: str | None) -> bool:
        """Return whether a request leaves the choice to the server. A model with the name ``auto`` comes first."""
        return (
            self.auto.is_enabled
            and model == AUTO_MODEL
            and not lora_path
            and not self.models.is_base(AUTO_MODEL)
            and AUTO_MODEL not in self.catalog
            and self.splits.get(AUTO_MODEL) is None
        )

    async def _chosen(self, prompt: Callable[[], str] | None, access: Access, *, generates: bool) -> ResolvedModel:
        """Return the adapter whose examples are nearest to a prompt, or the base model."""
        if prompt is None:
            raise bad_request("model: this route has no prompt by which `auto` could choose; name a model.", "model")
        text = prompt()
        for _ in range(_ATTEMPTS):
            nearest = await self.auto.choose(text, access)
            with suppress(ApiError):  # The adapter may just have been removed.
                target = await self.resolve(nearest.name or self.models.base, access=access, generates=generates)
                return target._replace(chosen=nearest.why)
        target = await self.resolve(self.models.base, access=access, generates=generates)
        return target._replace(chosen="none: the nearest cannot be used")

    async def _resolved(self, model: str | None, lora_path: str | None, access: Access, key: str) -> ResolvedModel:
        """Return the model that a request names now."""
        name = lora_path or (self.models.named_by(model) if model else "")
        if (split := self.splits.get(name)) is not None:
            return await self._version_of(name, split, access, key)
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
                if not access.may_use(name):  # Sources are not searched for a name that the sender may not use.
                    if name in await self.unloaded_names(access):
                        check_use(access, (name,), name)
                    break
                await self.loader.load(name)
        target = self.models.resolve(model, lora_path, access)
        if target.adapter is not None:
            self.loader.use(target.name)
        return target

    async def lease(
        self,
        model: str | None,
        lora_path: str | None = None,
        *,
        access: Access,
        generates: bool = True,
        key: str = "",
        prompt: Callable[[], str] | None = None,
    ) -> tuple[ResolvedModel, Lease]:
        """Resolve a model with :meth:`resolve`, and lease its version. The caller must close the lease.

        Raises:
            ApiError: see :meth:`resolve`.
        """
        while True:
            target = await self.resolve(model, lora_path, access=access, generates=generates, key=key, prompt=prompt)
            with suppress(VersionChanged):  # Another thread has just replaced the version.
                return target, self.leases.take(target.adapter)

    async def _version_of(self, name: str, split: Split, access: Access, key: str) -> ResolvedModel:
        """Return the version of a split for a key: the first in its order that is still there.

        A key of a tenant that may use the split may use its versions by it.
        """
        check_use(access, (name,), name)
        for version in split.ranked(name, key):
            with suppress(ApiError):  # The version has been removed, so its requests go to the others.
                target = await self._resolved(version, None, OPERATOR, key)
                return target._replace(split=name)
        raise ApiError(404, f"No version of `{name}` exists any more; it names {', '.join(split.versions)}.")

    async def unloaded_names(self, access: Access) -> list[str]:
        """Return the names of the unloaded adapters in ``--adapter-dir`` that the sender may see."""
        if not self.loader.is_enabled:
            return []
        names = await in_daemon_thread(self.loader.names)
        return [name for name in names if access.may_see(name) and not self.models.is_base(name)]

    async def adapter_names(self, access: Access) -> list[str]:
        """Return the names of the adapters that a sender may see, in the order of ``GET /v1/adapters``."""
        names = {*filter(access.may_see, self.catalog.names()), *await self.unloaded_names(access)}
        return sorted(names)

    async def _named(self, part: str, access: Access) -> str:
        """Return the adapter's name for an index in llama.cpp's form. Any other text is returned unchanged.

        Indexes do not count mixtures. If an adapter's name is a number, the number means the name.

        Raises:
            ApiError: 404, no adapter has this index.
        """
        if not _INDEX.fullmatch(part):
            return part
        names = [name for name in await self.adapter_names(access) if not name.startswith(PREFIX)]
        if part in names:
            return part
        if int(part) >= len(names):
            raise ApiError(
                404,
                f"The adapter {part} does not exist: /v1/adapters lists {len(names)}, counted from 0.",
                param="lora",
            )
        return names[int(part)]

    async def _mixed(self, text: str, mixture: Sequence[tuple[str, float]], access: Access) -> ResolvedModel:
        """Return a mixture of adapters, and make it if necessary.

        The mixture has the chat settings of its adapters if all adapters have the same ones; otherwise the base
        model's.
        """
        if not mixture:
            return self.models.resolve(self.models.base, None, access)
        targets = [await self.resolve(name, access=access, generates=False) for name, _ in mixture]
        parts = []
        for (name, weight), target in zip(mixture, targets, strict=True):
            is_mixture = target.name.startswith(PREFIX)
            if target.adapter is None or is_mixture or target.chat.task.invocation_token_ids:
                raise bad_request(f"{name!r} must be an adapter that can be mixed.", "model")
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
            self.mixtures.lost(name)  # Another request has removed the mixture.
        raise ApiError(409, f"The mixture `{text}` has just changed; send the request again.")

    async def _made(self, text: str, parts: Sequence[Part]) -> str:
        """Make a mixture and return its registered name. Errors name the mixture by the client's text."""
        try:
            return await self.mixtures.get(parts)
        except ApiError as error:
            own = name_of(parts)
            shown = text[:_SHOWN_CHARS]
            said = error.message.replace(f"adapter {own!r}", f"mixture {shown!r}").replace(own, shown)
            raise ApiError(error.status, said, param="model", type=error.type) from error
