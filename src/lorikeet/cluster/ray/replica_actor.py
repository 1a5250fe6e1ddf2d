"""Runs one replica as an actor, which starts and watches the engine on its machine and stores adapter files."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import ray
import ray.util

from lorikeet.cluster.adapters.folder import TEMPORARY_PREFIX, Files, PoolFolderError, bytes_of
from lorikeet.cluster.adapters.peer import PeerAddress, PeerServer
from lorikeet.cluster.adapters.replica_pool import ReplicaPool
from lorikeet.cluster.lease import FIRST_FENCE, RENEW_EVERY_S, LeaseState, Renewal, ReplicaLease
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import Reattach


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


class ReplicaOwner(NamedTuple):
    """Names the server that starts a replica which can outlive it.

    Attributes:
        process: id of the server's process.
        server: name of the server, for the log.
        orphan_timeout_s: seconds without a server after which the replica ends.
        is_spare: whether the server has the replica beside its own number of replicas.
    """

    process: str
    server: str
    orphan_timeout_s: float
    is_spare: bool = False


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
        owner: first owner of a replica that can outlive its server; None for one that ends with it.
    """

    def __init__(self, replica: ReplicaId, pool_dir: str, peer_key: bytes, owner: ReplicaOwner | None = None) -> None:
        self._replica = replica
        self._pool = ReplicaPool(Path(pool_dir), replica)
        self._node_ip: str = ray.util.get_node_ip_address()
        self._peers = PeerServer(self._node_ip, self._pool.intact, peer_key)
        self._peer_key = peer_key
        self._engine: _Engine | None = None
        self._replaced: tuple[int, int] | None = None  # process id and exit code of the last engine that ended
        self._is_temporary = Path(pool_dir).name.startswith(TEMPORARY_PREFIX)
        self._lease = ReplicaLease("", "", lambda: 0.0)  # Without another owner it never ends.
        if owner is not None:
            self._lease = ReplicaLease(owner.process, owner.server, time.monotonic, is_spare=owner.is_spare)
            threading.Thread(target=self._end_orphan, args=(owner.orphan_timeout_s,), daemon=True).start()

    def __repr__(self) -> str:
        """Return the prefix that Ray writes before each output line of the actor and its engine."""
        return f"replica {self._replica}"

    # --- the engine ----------------------------------------------------------------------------------

    async def start(self, address: str, settings: bytes, working_dir: str, fence: int = FIRST_FENCE) -> int:
        """Start an engine, after killing one that still runs.

        Args:
            address: address at which the controller listens for the engine.
            settings: a line for the engine's standard input.
            working_dir: folder to which relative paths in the settings refer; empty for the actor's working directory.
            fence: the caller's fencing token.

        Returns:
            Its process id.

        Raises:
            FencedOff: another server has claimed the replica.
            OSError: the engine cannot be started, or the model is not on this machine.
        """
        self._lease.check(fence)
        self._lease.renew(fence)  # The owner's renewals begin with the answer.
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

    async def kill(self, pid: int, fence: int = FIRST_FENCE) -> None:
        """Kill an engine, unless another engine runs by now because this call was delayed.

        Raises:
            FencedOff: another server has claimed the replica.
        """
        self._lease.check(fence)
        if self._engine is not None and self._engine.process.pid == pid:
            self._engine.process.kill()

    async def describe(self) -> ActorLocation:
        """Return the node and processes of the actor."""
        engine = self._engine
        engine_pid = None if engine is None or engine.ended.done() else engine.process.pid
        node_id = ray.get_runtime_context().get_node_id()
        return ActorLocation(node_id, self._node_ip, os.getpid(), engine_pid, self._peers.address)

    # --- the lease -----------------------------------------------------------------------------------

    async def lease(self) -> LeaseState:
        """Return a description of the lease."""
        return self._lease.state()

    async def renew(self, fence: int) -> Renewal:
        """Prolong the caller's lease; see ``ReplicaLease.renew``."""
        return self._lease.renew(fence)

    async def claim(self, process: str, server: str, peer_key: bytes, is_spare: bool) -> int | None:
        """Make a server the owner and return its fencing token; None if another server owns the replica.

        From now on, other processes fetch adapters with the new owner's key.
        """
        fence = self._lease.claim(process, server, is_spare=is_spare)
        if fence is not None:
            self._peers.close()
            self._peers = PeerServer(self._node_ip, self._pool.intact, peer_key)
            self._peer_key = peer_key
        return fence

    async def attach(self, address: str, key: str, fence: int) -> int | None:
        """Connect the running engine to the new owner, and return its process id; None if no engine runs.

        Raises:
            FencedOff: another server has claimed the replica.
        """
        self._lease.check(fence)
        engine = self._engine
        if engine is None or engine.ended.done():
            return None
        # Written here, not on a thread: two claims must arrive in order. A line this short fits the pipe.
        _send_settings(engine.process, msgspec.json.encode(Reattach(address, key)))
        return engine.process.pid

    async def want(self, process: str) -> bool:
        """Ask the owner to hand a spare replica back; see ``ReplicaLease.want``."""
        return self._lease.want(process)

    async def release(self, fence: int) -> None:
        """Free the replica for another server; see ``ReplicaLease.release``."""
        self._lease.release(fence)

    async def end(self, fence: int) -> None:
        """End the actor and its engine.

        Raises:
            FencedOff: another server has claimed the replica.
        """
        self._lease.check(fence)
        self._end()

    def _end_orphan(self, timeout_s: float) -> None:
        """End the actor when it has had no server for ``timeout_s``."""
        while not (self._lease.is_free and self._lease.silent_s > timeout_s):
            time.sleep(RENEW_EVERY_S)
        if self._is_temporary:
            with suppress(PoolFolderError):
                self._pool.discard()
        self._end()

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.process.kill()
        os._exit(0)

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

    async def delete(self, digest: AdapterDigest, fence: int = FIRST_FENCE) -> None:
        """Delete an adapter. A missing adapter is not an error.

        Raises:
            FencedOff: another server has claimed the replica.
            PoolFolderError: the folder cannot be written.
        """
        self._lease.check(fence)
        await asyncio.to_thread(self._pool.delete, digest)

    async def discard(self, fence: int = FIRST_FENCE) -> None:
        """Delete the whole folder. Later stores fail.

        Raises:
            FencedOff: another server has claimed the replica.
            PoolFolderError: the folder cannot be deleted.
        """
        self._lease.check(fence)
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
