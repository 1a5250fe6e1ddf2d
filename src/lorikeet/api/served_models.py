"""Names of the base model and the adapters: resolves the model of a request, and lists models."""

import hashlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from lorikeet.adapters.catalog import AdapterCatalog, AdapterRecord
from lorikeet.adapters.errors import AdapterNotServed
from lorikeet.api.errors import bad_request, hide_paths, model_not_found
from lorikeet.core.adapter import AdapterRef


class ResolvedModel(NamedTuple):
    """The model of a request.

    Attributes:
        name: the served name, for answers and metrics.
        adapter: the adapter version; None for the base model.
    """

    name: str
    adapter: AdapterRef | None


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

    def resolve(self, model: str | None, lora_path: str | None = None) -> ResolvedModel:
        """Resolve the names in a request: an exact name first, then ``base:adapter``.

        Args:
            model: None or empty for the base model, as in vLLM.
            lora_path: SGLang's field, an adapter's name.

        Raises:
            ApiError: 404 for an unknown name, which never falls back to the base; 400 if the two fields name
                different adapters.
        """
        target = self._by_model(model)
        if not lora_path:
            return target
        if target.adapter is not None and target.name != lora_path:
            raise bad_request(f"model asks for adapter {target.name!r}, lora_path for {lora_path!r}.", "lora_path")
        return self._adapter(lora_path, lora_path)

    def _by_model(self, model: str | None) -> ResolvedModel:
        if not model or model in self._base:
            return ResolvedModel(model if model in self.base_names else self.base, None)
        if self.record(model) is not None:
            return self._adapter(model, model)
        for base in self._base:
            if model.startswith(f"{base}:"):
                return self._adapter(model.removeprefix(f"{base}:"), model)
        raise model_not_found(model)

    def _adapter(self, name: str, asked: str) -> ResolvedModel:
        record = self.record(name)
        if record is None:
            raise model_not_found(asked)
        return ResolvedModel(name, record.ref)

    def record(self, name: str) -> AdapterRecord | None:
        """Return an adapter's record, None if no adapter has that name.

        Raises:
            ApiError: 400, it is registered, but cannot be served.
        """
        try:
            return self._catalog.get(name)
        except AdapterNotServed as error:
            raise bad_request(hide_paths(str(error)), "model") from error

    def cards(self) -> list[dict[str, Any]]:
        """Return a card for every model, the base model's first, which clients use by default."""
        cards = [self._card(name, self._created, self._root, None) for name in self.base_names]
        return cards + [self.adapter_card(record) for record in self._catalog.list()]

    def card(self, name: str) -> dict[str, Any]:
        """Return one card.

        Raises:
            ApiError: 404, no model has that name.
        """
        target = self._by_model(name)
        record = None if target.adapter is None else self.record(target.name)
        return self._card(target.name, self._created, self._root, None) if record is None else self.adapter_card(record)

    def adapter_card(self, record: AdapterRecord) -> dict[str, Any]:
        """Return an adapter's card."""
        card = self._card(record.name, int(record.created_at), record.shown_source, self.base)
        return card | {"source_sha256": hashlib.sha256(record.source.encode()).hexdigest()}

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
