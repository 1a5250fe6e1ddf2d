"""Transfers of adapters between the memories of two processes: checked, or an error with the reason."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from lorikeet.adapters.manifest import check_unchanged
from lorikeet.adapters.reader import describe
from lorikeet.adapters.store import reference
from lorikeet.cluster.adapters import replica_pool
from lorikeet.cluster.adapters.folder import TEMPORARY_PREFIX, PoolFolderError, PoolFolderUnwritableError, read_files
from lorikeet.cluster.adapters.peer import Arriving, PeerError, PeerServer, PeerUnreachable, make_peer_key
from lorikeet.cluster.adapters.replica_pool import ReplicaPool, is_in_memory
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import ReplicaId
from tests.adapters.builders import geometry, write_adapter

HERE = "127.0.0.1"
R0, R1, R2 = (ReplicaId(f"r{number}") for number in range(3))
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(tmp_path: Path) -> AdapterRef:
    return reference("a", write_adapter(tmp_path / "source"), geometry())


@pytest.fixture
def key() -> bytes:
    return make_peer_key()


@pytest.fixture
def serve(key: bytes) -> Iterator[Callable[..., PeerServer]]:
    made: list[PeerServer] = []

    def begin(pool: ReplicaPool) -> PeerServer:
        made.append(PeerServer(HERE, pool.intact, key))
        return made[-1]

    yield begin
    for server in made:
        server.close()


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., ReplicaPool]]:
    """Pools of replicas in a folder whose name says whether it is temporary; "memory" is a folder of the test."""
    made: list[ReplicaPool] = []
    (tmp_path / "memory").mkdir()

    def make(replica: ReplicaId, pool: str = TEMPORARY_PREFIX + "1") -> ReplicaPool:
        made.append(ReplicaPool(tmp_path / pool, replica))
        return made[-1]

    with (
        patch.object(replica_pool, "MEMORY_FOLDER", tmp_path / "memory"),
        patch.object(replica_pool, "free_memory_bytes", return_value=2**50),  # whatever else the machine does
    ):
        yield make
        for pool in made:
            pool.close()


def test_adapter_is_sent_from_memory_to_memory_with_its_manifest(
    make_pool: Callable[..., ReplicaPool], serve: Callable[..., PeerServer], adapter: AdapterRef, key: bytes
) -> None:
    first, second, third = make_pool(R0), make_pool(R1), make_pool(R2)
    first.store(adapter.digest, read_files(Path(adapter.folder)))
    server = serve(first)
    with patch("lorikeet.cluster.adapters.folder.describe", side_effect=AssertionError("it is not read again")):
        place = second.fetch(adapter.digest, server.address, key)
        assert second.fetch(adapter.digest, server.address, key) == place
        onwards = third.fetch(adapter.digest, serve(second).address, key)
    assert server.sent_bytes == adapter.weight_bytes, "once"
    for folder in (place, onwards):
        assert is_in_memory(folder)
        ref = reference("a", folder, geometry())
        assert ref.digest == adapter.digest
        assert check_unchanged(ref)
    assert second.held() == {adapter.digest: str(place)}
    second.discard()
    assert not place.exists()


def test_pool_is_on_disk_if_named_or_without_room_in_memory(
    make_pool: Callable[..., ReplicaPool], serve: Callable[..., PeerServer], adapter: AdapterRef, key: bytes
) -> None:
    kept, full = make_pool(R0, "pool"), make_pool(R1)
    place = kept.store(adapter.digest, read_files(Path(adapter.folder)))
    assert not is_in_memory(place)
    with patch.object(replica_pool, "free_memory_bytes", return_value=0):
        assert not is_in_memory(full.fetch(adapter.digest, serve(kept).address, key))
    assert is_in_memory(make_pool(R2).fetch(adapter.digest, serve(full).address, key))
    with (
        patch.object(Arriving, "receive", side_effect=OSError(28, "No space left on device")),
        pytest.raises(PoolFolderUnwritableError, match="No space"),
    ):
        make_pool(ReplicaId("r3")).fetch(adapter.digest, serve(full).address, key)


def test_peer_server_survives_a_failed_accept(
    make_pool: Callable[..., ReplicaPool], serve: Callable[..., PeerServer], adapter: AdapterRef, key: bytes
) -> None:
    source, target = make_pool(R0), make_pool(R1)
    source.store(adapter.digest, read_files(Path(adapter.folder)))
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def fail_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    with patch.object(socket.socket, "accept", fail_once):
        place = target.fetch(adapter.digest, serve(source).address, key)
    assert not failures
    assert reference("a", place, geometry()).digest == adapter.digest


def test_damage_strangers_and_losses_are_errors_without_leftovers(
    make_pool: Callable[..., ReplicaPool], serve: Callable[..., PeerServer], adapter: AdapterRef, key: bytes
) -> None:
    source, target = make_pool(R0), make_pool(R1)
    place = source.store(adapter.digest, read_files(Path(adapter.folder)))
    address = serve(source).address
    with pytest.raises(PeerError, match="closed"):
        target.fetch(adapter.digest, address, make_peer_key())
    with pytest.raises(PeerUnreachable, match="refused"):
        target.fetch(adapter.digest, address._replace(port=9), key)
    weights = place / WEIGHTS
    stored = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stored.st_atime_ns, stored.st_mtime_ns))
    with pytest.raises(PoolFolderError, match="damaged"):
        target.fetch(adapter.digest, address, key)
    source.delete(adapter.digest)
    with pytest.raises(PeerError, match="there is no"):
        target.fetch(adapter.digest, address, key)
    assert target.held() == {}


def test_adapter_is_fetched_from_another_peer_after_a_death(
    make_pool: Callable[..., ReplicaPool], serve: Callable[..., PeerServer], adapter: AdapterRef, key: bytes
) -> None:
    source, target = make_pool(R0), make_pool(R1)
    source.store(adapter.digest, read_files(Path(adapter.folder)))
    whole = serve(source)
    listener = socket.create_server((HERE, 0))

    def pass_half() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(whole.address) as server:
            client.sendall(server.recv(32, socket.MSG_WAITALL))
            server.sendall(client.recv(4096))
            left = adapter.weight_bytes // 2
            while left > 0:
                left -= len(chunk := server.recv(left))
                client.sendall(chunk)

    thread = threading.Thread(target=pass_half)
    thread.start()
    with pytest.raises(PeerError, match="lost"):
        target.fetch(adapter.digest, whole.address._replace(port=listener.getsockname()[1]), key)
    thread.join()
    listener.close()
    assert target.held() == {}
    assert describe(target.fetch(adapter.digest, whole.address, key)).weight_bytes == adapter.weight_bytes
