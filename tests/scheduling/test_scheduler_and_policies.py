"""What the scheduler does for admission policies, and what becomes of sequences that give way."""

import msgspec
import numpy as np
import pytest

from lorikeet.core.events import Admitted, FinishReason, Preempted
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.memory.blocks import WaitReason
from lorikeet.policies import ADMISSION
from lorikeet.presets import PreemptedKv, Preset
from lorikeet.scheduling.state import SchedulerLimits, StepTimeEstimator
from tests.scheduling.worlds import Telling
from tests.support.scripted import Bench, adapter, request


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Preset:
    monkeypatch.setitem(ADMISSION.own, "telling", Telling)  # type: ignore[arg-type]
    return Preset(admission="telling")


def policy(bench: Bench) -> Telling:
    assert isinstance(bench.scheduler.queue, Telling)
    return bench.scheduler.queue


def test_a_policy_is_told_that_room_lacks_for_kv(telling: Preset) -> None:
    bench = Bench(blocks=8, preset=telling)
    bench.engine.submit(request("first", list(range(12)), adapter=adapter("big", 4), max_tokens=4))
    bench.step()
    bench.step()
    bench.engine.submit(request("second", list(range(8)), 1.0, adapter=adapter("other", 2)))
    bench.step()
    assert policy(bench).outcomes[-1] == ("second", WaitReason.KV_BLOCKS)
    assert policy(bench).view.free_tokens() == 4
    assert [policy(bench).view.is_resident(adapter(name)) for name in ("big", "other")] == [True, False]
    assert policy(bench).view.adapter_tokens(adapter("big", 4)) == 16


def test_only_its_adapter_lacks_room(telling: Preset) -> None:
    bench = Bench(blocks=8, preset=telling)
    bench.engine.submit(request("first", list(range(4)), adapter=adapter("big", 4), max_tokens=8))
    bench.step()
    bench.step()
    assert bench.memory.evictor.unused() in (2, 3)
    bench.engine.submit(request("second", [1], 1.0, adapter=adapter("other", 3)))
    bench.step()
    assert policy(bench).outcomes[-1] == ("second", WaitReason.ADAPTER_BLOCKS)
    bench.run()
    assert len(bench.finished()) == 2
    assert policy(bench).ends == ["first", "second"]


def test_request_preempted_by_policy_resumes_where_it_was(telling: Preset) -> None:
    bench = Bench(preset=telling)
    bench.engine.submit(request("x", [1, 2, 3], max_tokens=6))
    undisturbed = Bench()
    undisturbed.engine.submit(request("x", [1, 2, 3], max_tokens=6))
    undisturbed.run()
    for _ in range(3):
        bench.step()
    policy(bench).back = {"x"}
    bench.run()
    assert bench.tokens == undisturbed.tokens
    assert policy(bench).ends == ["x", "x"]
    assert [event.request_id for event in bench.events if isinstance(event, Preempted)] == ["x"]


def test_a_repeat_ends_where_the_policy_wants_to_look(telling: Preset) -> None:
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, num_scheduler_steps=8, multi_step_limit_s=1e9
    )
    bench = Bench(preset=telling, limits=limits)
    policy(bench).review_at = 4
    bench.engine.submit(request("x", [1, 2, 3], max_tokens=12))
    bench.step()
    bench.step()
    assert bench.plans[-1].repeat == 3, "one token from the prompt, three more until the review"


def test_the_last_in_the_order_of_the_policy_gives_way(telling: Preset) -> None:
    bench = Bench(blocks=6, preset=telling)
    for arrival_s, (name, priority) in enumerate({"low": 5, "high": 0}.items()):
        asked = request(name, [priority] * 7, float(arrival_s), max_tokens=12)
        bench.engine.submit(msgspec.structs.replace(asked, priority=priority))
    bench.run()
    assert {event.request_id for event in bench.events if isinstance(event, Preempted)} == {"low"}
    assert len(bench.finished()) == 2


@pytest.mark.parametrize("kept", list(PreemptedKv))
def test_preempted_kv_is_kept_or_computed_again(kept: PreemptedKv) -> None:
    bench = Bench(blocks=8, preset=Preset(preempted_kv=kept))
    for index in range(2):
        bench.engine.submit(request(f"{index}", [index + 1] * 9, float(index), max_tokens=16))
    bench.run()
    assert len(bench.finished()) == 2
    preempted = [event.at_s for event in bench.events if isinstance(event, Preempted)]
    assert preempted, "there is no room for both to end"
    again = [event for event in bench.events if isinstance(event, Admitted) and event.at_s >= preempted[0]]
    assert again
    # Before there has been any copy none is known to take time, so cheaper is to keep it.
    assert bool(again[0].cached_tokens) is (kept is not PreemptedKv.DROPPED)


def test_pace_finds_what_a_step_a_prompt_token_and_a_decode_take() -> None:
    step_times, random = StepTimeEstimator(), np.random.default_rng(1)
    assert step_times.alone_s(10, 10) == 0.0
    for _ in range(400):
        prefill, decodes = int(random.integers(0, 300)), int(random.integers(1, 30))
        step_times.note(prefill, decodes, 0.01 + 0.001 * prefill + 0.0005 * decodes)
    assert step_times.step_s(100, 10) == pytest.approx(0.115, rel=0.01)
    assert step_times.alone_s(200, 11) == pytest.approx(0.21 + 10 * 0.0105, rel=0.02)
    for _ in range(3000):
        step_times.note(100, 10, 0.2)
    assert step_times.step_s(100, 10) == pytest.approx(0.2, rel=0.05), "old steps are forgotten"


# --- Whose request ends when the transfer of an adapter fails -----------------------------------


def test_failed_load_ends_only_requests_queued_before_it_began() -> None:
    bench = Bench(failing=frozenset({AdapterDigest("digest-a")}))
    for name in ("first", "second"):
        bench.engine.submit(request(name, [1, 2, 3], adapter=adapter("a")))
    bench.step()
    bench.clock.advance(0.01)
    bench.engine.submit(request("late", [1, 2, 3], 0.01, adapter("a")))
    while not bench.finished():
        bench.step()
    assert {name: end.reason for name, end in bench.finished().items()} == {
        RequestId("first"): FinishReason.ERROR,
        RequestId("second"): FinishReason.ERROR,
    }
    bench.executor._failing = frozenset()  # the files are whole again
    bench.run()
    assert bench.finished()[RequestId("late")].reason is FinishReason.LENGTH
