"""Describes adapters for the router: the source for backends, and the rank and size for placement."""

import hashlib
from pathlib import Path

import msgspec

from lorikeet.adapters.checkpoint import begin_digest
from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import MAX_CONFIG_BYTES, read_json
from lorikeet.core.ids import AdapterDigest

_WEIGHTS_FILES = (WEIGHTS_FILE, "adapter_model.bin")


class RoutedAdapter(msgspec.Struct, frozen=True):
    """One version of an adapter under one name.

    Attributes:
        name: the adapter's name for clients (in ``model``) and backends.
        source: path or URL from which backends load the adapter. It must mean the same adapter on all backends.
        digest: hash of name and content. If the router cannot read the files, it is the hash of name, source and number
            of replacements. The name is included since backends keep an adapter under each of its names.
        rank: the adapter's largest rank; 0 if unknown.
        size_bytes: size of the weights in bytes; 0 if unknown.
        replaces: whether the name belonged to another version before, which backends may still have.
        version: digest of the content, as a Lorikeet names the version; empty if the router cannot compute it.
    """

    name: str
    source: str
    digest: AdapterDigest
    rank: int
    size_bytes: int
    replaces: bool = False
    version: str = ""


class _Ranks(msgspec.Struct):
    r: int = 1
    rank_pattern: dict[str, int] | None = None


def describe_adapter(name: str, source: str, rank: int | None = None) -> RoutedAdapter:
    """Read rank, size and digest of an adapter. The backends check whether they can serve the adapter.

    Args:
        name: the adapter's name for clients, in ``model``.
        source: path or URL for the backends.
        rank: the adapter's largest rank, which is needed if the router cannot read the config.

    Raises:
        AdapterError: the rank is unknown, or the config cannot be read.
    """
    config, weights = _files(Path(source))
    digest = hashlib.sha256(b"%d\n" % len(name.encode()) + name.encode())
    if config is None or weights is None:
        if rank is None:
            raise AdapterError(f"adapter {name!r}: cannot be read here in {source}; give its rank, such as rank=16")
        digest.update(source.encode())
        return RoutedAdapter(name, source, AdapterDigest(digest.hexdigest()), rank, 0)
    try:
        ranks = msgspec.convert(read_json(config, MAX_CONFIG_BYTES), _Ranks)
        digest.update(config.read_bytes())
        version = _begin_version(config, weights)
        with weights.open("rb") as stream:
            while piece := stream.read(2**20):
                digest.update(piece)
                if version is not None:
                    version.update(piece)
        size_bytes = weights.stat().st_size
    except (AdapterError, OSError, msgspec.ValidationError) as error:
        raise AdapterError(f"adapter {name!r} in {source}: {error}") from error
    largest = max(ranks.r, *(ranks.rank_pattern or {}).values(), 0) if rank is None else rank
    named = "" if version is None else version.hexdigest()
    return RoutedAdapter(name, source, AdapterDigest(digest.hexdigest()), largest, size_bytes, version=named)


def _begin_version(config: Path, weights: Path) -> "hashlib._Hash | None":
    """Begin the digest by which a Lorikeet names a version; None for files that it does not take as they are."""
    if weights.name != WEIGHTS_FILE:
        return None
    try:
        return begin_digest(config)
    except AdapterError:
        return None


def as_new_version(adapter: RoutedAdapter, number: int) -> RoutedAdapter:
    """Return the adapter as version ``number`` from the same source, with a new digest."""
    digest = hashlib.sha256(f"{adapter.digest} {number}".encode()).hexdigest()
    return msgspec.structs.replace(adapter, digest=AdapterDigest(digest))


def _files(folder: Path) -> tuple[Path | None, Path | None]:
    """Return the config and weights files of a PEFT folder; None for a missing file."""
    config = folder / CONFIG_FILE
    weights = next((folder / name for name in _WEIGHTS_FILES if (folder / name).is_file()), None)
    return (config if config.is_file() else None), weights
