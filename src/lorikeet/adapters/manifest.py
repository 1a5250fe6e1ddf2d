"""The manifest of a stored adapter version, which describes its files at the time of registration."""

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
    """The description of a version at the time it was stored.

    Attributes:
        weight_bytes, weight_mtime_ns: size and modification time of the weights file. Any difference is an error.
        modules: tensors and scalings of the modules. Manifests of Lorikeet 0.2 or older have none.
        largest: see ``AdapterDescription``. Older manifests have 0.
        extras: the matrices besides A and B.
    """

    weight_bytes: int
    weight_mtime_ns: int
    modules: tuple[ModuleTensors, ...] = ()
    largest: float = 0.0
    extras: tuple[ExtraTensor, ...] = ()


class _Largest(msgspec.Struct, frozen=True):
    """The part of a manifest with the largest magnitude. Decoding only this part takes a tenth of the time."""

    largest: float = 0.0


def write_manifest(folder: Path, found: "AdapterDescription | Manifest", *, is_durable: bool = True) -> None:
    """Write the manifest of a version.

    Its weights file must be complete.

    Args:
        folder: the version's folder.
        found: the version's description, made here or on the server it came from.
        is_durable: whether to wait until the disk has the manifest; a version without a name after a restart need not.

    Raises:
        OSError: the manifest cannot be written.
    """
    weights = (folder / WEIGHTS_FILE).stat()
    manifest = Manifest(weights.st_size, weights.st_mtime_ns, found.modules, found.largest, found.extras)
    with (folder / MANIFEST_FILE).open("wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        if is_durable:
            os.fsync(file.fileno())


def largest_of(folder: Path) -> float:
    """Return the largest magnitude in a version's manifest; 0 if the manifest has none or cannot be read."""
    try:
        return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=_Largest).largest
    except (OSError, msgspec.DecodeError):
        return 0.0


Tensors = tuple[tuple[ModuleTensors, ...], tuple[ExtraTensor, ...]]
"""The modules and the extras of an adapter."""


def check_unchanged(ref: AdapterRef) -> Tensors:
    """Check by size and, in the store, modification time that the weights file is unchanged since registration.

    Returns:
        The tensors in the manifest; nothing for a folder outside the store, or from Lorikeet 0.2 or older.

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
    """Return an adapter's tensors from the manifest, or from the folder if the manifest does not list them.

    Args:
        ref: the adapter.
        geometry: sizes and module names of the base.

    Raises:
        AdapterError: the adapter is missing, has changed, or is not valid.
    """
    modules, extras = check_unchanged(ref)
    # The writer of the manifest, such as the pool of a cluster, may not have known the base.
    if (modules or extras) and all(each.module in geometry.modules or each.module == SCORE for each in modules):
        return modules, extras
    try:
        found = describe(Path(ref.folder), DescribeOptions(geometry.whole, checks_fit=False))
        return found.modules, found.extras
    except AdapterError as error:
        raise AdapterError(f"adapter {ref.name!r}: {error}") from error
