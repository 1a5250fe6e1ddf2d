"""Routing policies on small fleets."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from lorikeet.cluster.routing import plain
from lorikeet.cluster.routing.affinity import AdapterAffinity, KvAffinity, PrefixDepths, SentPrefixes
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.cluster.routing.by_table import ByTable
from lorikeet.cluster.routing.consistent import Consistent
from lorikeet.cluster.routing.fleet import Fleet, ReplicaGauges, ReplicaInfo
from lorikeet.cluster.routing.placed_work import LeastWork, PlacedWork
from lorikeet.cluster.routing.plain import LeastLoaded, RandomChoice, RoundRobin
from lorikeet.cluster.setup import ClusterOptions, PolicySetup
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.memory.tree import block_keys
from lorikeet.papers.loraserve.routing import FewestTokens
from lorikeet.papers.toppings.first_fit import FirstFit
from lorikeet.policies import ROUTING
from lorikeet.presets import Preset
from tests.support.fleets import ask, fleet_of, routed_to, run, send, table
from tests.support.policies import policy_values

SETUP = PolicySetup(Preset(), None, ClusterOptions(costs=ReplicaCosts(0.01, 1e-4, 1e-4)))


def routed(
    policy: RoutingPolicy, fleet: Fleet, count: int, adapter: str | None = None, placed: RoutingTable | None = None
) -> list[str | None]:
    """Where so many requests go, none of which is then sent."""
    return [routed_to(policy, ask(str(number), 8 if adapter else 0, adapter), fleet, placed) for number in range(count)]


# --- all of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policy_values("routing"))
def test_every_policy_chooses_open_replicas_or_none(name: str) -> None:
    policy, fleet = ROUTING[name](SETUP), fleet_of("a", "b", "c")
    placed = table(x={"a": 0.5, "b": 0.5})
    fleet.drain(ReplicaId("a"))
    assert set(routed(policy, fleet, 40, "x", placed=placed)) == {"b"}
    assert set(routed(policy, fleet, 40, placed=placed)) <= {"b", "c"}
    fleet.leave(ReplicaId("b"))
    assert set(routed(policy, fleet, 40, "x", placed=placed)) == {"c"}
    fleet.leave(ReplicaId("c"))
    assert routed(policy, fleet, 1, "x", placed=placed) == [None]


@pytest.mark.parametrize("name", policy_values("routing"))
def test_every_policy_repeats_itself(name: str) -> None:
    def choices() -> list[str | None]:
        policy, fleet, draws = ROUTING[name](SETUP), fleet_of("a", "b", "c", "d"), random.Random(5)
        placed = table(x={"a": 0.5, "b": 0.25, "c": 0.25}, y={"d": 1.0})
        chosen = []
        for number in range(60):
            asked = ask(str(number), draws.choice([8, 64]), draws.choice("xyz"), keys=(bytes([number % 7]),))
            chosen.append(replica := routed_to(policy, asked, fleet, placed))
            assert replica is not None
            fleet.dispatched(asked, replica)
            fleet.admitted(replica, asked.request_id, float(number))
        return chosen

    assert choices() == choices()


# --- plain -------------------------------------------------------------------------------------------


def test_random_is_uniform_and_set_by_its_seed() -> None:
    fleet = fleet_of("a", "b", "c", "d")
    chosen = routed(RandomChoice(3), fleet, 8000)
    assert all(count == pytest.approx(2000, abs=200) for count in Counter(chosen).values())
    assert chosen[:50] == routed(RandomChoice(3), fleet, 50) != routed(RandomChoice(4), fleet, 50)


def test_round_robin_takes_turns() -> None:
    fleet = fleet_of("a", "b", "c")
    assert routed(RoundRobin(), fleet, 7) == ["a", "b", "c", "a", "b", "c", "a"]


def test_round_robin_by_a_table_goes_round_the_replicas_of_each_adapter() -> None:
    policy, fleet = RoundRobin(), fleet_of("a", "b", "c")
    placed = table(x={"c": 0.5, "a": 0.5}, y={"b": 1.0})
    assert routed(policy, fleet, 3, "x", placed=placed) == ["a", "c", "a"]
    assert routed(policy, fleet, 2, "y", placed=placed) == ["b", "b"]
    assert routed(policy, fleet, 2, "x", placed=placed) == ["c", "a"]


def test_round_robin_remembers_the_turns_of_so_many_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_MAX_ADAPTERS", 2)
    policy, fleet = RoundRobin(), fleet_of("a", "b")
    placed = table(**{name: {"a": 0.5, "b": 0.5} for name in "xyz"})
    assert [routed(policy, fleet, 1, name, placed=placed)[0] for name in "xyxzxy"] == ["a", "a", "b", "a", "a", "a"]
    assert len(policy._turns) == 2


def test_least_loaded_counts_running_queued_and_others_requests() -> None:
    fleet = fleet_of("a", "b", "c", "d")
    run(fleet, "a", ask("1"), ask("2"))
    send(fleet, "b", ask("3"))
    fleet.gauges(ReplicaGauges(ReplicaId("c"), 0, 1, requests=3))
    run(fleet, "d", ask("4", known_tokens=10))
    assert routed_to(LeastLoaded(), ask("new"), fleet) == "d", "as many as b, but fewer tokens"
    send(fleet, "d", ask("5"))
    assert routed_to(LeastLoaded(), ask("new"), fleet) == "b"


def test_an_idle_replica_has_all_its_room_whatever_it_reported() -> None:
    """What fills it then is nobody's, and leaves for whoever comes; waiting for an end would be waiting for ever."""
    fleet = fleet_of(ReplicaInfo(ReplicaId("a"), total_tokens=250))
    fleet.gauges(ReplicaGauges(ReplicaId("a"), 0, 1, requests=0, free_tokens=10))
    assert routed_to(FirstFit(), ask("1"), fleet) == "a"
    send(fleet, "a", ask("1"))
    fleet.gauges(ReplicaGauges(ReplicaId("a"), 0, 2, requests=1, free_tokens=10))
    assert routed_to(FirstFit(), ask("2"), fleet) is None
    fleet.ended(ReplicaId("a"), ask("1").request_id, 1.0)
    assert routed_to(FirstFit(), ask("2"), fleet) == "a"


