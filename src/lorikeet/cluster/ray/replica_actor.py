"""Runs one replica as an actor, which starts and watches the engine on its machine and stores adapter files."""

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
    """Names the node and the processes of an actor.

    Attributes:
        node_id, node_ip: id and address of Ray's node.
        pid: process id of the actor.
        engine_pid: process id of the actor's engine; None if no engine runs.
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
    """Reads the model's folder from an ``EngineInput``."""

    settings: _Settings = msgspec.field(default_factory=_Settings)


class ReplicaActor:
    """Runs a replica's engine; :class:`~lorikeet.cluster.ray.host.RayHost` makes it a Ray actor.

    Tokens do not pass through the actor: the engine connects to the controller directly. The engine ends with the actor
    in every case, because its standard input is then closed. Files are read and written on threads, so that calls are
    answered quickly.

    Args:
        replica: id of the replica.
        pool_dir: folder on the actor's machine; ``<pool_dir>/<replica>/<digest>/`` holds an adapter. The folder
            outlives the actor, and the replica's next actor on this machine uses it.
        peer_key: key that clients of the actor's peer server must have.
    """

    def __init__(self, replica: ReplicaId, pool_dir: str, peer_key: bytes) -> None:
        self._replica = replica
        self._pool = ReplicaPool(Path(pool_dir), replica)
        self._node_ip: str = ray.util.get_node_ip_address()
        self._peers = PeerServer(self._node_ip, self._pool.intact, peer_key)
        self._peer_key = peer_key
        self._engine: _Engine | None = None
        self._replaced: tuple[int, int] | None = None  # process id and exit code of the last engine that ended

    def __repr__(self) -> str:
        """Return the prefix that Ray writes before each output line of the actor and its engine."""
        return f"replica {self._replica}"

    # --- the engine ----------------------------------------------------------------------------------

    async def start(self, address: str, settings: bytes, working_dir: str) -> int:
        """Start an engine, after killing one that still runs.

        Args:
            address: address at which the controller listens for the engine.
            settings: a line for the engine's standard input.
            working_dir: folder to which relative paths in the settings refer; empty for the actor's working directory.

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
        """Wait until an engine has ended and return its exit code. Return None if no engine has this process id."""
        engine = self._engine
        if self._replaced is not None and self._replaced[0] == pid:
            return self._replaced[1]  # The next engine may have been started before this call.
        if engine is None or engine.process.pid != pid:
            return None
        return await asyncio.shield(engine.ended)

    async def kill(self, pid: int) -> None:
        """Kill an engine, unless another engine runs by now because this call was delayed."""
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
            PeerError: the peer lacks the adapter, or was lost.
            PoolFolderError: the adapter arrived damaged, or cannot be written.
        """
        return str(await asyncio.to_thread(self._pool.fetch, digest, peer, self._peer_key))

    async def share(self, digest: AdapterDigest, replica: ReplicaId) -> str:
        """Share the copy of another replica on this machine, and return its folder; empty if there is no readable copy.

        Raises:
            PoolFolderError: the copy cannot be written, or was deleted during the call.
        """
        return str(await asyncio.to_thread(self._pool.share, digest, replica) or "")

    async def read(self, digest: AdapterDigest) -> tuple[int, Files]:
        """Return the size of an adapter in bytes, and its files.

        The two values are separate Ray objects, so that a caller can fetch only the size.

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
        """Delete an adapter. A missing adapter is not an error.

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
    with contextlib.suppress(BrokenPipeError):  # If the engine has ended, the waiting call reports it.
        process.stdin.write(settings + b"\n")
        process.stdin.flush()


def _watch(engine: _Engine, loop: asyncio.AbstractEventLoop) -> None:
    code = engine.process.wait()
    with contextlib.suppress(RuntimeError):  # The event loop may be closed because the actor is ending.
        loop.call_soon_threadsafe(engine.ended.set_result, code)
