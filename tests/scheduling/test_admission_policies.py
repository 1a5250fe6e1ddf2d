"""Fair shares, priority classes and earliest deadlines, and what holds for every admission policy."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.events import Admitted, Preempted
from lorikeet.core.request import Request, Slo
from lorikeet.memory.blocks import WaitReason
from lorikeet.policies import ADMISSION
from lorikeet.presets import Preset
from lorikeet.scheduling.policies.fair import FairShares, Owner
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.admission_queues import View, admitted, filled, made, order
from tests.support.scripted import Bench, adapter, request

RIVALS = ("sjf", "sjf(gamma=10)", "fair", "fair(spare=0)", "fair(by=adapter)", "priority", "deadline")


# --- priority classes and deadlines -------------------------------------------------------------------


def test_the_lowest_priority_value_goes_first_then_the_oldest() -> None:
    requests = [made("late", 2.0, priority=1), made("idle", 0.0, priority=7), made("early", 1.0, priority=1)]
    requests.append(made("urgent", 3.0, priority=-2))
    assert order("priority", requests) == ["urgent", "early", "late", "idle"]


def test_earliest_deadline_goes_first() -> None:
    requests = [
        made("no limit", 0.0),
        made("other limit", 0.5, slo=Slo(e2e_s=1.0)),
        made("relaxed", 1.0, slo=Slo(ttft_s=30.0)),
        made("tight", 2.0, slo=Slo(ttft_s=1.0)),
        made("after a minute", 59.5, slo=Slo(ttft_s=1.0)),
    ]
    assert (
        order("deadline", requests)
        == ["tight", "relaxed", "no limit", "other limit", "after a minute"]
        == [each.request_id for each in sorted(requests, key=ADMISSION["deadline"](View()).precedence)]
    )


@pytest.mark.parametrize("name", ["priority", "deadline"])
def test_the_least_urgent_gives_way_when_blocks_run_out(name: str) -> None:
    bench = Bench(blocks=6, preset=Preset(admission=name))
    for arrival_s, urgent in enumerate((False, True)):
        asked = request("urgent" if urgent else "not", [arrival_s + 1] * 7, float(arrival_s), max_tokens=12)
        urgency = {"priority": 0, "slo": Slo(ttft_s=1.0)} if urgent else {"priority": 5}
        bench.engine.submit(msgspec.structs.replace(asked, **urgency))
    bench.run()
    assert {event.request_id for event in bench.events if isinstance(event, Preempted)} == {"not"}
    assert len(bench.finished()) == 2


# --- fair shares --------------------------------------------------------------------------------------


def fair(by: Owner = Owner.TENANT) -> tuple[FairShares, View]:
    view = View()
    return FairShares(view, by=by), view


def test_prompt_tokens_count_once_and_output_tokens_twice() -> None:
    queue, view = fair()
    x, y = made("x", tenant="t", prompt_tokens=10), made("y", 1.0, tenant="t", prompt_tokens=3)
    filled(queue, [x, y])
    assert queue.served("t") == 0
    assert admitted(queue, most=1) == ["x"]
    assert queue.served("t") == 10
    view.answers["x"] = x, 4
    queue.review(0.0)
    queue.review(0.0)
    assert queue.served("t") == 10 + 2 * 4
    view.answers["x"] = x, 6
    queue.ended(x, 0.0)
    del view.answers["x"]
    queue.review(0.0)
    assert queue.served("t") == 10 + 2 * 6


def test_least_served_owner_is_first_and_its_oldest_request() -> None:
    queue, _ = fair()
    greedy = [made(f"g{index}", float(index), tenant="greedy", prompt_tokens=10) for index in range(4)]
    modest = [made(f"m{index}", 10.0 + index, tenant="modest", prompt_tokens=4) for index in range(3)]
    filled(queue, [*greedy, *modest])
    # Counters of greedy and modest before each: 0 0, 10 0, 10 4, 10 8, 10 12; modest has no more.
    assert admitted(queue) == ["g0", "m0", "m1", "m2", "g1", "g2", "g3"]
    assert (queue.served("greedy"), queue.served("modest")) == (40, 12)


def test_a_tenant_of_weight_two_is_served_twice_as_much() -> None:
    queue, view = fair()
    heavy = [made(f"h{index}", tenant="heavy", tenant_weight=2.0, prompt_tokens=10) for index in range(6)]
    light = [made(f"l{index}", 1.0, tenant="light", prompt_tokens=10) for index in range(6)]
    filled(queue, [*heavy, *light])
    assert admitted(queue, most=6) == ["h0", "l0", "h1", "h2", "l1", "h3"]
    assert (queue.served("heavy"), queue.served("light")) == (20, 20)
    view.answers["h0"] = heavy[0], 4
    queue.review(0.0)
    assert queue.served("heavy") == 20 + 2 * 4 / 2
    by_adapters, _ = fair(Owner.ADAPTER)
    filled(by_adapters, [heavy[0]])
    assert admitted(by_adapters) == ["h0"]
    assert by_adapters.served("") == 10, "adapters have no weights"


def test_returning_tenant_is_lifted_to_the_least_served_waiting_one() -> None:
    queue, _ = fair()
    filled(queue, [made(f"a{index}", tenant="a", prompt_tokens=30) for index in range(3)])
    filled(queue, [made(f"b{index}", 1.0, tenant="b", prompt_tokens=20) for index in range(4)])
    assert admitted(queue, most=4) == ["a0", "b0", "b1", "a1"]
    assert (queue.served("a"), queue.served("b")) == (60, 40)
    queue.add(made("c", 2.0, tenant="c"), 2.0)
    assert queue.served("c") == 40, "as b, who waits and was served least"


def test_tenant_served_more_than_the_waiting_ones_is_not_lowered() -> None:
    queue, _ = fair()
    filled(queue, [made("a", tenant="a", prompt_tokens=30), made("b", 1.0, tenant="b"), made("b2", 1.0, tenant="b")])
    assert admitted(queue, most=2) == ["a", "b"]
    queue.add(made("a again", 2.0, tenant="a"), 2.0)
    assert queue.served("a") == 30


def test_returning_tenant_starts_at_the_counter_of_the_last_owner() -> None:
    queue, view = fair()
    x = made("x", tenant="a", prompt_tokens=30)
    filled(queue, [x, made("y", 1.0, tenant="b", prompt_tokens=9)])
    assert admitted(queue) == ["x", "y"]
    view.answers["x"] = x, 100
    queue.review(0.0)
    queue.add(made("z", 2.0, tenant="c"), 2.0)
    assert queue.served("c") == 9


def test_preempted_request_is_charged_only_for_new_tokens() -> None:
    queue, view = fair()
    x = made("x", tenant="t", prompt_tokens=10)
    queue.add(x, 0.0)
    assert admitted(queue) == ["x"]
    view.answers["x"] = x, 3
    queue.ended(x, 0.0)
    del view.answers["x"]
    queue.add(msgspec.structs.replace(x, exports=1, output_token_ids=[5, 5, 5]), 0.0)
    assert admitted(queue) == ["x"]
    queue.review(0.0)
    assert queue.served("t") == 10 + 2 * 3


def test_prompt_is_charged_once_where_its_request_runs_first() -> None:
    queue, view = fair()
    restarted = made("x", tenant="t", prompt_tokens=10, attempt=1)
    queue.add(restarted, 0.0)
    assert admitted(queue) == ["x"]
    assert queue.served("t") == 10
    queue.ended(restarted, 0.0, will_resume=True)
    queue.add(msgspec.structs.replace(restarted, exports=1), 0.0)
    assert admitted(queue) == ["x"]
    assert queue.served("t") == 10, "once"
    view.answers.clear()
    queue.add(made("y", tenant="t", prompt_tokens=10, exports=1, output_token_ids=[5]), 0.0)
    assert admitted(queue) == ["y"]
    assert queue.served("t") == 10, "it has run elsewhere"


def test_missing_blocks_end_admission_and_other_reasons_do_not() -> None:
    requests = [
        made("t0", 0.0, tenant="t"),
        made("t1", 1.0, tenant="t"),
        made("u0", 2.0, tenant="u", prompt_tokens=9),
        made("u1", 3.0, tenant="u"),
    ]
    for wait in (WaitReason.SLOT, WaitReason.TRANSFER):
        queue = filled(fair()[0], requests)
        assert admitted(queue, {"t0": wait}) == ["t1", "u0", "u1"]
        assert [each.request_id for each in queue.waiting()] == ["t0"]
    for wait in (WaitReason.KV_BLOCKS, WaitReason.ADAPTER_BLOCKS):
        assert admitted(filled(fair()[0], requests), {"u0": wait}) == ["t0"], "u has been served less, and ends it"


@pytest.mark.parametrize(
    ("spare", "free", "names"),
    [
        (0.15, 149, ["b"]),
        (0.15, 150, ["a", "b"]),
        (0.03, 129, ["b"]),
        (0.03, 130, ["a", "b"]),
        (0.0, 100, ["a", "b"]),
    ],
)
def test_tenant_above_its_share_leaves_as_much_for_others(spare: float, free: int, names: list[str]) -> None:
    view = View()
    queue = FairShares(view, spare=spare)
    queue.add(made("running", tenant="a", prompt_tokens=400), 0.0)
    assert admitted(queue) == ["running"], "alone its share is everything"
    view.answers["running"] = view.answers["running"][0], 50
    filled(queue, [made("a", tenant="a", prompt_tokens=100), made("b", tenant="b", prompt_tokens=1)])
    view.free = free
    # Of 1,000 tokens 500 are a share, and a would hold 450 + 100.
    assert admitted(queue) == names


def test_tenant_holding_nothing_may_take_more_than_its_share() -> None:
    """Else two owners of large requests would wait for each other for ever."""
    view = View()
    view.free = 1000
    queue = FairShares(view)
    filled(queue, [made(name, tenant=name, prompt_tokens=950) for name in "ab"])
    assert admitted(queue)[:1] == ["a"]


def test_shares_may_be_of_adapters() -> None:
    queue, _ = fair(Owner.ADAPTER)
    one, other = adapter("one"), adapter("other")
    filled(queue, [made(f"1{index}", tenant=f"{index}", prompt_tokens=5, adapter=one) for index in range(3)])
    filled(queue, [made("2", 1.0, tenant="0", adapter=other), made("base", 2.0, prompt_tokens=2)])
    assert admitted(queue) == ["10", "2", "base", "11", "12"]
    assert (queue.served(one.digest), queue.served(other.digest), queue.served("")) == (15, 1, 2)


def test_last_admitted_is_preempted_regardless_of_arrival() -> None:
    bench = Bench(blocks=6, preset=Preset(admission="fair"), limits=SchedulerLimits(2, 16, 64))
    for name, arrival_s, tenant in (("a0", 0.0, "a"), ("a1", 0.1, "a"), ("b", 0.2, "b")):
        asked = request(name, [ord(name[-1])] * 7, arrival_s, max_tokens=4 if name == "a0" else 12)
        bench.engine.submit(msgspec.structs.replace(asked, tenant=tenant))
    bench.run()
    # b goes before a1, which then is the last; by arrival b would be.
    assert [event.request_id for event in bench.events if isinstance(event, Admitted)][:3] == ["a0", "b", "a1"]
    assert {event.request_id for event in bench.events if isinstance(event, Preempted)} == {"a1"}
    assert len(bench.finished()) == 3


def test_tokens_served_are_what_the_engine_made() -> None:
    bench = Bench(blocks=24, preset=Preset(admission="fair"))
    for index in range(12):
        asked = request(f"{index}", [index + 1] * (3 + index), float(index % 3), max_tokens=2 + index)
        bench.engine.submit(msgspec.structs.replace(asked, tenant="all"))
    bench.run()
    assert any(isinstance(event, Preempted) for event in bench.events)
    queue = bench.scheduler.queue
    assert isinstance(queue, FairShares)
    assert queue.served("all") == sum(3 + index + 2 * (2 + index) for index in range(12))


def test_one_that_sends_much_more_waits_and_the_others_do_not() -> None:
    def last_of_the_others(name: str) -> int:
        bench = Bench(
            preset=Preset(admission=name),
            limits=SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64),
        )
        for index in range(40):
            asked = request(f"greedy-{index}", [1] * 4, 0.0, max_tokens=4)
            bench.engine.submit(msgspec.structs.replace(asked, tenant="greedy"))
        for index in range(4):
            asked = request(f"other-{index}", [1] * 4, 0.0, max_tokens=4)
            bench.engine.submit(msgspec.structs.replace(asked, tenant=f"other-{index}"))
        bench.run()
        ids = [event.request_id for event in bench.events if isinstance(event, Admitted)]
        return max(place for place, request_id in enumerate(ids) if request_id.startswith("other"))

    assert last_of_the_others("fifo") == 43
    assert last_of_the_others("fair") <= 6


def test_gone_tenants_are_forgotten_once_it_makes_no_difference() -> None:
    queue, view = fair()
    for index in range(3_000):
        one = made(f"{index}", float(index), tenant=f"tenant-{index}", prompt_tokens=5)
        queue.add(one, 0.0)
        admitted(queue)
        queue.ended(one, 0.0)
        view.answers.clear()
    assert len(queue._served) <= 2 * 1024
    assert queue.served("tenant-2999") == 3_000 * 5, "each was lifted to the one before it"


# --- all ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(arrivals_s=st.lists(st.floats(0.0, 100.0), max_size=20))
@pytest.mark.parametrize("name", RIVALS)
def test_equal_requests_are_served_first_come_first_served(name: str, arrivals_s: list[float]) -> None:
    requests = [made(str(index), arrival_s) for index, arrival_s in enumerate(arrivals_s)]
    assert order(name, requests) == order("fifo", requests)


@pytest.mark.parametrize("name", ["sjf", "sjf(gamma=10)", "priority", "deadline"])
def test_request_without_room_is_not_passed(name: str) -> None:
    requests = [made("first", 0.0), made("second", 1.0), made("third", 2.0)]
    for wait in (WaitReason.KV_BLOCKS, WaitReason.ADAPTER_BLOCKS):
        assert admitted(filled(ADMISSION[name](View()), requests), {"second": wait}) == ["first"]
    for wait in (WaitReason.SLOT, WaitReason.TRANSFER):
        assert admitted(filled(ADMISSION[name](View()), requests), {"second": wait}) == ["first", "third"]


ASKED = st.builds(
    lambda tokens, arrival_s, tenant, priority, limit_s: made(
        "",
        arrival_s,
        prompt_tokens=tokens,
        answer_tokens=tokens,
        tenant=tenant,
        priority=priority,
        slo=None if limit_s is None else Slo(ttft_s=limit_s),
        adapter=None if tenant == "c" else adapter(tenant),
    ),
    st.integers(1, 20),
    st.floats(0.0, 10.0),
    st.sampled_from("abc"),
    st.integers(-1, 1),
    st.none() | st.floats(0.0, 5.0),
)
OUTCOME = st.none() | st.sampled_from(list(WaitReason))


@pytest.mark.slow
@given(data=st.data())
@pytest.mark.parametrize("name", RIVALS)
def test_every_request_leaves_the_queue_exactly_once(name: str, data: st.DataObject) -> None:
    view = View()
    queue = ADMISSION[name](view)
    waits: dict[str, Request] = {}
    for number in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["add", "add", "remove", "admit", "end"])):
            case "add":
                asked = msgspec.structs.replace(data.draw(ASKED), request_id=str(number))
                queue.add(asked, 0.0)
                waits[asked.request_id] = asked
            case "remove" if waits:
                queue.remove(waits.pop(data.draw(st.sampled_from(sorted(waits)))), 0.0)
            case "admit":
                outcomes = {name: wait for name in waits if (wait := data.draw(OUTCOME)) is not None}
                for request_id in admitted(queue, outcomes, most=data.draw(st.integers(0, 5))):
                    assert request_id not in outcomes
                    del waits[request_id]
            case "end" if view.answers:
                request_id = data.draw(st.sampled_from(sorted(view.answers)))
                running, tokens = view.answers[request_id]
                view.answers[request_id] = running, tokens + 3
                queue.review(0.0)
                queue.ended(running, 0.0)
                del view.answers[request_id]
                if data.draw(st.booleans()):
                    again = msgspec.structs.replace(
                        running, exports=running.exports + 1, output_token_ids=[7] * (tokens + 3)
                    )
                    queue.add(again, 0.0)
                    waits[request_id] = again
        assert len(queue) == len(waits)
        assert {each.request_id: each for each in queue.waiting()} == waits
    assert sorted(admitted(queue)) == sorted(waits)
    assert not len(queue)
    assert not list(queue.waiting())
