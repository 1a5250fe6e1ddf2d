"""Times of merged and unmerged steps, fitted while serving."""

import numpy as np
import pytest

from lorikeet.core.plan import KernelForm
from lorikeet.papers.dlora.mode_times import ModeBatch, ModeTimes, lora_work
from lorikeet.scheduling.batching.mode import BatchWork
from tests.support.batching import RANK, A, B


@pytest.mark.parametrize(
    ("form", "work"), [(KernelForm.UNPADDED, 3 * 8 + 2 * 64), (KernelForm.PADDED, 5 * 64), (KernelForm.EINSUM, 640)]
)
def test_lora_work_is_counted_as_the_kernel_form_does_it(form: KernelForm, work: float) -> None:
    assert lora_work(form, {A: 3, B: 2}, {A: 8, B: 64}.__getitem__) == work
    assert lora_work(form, {}, {A: 8}.__getitem__) == 0


def seen(random: np.random.Generator, times: ModeTimes, steps: int, merged: bool) -> None:
    """Feed steps of a machine on which a decode takes 0.3 ms, and another 0.2 ms unmerged."""
    for _ in range(steps):
        decodes, prefill = int(random.integers(2, 30)), int(random.integers(0, 3)) * 50
        rows = {} if merged else {A: decodes + prefill}
        step_s = 0.01 + 0.0001 * prefill + 0.0003 * decodes + (not merged) * (0.004 + 0.0002 * (decodes + prefill))
        times.note(1, BatchWork(bool(prefill), prefill, decodes, rows), step_s)


def test_times_of_both_modes_are_found_from_a_few_steps_of_each() -> None:
    times, generator = ModeTimes(KernelForm.UNPADDED, lambda _: RANK), np.random.default_rng(1)
    assert not times.is_known
    seen(generator, times, 200, merged=False)
    assert not times.is_known
    seen(generator, times, 20, merged=True)
    assert times.is_known
    times.note(2000, BatchWork(0, 0, 16, {A: 16}), 0.01 + 0.0003 * 16 + 0.004 + 0.0002 * 16)
    assert times.batch_s(ModeBatch(10)) == pytest.approx(0.013, rel=0.02), "decodes only, as lately"
    assert times.batch_s(times.batch([A] * 10)) == pytest.approx(0.019, rel=0.02)
    assert times.batch_s(times.batch([A] * 5 + [None] * 5)) == pytest.approx(0.018, rel=0.02)


def test_lora_steps_are_due_after_8_merged_ones_then_after_256_times_their_time() -> None:
    times = ModeTimes(KernelForm.UNPADDED, lambda _: RANK)
    merged, unmerged = BatchWork(0, 0, 4, {}), BatchWork(0, 0, 4, {A: 4})
    times.note(7, merged, 0.01)
    assert times.lora_steps_due == 0
    times.note(1, merged, 0.01)
    assert times.lora_steps_due == 8
    times.note(7, unmerged, 0.02)
    assert (times.lora_steps_due, times.is_known) == (1, False)
    times.note(1, unmerged, 0.02)
    assert (times.lora_steps_due, times.is_known) == (0, True)
    times.note(256 * 16 - 1, merged, 0.01)
    assert times.lora_steps_due == 0
    times.note(1, merged, 0.01)
    assert times.lora_steps_due == 8


def test_a_batch_that_has_not_run_has_the_mix_of_those_that_have() -> None:
    times, generator = ModeTimes(KernelForm.UNPADDED, lambda _: RANK), np.random.default_rng(2)
    for merged in (False, True):
        for tens in generator.integers(1, 5, 100).tolist():  # of ten sequences one prefills 90 tokens
            rows = {} if merged else {A: 99 * tens}
            step_s = 0.01 + 0.001 * 9 * tens + 0.0003 * 9 * tens + (not merged) * 0.0002 * 99 * tens
            times.note(1, BatchWork(tens, 90 * tens, 9 * tens, rows), step_s)
    assert times.batch_s(ModeBatch(20)) == pytest.approx(0.01 + 0.018 + 0.0054, rel=0.01)
    assert times.batch_s(times.batch([A] * 20)) == pytest.approx(0.01 + 0.018 + 0.0054 + 0.0396, rel=0.01)


def test_a_switch_costs_what_switches_cost_so_far() -> None:
    times = ModeTimes(KernelForm.UNPADDED, lambda _: RANK)
    assert times.switch_s(to_merged=True) == 0.0
    times.note_switch(to_merged=True, switch_s=0.1)
    assert times.switch_s(to_merged=False) == pytest.approx(0.1), "until one that way has been seen"
    times.note_switch(to_merged=True, switch_s=0.3)
    times.note_switch(to_merged=False, switch_s=0.02)
    assert times.switch_s(to_merged=True) == pytest.approx(0.2)
    assert times.switch_s(to_merged=False) == pytest.approx(0.02)
