"""Lists the content of an adapter by digests, so that two copies can be compared tensor by tensor."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lorikeet.adapters.checkpoint import shard_names
from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE, TensorEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import read_config
from lorikeet.adapters.tensors import read_entries

_CHUNK_BYTES = 4 * 2**20


class AdapterContent(msgspec.Struct, frozen=True):
    """The content of an adapter's folder.

    Attributes:
        settings: settings of the config that change the meaning of the weights.
        tensors: hex SHA-256 of each tensor's dtype, shape and bytes, by name.
    """

    settings: dict[str, Any]
    tensors: dict[str, str]


class ContentDifferences(NamedTuple):
    """The differences between two contents.

    Attributes:
        settings: both values of each setting that differs.
        differing: names of tensors that both contents have with different bytes.
        only_first, only_second: names of tensors that only one content has.
    """

    settings: dict[str, tuple[Any, Any]]
    differing: list[str]
    only_first: list[str]
    only_second: list[str]

    @property
    def are_same(self) -> bool:
        """Whether both contents are equal."""
        return not any(self)


def read_content(folder: Path) -> AdapterContent:
    """Read the content of an adapter's folder, whose weights may be sharded.

    Raises:
        AdapterError: a file is missing or not valid.
    """
    settings = msgspec.json.decode(read_config(folder / CONFIG_FILE).config.digest_fields())
    is_whole = (folder / WEIGHTS_FILE).is_file()
    files = [folder / WEIGHTS_FILE] if is_whole else [folder / name for name in shard_names(folder)]
    tensors: dict[str, str] = {}
    for file in files:
        try:
            tensors |= {name: _digest(file, entry) for name, entry in read_entries(file).items()}
        except OSError as error:
            raise AdapterError(f"{file.name}: cannot be read: {error.strerror} ({folder})") from error
    return AdapterContent(settings, dict(sorted(tensors.items())))


def compare(first: AdapterContent, second: AdapterContent) -> ContentDifferences:
    """Return the differences between two contents."""
    keys = sorted({*first.settings, *second.settings})
    values = {key: (first.settings.get(key), second.settings.get(key)) for key in keys}
    return ContentDifferences(
        {key: pair for key, pair in values.items() if pair[0] != pair[1]},
        [name for name, digest in first.tensors.items() if second.tensors.get(name, digest) != digest],
        [name for name in first.tensors if name not in second.tensors],
        [name for name in second.tensors if name not in first.tensors],
    )


def _digest(file: Path, entry: TensorEntry) -> str:
    digest = hashlib.sha256(f"{entry.dtype} {list(entry.shape)}\n".encode())
    with file.open("rb") as stream:
        stream.seek(entry.start)
        rest = entry.stop - entry.start
        while chunk := stream.read(min(rest, _CHUNK_BYTES)):
            digest.update(chunk)
            rest -= len(chunk)
    if rest:
        raise AdapterError(f"{file.name}: it was cut off while tensor {entry.name} was read")
    return digest.hexdigest()
