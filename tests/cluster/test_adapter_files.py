"""Copies of adapter files: reported outcomes, and forgotten adapters."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.adapters.transport import DestinationLost, LocalTransport, Traffic, TransportError
from lorikeet.cluster.controller.adapter_files import AdapterCopier
from lorikeet.cluster.controller.dispatcher import Provision
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId
from tests.support.waiting import until

R0, R1 = ReplicaId("r0"), ReplicaId("r1")
A = AdapterRef(AdapterName("a"), AdapterDigest("A"), "/source", {"q": (4,)}, 1000)


class Told:
    """What a carrier told."""

    def __init__(self) -> None:
        self.done: list[Fetch | Provision] = []
        self.failed: list[tuple[Fetch | Provision, str]] = []

    def copy_done(self, copy: Fetch | Provision) -> None:
        self.done.append(copy)

    def copy_failed(self, copy: Fetch | Provision, reason: str) -> None:
        self.failed.append((copy, reason))


class Copies:
    """A transport that ends every copy as it is told to."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.held_at: dict[ReplicaId, dict[AdapterDigest, str]] = {}
        self.before_end: Callable[[], None] = lambda: None

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        return await self.provide(adapter, destination)

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        self.before_end()
        if self.error is not None:
            raise self.error
        return adapter

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        pass

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        return self.held_at.get(replica, {})

    async def discard(self, replica: ReplicaId) -> None:
        pass

    def release(self, replica: ReplicaId) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("copy", [Provision(0, A.digest, R1), Fetch(0, A.digest, R0, R1)])
async def test_copy_to_a_dead_destination_is_not_reported(copy: Fetch | Provision) -> None:
    told, transport = Told(), Copies()
    copier = AdapterCopier(transport, {A.digest: A}, {}, told)
    transport.error = DestinationLost("r1 died")
    copier.copy(copy)
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    assert (told.done, told.failed) == ([], []), "whoever hears of the death knows what was lost with it"
    assert copier.counts.failed == 1
    transport.error = TransportError("no room")
    copier.copy(copy)
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    assert told.failed == [(copy, "no room")]


async def test_unexpected_copy_failure_ends_the_wait() -> None:
    told, transport = Told(), Copies()
    copier = AdapterCopier(transport, {A.digest: A}, {}, told)
    transport.error = MemoryError("too large")
    copier.copy(Provision(0, A.digest, R1))
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    assert told.failed == [(Provision(0, A.digest, R1), "MemoryError('too large')")]
    assert copier.counts.failed == 1


async def test_removed_replica_is_forgotten_and_gets_no_copies() -> None:
    told, transport = Told(), Copies()
    copier = AdapterCopier(transport, {A.digest: A}, {}, told)
    for replica in (R0, R1):
        copier.copy(Provision(0, A.digest, replica))
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    copier.forget(R1)
    assert copier.pairs() == {(A.digest, R0)}
    assert copier.placed_at(R1) == []
    told.done.clear()
    copier.copy(Provision(1, A.digest, R1))
    transport.before_end = lambda: copier.forget(R0)
    copier.copy(Provision(2, A.digest, R0))
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    assert copier.pairs() == set(), "neither one that began afterwards counts, nor one that was on its way"
    assert (told.done, told.failed) == ([], [])
    with pytest.raises(TransportError, match="r1 was removed"):
        await copier.scan(R1)


async def test_removed_replica_is_no_source_of_copies(tmp_path: Path) -> None:
    told, transport = Told(), LocalTransport(tmp_path)
    copier = AdapterCopier(transport, {A.digest: A}, {}, told)
    await transport.held(R0)
    await transport.discard(R0)
    transport.release(R0)
    copier.forget(R0)
    copier.copy(Fetch(0, A.digest, R0, R1))
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    assert told.failed == [(Fetch(0, A.digest, R0, R1), "r0 was removed")]
    assert not (tmp_path / R0).exists()
    transport.close()


async def test_which_adapters_are_where_is_counted_anew_only_when_it_has_changed() -> None:
    copier = AdapterCopier(Copies(), {A.digest: A}, {}, Told())
    assert copier.pairs() is copier.pairs()
    before = copier.pairs()
    copier.copy(Provision(0, A.digest, R0))
    await until(lambda: not copier.counts.under_way, "the copier copies nothing")
    assert (before, copier.pairs()) == (set(), {(A.digest, R0)})


async def test_copies_found_at_replicas_count_once_their_adapter_is_known() -> None:
    refs: dict[AdapterDigest, AdapterRef] = {}
    transport = Copies()
    copier = AdapterCopier(transport, refs, {}, Told())
    for replica in (R0, R1):
        transport.held_at[replica] = {A.digest: f"/pool/{replica}/A"}
        assert await copier.scan(replica) == []
    transport.held_at[R1] = {}
    assert await copier.scan(R1) == [], "it came back without"
    assert copier.pairs() == set()
    refs[A.digest] = A
    assert copier.register(A) == [R0]
    assert copier.placed(A.digest, R0).folder == "/pool/r0/A"
    assert copier.register(A) == []