# --- table -------------------------------------------------------------------------------------------


def test_draws_follow_the_shares_of_the_table() -> None:
    """LoRAServe's example E, through the policy."""
    policy, fleet = ByTable(1), fleet_of("s1", "s2")
    placed = table(x={"s1": 0.7, "s2": 0.3})
    assert Counter(routed(policy, fleet, 10_000, "x", placed=placed))["s1"] / 10_000 == pytest.approx(0.7, abs=0.015)


def test_draws_among_open_replicas_keep_their_proportion() -> None:
    policy, fleet = ByTable(1), fleet_of("s1", "s2", "s3")
    placed = table(x={"s1": 0.6, "s2": 0.3, "s3": 0.1})
    fleet.drain(ReplicaId("s1"))
    assert Counter(routed(policy, fleet, 10_000, "x", placed=placed))["s2"] / 10_000 == pytest.approx(0.75, abs=0.015)


def test_adapter_outside_the_table_goes_to_the_least_loaded() -> None:
    policy, fleet = ByTable(1), fleet_of("s1", "s2")
    placed = table(x={"s1": 1.0})
    send(fleet, "s1", ask("1"))
    assert routed(policy, fleet, 1, "unknown", placed=placed) == routed(policy, fleet, 1, None, placed=placed) == ["s2"]


# --- affinity ----------------------------------------------------------------------------------------


def test_adapter_affinity_prefers_a_holder_until_it_is_overloaded() -> None:
    policy, fleet = AdapterAffinity(bound=1.25), fleet_of("a", "b", "c", "d")
    fleet.loaded(ReplicaId("c"), AdapterDigest("x"))
    chosen = []
    for number in range(24):
        asked = ask(str(number), 8, "x")
        chosen.append(replica := routed_to(policy, asked, fleet))
        assert replica is not None
        fleet.dispatched(asked, replica)
    assert chosen[:4] == ["c"] * 4, "few requests are no overload"
    assert chosen[4] == "a"
    assert fleet.loads.requests.max() <= 1.25 * 24 / 4 + 1


def test_adapter_affinity_takes_the_least_loaded_holder_or_else_replica() -> None:
    policy, fleet = AdapterAffinity(), fleet_of("a", "b", "c")
    for holder in "ab":
        fleet.loaded(ReplicaId(holder), AdapterDigest("x"))
    send(fleet, "a", ask("1"))
    assert routed_to(policy, ask("2", 8, "x"), fleet) == "b"
    assert routed_to(policy, ask("2", 8, "y"), fleet) == "c", "it has fewer adapters than b"
    send(fleet, "c", ask("3"))
    assert routed_to(policy, ask("2", 8, "y"), fleet) == "b"


