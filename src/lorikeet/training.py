"""Sends the adapter of a live PEFT model to a server, without a folder between them: :func:`sync`.

A trainer on the server's machine writes the weights into shared memory once, and the server reads them there. Elsewhere
they are the body of a request. Both are the file that PEFT would save, byte for byte, so that the digest is the one
that ``lorikeet adapters inspect`` prints for such a folder.

This module imports neither torch nor PEFT; the model brings them.
"""

import http.client
import json
import mmap
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import numpy as np

from lorikeet.adapters.description import CONFIG_FILE
from lorikeet.adapters.shared_memory import FOLDER, PREFIX
from lorikeet.http.urls import server_root, unix_socket

DEFAULT_URL = "http://127.0.0.1:8000"

_TIMEOUT_S = 600.0
_ALIGNMENT = 8
_BEGINNING = 1024
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SyncError(RuntimeError):
    """The server did not take the weights; the message is the server's."""


class Synced(NamedTuple):
    """The outcome of a sync.

    Attributes:
        digest: the version's digest at the server.
        bytes: size of the weights file.
        changed: number of tensors that differ from those of the last sync over the same memory.
        seconds: time of the whole call.
    """

    digest: str
    bytes: int
    changed: int
    seconds: float


def sync(
    model: Any,
    name: str,
    url: str = DEFAULT_URL,
    *,
    adapter: str | None = None,
    api_key: str = "",
    shared_memory: "SharedWeights | None" = None,
) -> Synced:
    """Register the adapter of a live PEFT model at a server, replacing what has the name.

    Requests that run keep the version that they have.

    Args:
        model: the ``PeftModel``.
        name: the adapter's name at the server.
        url: address of the server; ``unix:PATH`` for one with ``--uds``.
        adapter: name of the adapter in the model; None for its active one.
        api_key: key that is sent as a bearer token.
        shared_memory: memory that the server, on the same machine and with the same user, reads; None to send the
            weights in the body of the request.

    Returns:
        The digest of the version, and what it took.

    Raises:
        SyncError: the server refuses the weights or cannot be reached.
        TypeError: the model is not a ``PeftModel``.
    """
    began_s = time.monotonic()
    if not hasattr(model, "peft_config"):
        raise TypeError(f"sync() needs a PeftModel, not a {type(model).__name__}")
    adapter = adapter or model.active_adapters[0]
    tensors = _state(model, adapter) if shared_memory is None else shared_memory.state(model, adapter)
    query = {"name": name, "replace": "true", "config": _config(model, adapter)}
    header, size = _header(tensors)
    if shared_memory is None:
        changed = len(tensors)
        content = b"".join([header, *(_bytes(tensors[key]).data for key in _ordered(tensors))])
    else:
        changed = shared_memory.write(header, size, {key: _bytes(tensors[key]) for key in _ordered(tensors)})
        query["shm"] = shared_memory.name
        content = b""
    card = _post(url, f"/v1/adapters/upload?{urlencode(query)}", content, api_key)
    return Synced(card["digest"], size, changed, time.monotonic() - began_s)


class SharedWeights:
    """Shared memory for the weights of one adapter, which syncs use again. As a context manager it is freed at the end.

    Tensors that have not changed since the last sync are not written again.
    """

    def __init__(self) -> None:
        self.name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._path = FOLDER / self.name
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._header = b""
        self._map: mmap.mmap | None = None
        self._parameters: dict[str, Any] = {}
        self._adapter = ""

    def state(self, model: Any, adapter: str) -> dict[str, Any]:
        """Return the tensors that PEFT saves of an adapter, on the CPU.

        PEFT goes through the whole model to find them. Later calls read the parameters that the first one found, as
        long as the model has them.
        """
        there = {id(parameter) for parameter in model.parameters()}
        known = self._parameters
        if not known or adapter != self._adapter or not all(id(each) in there for each in known.values()):
            state = _saved(model, adapter)
            owners = {parameter.data_ptr(): parameter for parameter in model.parameters()}
            known = {name: owners.get(tensor.data_ptr()) for name, tensor in state.items()}
            if any(found is None or found.shape != state[name].shape for name, found in known.items()):
                return _on_cpu(state)  # A tensor is made for the file.
            self._parameters = known
            self._adapter = adapter
        return _on_cpu(known)

    def write(self, header: bytes, size: int, tensors: Mapping[str, "np.ndarray[Any, np.dtype[np.uint8]]"]) -> int:
        """Write a weights file; return the number of tensors that were written.

        Args:
            header: the file's header.
            size: bytes of the whole file.
            tensors: the bytes of each tensor, in the file's order.
        """
        is_new = header != self._header or self._map is None
        if is_new:
            os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
            self._map[: len(header)] = header
            self._header = header
        assert self._map is not None
        there = np.frombuffer(self._map, dtype=np.uint8)
        begin = len(header)
        changed = 0
        for content in tensors.values():
            part = there[begin : begin + len(content)]
            if is_new or not _are_equal(part, content):
                part[:] = content
                changed += 1
            begin += len(content)
        return changed

    def close(self) -> None:
        """Free the memory."""
        self._map = None
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> "SharedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _are_equal(first: "np.ndarray[Any, np.dtype[np.uint8]]", second: "np.ndarray[Any, np.dtype[np.uint8]]") -> bool:
    """Return whether bytes are equal. Tensors that were trained differ at their beginning, which is compared first."""
    return np.array_equal(first[:_BEGINNING], second[:_BEGINNING]) and np.array_equal(first, second)


def _state(model: Any, adapter: str) -> dict[str, Any]:
    """Return the tensors that PEFT saves of an adapter, on the CPU."""
    return _on_cpu(_saved(model, adapter))


def _saved(model: Any, adapter: str) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=adapter)
    return state


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _config(model: Any, adapter: str) -> str:
    """Return the config that PEFT saves of an adapter."""
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config[adapter].save_pretrained(folder)
        value = json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8"))
    return json.dumps(value, separators=(",", ":"))


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise SyncError(f"tensors of {name} cannot be served")
    return _DTYPES[name]


def _ordered(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names in the order of a safetensors file: wide numbers first, then by name."""
    return sorted(tensors, key=lambda name: (-_WIDTHS[_dtype(tensors[name])], name))


def _header(tensors: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the header of the safetensors file, with its length in front, and the size of the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in _ordered(tensors):
        begin = end
        end += tensors[name].numel() * tensors[name].element_size()
        entries[name] = {
            "dtype": _dtype(tensors[name]),
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def _bytes(tensor: Any) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the bytes of a contiguous tensor, without a copy."""
    import torch

    return np.asarray(tensor.reshape(-1).view(torch.uint8).numpy())


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


@contextmanager
def _connection(url: str) -> Iterator[http.client.HTTPConnection]:
    found: http.client.HTTPConnection
    if path := unix_socket(url):
        found = _UnixConnection(path)
    else:
        parts = urlsplit(server_root(url))
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        found = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        yield found
    finally:
        found.close()


def _post(url: str, path: str, content: bytes, api_key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with _connection(url) as connection:
            connection.request("POST", path, body=content, headers=headers)
            reply = connection.getresponse()
            body = json.loads(reply.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SyncError(f"{url}: {error}") from error
    if reply.status >= 400:
        message = body.get("error", {}).get("message", "")
        raise SyncError(f"{url} answers {reply.status} to POST {path.partition('?')[0]}: {message}")
    card: dict[str, Any] = body
    return card
