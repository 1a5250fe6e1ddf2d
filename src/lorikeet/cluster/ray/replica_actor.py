"""The actor of one replica: it starts the engine on its machine, watches it, and stores adapter files there."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec
import ray
import ray.util

from lorikeet.cluster.adapters.folder import Files, bytes_of
from lorikeet.cluster.adapters.peer import PeerAddress, PeerServer
from lorikeet.cluster.adapters.replica_pool import ReplicaPool
from lorikeet.core.ids import AdapterDigest, ReplicaId


class ActorLocation(NamedTuple):
    """The node and processes of an actor.

    Attributes:
        node_id, node_ip: id and address of Ray's node.
        pid: process id of the actor.
        engine_pid: process id of its engine; None if none runs.
        peer: address at which other machines fetch its adapters.
    """

    node_id: str
    node_ip: str
    pid: int
    engine_pid: int | None
    peer: PeerAddress


class _Engine(NamedTuple):
    process: "subprocess.Popen[bytes]"
    ended: "asyncio.Future[int]"


class _Model(msgspec.Struct):
    model: str = ""


class _Settings(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)


class _Input(msgspec.Struct):
    """The part of an ``EngineInput`` that names the model's folder."""

    settings: _Settings = msgspec.field(default_factory=_Settings)


class ReplicaActor:
    """Runs a replica's engine; :class:`~lorikeet.cluster.ray.host.RayHost` makes it a Ray actor.

    Tokens do not pass through it: its engine connects to the controller directly. The engine ends with the actor,
    however that ends, because its standard input is closed then. Files are read and written on threads, so that calls
    are answered quickly.

    Args:
        replica: id of the replica.
        pool_dir: on its machine; ``<pool_dir>/<replica>/<digest>/`` holds an adapter. It outlives the actor, and the
            replica's next actor on this machine continues with it.
        peer_key: key that clients of its peer server must have.
    """

    def __init__(self, replica: ReplicaId, pool_dir: str, peer_key: bytes) -> None:
        self._replica = replica
        self._pool = ReplicaPool(Path(pool_dir), replica)
        self._node_ip: str = ray.util.get_node_ip_address()
        self._peers = PeerServer(self._node_ip, self._pool.intact, peer_key)
        self._peer_key = peer_key
        self._engine: _Engine | None = None
        self._replaced: tuple[int, int] | None = None  # process id and exit code of the previous engine

    def __repr__(self) -> str:
        """Return the prefix that Ray writes before each output line of the actor and its engine."""
        return f"replica {self._replica}"

    # --- the engine ----------------------------------------------------------------------------------

    async def start(self, address: str, settings: bytes, working_dir: str) -> int:
        """Kill an engine that still runs, and start another.

        Args:
            address: address at which the controller listens for the engine.
            settings: a line for its standard input.
            working_dir: base of relative paths in its settings; empty for the actor's own.

        Returns:
            Its process id.

        Raises:
            OSError: the engine cannot be started, or the model is not on this machine.
        """
        self._check_model(settings, working_dir)
        if self._engine is not None:
            self._engine.process.kill()
            self._replaced = self._engine.process.pid, await asyncio.shield(self._engine.ended)
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.engine", address],
            stdin=subprocess.PIPE,
            cwd=working_dir or None,
            start_new_session=True,
        )
        self._engine = _Engine(process, asyncio.get_running_loop().create_future())
        # Wait on a thread: Ray's event loop does not run in the main thread, and may be any kind of loop.
        threading.Thread(target=_watch, args=(self._engine, asyncio.get_running_loop()), daemon=True).start()
        await asyncio.to_thread(_send_settings, process, settings)
        return process.pid

    def _check_model(self, settings: bytes, working_dir: str) -> None:
        model = msgspec.json.decode(settings, type=_Input).settings.model.model
        if model and not (Path(working_dir) / model).exists():
            raise FileNotFoundError(
                f"machine {socket.gethostname()} ({self._node_ip}) has no model at {model}: put it there, or on a file "
                f"system that all machines of the cluster have at this path"
            )

    async def wait(self, pid: int) -> int | None:
        """Wait until an engine has ended and return its exit code; None if there is no such engine."""
        engine = self._engine
        if self._replaced is not None and self._replaced[0] == pid:
            return self._replaced[1]  # The next engine was started before this call.
        if engine is None or engine.process.pid != pid:
            return None
        return await asyncio.shield(engine.ended)

    async def kill(self, pid: int) -> None:
        """Kill an engine, unless another runs by now: the call may have waited for a lost connection."""
        if self._engine is not None and self._engine.process.pid == pid:
            self._engine.process.kill()

    async def describe(self) -> ActorLocation:
        """Return the node and processes of the actor."""
        engine = self._engine
        engine_pid = None if engine is None or engine.ended.done() else engine.process.pid
        node_id = ray.get_runtime_context().get_node_id()
        return ActorLocation(node_id, self._node_ip, os.getpid(), engine_pid, self._peers.address)

    # --- adapters ------------------------------------------------------------------------------------

    async def fetch(self, digest: AdapterDigest, peer: PeerAddress) -> str:
        """Fetch an adapter from the memory of another process, and return its folder.

        Raises:
            PeerUnreachable: no connection to the peer can be made.
            PeerError: the peer has not got the adapter, or was lost.
            PoolFolderError: the adapter arrived damaged, or cannot be written.
        """
        return str(await asyncio.to_thread(self._pool.fetch, digest, peer, self._peer_key))

    async def share(self, digest: AdapterDigest, replica: ReplicaId) -> str:
        """Share the copy of another replica on this machine, and return its folder; empty if none is visible.

        Raises:
            PoolFolderError: the copy cannot be written, or was deleted meanwhile.
        """
        return str(await asyncio.to_thread(self._pool.share, digest, replica) or "")

    async def read(self, digest: AdapterDigest) -> tuple[int, Files]:
        """Return the size of an adapter in bytes, and its files, as two values: the caller need not fetch the second.

        Raises:
            PoolFolderError: the adapter is missing or damaged.
        """
        files = await asyncio.to_thread(self._pool.read, digest)
        return bytes_of(files), files

    async def store(self, digest: AdapterDigest, files: Files) -> str:
        """Store an adapter and return its folder.

        Raises:
            PoolFolderError: the adapter arrived damaged, or cannot be written.
        """
        return str(await asyncio.to_thread(self._pool.store, digest, files))

    async def delete(self, digest: AdapterDigest) -> None:
        """Delete an adapter. A missing one is no error.

        Raises:
            PoolFolderError: the folder cannot be written.
        """
        await asyncio.to_thread(self._pool.delete, digest)

    async def discard(self) -> None:
        """Delete the whole folder. Later stores fail.

        Raises:
            PoolFolderError: the folder cannot be deleted.
        """
        await asyncio.to_thread(self._pool.discard)

    async def held(self) -> dict[AdapterDigest, str]:
        """Return the folders of all stored adapters, including those of earlier actors of the replica."""
        return await asyncio.to_thread(self._pool.held)


def _send_settings(process: "subprocess.Popen[bytes]", settings: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # The engine has ended, which its waiter reports.
        process.stdin.write(settings + b"\n")
        process.stdin.flush()


def _watch(engine: _Engine, loop: asyncio.AbstractEventLoop) -> None:
    code = engine.process.wait()
    with contextlib.suppress(RuntimeError):  # The loop is closed because the actor is ending.
        loop.call_soon_threadsafe(engine.ended.set_result, code)
