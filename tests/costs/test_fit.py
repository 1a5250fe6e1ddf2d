"""Fits find the constants that made the measurements, within the errors that they state."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.plan import KernelForm
from lorikeet.costs.fit import (
    LoraMeasurement,
    StepMeasurement,
    fit_line,
    fit_lora,
    fit_step,
    nonnegative_least_squares,
    quality,
)
from lorikeet.costs.model import CostModel, LoraWork, StepWork, lora_s, step_work
from lorikeet.costs.profile import Constant, CostProfile, Curve, LoraCosts, StepCosts
from lorikeet.profiling.steps import Step, SweepLimits, base_steps, lora_steps

LIMITS = SweepLimits(sequences=32, step_tokens=256, sequence_tokens=4096, kv_tokens=16_384)
ADAPTERS = {8: ["a", "b", "c"], 32: ["d", "e"], 128: ["f", "g"]}
NOISE = 0.02
constants = st.floats(0.2, 5.0)


def measured(seconds: float, generator: np.random.Generator, times: int = 9) -> tuple[float, ...]:
    return tuple(seconds * generator.normal(1.0, NOISE, times))


def model_of(step: StepCosts) -> CostModel:
    geometry = ModelGeometry(1, 1, 1, dict.fromkeys(LORA_MODULES, ModuleShape(1, 1)), 2)
    return CostModel(
        CostProfile("p", "d", "m", 1, "measured", "", geometry, 10, 4096, 1, LORA_MODULES, step), KernelForm.UNPADDED
    )


def works() -> list[StepWork]:
    return [step_work(step, KernelForm.UNPADDED) for step in base_steps(LIMITS)]


def inside(figure: Constant, truth: float) -> bool:
    """Whether the truth lies within twice the stated error: the interval holds it 95 times of 100."""
    assert figure.error is not None
    return abs(figure.value - truth) <= 2 * figure.error


@pytest.mark.slow
@settings(max_examples=5)
@given(st.tuples(*[constants] * 5), st.integers(0, 2**32 - 1))
def test_steps_are_taken_apart_again(scales: tuple[float, ...], seed: int) -> None:
    token, row, sequence, context, pair = scales
    truth = StepCosts(
        tokens=Curve("tokens", ((1, 8e-3), (16, 1e-2), (256, 1e-2 + 240 * token * 5e-4))),
        sampled_rows=Curve("rows", ((1, 2e-3), (4, 2e-3 + 3 * row * 2e-4), (32, 2e-3 + 31 * row * 2e-4))),
        decode_attention=Constant(context * 1e-6, ""),
        decode_sequence=Constant(sequence * 1e-4, ""),
        prefill_attention=Constant(pair * 2e-7, ""),
        prefill_sequence=Constant(1e-4, ""),
        loop=Constant(0, ""),
        loop_sequence=Constant(0, ""),
    )
    generator, made_by = np.random.default_rng(seed), model_of(truth)
    found = fit_step(
        [StepMeasurement(work, measured(made_by.step_s(work), generator)) for work in works()], truth.loop, truth.loop
    )
    assert inside(found.decode_attention, truth.decode_attention.value)
    assert inside(found.decode_sequence, truth.decode_sequence.value)
    assert inside(found.prefill_attention, truth.prefill_attention.value)
    assert inside(found.prefill_sequence, truth.prefill_sequence.value)
    assert found.fit is not None
    assert found.fit.r2 > 0.99
    again = model_of(found)
    for work in works():
        assert again.step_s(work) == pytest.approx(made_by.step_s(work), rel=0.05)


@pytest.mark.slow
def test_others_on_the_machine_make_the_average_longer_and_change_no_part() -> None:
    nothing = Constant(0.0, "")
    curves = Curve("tokens", ((1, 8e-3), (256, 0.2))), Curve("rows", ((1, 2e-3), (32, 8e-3)))
    truth = StepCosts(
        *curves, Constant(1e-6, ""), Constant(1e-4, ""), Constant(2e-7, ""), Constant(1e-4, ""), nothing, nothing
    )
    alone = model_of(truth)
    busy = (1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.4, 1.0)
    points = [StepMeasurement(work, tuple(alone.step_s(work) * times for times in busy)) for work in works()]
    found = fit_step(points, Constant(1e-3, "s"), Constant(1e-5, "s/sequence"))
    assert found.average is not None
    assert found.average.value == pytest.approx(1.175, rel=0.01)
    assert found.average.error == pytest.approx(1.96 * np.std(busy, ddof=1) / len(busy) ** 0.5, rel=0.01)
    with_others, without = model_of(found), model_of(msgspec.structs.replace(found, average=None))
    for work in works():
        assert without.step_s(work) == pytest.approx(alone.step_s(work), rel=0.02)
        assert with_others.step_s(work) == pytest.approx(found.average.value * without.step_s(work))
        assert with_others.growth_s(work) == pytest.approx(found.average.value * without.growth_s(work))
    assert with_others.loop_s(10) == pytest.approx(found.average.value * 1.1e-3)


@pytest.mark.slow
@settings(max_examples=5)
@given(st.sampled_from(KernelForm), st.tuples(*[constants] * 4), st.integers(0, 2**32 - 1))
def test_additions_of_adapters_are_taken_apart_again(form: KernelForm, scales: tuple[float, ...], seed: int) -> None:
    fixed, row, token, adapter = scales
    einsum = form is KernelForm.EINSUM
    truth = LoraCosts(
        fixed=Constant(fixed * 1e-3, ""),
        decode_row_rank=Constant(row * 1e-6, ""),
        prefill_token_rank=Constant(token * 1e-6, ""),
        adapter_rank=Constant(adapter * 1e-5, ""),
        row=Constant(1e-4, "") if einsum else None,
        adapter=Constant(2e-3, "") if einsum else None,
        prefill=Constant(3e-3, "") if einsum else None,
    )
    generator = np.random.default_rng(seed)

    def measurement(step: Step) -> LoraMeasurement:
        work = step_work(step, form).lora
        assert work is not None
        base_s = generator.normal(0.01, 0.001, 15)  # the machine drifts
        with_s = base_s * (1 + lora_s(truth, work) / 0.01) * generator.normal(1.0, 0.005, 15)
        return LoraMeasurement(work, list(base_s), list(with_s))

    found = fit_lora([measurement(step) for step in lora_steps(ADAPTERS, LIMITS)], form)
    assert inside(found.adapter_rank, truth.adapter_rank.value)
    assert inside(found.prefill_token_rank, truth.prefill_token_rank.value)
    assert found.decode_fit is not None
    assert found.prefill_fit is not None
    assert min(found.decode_fit.r2, found.prefill_fit.r2) > 0.9
    assert (found.row is not None) == (found.prefill is not None) == einsum


def test_chunks_cost_something_once_in_a_step_and_decodes_nothing_of_it() -> None:
    nothing = Constant(0.0, "")
    costs = LoraCosts(nothing, nothing, nothing, nothing, prefill=Constant(3e-3, ""))
    assert lora_s(costs, LoraWork(8.0, 64.0, 8.0, rows=9, adapters=2)) == pytest.approx(3e-3)
    assert lora_s(costs, LoraWork(8.0, 0.0, 8.0, rows=1, adapters=1)) == 0.0


def test_a_busy_moment_harms_no_fit() -> None:
    counts = (1, 2, 4, 8)
    found = fit_line(counts, [[1.0 + count, 1.0 + count, 100.0] for count in counts])
    assert found.values == pytest.approx([1.0, 1.0])


@given(st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=4, max_size=12), st.data())
def test_no_constant_is_below_zero_and_no_neighbour_is_better(rows: list[list[float]], data: st.DataObject) -> None:
    matrix = np.array(rows)
    values = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=len(rows), max_size=len(rows))))
    found = nonnegative_least_squares(matrix, values)
    assert (found >= 0).all()
    best = np.linalg.norm(matrix @ found - values)
    for step in (1e-3, -1e-3):
        for i in range(3):
            moved = found.copy()
            moved[i] = max(0.0, moved[i] + step)
            assert np.linalg.norm(matrix @ moved - values) >= best - 1e-7


def test_quality_names_the_share_explained_and_the_worst_point() -> None:
    fit = quality(np.array([1.0, 2.2]), np.array([1.0, 2.0]))
    assert fit.r2 == pytest.approx(1 - 0.04 / 0.5)
    assert fit.worst == pytest.approx(0.1)
    assert fit.points == 2
