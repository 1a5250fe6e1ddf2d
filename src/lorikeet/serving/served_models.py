"""Resolves the model that a request names, and lists the base model and the adapters."""

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
from lorikeet.http.errors import bad_request, hide_paths, model_not_found
from lorikeet.http.tenancy import check_use
from lorikeet.tenants.keys import OPERATOR, Access

_VERSIONED = re.compile(r"(.+)@([0-9a-f]{8,64})")
"""An adapter's name, and the beginning of its version's digest."""


_PUBLISHED = re.compile("publishers/[^/]+/models/")
"""KServe's prefix of the names in a namespace. A base with such a name gives its adapters the prefix, too."""


class ResolvedModel(NamedTuple):
    """The model of a request.

    Attributes:
        name: the served name, for answers and metrics.
        adapter: the adapter version; None for the base model.
        chat: chat settings in which the model differs from the base model.
        split: the split that chose the model; empty for none.
        chosen: why ``model: "auto"`` chose the model; empty if the request names it.
    """

    name: str
    adapter: AdapterRef | None
    chat: AdapterChat = AdapterChat()
    split: str = ""
    chosen: str = ""


class ServedModels:
    """Finds the base model and the adapters by name.

    Args:
        base_names: names of the base model. Answers report the first.
        aliases: further names that are accepted but not listed, such as the model's folder.
        root: hub id of the base model, or name of its folder.
        catalog: the registered adapters.
        max_model_len: longest sequence, in tokens.
        base_digest: hex SHA-256 of the served base model.
        takes_images: whether prompts may have images.
    """

    def __init__(
        self,
        base_names: tuple[str, ...],
        aliases: Iterable[str],
        root: str,
        catalog: AdapterCatalog,
        max_model_len: int,
        base_digest: str,
        takes_images: bool = False,
    ) -> None:
        self.base_digest = base_digest
        self.base_names = base_names
        self._base = frozenset(base_names) | frozenset(aliases)
        published = {found[0] for found in map(_PUBLISHED.match, self._base) if found}
        self._prefixes = (*(f"{base}:" for base in self._base), *published)
        self._root = root
        self._catalog = catalog
        self._max_model_tokens = max_model_len
        self._modalities = ["text", "image"] if takes_images else ["text"]
        self._created = int(time.time())

    @property
    def base(self) -> str:
        """Name of the base model in answers."""
        return self.base_names[0]

    def is_base(self, name: str) -> bool:
        """Return whether ``name`` is a name of the base model."""
        return name in self._base

    def resolve(self, model: str | None, lora_path: str | None = None, access: Access = OPERATOR) -> ResolvedModel:
        """Resolve the names in a request: first as an exact name, then as ``base:adapter``.

        A name may end with the first characters of the adapter's digest, ``name@05d07048``. It then matches only that
        version.

        Args:
            model: None or empty for the base model, as in vLLM.
            lora_path: an adapter's name, from SGLang's field.
            access: the sender's rights. Models that the sender may not see are treated as unknown.

        Raises:
            ApiError: 404 for an unknown name, which never falls back to the base; 403 for a model that the sender may
                see but not use; 400 if the two fields name different adapters.
        """
        target = self._by_model(model, access, is_asked=not lora_path)
        if not lora_path:
            return target
        if target.adapter is not None and target.name != self._unversioned(lora_path):
            raise bad_request(
                f"model names the adapter {target.name!r}, but lora_path names {lora_path!r}.", "lora_path"
            )
        return self._adapter(lora_path, lora_path, access)

    def mixture(self, model: str | None) -> tuple[str, list[tuple[str, float]]] | None:
        """Split a mixture such as ``base:a*0.7+b*0.3`` into its prefix, ``base:`` or empty, and its parts.

        Returns None for a name that is not a mixture.

        Raises:
            ApiError: 400, the mixture is not valid.
        """
        if not model or model in self._base or not MIXED.intersection(model):
            return None
        prefix = next((f"{base}:" for base in self._base if model.startswith(f"{base}:")), "")
        parts = spelled(model.removeprefix(prefix))
        if parts is None:
            return None
        if ":" in parts[0][0]:  # An adapter's name cannot contain a colon.
            other = parts[0][0].rpartition(":")[0]
            raise bad_request(
                f"Beside lora or merged_adapters, model must be the base or missing, not {other!r}.",
                "model",
            )
        return prefix, parts

    def missing(self, model: str | None, lora_path: str | None = None) -> list[str]:
        """Return the names of unregistered adapters in a request."""
        mixture = self.mixture(model)
        if mixture is not None:
            return [missing for name, weight in mixture[1] if weight for missing in self.missing(name)]
        names = [lora_path] if lora_path else []
        if model and model not in self._base and model not in self._catalog:
            names.append(self.named_by(model))
        return [name for name in map(self._unversioned, names) if name not in self._catalog]

    def named_by(self, model: str) -> str:
        """Return the adapter's name in ``model``, without the base's name and the version."""
        if model not in self._catalog:
            model = next((model.removeprefix(each) for each in self._prefixes if model.startswith(each)), model)
        return self._unversioned(model)

    def _unversioned(self, name: str) -> str:
        """Return the name in ``name@version``. Any other name is returned unchanged."""
        found = _VERSIONED.fullmatch(name)
        return name if found is None or name in self._catalog else found[1]

    def _by_model(self, model: str | None, access: Access, *, is_asked: bool = True) -> ResolvedModel:
        """Return the model called ``model``. If ``is_asked``, check that the sender may use the base model."""
        if not model or model in self._base:
            if is_asked:
                check_use(access, self.base_names, model or self.base)
            return ResolvedModel(model if model in self.base_names else self.base, None)
        plain = self._unversioned(model)
        if access.may_use(plain):
            record = self.record(plain)
            if record is not None and (plain == model or _has_version(record, model)):
                return ResolvedModel(plain, record.ref, record.request_chat)
        elif plain in self._catalog:
            check_use(access, (plain,), model)
        for prefix in self._prefixes:
            if model.startswith(prefix):
                return self._adapter(model.removeprefix(prefix), model, access)
        raise model_not_found(model)

    def _adapter(self, name: str, asked: str, access: Access) -> ResolvedModel:
        plain = self._unversioned(name)
        check_use(access, (plain,), asked)
        record = self.record(plain)
        if record is None or not _has_version(record, name):
            raise model_not_found(asked)
        return ResolvedModel(plain, record.ref, record.request_chat)

    def record(self, name: str) -> AdapterRecord | None:
        """Return an adapter's record; None for an unknown name.

        Raises:
            ApiError: 400, the adapter is registered but cannot be served.
        """
        try:
            return self._catalog.get(name)
        except AdapterNotServed as error:
            raise bad_request(hide_paths(str(error)), "model") from error

    def cards(self, unloaded: Iterable[str] = (), access: Access = OPERATOR) -> list[dict[str, Any]]:
        """Return a card for every model. The base model is first, since clients use the first by default.

        Args:
            unloaded: names of adapters that would be loaded if a request named them.
            access: the sender's rights. The cards include only models that the sender may see.
        """
        cards = [self._card(name, self._created, self._root, None) for name in self.base_names if access.may_see(name)]
        # Mixtures are not listed: requests make them, and they are removed when unused.
        records = (each for each in self._catalog.list() if not each.name.startswith(PREFIX))
        cards += [self.adapter_card(record) for record in records if access.may_see(record.name)]
        names = (name for name in unloaded if name not in self._catalog and name not in self._base)
        return cards + [self.unloaded_card(name) for name in names if access.may_see(name)]

    def unloaded_card(self, name: str) -> dict[str, Any]:
        """Return the card of an adapter that the first request would load."""
        return self._card(name, self._created, name, self.base)

    def card(self, name: str, access: Access = OPERATOR) -> dict[str, Any]:
        """Return the card of one model.

        Raises:
            ApiError: 404, the sender may not see a model of this name.
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
        card["digest"] = record.digest
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
            "input_modalities": self._modalities,
            "permission": [_permission(name, created)],
        }


def _has_version(record: AdapterRecord, name: str) -> bool:
    """Return whether a record is the version in ``name@version``; True for a name without a version."""
    return name == record.name or record.digest.startswith(name.removeprefix(f"{record.name}@"))


def describe_chat(chat: AdapterChat) -> dict[str, Any]:
    """Return the chat settings in which an adapter differs from the base model."""
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
        "examples": len(chat.examples),
    }
    return {key: value for key, value in said.items() if value}


def _permission(name: str, created: int) -> dict[str, Any]:
    """Return OpenAI's old permission object, which clients of vLLM still parse."""
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