def keys(*tokens: int, adapter: str | None = None) -> tuple[bytes, ...]:
    """Keys of blocks of one token."""
    return tuple(block_keys(None if adapter is None else AdapterDigest(adapter), tokens, 1))


def test_kv_affinity_goes_to_the_longest_prefix_of_the_same_adapter() -> None:
    policy, fleet = KvAffinity(), fleet_of("a", "b", "c")

    def route(name: str, adapter: str | None, *tokens: int) -> str | None:
        asked = ask(name, 8 if adapter else 0, adapter, keys=keys(*tokens, adapter=adapter))
        replica = routed_to(policy, asked, fleet)
        assert replica is not None
        fleet.dispatched(asked, replica)
        return replica

    assert route("1", None, 1, 2, 3) == "a"
    assert route("2", None, 9, 9, 9) == "b"
    assert route("3", None, 1, 2, 4, 5) == "a", "two blocks of the first"
    assert route("4", None, 9, 9) == "b"
    assert route("5", "x", 1, 2, 3) == "c", "the same tokens of an adapter are another prefix"
    assert route("6", "x", 1, 2, 3, 4) == "c"


def test_kv_affinity_forgets_a_replica_that_was_started_again() -> None:
    policy, fleet = KvAffinity(), fleet_of("a", "b")
    asked = ask("1", keys=keys(1, 2))
    assert routed_to(policy, asked, fleet) == "a"
    send(fleet, "a", ask("busy"))
    assert routed_to(policy, asked, fleet) == "a"
    fleet.leave(ReplicaId("a"))
    fleet.join(ReplicaInfo(ReplicaId("a"), epoch=1))
    assert [info.replica for info in fleet.infos()] == ["b", "a"]
    assert routed_to(policy, asked, fleet) == "b", "both are idle and know nothing"


def test_kv_affinity_leaves_an_overloaded_replica() -> None:
    policy, fleet = KvAffinity(bound=1.0), fleet_of("a", "b")
    chosen = []
    for number in range(20):
        asked = ask(str(number), keys=keys(1, 2, 3))
        chosen.append(replica := routed_to(policy, asked, fleet))
        assert replica is not None
        fleet.dispatched(asked, replica)
    assert abs(chosen.count("a") - chosen.count("b")) <= 1


def test_prefixes_match_like_a_plain_search_and_stay_within_their_bound() -> None:
    draws = random.Random(1)
    prefixes, sent = SentPrefixes(max_prefixes=10_000), list[tuple[tuple[bytes, ...], tuple[ReplicaId, int]]]()
    for _ in range(300):
        prompt = keys(*(draws.randrange(2) for _ in range(draws.randrange(1, 12))))
        plain = Counter[tuple[ReplicaId, int]]()
        for known, home in sent:
            shared = next(
                (n for n, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), min(len(known), len(prompt))
            )
            if shared:
                plain[home] = max(plain[home], shared)
        assert prefixes.match(prompt) == plain
        home = ReplicaId(str(draws.randrange(5))), 0
        prefixes.add(prompt, home)
        sent.append((prompt, home))
    bounded = SentPrefixes(max_prefixes=50)
    for known, home in sent:
        bounded.add(known, home)
        assert len(bounded) <= 50
    assert bounded.match(sent[-1][0])[sent[-1][1]] == len(sent[-1][0]), "what was sent last is known"


def test_of_a_long_prompt_the_longest_prefixes_are_forgotten_first() -> None:
    prefixes, prompt, home = SentPrefixes(max_prefixes=10), keys(*range(30)), (ReplicaId("a"), 0)
    prefixes.add(prompt, home)
    assert prefixes.match(prompt) == {home: 10}


def test_forgotten_replica_has_no_prefixes_when_replicas_return() -> None:
    prefixes, stays = SentPrefixes(), (ReplicaId("stays"), 0)
    prefixes.add(keys(1), stays)
    for epoch in range(200):
        home = ReplicaId("restarts"), epoch
        assert home not in prefixes.match(keys(1, 2, 3))
        prefixes.add(keys(1, 2, 3), home)
        assert prefixes.match(keys(1, 2, 3, 4))[home] == 3
        prefixes.forget(home)
        assert set(prefixes.match(keys(1, 2, 3))) <= {stays}
        assert prefixes.homes() == [stays]
        if epoch < 63:
            assert prefixes.match(keys(1, 2)) == {stays: 1}


