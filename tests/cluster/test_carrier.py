"""What the carrier tells of copies, and what it forgets."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.adapters.transport import DestinationLost, LocalTransport, TransportError
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
    carrier = AdapterCopier(transport, {A.digest: A}, {}, told)
    transport.error = DestinationLost("r1 died")
    carrier.copy(copy)
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    assert (told.done, told.failed) == ([], []), "whoever hears of the death knows what was lost with it"
    assert carrier.counts.failed == 1
    transport.error = TransportError("no room")
    carrier.copy(copy)
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    assert told.failed == [(copy, "no room")]


async def test_unexpected_copy_failure_ends_the_wait() -> None:
    told, transport = Told(), Copies()
    carrier = AdapterCopier(transport, {A.digest: A}, {}, told)
    transport.error = MemoryError("too large")
    carrier.copy(Provision(0, A.digest, R1))
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    assert told.failed == [(Provision(0, A.digest, R1), "MemoryError('too large')")]
    assert carrier.counts.failed == 1


async def test_removed_replica_is_forgotten_and_gets_no_copies() -> None:
    told, transport = Told(), Copies()
    carrier = AdapterCopier(transport, {A.digest: A}, {}, told)
    for replica in (R0, R1):
        carrier.copy(Provision(0, A.digest, replica))
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    carrier.forget(R1)
    assert carrier.pairs() == {(A.digest, R0)}
    assert carrier.placed_at(R1) == []
    told.done.clear()
    carrier.copy(Provision(1, A.digest, R1))
    transport.before_end = lambda: carrier.forget(R0)
    carrier.copy(Provision(2, A.digest, R0))
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    assert carrier.pairs() == set(), "neither one that began afterwards counts, nor one that was on its way"
    assert (told.done, told.failed) == ([], [])
    with pytest.raises(TransportError, match="r1 was taken out"):
        await carrier.find(R1)


async def test_nothing_is_fetched_from_a_replica_that_was_taken_out(tmp_path: Path) -> None:
    told, transport = Told(), LocalTransport(tmp_path)
    carrier = AdapterCopier(transport, {A.digest: A}, {}, told)
    await transport.held(R0)
    await transport.discard(R0)
    transport.release(R0)
    carrier.forget(R0)
    carrier.copy(Fetch(0, A.digest, R0, R1))
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    assert told.failed == [(Fetch(0, A.digest, R0, R1), "r0 was taken out")]
    assert not (tmp_path / R0).exists()
    transport.close()


async def test_copies_are_counted_again_only_after_a_change() -> None:
    carrier = AdapterCopier(Copies(), {A.digest: A}, {}, Told())
    assert carrier.pairs() is carrier.pairs()
    before = carrier.pairs()
    carrier.copy(Provision(0, A.digest, R0))
    await until(lambda: not carrier.counts.under_way, "the carrier carries nothing")
    assert (before, carrier.pairs()) == (set(), {(A.digest, R0)})


async def test_copies_found_at_replicas_count_once_their_adapter_is_known() -> None:
    refs: dict[AdapterDigest, AdapterRef] = {}
    transport = Copies()
    carrier = AdapterCopier(transport, refs, {}, Told())
    for replica in (R0, R1):
        transport.held_at[replica] = {A.digest: f"/pool/{replica}/A"}
        assert await carrier.find(replica) == []
    transport.held_at[R1] = {}
    assert await carrier.find(R1) == [], "it came back without"
    assert carrier.pairs() == set()
    refs[A.digest] = A
    assert carrier.recognise(A) == [R0]
    assert carrier.placed(A.digest, R0).folder == "/pool/r0/A"
    assert carrier.recognise(A) == []
