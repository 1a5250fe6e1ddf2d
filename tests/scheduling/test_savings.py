"""What an engine says that its mechanisms saved, on a scripted executor; and costs measured from steps."""

import random
from collections import Counter

import msgspec
import pytest

from lorikeet.core.events import Admitted, Decided, Mechanism
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.assist_costs import AssistRecord
from lorikeet.presets import Preset
from lorikeet.scheduling.step_costs import StepCostMeter
from tests.support.scripted import Bench, adapter, request


def decided(bench: Bench, name: str) -> list[Decided]:
    return [event for event in bench.events if isinstance(event, Decided) and event.request_id == name]


def test_second_request_of_an_adapter_saves_load_and_prefix() -> None:
    bench = Bench(preset=Preset())
    ref, prompt = adapter("a", 2), list(range(1, 14))
    for name in ("first", "again"):
        bench.engine.submit(request(name, prompt, adapter=ref))
        bench.run()
    (cold,) = decided(bench, "first")
    assert (cold.mechanism, cold.saved_s) == (Mechanism.ADAPTER_CACHE, 0.0)
    assert "loaded from its files" in cold.why
    cached, prefix = decided(bench, "again")
    assert cached.mechanism is Mechanism.ADAPTER_CACHE
    assert cached.saved_s > 0
    assert prefix.mechanism is Mechanism.PREFIX_REUSE
    assert prefix.why == "KV of 12 of 13 tokens was there"


def test_a_refused_request_says_what_it_waited_for() -> None:
    bench = Bench(blocks=6, preset=Preset())
    for number, name in enumerate(("first", "second")):
        bench.engine.submit(request(name, list(range(20 * number, 20 * number + 13)), max_tokens=6))
    bench.run()
    waits = {event.request_id: event.waited_for for event in bench.events if isinstance(event, Admitted)}
    assert waits["first"] == ""
    assert waits["second"] == "memory for its KV"


def test_request_passing_longer_ones_saves_their_time() -> None:
    bench = Bench(preset=Preset(admission="bounded-sjf"))
    bench.engine.submit(request("known", [1, 2, 3]))  # so that the times of steps are known
    bench.run()
    for name, tokens in (("long", 40), ("short", 3)):
        bench.engine.submit(request(name, list(range(100, 100 + tokens)), bench.clock.now()))
    bench.run()
    orders = [event for event in bench.events if isinstance(event, Decided) and event.mechanism is Mechanism.ORDER]
    admitted = [event.request_id for event in bench.events if isinstance(event, Admitted)]
    if admitted.index("short") < admitted.index("long"):  # type: ignore[arg-type]
        assert [event.request_id for event in orders] == ["short"]
        assert orders[0].saved_s > 0
    else:
        assert not orders


# --- costs of steps ----------------------------------------------------------------------------------

TRUE = ReplicaCosts(0.01, 1e-4, 1e-3, 5e-4, 2e-7, 1e-5)
RANKS = {AdapterDigest("a"): 8, AdapterDigest("b"): 64}


def note_steps(meter: StepCostMeter, costs: ReplicaCosts, count: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        decode_rows = Counter({name: draw.randrange(5) for name in RANKS if draw.random() < 0.6})
        decode_rows = +decode_rows
        decodes = decode_rows.total() + draw.randrange(8)
        prefill = draw.choice((0, 0, 64, 256))
        prefill_rows = Counter({AdapterDigest("b"): prefill}) if prefill and draw.random() < 0.5 else Counter()
        has_lora = bool(decode_rows or prefill_rows)
        seconds = costs.step_s + costs.prefill_token_s * prefill + costs.decode_s * decodes + costs.lora_s * has_lora
        seconds += costs.lora_decode_s * sum(RANKS[name] * rows for name, rows in decode_rows.items())
        seconds += costs.lora_prefill_s * sum(RANKS[name] * rows for name, rows in prefill_rows.items())
        meter.note(1, seconds, prefill, decodes, prefill_rows, decode_rows)


def test_costs_are_measured_from_the_steps_themselves_and_follow_them() -> None:
    meter = StepCostMeter(KernelForm.UNPADDED, RANKS.__getitem__)
    assert meter.costs() is None
    note_steps(meter, TRUE, 200)
    found = meter.costs()
    assert found is not None
    for part in ("step_s", "prefill_token_s", "decode_s", "lora_decode_s", "lora_prefill_s"):
        assert getattr(found, part) == pytest.approx(getattr(TRUE, part), rel=0.1), part
    slower = ReplicaCosts(*(2 * part for part in msgspec.structs.astuple(TRUE)[:-2]))
    note_steps(meter, slower, 600, seed=1)
    found = meter.costs()
    assert found is not None
    assert found.prefill_token_s == pytest.approx(slower.prefill_token_s, rel=0.1)


@pytest.mark.parametrize(("form", "work"), [(KernelForm.PADDED, 64 * 5), (KernelForm.EINSUM, 2 * 64 * 5)])
def test_work_is_counted_as_the_kernel_form_computes_it(form: KernelForm, work: int) -> None:
    meter = StepCostMeter(form, RANKS.__getitem__)
    rows = Counter({AdapterDigest("a"): 3, AdapterDigest("b"): 2})
    assert meter._work(Counter(), rows) == (0.0, float(work))


def test_slow_assistance_is_tried_less_and_later_again() -> None:
    record = AssistRecord()
    for _ in range(10):
        record.note(1.0, 1.2, is_assisted=False)
        record.note(1.0, 3.0, is_assisted=True)
    assert record.ratio > 2
    for _ in range(200):
        record.note(1.0, 1.2, is_assisted=False)
    assert record.ratio < 1.05
