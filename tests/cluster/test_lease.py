"""Leases of replicas, on a clock of the test's own."""

import pytest

from lorikeet.cluster.lease import FIRST_FENCE, TERM_S, WISH_S, FencedOff, Renewal, ReplicaLease


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> ReplicaLease:
    return ReplicaLease("a", "server a", clock)


def test_lease_that_is_renewed_cannot_be_claimed(lease: ReplicaLease, clock: Clock) -> None:
    for _ in range(10):
        clock.now += TERM_S
        assert lease.renew(FIRST_FENCE) == Renewal(is_owner=True, is_wanted=False)
        assert lease.claim("b", "server b", is_spare=True) is None
    lease.check(FIRST_FENCE)


def test_claim_of_a_lease_that_has_run_out_fences_the_owner_off(lease: ReplicaLease, clock: Clock) -> None:
    clock.now += TERM_S + 0.1
    fence = lease.claim("b", "server b", is_spare=True)
    assert fence is not None
    assert fence > FIRST_FENCE
    lease.check(fence)
    for act in (lease.check, lease.release):
        with pytest.raises(FencedOff, match="server b"):
            act(FIRST_FENCE)
    assert lease.renew(FIRST_FENCE) == Renewal(is_owner=False, is_wanted=False)
    assert lease.claim("c", "server c", is_spare=True) is None, "one of two claims is the first"


def test_owner_that_comes_back_before_any_claim_goes_on(lease: ReplicaLease, clock: Clock) -> None:
    clock.now += 10 * TERM_S
    assert lease.is_free
    assert lease.renew(FIRST_FENCE).is_owner
    assert not lease.is_free


def test_released_replica_is_free_at_once_and_its_owner_does_not_act(lease: ReplicaLease) -> None:
    lease.release(FIRST_FENCE)
    assert lease.is_free
    with pytest.raises(FencedOff):
        lease.check(FIRST_FENCE)
    assert not lease.renew(FIRST_FENCE).is_owner
    assert lease.claim("b", "server b", is_spare=False) is not None


def test_spare_replica_is_handed_back_to_the_server_that_asked_first(lease: ReplicaLease, clock: Clock) -> None:
    assert not lease.want("b"), "only adopted replicas are to spare"
    clock.now += TERM_S + 0.1
    fence = lease.claim("b", "server b", is_spare=True)
    assert fence is not None
    assert not lease.want("b"), "it is there already"
    assert lease.want("c")
    assert lease.want("c")
    assert not lease.want("d")
    assert lease.renew(fence) == Renewal(is_owner=True, is_wanted=True)
    lease.release(fence)
    assert lease.claim("d", "server d", is_spare=True) is None, "it is reserved"
    third = lease.claim("c", "server c", is_spare=False)
    assert third is not None
    assert not lease.want("d")
    assert not lease.state().is_spare


def test_replica_that_was_handed_back_goes_to_anybody_if_the_server_that_asked_is_lost(
    lease: ReplicaLease, clock: Clock
) -> None:
    clock.now += TERM_S + 0.1
    fence = lease.claim("b", "server b", is_spare=True)
    assert fence is not None
    assert lease.want("c")
    lease.release(fence)
    clock.now += WISH_S
    assert lease.claim("d", "server d", is_spare=True) is None
    clock.now += 0.1
    assert lease.claim("d", "server d", is_spare=True) is not None


def test_wish_that_is_not_repeated_ends(lease: ReplicaLease, clock: Clock) -> None:
    clock.now += TERM_S + 0.1
    fence = lease.claim("b", "server b", is_spare=True)
    assert fence is not None
    assert lease.want("c")
    clock.now += WISH_S
    assert lease.want("c")
    clock.now += WISH_S
    assert lease.renew(fence).is_wanted
    clock.now += 0.1
    assert not lease.renew(fence).is_wanted
    assert lease.want("d")


def test_state_names_the_last_owner(lease: ReplicaLease, clock: Clock) -> None:
    clock.now += TERM_S + 1
    state = lease.state()
    assert (state.owner, state.server, state.is_free, state.silent_s) == ("a", "server a", True, TERM_S + 1)
