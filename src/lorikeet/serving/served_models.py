"""Names of the base model and the adapters: resolves the model of a request, and lists models."""

import hashlib
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from lorikeet.adapters.catalog import AdapterCatalog, AdapterRecord
from lorikeet.adapters.chat import AdapterChat
from lorikeet.adapters.errors import AdapterNotServed
from lorikeet.chat.mixtures import MIXED, PREFIX, spelled
from lorikeet.core.adapter import AdapterRef
from lorikeet.http.errors import ApiError, bad_request, hide_paths, model_not_found
from lorikeet.tenants.keys import OPERATOR, Access

_VERSIONED = re.compile(r"(.+)@([0-9a-f]{8,64})")
"""An adapter's name, and the beginning of its version's digest."""


class ResolvedModel(NamedTuple):
    """The model of a request.

    Attributes:
        name: the served name, for answers and metrics.
        adapter: the adapter version; None for the base model.
        chat: how conversations with it differ from those with the base model.
    """

    name: str
    adapter: AdapterRef | None
    chat: AdapterChat = AdapterChat()


class ServedModels:
    """Base model and adapters by name.

    Args:
        base_names: names of the base model; the first is reported.
        aliases: further names that are accepted and not listed, such as the folder.
        root: hub id of the base model, or name of its folder.
        catalog: the adapters.
        max_model_len: longest sequence, in tokens.
    """

    def __init__(
        self,
        base_names: tuple[str, ...],
        aliases: Iterable[str],
        root: str,
        catalog: AdapterCatalog,
        max_model_len: int,
    ) -> None:
        self.base_names = base_names
        self._base = frozenset(base_names) | frozenset(aliases)
        self._root = root
        self._catalog = catalog
        self._max_model_tokens = max_model_len
        self._created = int(time.time())

    @property
    def base(self) -> str:
        """The name that the base model is reported under."""
        return self.base_names[0]

    def is_base(self, name: str) -> bool:
        """Return whether ``name`` is one of the base model's."""
        return name in self._base

    def resolve(self, model: str | None, lora_path: str | None = None, access: Access = OPERATOR) -> ResolvedModel:
        """Resolve the names in a request: an exact name first, then ``base:adapter``.

        An adapter may be named with the beginning of its digest, ``name@05d07048``; another version is not found then.

        Args:
            model: None or empty for the base model, as in vLLM.
            lora_path: SGLang's field, an adapter's name.
            access: the sender's rights. A model that it may not see does not exist for it.

        Raises:
            ApiError: 404 for an unknown name, which never falls back to the base; 403 for one that the sender may see
                and not use; 400 if the two fields name different adapters.
        """
        target = self._by_model(model, access, is_asked=not lora_path)
        if not lora_path:
            return target
        if target.adapter is not None and target.name != self._unversioned(lora_path):
            raise bad_request(f"model asks for adapter {target.name!r}, lora_path for {lora_path!r}.", "lora_path")
        return self._adapter(lora_path, lora_path, access)

    def mixture(self, model: str | None) -> tuple[str, list[tuple[str, float]]] | None:
        """Return the base's name, if it is there, with its colon, and the parts of ``base:a*0.7+b*0.3``.

        None for a name that is not a mixture.

        Raises:
            ApiError: 400, the mixture is not valid.
        """
        if not model or model in self._base or not MIXED.intersection(model):
            return None
        prefix = next((f"{base}:" for base in self._base if model.startswith(f"{base}:")), "")
        parts = spelled(model.removeprefix(prefix))
        if parts is None:
            return None
        if ":" in parts[0][0]:  # no adapter's name has a colon
            other = parts[0][0].rpartition(":")[0]
            raise bad_request(
                f"Beside lora or merged_adapters, model must be the base or missing, not {other!r}.",
                "model",
            )
        return prefix, parts

    def missing(self, model: str | None, lora_path: str | None = None) -> list[str]:
        """Return the adapters that a request names and that are not registered."""
        mixture = self.mixture(model)
        if mixture is not None:
            return [missing for name, weight in mixture[1] if weight for missing in self.missing(name)]
        names = [lora_path] if lora_path else []
        if model and model not in self._base and model not in self._catalog:
            names.append(self.named_by(model))
        return [name for name in map(self._unversioned, names) if name not in self._catalog]

    def named_by(self, model: str) -> str:
        """Return the name of the adapter that ``model`` means, without the base's name or a version."""
        if model not in self._catalog:
            model = next((model[len(base) + 1 :] for base in self._base if model.startswith(f"{base}:")), model)
        return self._unversioned(model)

    def _unversioned(self, name: str) -> str:
        """Return the name in ``name@version``, and any other name as it is."""
        found = _VERSIONED.fullmatch(name)
        return name if found is None or name in self._catalog else found[1]

    def _by_model(self, model: str | None, access: Access, *, is_asked: bool = True) -> ResolvedModel:
        """Return the model called ``model``; ``is_asked``: it is what will be used."""
        if not model or model in self._base:
            if is_asked:
                check_use(access, self.base_names, model or self.base)
            return ResolvedModel(model if model in self.base_names else self.base, None)
        plain = self._unversioned(model)
        if access.may_use(plain):
            record = self.record(plain)
            if record is not None and (plain == model or _has_version(record, model)):
                return ResolvedModel(plain, record.ref, record.chat)
        elif plain in self._catalog:
            check_use(access, (plain,), model)
        for base in self._base:
            if model.startswith(f"{base}:"):
                return self._adapter(model.removeprefix(f"{base}:"), model, access)
        raise model_not_found(model)

    def _adapter(self, name: str, asked: str, access: Access) -> ResolvedModel:
        plain = self._unversioned(name)
        check_use(access, (plain,), asked)
        record = self.record(plain)
        if record is None or not _has_version(record, name):
            raise model_not_found(asked)
        return ResolvedModel(plain, record.ref, record.chat)

    def record(self, name: str) -> AdapterRecord | None:
        """Return an adapter's record, None if no adapter has that name.

        Raises:
            ApiError: 400, it is registered, but cannot be served.
        """
        try:
            return self._catalog.get(name)
        except AdapterNotServed as error:
            raise bad_request(hide_paths(str(error)), "model") from error

    def cards(self, unloaded: Iterable[str] = (), access: Access = OPERATOR) -> list[dict[str, Any]]:
        """Return a card for every model, the base model's first, which clients use by default.

        Args:
            unloaded: names of adapters that would be loaded if a request named them.
            access: the sender's rights; it gets only models that it may see.
        """
        cards = [self._card(name, self._created, self._root, None) for name in self.base_names if access.may_see(name)]
        # Mixtures are made by requests, and go again.
        records = (each for each in self._catalog.list() if not each.name.startswith(PREFIX))
        cards += [self.adapter_card(record) for record in records if access.may_see(record.name)]
        names = (name for name in unloaded if name not in self._catalog and name not in self._base)
        return cards + [self.unloaded_card(name) for name in names if access.may_see(name)]

    def unloaded_card(self, name: str) -> dict[str, Any]:
        """Return the card of an adapter that would be loaded if a request named it."""
        return self._card(name, self._created, name, self.base)

    def card(self, name: str, access: Access = OPERATOR) -> dict[str, Any]:
        """Return one card.

        Raises:
            ApiError: 404, no model that the sender may see has that name.
        """
        names = self.base_names if self.is_base(name) else (self.named_by(name),)
        if not any(map(access.may_see, names)):
            raise model_not_found(name)
        target = self._by_model(name, OPERATOR)
        record = None if target.adapter is None else self.record(target.name)
        return self._card(target.name, self._created, self._root, None) if record is None else self.adapter_card(record)

    def adapter_card(self, record: AdapterRecord) -> dict[str, Any]:
        """Return an adapter's card."""
        card = self._card(record.name, int(record.created_at), record.shown_source, self.base)
        card["source_sha256"] = hashlib.sha256(record.source.encode()).hexdigest()
        return card | {"chat": describe_chat(record.chat)} if record.row.chat else card

    def _card(self, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "lorikeet",
            "root": root,
            "parent": parent,
            "max_model_len": self._max_model_tokens,
            "permission": [_permission(name, created)],
        }