def test_depths_are_exact_at_first_and_then_a_part_of_the_length() -> None:
    depths = PrefixDepths()
    assert depths.of(21) == [*range(1, 17), 18, 20]
    long = depths.of(10_000)
    assert all(after - before <= before / 8 for before, after in pairwise(long[15:]))
    assert len(long) < 100
    assert depths.of(5) == [1, 2, 3, 4, 5]


# --- work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FewestTokens(), LeastWork(), PlacedWork()])
def test_work_goes_only_to_replicas_that_the_table_names(policy: RoutingPolicy) -> None:
    fleet = fleet_of("0", "1", "2")
    new = ask("new", 8)
    named = (ReplicaShare(ReplicaId("1"), 0.9), ReplicaShare(ReplicaId("2"), 0.1))
    placed = RoutingTable(1, {AdapterDigest("new's"): named})
    assert routed_to(policy, new, fleet, placed) == "1"
    send(fleet, "1", ask("x"))
    assert routed_to(policy, new, fleet, placed) == "2", "shares tell who may have it, not how often"
    fleet.leave(ReplicaId("1"))
    fleet.leave(ReplicaId("2"))
    assert routed_to(policy, new, fleet, placed) == "0", "none that is named is open"


def test_placed_work_ignores_placement_beyond_a_factor_of_the_least_cost() -> None:
    """A request of 100 tokens behind 51 and 50: more than 1.5 times the work of an idle replica, and just that."""
    for tokens, choice in ((51, "b"), (50, "a")):
        fleet = fleet_of("a", "b")
        policy = PlacedWork(0.0)
        placed = table(wanted={"a": 1.0})
        run(fleet, "a", ask("x", known_tokens=tokens, expected_tokens=0))
        asked = ask("new", 8, "wanted", known_tokens=100, expected_tokens=0)
        assert routed_to(policy, asked, fleet, placed) == choice


# --- by hash -----------------------------------------------------------------------------------------


def test_choices_by_hash_agree_in_any_order_and_a_replica_that_leaves_moves_only_its_adapters() -> None:
    names = [f"adapter-{number}" for number in range(60)]
    fleet, turned = fleet_of("a", "b", "c", "d"), fleet_of("d", "c", "b", "a")
    chosen = {name: routed(Consistent(), fleet, 1, name)[0] for name in names}
    assert {name: routed(Consistent(), turned, 1, name)[0] for name in names} == chosen
    assert {*chosen.values()} == {"a", "b", "c", "d"}
    fleet.leave(ReplicaId("b"))
    after = {name: routed(Consistent(), fleet, 1, name)[0] for name in names}
    assert {name for name in names if after[name] != chosen[name]} == {name for name in names if chosen[name] == "b"}


def test_choices_by_hash_use_names_before_ids() -> None:
    names = [f"adapter-{number}" for number in range(20)]
    chosen = []
    for ids in (("0", "1"), ("1", "0")):
        fleet = Fleet()
        for replica, address in zip(ids, ("x", "y"), strict=True):
            fleet.join(ReplicaInfo(ReplicaId(replica), name=address))
        at = dict(zip(ids, ("x", "y"), strict=True))
        chosen.append([at[str(routed(Consistent(), fleet, 1, name)[0])] for name in names])
    assert chosen[0] == chosen[1]


def test_a_popular_adapter_overflows_to_the_next_replica_by_hash() -> None:
    fleet = fleet_of("a", "b", "c")
    counts: Counter[str] = Counter()
    for number in range(60):
        asked = ask(str(number), 8, "x")
        replica = routed_to(Consistent(), asked, fleet)
        assert replica is not None
        fleet.dispatched(asked, ReplicaId(replica))
        counts[replica] += 1
    assert max(counts.values()) <= 26
    assert len(counts) == 3


def test_prompts_of_the_base_that_begin_alike_go_to_one_replica_by_hash() -> None:
    fleet = fleet_of("a", "b", "c")
    by_key = [
        {routed_to(Consistent(), ask("r", 0, None, keys=(bytes([first]), bytes([rest]))), fleet) for rest in range(5)}
        for first in range(12)
    ]
    assert all(len(replicas) == 1 for replicas in by_key)
    assert len(set.union(*by_key)) == 3
