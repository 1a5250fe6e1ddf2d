"""Chameleon's queue as printed, Lorikeet's, worked examples, and what must hold under any traffic."""

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.papers.chameleon.options import MultilevelOptions
from lorikeet.papers.chameleon.queue import ChameleonQueue, InitialClasses, wait_in_steps
from lorikeet.papers.chameleon.quotas import class_load
from lorikeet.papers.chameleon.size_aware import SIZE_AWARE, SizeAwareQueue
from lorikeet.papers.chameleon.size_classes import OUTPUT_ONLY_WEIGHTS, RequestSize, SizeClasses
from lorikeet.scheduling.admission import Admission, AdmissionQueue, AdmissionView
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.state import StepTimeEstimator
from tests.scheduling.worlds import World, admit
from tests.support.scripted import adapter as make_adapter
from tests.support.step_counts import STEPS_VARIABLE, count, examples

RUN_STEPS = 150
RUNS = max(examples(3), 2 * int(os.environ.get(STEPS_VARIABLE, "0")) // RUN_STEPS)


def ask(name: str, prompt: int, output: int, arrival_s: float = 0.0, adapter: AdapterRef | None = None) -> Request:
    """A request of so many tokens, predicted to answer with ``output`` of at most 400."""
    params = SamplingParams(max_tokens=400)
    return Request(RequestId(name), [1] * prompt, params, arrival_s, adapter, predicted_tokens=output)


def with_quotas(
    world: World,
    quotas: tuple[int, ...],
    class_of: Callable[[RequestSize], int] = lambda sizes: 0,
) -> ChameleonQueue:
    """The printed queue, with classes that are given."""
    return ChameleonQueue(world, initial=InitialClasses(quotas, class_of, {}))


def size_aware(
    world: World,
    quotas: tuple[int, ...],
    class_of: Callable[[RequestSize], int] = lambda sizes: 0,
    longest_run_s: Mapping[int, float] | None = None,
) -> SizeAwareQueue:
    """Lorikeet's queue, with classes that are given."""
    return SizeAwareQueue(world, initial=InitialClasses(quotas, class_of, longest_run_s or {}))


def input_above(tokens: int) -> Callable[[RequestSize], int]:
    """Two classes: prompts of more than so many tokens are of the second."""
    return lambda sizes: int(sizes.input_tokens > tokens)


def three_classes(needs: dict[str, list[int]]) -> tuple[ChameleonQueue, World]:
    """Quotas 9, 8 and 12 and requests of so many tokens each, whatever their sizes say."""
    world, number = World(), 0
    queue = with_quotas(world, (9, 8, 12), lambda sizes: number)
    for number, (name, each) in enumerate(needs.items()):  # noqa: B007 - the queue asks for it
        for index, need in enumerate(each):
            queue.add(ask(f"{name}{index}", need - 1, 1, index), 0.0)
    return queue, world


def held(queue: ChameleonQueue) -> list[int]:
    return list(queue.state().held_tokens)


def test_case_a_every_class_by_its_own_quota() -> None:
    queue, world = three_classes({"small": [3] * 4, "medium": [4] * 3, "large": [6] * 3})
    assert admit(queue, world) == ["small0", "small1", "small2", "medium0", "medium1", "large0", "large1"]
    assert held(queue) == [9, 8, 12]


def test_case_b_what_an_empty_class_has_left_goes_to_the_smallest_that_fit() -> None:
    queue, world = three_classes({"small": [3] * 4, "medium": [4], "large": [6] * 3})
    assert admit(queue, world) == ["small0", "small1", "small2", "medium0", "large0", "large1", "small3"]
    assert held(queue) == [9, 7, 12], "medium lent 3"
    queue.ended(ask("small3", 2, 1), 1.0)
    assert held(queue) == [9, 4, 12], "and gets them back"


def test_case_c_a_class_with_waiters_donates_no_fragment() -> None:
    queue, world = three_classes({"small": [4] * 3, "medium": [], "large": []})
    assert admit(queue, world) == ["small0", "small1", "small2"]
    assert held(queue) == [8, 4, 0], "the third is paid by the highest of those that lend"


def test_request_above_its_class_quota_runs_when_none_of_it_is_held() -> None:
    queue, world = three_classes({"small": [3], "medium": [], "large": [2, 30]})
    assert admit(queue, world) == ["small0", "large0"]
    assert held(queue) == [3, 0, 2]
    assert admit(queue, world) == [], "one of its class holds two tokens"
    request, _ = world.running_now.pop(RequestId("large0"))
    queue.ended(request, 1.0)
    assert admit(queue, world) == ["large1"]
    state = queue.state()
    assert state.held_tokens[2] > state.quotas[2]
    assert sum(state.held_tokens) == 3 + 30
    assert sum(state.quotas) == 29


def bypass_world() -> tuple[World, ChameleonQueue]:
    """100 tokens free; one that ends in 10 steps frees 60, one that ends in 25 frees 200."""
    world = World(total_tokens=360)
    queue = with_quotas(world, (10_000,))
    for name, kv, left in (("ten", 60, 10), ("twenty-five", 200, 25)):
        request = ask(name, kv - 5, 5 + left, -1.0)
        queue.add(request, 0.0)
        assert admit(queue, world) == [name]
        world.running_now[request.request_id] = request, 5
    assert world.free_tokens() == 100
    return world, queue


def test_bypass_by_those_that_will_have_ended_when_the_head_can_start() -> None:
    world, queue = bypass_world()
    head = ask("head", 56, 10, 1.0, make_adapter("big", 50))  # 256 tokens of room
    expected = {name: entry.waiting.expected_tokens for name, entry in queue.state().admitted.items()}
    assert wait_in_steps(256, 100, world.running(), expected, world) == 25
    for request in (head, ask("x", 40, 20, 2.0), ask("y", 40, 30, 3.0)):
        queue.add(request, 1.0)
    assert admit(queue, world, 1.0) == ["x"]
    assert queue.tokens_until_review([(ask("x", 40, 20), 15)]) == 5
    assert queue.tokens_until_review([(ask("ten", 55, 15), 5)]) == float("inf")
    world.running_now[RequestId("x")] = world.running_now[RequestId("x")][0], 19
    assert queue.review(1.5) == []
    world.running_now[RequestId("x")] = world.running_now[RequestId("x")][0], 20
    back = queue.review(2.0)
    assert [request.request_id for request in back] == ["x"], "it has not ended at 20 tokens"
    request, _ = world.running_now.pop(RequestId("x"))
    queue.ended(request, 2.0, will_resume=True)
    resumed = Request(
        request.request_id,
        request.prompt_token_ids,
        request.sampling,
        request.arrival_s,
        None,
        predicted_tokens=20,
        exports=1,
        output_token_ids=[1] * 20,
    )
    queue.add(resumed, 2.0)
    assert [each.request_id for each in queue.waiting()] == ["head", "x", "y"], "back where its arrival puts it"
    sent_back = queue.state().waiting[0][1]
    assert (sent_back.may_pass, sent_back.expected_tokens) == (False, 21)
    assert admit(queue, world, 3.0) == [], "nobody passes twice"
    assert (queue.figures().bypassed, queue.figures().squashed) == (1, 1)
    told = queue.stats()
    assert (told.waiting, told.bypassed, told.squashed) == ((3,), 1, 1)
    assert (told.quota_tokens, sum(told.held_tokens)) == (queue.state().quotas, sum(held(queue)))
    for name in ("head", "x", "y"):
        queue.remove(next(each for each in queue.waiting() if each.request_id == name), 3.0)
    queue.add(resumed, 4.0)
    assert queue.state().waiting[0][0].may_pass, "taken out by whoever asked, it is another"


def test_squashed_request_never_bypasses_again_after_a_preemption() -> None:
    world, queue = bypass_world()
    head, request = ask("head", 56, 10, 1.0, make_adapter("big", 50)), ask("x", 40, 20, 2.0)
    for each in (head, request):
        queue.add(each, 1.0)
    assert admit(queue, world, 1.0) == ["x"]
    world.running_now[request.request_id] = request, 20
    assert queue.review(2.0) == [request], "it passed the head, and has not ended"
    for now in (2.0, 3.0):  # sent back, and then to give way
        world.running_now.pop(request.request_id)
        queue.ended(request, now, will_resume=True)
        queue.add(msgspec.structs.replace(request, exports=1), now)
        if now == 2.0:
            queue.remove(head, now)
            assert admit(queue, world, now) == ["x"], "there is nobody to pass"
    assert not queue.state().waiting[0][0].may_pass


def test_run_time_counts_admission_to_end_without_time_spent_preempted() -> None:
    world = World()
    queue = size_aware(world, (1000,))
    request = ask("x", 10, 5)
    queue.add(request, 0.0)
    assert admit(queue, world, 0.0) == ["x"]
    world.running_now.clear()
    queue.ended(request, 4.0, will_resume=True)
    queue.add(msgspec.structs.replace(request, exports=1), 4.0)
    assert admit(queue, world, 10.0) == ["x"]
    queue.ended(request, 16.0)
    assert queue.longest_run_s == {0: 10.0}
    queue.add(ask("y", 10, 5, 310.0), 310.0)
    assert queue.figures().refreshes == 1
    assert queue.longest_run_s == {0: 10.0}, "of those that ended lately"


def test_classes_come_with_the_hundredth_arrival_after_a_quiet_time_too() -> None:
    queue = ChameleonQueue(World())
    queue.view.step_times.note(100, 4, 0.1)
    queue.add(ask("alone", 10, 10), 0.0)
    queue.add(ask("later", 10, 10, 400.0), 400.0)
    assert queue.figures().refreshes == 1
    for number in range(120):
        queue.add(ask(f"r{number}", 10 + 3 * (number % 60), 5 + 4 * (number % 60), 401.0 + number), 401.0 + number)
    assert queue.figures().refreshes == 2
    assert queue.figures().boundaries


def test_large_head_is_not_starved_by_a_stream_of_small_requests() -> None:
    world = World(total_tokens=1000)
    queue = size_aware(world, (1010, 140), input_above(100), longest_run_s={0: 10.0, 1: 10.0})
    for number in range(50):
        queue.add(ask(f"s{number}", 19, 1, number), 0.0)
    assert len(admit(queue, world, 0.0)) == 50
    queue.add(ask("large", 139, 1, 100.0), 0.0)
    for step in range(1, 60):
        queue.add(ask(f"t{step}", 19, 1, 200.0 + step), step)
        gone = next(iter(world.running_now.values()))[0]
        del world.running_now[gone.request_id]
        queue.ended(gone, step)
        if "large" in admit(queue, world, step):
            return
    raise AssertionError("it waits")


def test_a_head_that_is_held_back_is_waited_for_when_it_is_the_oldest() -> None:
    """Else a class whose heads always lack room would keep the next class from ever being tried."""
    world = World(total_tokens=1000)
    queue = size_aware(world, (10_000, 10_000), input_above(500))
    for number in range(2):
        queue.add(ask(f"first{number}", 400, 1, number), 0.0)
    assert admit(queue, world, 0.0) == ["first0", "first1"]
    queue.add(ask("small0", 300, 1, 2.0), 2.0)
    assert admit(queue, world, 2.0) == []
    queue.add(ask("large", 600, 1, 3.0), 3.0)
    queue.add(ask("small1", 300, 1, 4.0), 4.0)
    assert admit(queue, world, 4.0) == []
    for name, now, admitted in (("first0", 5.0, ["small0"]), ("first1", 6.0, ["large"])):
        gone, _ = world.running_now.pop(RequestId(name))
        queue.ended(gone, now)
        assert admit(queue, world, now) == admitted


def with_stuck_head(quotas: tuple[int, int], first: int, large: int) -> tuple[ChameleonQueue, World]:
    """Two large prompts of so many tokens, of which the second is not admitted, in a pool of 160."""
    world = World(total_tokens=160)
    queue = size_aware(world, quotas, input_above(50))
    for name, prompt, arrival_s in (("first", first, 0.0), ("large", large, 1.0)):
        queue.add(ask(name, prompt, 5, arrival_s), arrival_s)
    assert admit(queue, world, 1.0) == ["first"]
    return queue, world


def test_no_room_is_left_for_a_head_that_lacks_tokens() -> None:
    queue, world = with_stuck_head((60, 100), 55, 75)  # 40 of 100 tokens are left
    queue.add(ask("small", 45, 5, 2.0), 2.0)
    assert admit(queue, world, 2.0) == ["small"], "60 of 105 tokens of room are left"


def test_no_room_is_left_for_a_head_that_may_not_run_now() -> None:
    """Under a batching mode its turn may come only after the others have run."""
    queue, world = with_stuck_head((1000, 1000), 100, 120)  # it waits for room
    queue.add(ask("small", 45, 5, 2.0), 2.0)
    assert admit(queue, world, 2.0) == [], "small leaves it what there is"
    world.out_of_turn = {"large"}
    assert admit(queue, world, 3.0) == ["small"]


def joining_world(
    quotas: tuple[int, ...] = (10_000, 10_000), longest_run_s: Mapping[int, float] | None = None
) -> tuple[World, SizeAwareQueue, AdapterRef]:
    """One request runs under an adapter of 100 tokens, in a pool of which 60 tokens are free."""
    world, big = World(total_tokens=200), make_adapter("big", 25)
    queue = size_aware(world, quotas, input_above(100), longest_run_s)
    queue.add(ask("first", 40, 10, 0.0, big), 0.0)
    assert admit(queue, world, 0.0) == ["first"]
    assert world.free_tokens() == 60
    return world, queue, big


def test_request_joining_a_running_large_adapter_comes_first() -> None:
    world, queue, big = joining_world()
    world.total_tokens = 800
    for request in (
        ask("head", 20, 10, 1.0, make_adapter("other", 160)),
        ask("long", 515, 10, 2.0, big),
        ask("joins", 150, 10, 3.0, big),
    ):
        queue.add(request, 4.0)
    policy = queue.admit(4.0)
    assert next(policy).request.request_id == "joins", "100 tokens of adapter are less than a quarter of 525"
    policy.close()
    assert admit(queue, world, 4.0) == ["joins"]
    assert (queue.stats().joined, queue.stats().bypassed) == (1, 0)
    assert sum(held(queue)) == (40 + 10 + 100) + (150 + 10), "the adapter is paid once"


def test_joining_request_pays_from_its_class_quota() -> None:
    world, queue, big = joining_world((160, 10_000))
    for name, prompt in (("joins0", 5), ("joins1", 4)):
        queue.add(ask(name, prompt, 3, 1.0, big), 1.0)
    queue.add(ask("head", 95, 3, 0.5), 1.0)
    policy = queue.admit(1.0)
    assert next(policy).request.request_id == "joins0", "8 of the 10 tokens that are left"
    queue.remove(next(each for each in queue.waiting() if each.request_id == "joins0"), 1.0)
    policy.close()
    first, _ = world.running_now[RequestId("first")]
    world.running_now[RequestId("first")] = first, 13
    assert queue.review(1.0) == [], "it runs longer than predicted, and holds four tokens more"
    assert admit(queue, world, 1.0) == [], "7 tokens are more than the 6 that are left"


def test_joining_request_leaves_room_to_a_head_that_waited_half_the_longest_run() -> None:
    world, queue, big = joining_world(longest_run_s={0: 10.0})
    queue.add(ask("head", 70, 10, 1.0), 1.0)
    assert admit(queue, world, 1.0) == [], "it lacks 10 tokens"
    for now, admitted in ((5.9, ["joins0"]), (6.0, [])):
        queue.add(ask(f"joins{len(world.running_now) - 1}", 20, 10, now, big), now)
        assert admit(queue, world, now) == admitted


def test_head_of_a_class_is_not_starved_by_a_stream_of_joining_requests() -> None:
    world, big = World(total_tokens=2000), make_adapter("big", 25)
    queue = size_aware(world, (300,), longest_run_s={0: 10.0})
    queue.add(ask("first", 20, 30, 0.0, big), 0.0)
    assert admit(queue, world, 0.0) == ["first"]
    queue.add(ask("head", 180, 20, 1.0), 1.0)
    for step in range(2, 40):
        for number in range(3):
            queue.add(ask(f"joins{step}-{number}", 20, 30, float(step), big), step)
        if "head" in admit(queue, world, step):
            assert 6 <= step < 20, "it gives way to them for five seconds, and then for as long as they run"
            return
        if step % 2:
            gone = next(iter(world.running_now.values()))[0]
            del world.running_now[gone.request_id]
            queue.ended(gone, step)
    raise AssertionError("it waits")


@pytest.mark.parametrize("joins", [False, True])
def test_full_steps_do_not_keep_a_class_from_being_tried_for_ever(joins: bool) -> None:
    world, queue, big = joining_world(longest_run_s={0: 1.0, 1: 8.0})
    world.total_tokens, slots = 1000, 3
    for number in range(2):
        queue.add(ask(f"small {number}", 1, 1, 0.0, big if joins else None), 0.0)
    assert admit(queue, world, 0.0, slots) == ["small 0", "small 1"]
    for number in range(2):
        queue.add(ask(f"large {number}", 101, 100, 0.0), 0.0)
    order: list[str] = []
    for now in range(1, 12):
        ended, _ = world.running_now.pop(list(world.running_now)[1])  # "first" goes on
        queue.ended(ended, float(now))
        queue.add(ask(f"small at {now}", 1, 1, float(now), big if joins else None), float(now))
        order += admit(queue, world, float(now), slots)
    assert len(order) == 11, "no slot stays empty"
    late = [now for now, name in enumerate(order, 1) if "large" in name]
    assert late == [5, 10], "half of 8 s after it was first not tried, and once more"


def test_patience_follows_what_ended_lately() -> None:
    world = World()
    queue = SizeAwareQueue(world, replace(SIZE_AWARE, least_samples=2, refresh_s=10.0))
    for arrival_s, ran_s in ((0.0, 6.0), (0.0, 5.0), (20.0, 1.0), (40.0, 2.0)):
        request = ask(f"at {arrival_s}", 10, 10, arrival_s)
        queue.add(request, arrival_s)
        assert admit(queue, world, arrival_s) == [request.request_id]
        world.running_now.clear()
        queue.ended(request, arrival_s + ran_s)
        assert queue.longest_run_s == {0: max(ran_s, 6.0 if arrival_s == 0.0 else 0.0)}


@pytest.mark.slow
def test_classes_are_found_again_when_twice_as_many_have_arrived() -> None:
    queue = ChameleonQueue(World())
    queue.view.step_times.note(100, 4, 0.1)
    found = []
    for number in range(5000):
        before = queue.figures().refreshes
        queue.add(ask(f"r{number}", 10 + 3 * (number % 60), 5, 0.1 * number), 0.1 * number)
        found += [number + 1] * (queue.figures().refreshes - before)
    assert found == [100, 200, 400, 800, 1600, 4600], "five minutes hold 3,000, and are over then"


def test_a_head_without_room_for_its_kv_is_not_passed() -> None:
    world, queue = bypass_world()
    for request in (ask("head", 150, 10, 1.0), ask("x", 40, 20, 2.0)):
        queue.add(request, 1.0)
    assert admit(queue, world, 1.0) == []


def test_request_running_longer_than_predicted_holds_more() -> None:
    world = World()
    queue = with_quotas(world, (100,))
    request = ask("long", 10, 5)
    queue.add(request, 0.0)
    assert admit(queue, world) == ["long"]
    assert held(queue) == [15]
    for made in range(1, 9):
        world.running_now[request.request_id] = request, made
        assert queue.review(0.0) == []
    assert held(queue) == [10 + 9]
    queue.ended(request, 1.0)
    assert held(queue) == [0]


@pytest.mark.parametrize("make", [with_quotas, size_aware])
def test_one_of_the_users_of_an_adapter_is_charged_for_it_until_all_have_ended(
    make: Callable[..., ChameleonQueue],
) -> None:
    world, lora = World(), make_adapter("a", 5)
    queue = make(world, (1000,))
    requests = [ask(f"{index}", 9, 1, index, lora) for index in range(3)]
    for request in requests:
        queue.add(request, 0.0)
    assert admit(queue, world) == ["0", "1", "2"]
    assert held(queue) == [20 + 30]
    for left, request in zip((20 + 20, 20 + 10, 0), requests, strict=True):
        del world.running_now[request.request_id]
        queue.ended(request, 1.0)
        assert held(queue) == [left]


def test_empty_class_has_no_load() -> None:
    numbers = SizeClasses((0.1, 0.5, 0.9), (0.3, 0.7), ()).of(np.array([0.1, 0.2, 0.9]))
    arrived = [np.ones((3, 3))[numbers == number] for number in range(3)]
    loads = [class_load(each, np.empty(0), 10.0, StepTimeEstimator(), 100.0) for each in arrived]
    assert [load.rate_per_s for load in loads] == [0.2, 0.0, 0.1]
    assert loads[1].least_tokens == 0


# --- random traffic -------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Random requests through a queue, with true lengths that the predictions miss."""

    seed: int
    make: type[ChameleonQueue]
    options: MultilevelOptions
    squashed: int = 0
    steps: int = 0
    most_classes: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        total, held_back = self.random.choice([(300, 0), (900, 600), (1200, 600), (3000, 1000)])
        self.world = World(total, held_back)  # so that sometimes tokens are short, sometimes only room
        self.slots = self.random.choice([3, 1000])
        self.queue = self.make(self.world, self.options)
        self.adapters = [None, *(make_adapter(f"a{rank}", rank) for rank in (1, 2, 4, 8, 16))]
        self.truth: dict[RequestId, int] = {}
        self.waiting: dict[RequestId, Request] = {}
        self.now = 0.0

    def arrive(self) -> None:
        name = RequestId(f"r{len(self.truth)}")
        true = self.random.choice([1, 3, 10, 40, 90])
        predicted = true if self.random.random() < 0.7 else self.random.choice([1, 5, 60])
        request = ask(
            name, self.random.choice([2, 10, 60, 100]), predicted, self.now, self.random.choice(self.adapters)
        )
        self.truth[name] = true
        self.waiting[name] = request
        self.queue.add(request, self.now)

    def leave(self, request: Request, made: int, *, will_resume: bool) -> None:
        del self.world.running_now[request.request_id]
        self.queue.ended(request, self.now, will_resume=will_resume)
        if will_resume:
            resumed = Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling,
                request.arrival_s,
                request.adapter,
                predicted_tokens=request.predicted_tokens,
                exports=request.exports + 1,
                output_token_ids=[1] * made,
            )
            self.waiting[request.request_id] = resumed
            self.queue.add(resumed, self.now)

    def step(self) -> None:
        self.now += self.random.choice([0.05, 0.05, 2.0])
        world = self.world
        for request in self.queue.review(self.now):
            self.squashed += 1
            made = 0 if self.queue.restarts_squashed else world.running_now[request.request_id][1]
            self.leave(request, made, will_resume=True)
        self.check_order(admit(self.queue, world, self.now, self.slots))
        while world.free_tokens() < len(world.running_now):
            request, made = max(world.running_now.values(), key=lambda pair: pair[0].arrival_s)
            self.leave(request, made, will_resume=True)
        for request, made in list(world.running_now.values()):
            world.running_now[request.request_id] = request, made + 1
            if made + 1 >= self.truth[request.request_id]:
                self.leave(request, made + 1, will_resume=False)
        self.steps += 1
        self.check()

    def check_order(self, admitted: list[str]) -> None:
        """Whoever was admitted before an older one of its class that still waits has passed it, or joined others."""
        for name in admitted:
            del self.waiting[RequestId(name)]
        users = Counter(request.digest for request, _ in self.world.running_now.values())
        state = self.queue.state()
        for number, queue in enumerate(state.waiting):
            for entry in queue[:1]:
                for name in admitted:
                    mine = state.admitted[RequestId(name)]
                    joined = self.make is SizeAwareQueue and users[mine.waiting.request.digest] > 1
                    if mine.number == number and mine.passed is None and not joined:
                        assert mine.waiting.request.arrival_s <= entry.request.arrival_s

    def check(self) -> None:
        state = self.queue.state()
        self.most_classes = max(self.most_classes, len(state.quotas))
        assert sum(state.quotas) == int(self.queue.overcommit * self.world.total_tokens)
        assert sum(state.held_tokens) == sum(state.held_by[name] for name in self.world.running_now)
        assert set(state.held_by) == set(self.world.running_now) == set(state.admitted)
        assert {request.request_id for request in self.queue.waiting()} == set(self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert self.world.free_tokens() >= 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.random.choice([0, 0, 1, 3])):
                self.arrive()
            if self.waiting and self.random.random() < 0.05:
                name = self.random.choice(sorted(self.waiting))
                self.queue.remove(self.waiting.pop(name), self.now)
            if self.world.running_now and self.random.random() < 0.05:
                request, made = self.world.running_now[self.random.choice(sorted(self.world.running_now))]
                self.leave(request, made, will_resume=self.random.random() < 0.3)
            self.step()
        for _ in range(50_000):
            if not self.waiting and not self.world.running_now:
                return
            self.step()
        raise AssertionError(f"{len(self.waiting)} still wait")


