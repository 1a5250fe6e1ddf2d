"""Copies between replicas of one machine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.adapters.manifest import check_unchanged
from lorikeet.adapters.store import reference
from lorikeet.cluster.adapters.transport import LocalTransport, Transport, TransportError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import ReplicaId
from tests.adapters.builders import geometry, write_adapter

R0, R1, R2 = (ReplicaId(f"r{number}") for number in range(3))


@pytest.fixture
def adapter(tmp_path: Path) -> AdapterRef:
    return reference("a", write_adapter(tmp_path / "source"), geometry())


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    made = LocalTransport(tmp_path / "pool")
    yield made
    made.close()


async def test_adapter_is_copied_from_files_then_between_replicas(
    transport: Transport, adapter: AdapterRef, tmp_path: Path
) -> None:
    first = await transport.provide(adapter, R0)
    assert first.folder == str(tmp_path / "pool" / R0 / adapter.digest)
    others = await asyncio.gather(transport.copy(adapter, R0, R1), transport.copy(adapter, R0, R2))
    for ref in (first, *others):
        check_unchanged(ref)
        assert reference("a", Path(ref.folder), geometry()).digest == adapter.digest
    assert len({ref.folder for ref in (first, *others)}) == 3
    await transport.delete(adapter, R0)
    await transport.delete(adapter, R0)
    assert await transport.held(R0) == {}
    assert await transport.held(R1) == {adapter.digest: others[0].folder}


async def test_copies_are_deleted_or_left_to_another_process(
    transport: Transport, adapter: AdapterRef, tmp_path: Path
) -> None:
    for replica in (R0, R1, R2):
        await transport.provide(adapter, replica)
    await transport.discard(R0)
    transport.release(R0)
    transport.release(R1)
    transport.release(R1)
    assert not (tmp_path / "pool" / R0).exists()
    other = LocalTransport(tmp_path / "pool")
    assert list(await other.held(R1)) == [adapter.digest]
    with pytest.raises(TransportError, match="in use by another process"):
        await other.discard(R2)
    other.close()
    assert list(await transport.held(R2)) == [adapter.digest]


async def test_copies_are_found_again_after_a_restart(adapter: AdapterRef, tmp_path: Path) -> None:
    before = LocalTransport(tmp_path / "pool")
    ref = await before.provide(adapter, R0)
    before.close()
    after = LocalTransport(tmp_path / "pool")
    assert await after.held(R0) == {adapter.digest: ref.folder}
    after.close()


async def test_errors_name_the_adapter_and_both_replicas(transport: Transport, adapter: AdapterRef) -> None:
    with pytest.raises(TransportError, match=r"'a' from r0 to r1: .*there is no"):
        await transport.copy(adapter, R0, R1)
    (Path(adapter.folder) / "adapter_config.json").unlink()
    with pytest.raises(TransportError, match=r"'a' to r0: .*adapter_config.json"):
        await transport.provide(adapter, R0)


async def test_a_copy_is_checked_against_its_digest(transport: Transport, adapter: AdapterRef) -> None:
    weights = Path(adapter.folder) / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(TransportError, match="damaged"):
        await transport.provide(adapter, R0)
    assert await transport.held(R0) == {}
