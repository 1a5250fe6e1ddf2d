"""Sends adapters from the memory of one process to that of another, over TCP.

A transfer is one connection. The server sends a challenge; the client answers with the digest of an adapter. The server
then sends an offer: the adapter's config and manifest. Both messages are signed with a key that the two processes
share. The weights follow without a change of format: the kernel sends them from the server's file, and the client
writes them to the file of its copy. The weights need no signature, because the client knows their digest. Nothing is
encrypted.
"""

import hashlib
import hmac
import mmap
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.adapters.manifest import MANIFEST_FILE
from lorikeet.core.ids import AdapterDigest

SILENCE_S = 10.0
"""Seconds without progress after which a peer is lost."""

_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAX_REQUEST_BYTES = 4096
_MAX_OFFER_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
_CONCURRENT = 16
"""Most transfers from one process at a time."""
_ACCEPT_RETRY_S = 0.1
"""Seconds to pause after a connection could not be accepted."""


def make_peer_key() -> bytes:
    """Return a new key for a server and the processes that it starts."""
    return secrets.token_bytes(32)


class PeerUnreachable(RuntimeError):
    """No connection to a peer can be made. Ray may still be able to send the files."""


class PeerError(RuntimeError):
    """A transfer has failed, because the peer lacks the adapter, has another key, or was lost."""


class PeerAddress(NamedTuple):
    """The address at which a process serves its adapters."""

    host: str
    port: int


class _Request(msgspec.Struct, frozen=True):
    digest: AdapterDigest
    nonce: bytes


class Offer(msgspec.Struct, frozen=True):
    """Describes an adapter that a peer is about to send.

    Attributes:
        error: reason why the peer cannot send the adapter; empty if it can.
        config: content of the adapter's config file.
        manifest: content of the adapter's manifest; empty if there is no manifest.
        weight_bytes: size of the weights file, which follows.
    """

    error: str = ""
    config: bytes = b""
    manifest: bytes = b""
    weight_bytes: int = 0


class PeerServer:
    """Sends the adapters of this process to peers, on separate threads.

    Args:
        host: address to listen on. The operating system chooses a free port.
        find: returns the folder of an adapter. It raises ``OSError``, ``RuntimeError`` or ``KeyError`` for an adapter
            that this process lacks.
        key: key that clients must sign with.

    Raises:
        OSError: the server cannot listen on the address.

    Attributes:
        address: address of the server.
        sent_bytes: bytes of weights sent so far.
    """

    def __init__(self, host: str, find: Callable[[AdapterDigest], Path], key: bytes) -> None:
        self._find = find
        self._key = key
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self.address = PeerAddress(host, self._listener.getsockname()[1])
        self.sent_bytes = 0
        self._free = threading.BoundedSemaphore(_CONCURRENT)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="peer-server", daemon=True).start()

    def close(self) -> None:
        """Stop accepting transfers. Running transfers continue."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # The shutdown wakes the thread that accepts connections.
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:  # The socket was closed, or the process has too many open files for now.
                self._free.release()
                if self._closed.wait(_ACCEPT_RETRY_S):
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), name="peer-transfer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(SILENCE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._transfer(connection)
        except (OSError, PeerError, msgspec.DecodeError):
            pass  # The client has disconnected, or has another key.
        finally:
            self._free.release()

    def _transfer(self, connection: socket.socket) -> None:
        challenge = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(challenge)
        body = _receive_signed(connection, self._key, b"request" + challenge, _MAX_REQUEST_BYTES)
        request = msgspec.msgpack.decode(body, type=_Request)
        purpose = b"offer" + request.nonce
        try:
            folder = self._find(request.digest)
            config = (folder / CONFIG_FILE).read_bytes()
            manifest = folder / MANIFEST_FILE
            about = manifest.read_bytes() if manifest.exists() else b""
            weights = (folder / WEIGHTS_FILE).open("rb")
        except (OSError, RuntimeError, KeyError) as error:
            _send_signed(connection, self._key, purpose, msgspec.msgpack.encode(Offer(error=str(error))))
            return
        with weights:
            size = os.fstat(weights.fileno()).st_size
            _send_signed(connection, self._key, purpose, msgspec.msgpack.encode(Offer("", config, about, size)))
            self.sent_bytes += connection.sendfile(weights, 0, size)


class Arriving:
    """Holds a peer's offer and the connection on which the weights will follow.

    Attributes:
        offer: the peer's offer, whose ``error`` is empty.
    """

    def __init__(self, connection: socket.socket, offer: Offer) -> None:
        self.offer = offer
        self._connection = connection

    def receive(self, file: Path, digest: "hashlib._Hash") -> None:
        """Receive the weights into a new file, and update ``digest`` with their bytes.

        Raises:
            PeerError: the peer was lost.
            OSError: the file cannot be written.
        """
        size = self.offer.weight_bytes
        at = 0
        with file.open("x+b") as target:
            if not size:
                return
            _reserve(target.fileno(), size)
            with mmap.mmap(target.fileno(), size) as content, memoryview(content) as view:
                while at < size:
                    end = min(at + _CHUNK_BYTES, size)
                    with view[at:end] as chunk:
                        _receive_into(self._connection, chunk)
                        digest.update(chunk)
                    at = end


@contextmanager
def ask_peer(address: PeerAddress, wanted: AdapterDigest, key: bytes) -> Iterator[Arriving]:
    """Request an adapter from a peer.

    Raises:
        PeerUnreachable: no connection can be made.
        PeerError: the peer lacks the adapter, has another key, or was lost.
    """
    try:
        connection = socket.create_connection(address, timeout=SILENCE_S)
    except OSError as error:
        raise PeerUnreachable(f"{address.host}:{address.port}: {error}") from error
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = _receive(connection, _NONCE_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            _send_signed(connection, key, b"request" + challenge, msgspec.msgpack.encode(_Request(wanted, nonce)))
        except OSError as error:
            raise PeerError(f"the peer was lost: {error}") from error
        body = _receive_signed(connection, key, b"offer" + nonce, _MAX_OFFER_BYTES)
        try:
            offer = msgspec.msgpack.decode(body, type=Offer)
        except msgspec.DecodeError as error:
            raise PeerError(f"the peer sends no offer: {error}") from error
        if offer.error:
            raise PeerError(offer.error)
        yield Arriving(connection, offer)


def _reserve(file: int, size: int) -> None:
    """Reserve the bytes of a file.

    Without the reservation, a full disk or memory would kill the process by a signal later.
    """
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _mac(key: bytes, purpose: bytes, body: bytes) -> bytes:
    return hmac.digest(key, purpose + body, "sha256")


def _send_signed(connection: socket.socket, key: bytes, purpose: bytes, body: bytes) -> None:
    connection.sendall(len(body).to_bytes(4, "little") + _mac(key, purpose, body) + body)


def _receive_signed(connection: socket.socket, key: bytes, purpose: bytes, most_bytes: int) -> bytes:
    size = int.from_bytes(_receive(connection, 4), "little")
    if size > most_bytes:
        raise PeerError(f"the peer sends {size} bytes where at most {most_bytes} are expected")
    mac = _receive(connection, _MAC_BYTES)
    body = _receive(connection, size)
    if not hmac.compare_digest(mac, _mac(key, purpose, body)):
        raise PeerError("the peer has another key")
    return body


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    with memoryview(content) as view:
        _receive_into(connection, view)
    return bytes(content)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        try:
            count = connection.recv_into(view[at:])
        except OSError as error:
            raise PeerError(f"the peer was lost: {error}") from error
        if not count:
            raise PeerError("the peer was lost: it closed the connection")
        at += count