def _has_version(record: AdapterRecord, name: str) -> bool:
    """Return whether a record is the version in ``name@version``; True for a name without one."""
    return name == record.name or record.digest.startswith(name.removeprefix(f"{record.name}@"))


def check_use(access: Access, names: Iterable[str], asked: str) -> None:
    """Check that a sender may use a model by one of its names.

    Raises:
        ApiError: 404 if it may not even see it, with the words for a model that does not exist; else 403.
    """
    known = tuple(names)
    if any(map(access.may_use, known)):
        return
    if any(map(access.may_see, known)):
        raise ApiError(403, f"This key may see the model `{asked}`, but not use it.", param="model")
    raise model_not_found(asked)


def describe_chat(chat: AdapterChat) -> dict[str, Any]:
    """Return how conversations with an adapter differ from those with the base model; what does not is left out."""
    said: dict[str, Any] = {
        "chat_template": "its own" if chat.chat_template else None,
        "added_tokens": {token.content: token.id for token in chat.added_tokens},
        "generation_config": msgspec.to_builtins(chat.generation),
        "eos_token_ids": chat.eos_token_ids,
        "system_prompt": chat.system_prompt,
        "tool_call_parser": chat.tool_call_parser,
        "reasoning_parser": chat.reasoning_parser,
        "labels": chat.task.labels,
        "pooling": chat.task.pooling,
        "invocation_token_ids": chat.task.invocation_token_ids,
    }
    return {key: value for key, value in said.items() if value}


def _permission(name: str, created: int) -> dict[str, Any]:
    """Return OpenAI's former permission object, which clients of vLLM still parse."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
