"""The manifest of a stored adapter version: a description of its files from the time it was registered."""

import os
from pathlib import Path

import msgspec

from lorikeet.adapters.checkpoint import DescribeOptions
from lorikeet.adapters.description import WEIGHTS_FILE, AdapterDescription, ExtraTensor, ModuleTensors
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.reader import describe
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import SCORE, ModelGeometry

MANIFEST_FILE = "version.json"


class Manifest(msgspec.Struct, frozen=True):
    """The description of a version from the time it was stored.

    Attributes:
        weight_bytes, weight_mtime_ns: size and modification time of its weights file; any difference is an error.
        modules: its tensors and scalings. A manifest of Lorikeet 0.2 or older has none.
        largest: see ``AdapterDescription``; older manifests have 0.
        extras: its other matrices.
    """

    weight_bytes: int
    weight_mtime_ns: int
    modules: tuple[ModuleTensors, ...] = ()
    largest: float = 0.0
    extras: tuple[ExtraTensor, ...] = ()


class _Largest(msgspec.Struct, frozen=True):
    """The part of a manifest that is decoded alone, in a tenth of the time."""

    largest: float = 0.0


def write_manifest(folder: Path, found: "AdapterDescription | Manifest") -> None:
    """Write the manifest of a version, whose weights file is complete.

    Args:
        folder: folder of the version.
        found: its description, made here or at its origin.

    Raises:
        OSError: it cannot be written.
    """
    weights = (folder / WEIGHTS_FILE).stat()
    manifest = Manifest(weights.st_size, weights.st_mtime_ns, found.modules, found.largest, found.extras)
    with (folder / MANIFEST_FILE).open("wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())


def largest_of(folder: Path) -> float:
    """Return the largest magnitude that the manifest of a version notes; 0 if it notes none or cannot be read."""
    try:
        return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=_Largest).largest
    except (OSError, msgspec.DecodeError):
        return 0.0


Tensors = tuple[tuple[ModuleTensors, ...], tuple[ExtraTensor, ...]]
"""The modules and the extras of an adapter."""


def check_unchanged(ref: AdapterRef) -> Tensors:
    """Check that the weights file is unchanged since it was registered: by size and, in the store, modification time.

    Returns:
        What its manifest lists; nothing for a folder outside the store, or of Lorikeet 0.2 or older.

    Raises:
        AdapterError: the file is missing or differs.
    """
    folder = Path(ref.folder)
    try:
        found = (folder / WEIGHTS_FILE).stat()
    except OSError as error:
        raise AdapterError(f"adapter {ref.name!r}: {folder / WEIGHTS_FILE}: {error.strerror}") from error
    if found.st_size != ref.weight_bytes:
        raise AdapterError(
            f"adapter {ref.name!r}: {folder / WEIGHTS_FILE} has {found.st_size} bytes, "
            f"but was registered with {ref.weight_bytes}; register it again"
        )
    if not (folder / MANIFEST_FILE).exists():
        return (), ()
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterError(
            f"adapter {ref.name!r}: {folder / MANIFEST_FILE} cannot be read: {error}; register it again"
        ) from error
    if found.st_mtime_ns != manifest.weight_mtime_ns:
        raise AdapterError(
            f"adapter {ref.name!r}: {folder / WEIGHTS_FILE} was changed after it was registered; register it again"
        )
    return manifest.modules, manifest.extras


def tensors_of(ref: AdapterRef, geometry: ModelGeometry) -> Tensors:
    """Return the tensors of an adapter, from its manifest if that lists them, else from its folder.

    Args:
        ref: the adapter.
        geometry: sizes and module names of the base.

    Raises:
        AdapterError: it is missing, has changed, or is not valid.
    """
    modules, extras = check_unchanged(ref)
    # Its writer may not have known the base, like the pool of a cluster.
    if (modules or extras) and all(each.module in geometry.modules or each.module == SCORE for each in modules):
        return modules, extras
    try:
        found = describe(Path(ref.folder), DescribeOptions(geometry.whole, checks_fit=False))
        return found.modules, found.extras
    except AdapterError as error:
        raise AdapterError(f"adapter {ref.name!r}: {error}") from error
