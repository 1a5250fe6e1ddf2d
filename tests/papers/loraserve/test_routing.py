"""LoRAServe's readings of TOPPINGS."""

from lorikeet.cluster.routing.placed_work import LeastWork
from lorikeet.core.ids import ReplicaId
from lorikeet.papers.loraserve.routing import FewestTokens, LeastAddedLatency
from tests.support.fleets import ask, fleet_of, routed_to, run, send


def test_fewest_tokens_gives_ties_to_the_first() -> None:
    """The example of LoRAServe's Toppings: loads 3000, 1200, 1200."""
    fleet = fleet_of("0", "1", "2")
    send(fleet, "0", ask("x", known_tokens=2000, expected_tokens=1000))
    for replica in "12":
        send(fleet, replica, ask(replica, known_tokens=1000, expected_tokens=200))
    assert fleet.loads.pending_tokens.tolist() == [3000, 1200, 1200]
    assert routed_to(FewestTokens(), ask("new"), fleet) == "1"


def test_computed_tokens_no_longer_count() -> None:
    fleet = fleet_of("a", "b")
    run(fleet, "a", ask("x", known_tokens=1000, expected_tokens=100))
    run(fleet, "b", ask("y", known_tokens=500, expected_tokens=100))
    assert routed_to(FewestTokens(), ask("new"), fleet) == "b"
    fleet.generated(ReplicaId("a"), ask("x").request_id, 40)
    assert fleet.loads.pending_tokens.tolist() == [60, 600]
    assert routed_to(FewestTokens(), ask("new"), fleet) == "a"


def test_least_added_latency_separates_small_ranks_from_large_ones() -> None:
    """m(r) = 1 + r / 8: rank 8 doubles the time of a token, rank 56 takes eight times as long."""
    policy, fleet = LeastAddedLatency(1 / 8), fleet_of("small", "large")
    run(fleet, "small", ask("s", 8, known_tokens=100, expected_tokens=100))
    run(fleet, "large", ask("l", 56, known_tokens=80, expected_tokens=100))
    # small: 2 * 400 = 800, and 400 more for the one there; large: 8 * 380 = 3040, and 1600 more.
    assert routed_to(policy, ask("new", 8, known_tokens=100, expected_tokens=100), fleet) == "small"
    # small: 8 * 400 = 3200, and 2800 more; large: 3040, and 1600 more.
    assert routed_to(policy, ask("new", 56, known_tokens=100, expected_tokens=100), fleet) == "large"
    # Without ranks only tokens count: 180 on large.
    assert routed_to(FewestTokens(), ask("new", 8), fleet) == "large"
    # With them, but without those that are there: 2 * 350 and 8 * 330; 8 * 350 and 8 * 330.
    assert routed_to(LeastWork(1 / 8), ask("new", 8), fleet) == "small"
    assert routed_to(LeastWork(1 / 8), ask("new", 56), fleet) == "large"
