"""One registered adapter, what may name it, and what base model it belongs to."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.registry import RegistryRow
from lorikeet.adapters.sources import without_credentials
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, AdapterName

_NAME = re.compile(r"[A-Za-z0-9_@-][A-Za-z0-9._/@-]{0,127}")


@dataclass(frozen=True)
class AdapterRecord:
    """One registered name.

    Attributes:
        row: what the registry knows.
        folder: where its content lies.
        persistent: whether the registry remembers it after a restart.
    """

    row: RegistryRow
    folder: str
    persistent: bool = True

    @property
    def name(self) -> AdapterName:
        """The name."""
        return AdapterName(self.row.name)

    @property
    def digest(self) -> AdapterDigest:
        """The version that the name points to."""
        return AdapterDigest(self.row.digest)

    @property
    def source(self) -> str:
        """Where it was loaded from, as everybody may see it."""
        return without_credentials(self.row.source)

    @property
    def created_at(self) -> float:
        """When the name came to point to this version, Unix seconds."""
        return self.row.created_at

    @property
    def max_rank(self) -> int:
        """Largest rank of the adapter."""
        return self.row.max_rank

    @cached_property
    def ref(self) -> AdapterRef:
        """What requests carry, made at first use."""
        return AdapterRef(self.name, self.digest, self.folder, _decode_ranks(self.row.ranks), self.row.weight_bytes)


class Registered(NamedTuple):
    """What registering a name came to.

    Attributes:
        record: what the name points to.
        replaced: what it pointed to before; None if that was nothing, or the same version.
    """

    record: AdapterRecord
    replaced: AdapterRecord | None


@lru_cache(maxsize=256)
def _decode_ranks(text: str) -> dict[str, tuple[int, ...]]:
    """Return the ranks that a registry row holds; thousands of adapters share a few, which nobody changes."""
    return msgspec.json.decode(text, type=dict[str, tuple[int, ...]])


def check_name(name: str, reserved: set[str]) -> None:
    """Check a name for an adapter.

    Raises:
        AdapterError: it is not one, or reserved.
    """
    if not _NAME.fullmatch(name) or ".." in name or "//" in name or name.endswith("/"):
        raise AdapterError(
            f"{name[:200]!r} cannot name an adapter: 1 to 128 of letters, digits and . _ - / @, "
            f"not starting with . or /, without '..'"
        )
    if name.endswith("/stats"):
        raise AdapterError(f"{name!r} cannot name an adapter: /v1/adapters/NAME/stats tells the statistics of another")
    if name in reserved:
        raise AdapterError(f"{name!r} is the name of the base model")


def base_identity(base_name: str, geometry: ModelGeometry) -> str:
    """What a base model is remembered by: its name and its sizes (in whatever dtype it is served)."""
    sizes = msgspec.json.encode(msgspec.structs.replace(geometry, dtype_bytes=0), order="deterministic")
    return f"{base_name} {hashlib.sha256(sizes).hexdigest()[:16]}"
