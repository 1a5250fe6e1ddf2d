"""Stores adapters whose weights arrive in the body of a request."""

import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.adapters.catalog import AdapterRecord
from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.threads import in_daemon_thread

METADATA_KEY = "adapter_config"
"""Key of the adapter's config, as JSON, in the metadata of a safetensors file."""

_CHUNK_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 4 * 2**20
_LENGTH = struct.Struct("<Q")


async def receive_weights(stream: AsyncIterator[bytes], folder: Path) -> None:
    """Write a body to the weights file in a folder; the middleware limits its size.

    Raises:
        ApiError: 500, the file cannot be written.
    """
    try:
        with (folder / WEIGHTS_FILE).open("wb") as file:
            held: list[bytes] = []
            size = 0
            async for chunk in stream:
                held.append(chunk)
                size += len(chunk)
                if size >= _CHUNK_BYTES:
                    await in_daemon_thread(lambda parts=tuple(held): file.writelines(parts))  # type: ignore[misc]
                    held = []
                    size = 0
            file.writelines(held)
    except OSError as error:
        raise ApiError(500, f"The weights cannot be stored: {error.strerror}.") from error


def write_config(folder: Path, config: str | None, known: AdapterRecord | None, weights: Path) -> None:
    """Write the config of an adapter into its folder.

    Args:
        folder: the folder.
        config: the config as JSON; None for the config in the weights' metadata, or else the present version's.
        known: the present version; None for a new adapter.
        weights: the weights file.

    Raises:
        ApiError: 400, the config is missing.
    """
    if config is None:
        config = _metadata(weights).get(METADATA_KEY)
    if config is not None:
        (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
    elif known is not None:
        (folder / CONFIG_FILE).write_bytes((Path(known.folder) / CONFIG_FILE).read_bytes())
    else:
        raise bad_request(
            f"A new adapter needs its config: in the query, or as {METADATA_KEY!r} in the metadata of the file.",
            "config",
        )


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def _metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty if the file is not valid, which a later check refuses."""
    with file.open("rb") as stream:
        head = stream.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if length > _MAX_HEADER_BYTES:
            return {}
        try:
            return msgspec.json.decode(stream.read(length), type=_Header).metadata
        except msgspec.DecodeError:
            return {}


def check_config(config: str | None) -> None:
    """Check that a config in a query is a JSON object.

    Raises:
        ApiError: 400, the config is not a JSON object.
    """
    if config is None:
        return
    value: Any = None
    try:
        value = json.loads(config)
    except ValueError as error:
        raise bad_request(f"config: not valid JSON: {error}.", "config") from error
    if not isinstance(value, dict):
        raise bad_request("config: must be a JSON object.", "config")
