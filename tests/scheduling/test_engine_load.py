"""What a lost second delays, and prompts apart from decodes where that pays."""

import pytest

from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.presets import PrefillApart, Preset
from lorikeet.scheduling.step_costs import Utilization
from tests.support.scripted import Bench, adapter, request

COSTS = ReplicaCosts(1e-3, 1e-4, 1e-4, lora_prefill_s=1e-4, lora_decode_s=1e-6)


def test_a_lost_second_delays_the_more_the_busier_the_engine_is() -> None:
    idle, half, full = Utilization(), Utilization(), Utilization()
    assert idle.delay_of_a_second(0.01) == 1.0
    for step in range(1, 200):
        half.note(step * 0.1, 1, 0.06)
        full.note(step * 0.1, 1, 0.1)
    assert half.delay_of_a_second(0.01) == pytest.approx(2.0), "half of the time is work that grows with requests"
    assert full.delay_of_a_second(0.0) == pytest.approx(20.0), "the most that counts"


@pytest.mark.parametrize("form", [KernelForm.PADDED, KernelForm.UNPADDED])
def test_prompts_run_apart_only_where_ranks_make_them_longer_beside_decodes(
    form: KernelForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(preset=Preset(prefill_apart=PrefillApart.WHEN_FASTER, kernel_form=form))
    meter = bench.scheduler.selector.meter
    monkeypatch.setattr(meter, "costs", lambda: COSTS)
    bench.engine.submit(request("large", [1, 2, 3], max_tokens=8, adapter=adapter("large", 8)))
    bench.step()
    bench.engine.submit(request("small", [1] * 12, max_tokens=4, adapter=adapter("small", 1)))
    bench.run()
    began = next(plan for plan in bench.plans if any(start.request_id == "small" for start in plan.starts))
    assert len(began.sequences) == (1 if form is KernelForm.PADDED else 2)
    assert {name: len(made) for name, made in bench.tokens.items()} == {"large": 8, "small": 4}
