"""Connects ranks on other machines.

Rank 0 waits for the ranks at an address, and ``lorikeet rank`` joins each engine there.

A rank connects over TCP. Both ends prove with a challenge that they have the same key (``multiprocessing.connection``
of the standard library). Then the connection carries the same messages as the pipes between the ranks of one machine.
Nothing is encrypted, and ``torch.distributed`` checks no key, so the machines need a private network.
"""

import logging
import multiprocessing
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import msgspec
import psutil

from lorikeet import __version__
from lorikeet.config import Settings
from lorikeet.core.executor import ExecutorError

_LOG = logging.getLogger(__name__)

MIN_KEY_BYTES = 16
_AUTHENTICATION_S = 10.0
_RETRY_S = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds after which a lost connection to a machine is noticed."""


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank that has joined: its number and the engine's settings.

    Attributes:
        version: rank 0's version of Lorikeet. The rank must have the same version.
        settings: the engine's settings, as JSON.
        folder: folder of the model, on rank 0's machine.
        number: number of the rank.
        init_url: address at which the ranks meet for ``torch.distributed``.
    """

    version: str
    settings: bytes
    folder: str
    number: int
    init_url: str


class RemoteRankError(ValueError):
    """An address or a key of ranks on other machines is wrong."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        RemoteRankError: the text is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RemoteRankError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def read_key(file: str) -> bytes:
    """Return the key in a file, without the white space around the key.

    Raises:
        RemoteRankError: the file cannot be read, or the key is too short.
    """
    try:
        key = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        raise RemoteRankError(f"{file}: {error.strerror or error}") from error
    if len(key) < MIN_KEY_BYTES:
        raise RemoteRankError(f"{file}: a key has at least {MIN_KEY_BYTES} bytes, this one {len(key)}")
    return key


def wait_for_ranks(settings: Settings, folder: Path) -> tuple[list[Connection], str]:
    """Wait until all missing ranks have joined.

    Returns:
        The connections to ranks 1 and above, and the URL at which rank 0 meets the ranks.

    Raises:
        ExecutorError: this machine cannot listen at the address, or the key cannot be read.
    """
    engine = settings.engine
    try:
        host, port = parse_address(engine.rank_address)
        key = read_key(engine.rank_key_file)
        listener = socket.create_server((host, port), family=_family(host))
    except (RemoteRankError, OSError) as error:
        raise ExecutorError(f"rank_address: {engine.rank_address}: {error}") from error
    missing = engine.ranks - 1
    _LOG.warning("waiting at %s for %d ranks; start each with lorikeet rank", engine.rank_address, missing)
    connections: list[Connection] = []
    meeting_port = _free_port(host)
    with listener:
        while len(connections) < missing:
            accepted, peer = listener.accept()
            own = accepted.getsockname()[0]
            connection = _authenticated(accepted, key, answers_first=False)
            if connection is None:
                _LOG.warning("%s was refused as a rank: it does not have the key", peer[0])
                continue
            _set_interface(own)
            number = len(connections) + 1
            init_url = f"tcp://{_bracketed(own)}:{meeting_port}"
            start = RankStart(__version__, msgspec.json.encode(settings), str(folder), number, init_url)
            try:
                connection.send_bytes(msgspec.msgpack.encode(start))
            except OSError:
                connection.close()
                continue
            connections.append(connection)
            _LOG.warning("%s has joined as rank %d", peer[0], number)
    return connections, init_url


RunRank = Callable[[Connection, Settings, Path, int, str, int], None]
"""Runs a rank: connection, settings, folder, number, URL of the meeting, number of its GPU."""


def follow_engine(run: RunRank, address: str, key_file: str, model: str, log_level: str) -> None:
    """Join the engine at an address whenever it waits for ranks, and run each rank in a new process.

    Args:
        run: the function that runs a rank.
        address: address of the engine, HOST:PORT.
        key_file: file with the key.
        model: the model's folder on this machine. Empty if the path is the same as on rank 0's machine.
        log_level: the log level of the process.

    Raises:
        RemoteRankError: the address or the key is wrong, or the engine has another key or version.
    """
    place = parse_address(address)
    key = read_key(key_file)
    spawn = multiprocessing.get_context("spawn")
    is_told = False
    while True:
        try:
            connected = socket.create_connection(place, timeout=_AUTHENTICATION_S)
        except OSError as error:
            if not is_told:
                _LOG.warning("waiting for the engine at %s: %s", address, error.strerror or error)
            is_told = True
            time.sleep(_RETRY_S)
            continue
        is_told = False
        connected.settimeout(None)
        own = connected.getsockname()[0]
        connection = _authenticated(connected, key, answers_first=True)
        if connection is None:
            raise RemoteRankError(f"the engine at {address} has another key")
        try:
            start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
        except (EOFError, OSError):  # The engine has enough ranks, or has ended.
            connection.close()
            time.sleep(_RETRY_S)
            continue
        if start.version != __version__:
            raise RemoteRankError(f"the engine at {address} is Lorikeet {start.version}, this is {__version__}")
        _LOG.warning("running rank %d of the engine at %s", start.number, address)
        process = spawn.Process(
            target=_run, args=(run, connection, start, model, own, log_level), name=f"rank-{start.number}", daemon=True
        )
        process.start()
        connection.close()
        process.join()
        _LOG.warning("rank %d has ended; waiting for the next engine at %s", start.number, address)


def _run(run: RunRank, connection: Connection, start: RankStart, model: str, own: str, log_level: str) -> None:
    """Run one rank in a new process, since a process can join ``torch.distributed`` only once."""
    from lorikeet.core.logs import configure_logs

    configure_logs(log_level, as_json=False)
    _set_interface(own)
    settings = msgspec.json.decode(start.settings, type=Settings)
    run(connection, settings, Path(model or start.folder), start.number, start.init_url, 0)


def _authenticated(sock: socket.socket, key: bytes, *, answers_first: bool) -> Connection | None:
    """Return a connection after both ends have proved that they have the key, None if the other end does not have it.

    Args:
        sock: the socket, which the connection owns from then on.
        key: the secret key of both ends.
        answers_first: whether the other end sends the first challenge.
    """
    seconds = int(_AUTHENTICATION_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(sock.detach())
    steps = (answer_challenge, deliver_challenge) if answers_first else (deliver_challenge, answer_challenge)
    try:
        for step in steps:
            step(connection, key)
    # Python 3.11 asserts the form of the challenge.
    except (AuthenticationError, AssertionError, ValueError, EOFError, OSError):
        connection.close()
        return None
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def _set_interface(address: str) -> None:
    """Make gloo and NCCL use the network interface with this address, unless the environment names another."""
    if sys.platform != "linux":
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
    if address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as free:
        return int(free.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