QUEUES = [
    (ChameleonQueue, MultilevelOptions(refresh_s=8.0, least_samples=10)),
    (ChameleonQueue, MultilevelOptions(refresh_s=20.0, least_samples=20, weights=OUTPUT_ONLY_WEIGHTS)),
    (SizeAwareQueue, replace(SIZE_AWARE, refresh_s=8.0, least_samples=10)),
]


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from(QUEUES))
@settings(max_examples=RUNS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_add_up_after_every_step_and_all_requests_are_served(
    seed: int, queue: tuple[type[ChameleonQueue], MultilevelOptions]
) -> None:
    traffic = Traffic(seed, *queue)
    traffic.run(RUN_STEPS)
    figures = traffic.queue.figures()
    count("step: step", traffic.steps)
    for name in ("admitted", "bypassed", "squashed", "joined", "refreshes", "infeasible_refreshes"):
        count(name, getattr(figures, name))


@pytest.mark.slow
def test_random_traffic_passes_sends_back_refreshes_and_finds_classes() -> None:
    """The property above sees what it should."""
    figures, squashed, classes = [], 0, 0
    for seed in range(6):
        traffic = Traffic(seed, *QUEUES[0])
        traffic.run(300)
        figures.append(traffic.queue.figures())
        squashed += traffic.squashed
        classes = max(classes, traffic.most_classes)
    assert squashed == sum(each.squashed for each in figures) > 0
    assert sum(each.bypassed for each in figures) > 0
    assert all(each.refreshes > 3 for each in figures)
    assert classes > 1


@pytest.mark.parametrize("seed", range(5))
def test_with_one_class_and_all_tokens_it_is_fifo(seed: int) -> None:
    """Without bypass, and where tokens do not bind, the same requests are admitted at the same steps."""

    class OneClass(ChameleonQueue):
        overcommit = 1e6

        def __init__(self, view: AdmissionView) -> None:
            super().__init__(view, MultilevelOptions(least_samples=10**9))

        def _bypass(self, *_: object) -> Admission:
            yield from ()

    def orders(make: type[AdmissionQueue]) -> list[list[str]]:
        world, chance = World(total_tokens=900), random.Random(seed)
        queue = make(world)
        found = []
        for step in range(300):
            if chance.random() < 0.5:
                lora = make_adapter(f"a{chance.randrange(8)}", chance.choice([1, 4, 16]))
                queue.add(ask(f"r{step}", chance.randrange(1, 120), chance.randrange(1, 60), step, lora), step)
            found.append(admit(queue, world, step))
            for request, made in list(world.running_now.values()):
                world.running_now[request.request_id] = request, made + 1
                if made + 1 >= request.expected_tokens:
                    del world.running_now[request.request_id]
                    queue.ended(request, step)
        return found

    assert orders(Fifo) == orders(OneClass)
