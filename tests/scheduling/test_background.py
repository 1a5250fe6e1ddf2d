"""Background requests give way to all others, under every admission policy, and lose nothing by it."""

import msgspec
import pytest

from lorikeet.core.events import Admitted, Finished, Preempted
from lorikeet.core.request import Request
from lorikeet.presets import Preset
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.policies import policy_values
from tests.support.scripted import Bench, adapter, request

SLOTS = 4
LIMITS = SchedulerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=64, max_model_len=64)


def background(name: str, prompt: list[int], arrival_s: float = 0.0, **more: object) -> Request:
    return msgspec.structs.replace(request(name, prompt, arrival_s, **more), background=True)  # type: ignore[arg-type]


def order_of(bench: Bench, kind: type) -> list[str]:
    return [event.request_id for event in bench.events if isinstance(event, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("admission", policy_values("admission", "fair(spare=0)"))
def test_background_requests_give_up_their_slots_and_lose_no_token(admission: str) -> None:
    bench = Bench(preset=Preset(admission=admission), limits=LIMITS)
    prompts = [[index, index + 1] for index in range(SLOTS + 2)]
    for index, prompt in enumerate(prompts):
        bench.engine.submit(background(f"b{index}", prompt, max_tokens=20, adapter=adapter("ab"[index % 2])))
    for _ in range(4):
        bench.step()
    for index in range(SLOTS + 1):
        bench.engine.submit(request(f"f{index}", [9, index], bench.clock.now(), max_tokens=3, adapter=adapter("a")))
    bench.run()
    ended = order_of(bench, Finished)
    assert sorted(ended) == sorted({*(f"b{i}" for i in range(len(prompts))), *(f"f{i}" for i in range(SLOTS + 1))})
    assert {name[0] for name in ended[: SLOTS + 1]} == {"f"}
    assert set(order_of(bench, Preempted)) == {f"b{index}" for index in range(SLOTS)}
    for index, prompt in enumerate(prompts):
        alone = Bench()
        alone.engine.submit(request("x", prompt, max_tokens=20, adapter=adapter("ab"[index % 2])))
        alone.run()
        assert bench.tokens[f"b{index}"] == alone.tokens["x"]  # type: ignore[index]


def test_background_requests_give_up_blocks_that_others_wait_for() -> None:
    bench = Bench(blocks=16, limits=LIMITS)
    for index in range(2):
        bench.engine.submit(
            background(f"b{index}", list(range(30 * index, 30 * index + 24)), float(index), max_tokens=8)
        )
    for _ in range(4):
        bench.step()
    bench.engine.submit(request("f", list(range(60, 90)), bench.clock.now(), max_tokens=2))
    bench.run()
    assert order_of(bench, Finished)[0] == "f"
    assert order_of(bench, Preempted) == ["b1"]


def test_no_background_request_is_admitted_while_another_waits() -> None:
    bench = Bench(limits=msgspec.structs.replace(LIMITS, max_num_seqs=1))
    for index in range(3):
        bench.engine.submit(request(f"f{index}", [index, 1], float(index), max_tokens=4))
    bench.engine.submit(background("b0", [7, 8], -1.0))
    bench.run()
    assert order_of(bench, Admitted) == ["f0", "f1", "f2", "b0"]
    assert not order_of(bench, Preempted)


def test_an_arrival_ends_a_plan_of_background_requests() -> None:
    """Else it would wait for all steps of the plan."""
    bench = Bench(limits=msgspec.structs.replace(LIMITS, max_num_seqs=1))
    for index in range(2):
        bench.engine.submit(background(f"b{index}", [index, 1]))
    bench.step()
    assert bench.scheduler.may_be_next(request("f", [1, 2]))
    assert not bench.scheduler.may_be_next(background("b", [1, 2]))
