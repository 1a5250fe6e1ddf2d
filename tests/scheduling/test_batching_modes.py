"""Times of steps as they ran, modes that find out whether merging pays, and modes of one adapter at a time."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm
from lorikeet.papers.dlora.merge_turns import CreditParams, MergeTurns
from lorikeet.papers.dlora.mode_times import BreakEvenParams, ModeBatch, ModeTimes, lora_work
from lorikeet.papers.dlora.one_adapter import OneAdapter
from lorikeet.policies import BATCHING
from lorikeet.presets import PRESETS
from lorikeet.scheduling.batching.mode import ALL_REQUESTS, BatchWork, LiveRequest, Unmerged
from tests.support.batching import RANK, A, B, C, batch_of, ids, live_of, run, setup_of, work_of
from tests.support.policies import policy_values

# --- times -------------------------------------------------------------------------------------------


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


# --- worlds in which merging pays, or not ------------------------------------------------------------


@dataclass
class Machine:
    """A replica with 16 requests at any time, each of 40 tokens; whoever ends is followed by another.

    Attributes:
        lora_s, lora_row_s: what LoRA adds to a step, and for each preset.
    """

    lora_s: float
    lora_row_s: float
    switch_s: float = 0.05

    def run(self, mode: MergeTurns, hot: float, steps: int) -> tuple[float, float]:
        """Run, and return the share of merged steps and tokens per second in the second half."""
        chance, number = random.Random(5), 0
        merged: AdapterDigest | None = None
        live: list[LiveRequest] = []
        left: dict[RequestId, int] = {}
        elapsed_s, tokens, merged_steps = 0.0, 0, 0
        for step in range(steps):
            if step == steps // 2:
                elapsed_s, tokens, merged_steps = 0.0, 0, 0
            while len(live) < 16:
                adapter = A if chance.random() < hot else AdapterDigest(f"other-{chance.randrange(8)}")
                live.append(LiveRequest(RequestId(str(number)), adapter, True, 10))
                left[live[-1].request_id] = chance.randrange(20, 61)
                number += 1
            choice = mode.choose(live)
            work = work_of(choice, live)
            rows = sum(work.rows.values())
            step_s = 0.01 + 0.0005 * work.decodes + (self.lora_s + self.lora_row_s * rows) * bool(rows)
            switch_s = self.switch_s * (choice.merged != merged)
            merged = choice.merged
            mode.ran(1, work, step_s * chance.uniform(0.97, 1.03), switch_s)
            elapsed_s, tokens = elapsed_s + step_s + switch_s, tokens + work.decodes
            merged_steps += merged is not None
            for request in batch_of(choice, live):
                left[request.request_id] -= 1
            live = [request for request in live if left[request.request_id]]
        return merged_steps / (steps - steps // 2), tokens / elapsed_s


DEAR, FREE = Machine(lora_s=0.01, lora_row_s=0.002), Machine(lora_s=0.0, lora_row_s=0.0)


@pytest.mark.slow
def test_where_merging_pays_alpha_falls_and_it_merges() -> None:
    mode = MergeTurns(setup_of(max_batch=256))
    share, tokens_per_s = DEAR.run(mode, hot=0.95, steps=4000)
    assert mode.thresholds.alpha < 0.8
    assert share > 0.5
    never = BreakEvenParams(alpha=2.0, least_alpha=2.0, most_alpha=2.0, from_even=False)
    unmerged = MergeTurns(setup_of(max_batch=256), threshold_params=never)
    assert tokens_per_s > 1.15 * DEAR.run(unmerged, hot=0.95, steps=4000)[1]


@pytest.mark.slow
@pytest.mark.parametrize("hot", [0.7, 0.95])
def test_alpha_rises_and_mode_stays_unmerged_without_gain(hot: float) -> None:
    mode = MergeTurns(setup_of(max_batch=256))
    share, tokens_per_s = FREE.run(mode, hot, steps=4000)
    assert mode.thresholds.alpha > 0.8
    assert share < 0.1
    assert tokens_per_s > 0.95 * 16 / (0.01 + 16 * 0.0005)


@pytest.mark.slow
def test_break_even_of_merging_is_measured_again() -> None:
    mode = MergeTurns(setup_of(max_batch=256))
    FREE.run(mode, hot=0.95, steps=2000)
    assert mode.thresholds.alpha > 1.0
    share, _ = DEAR.run(mode, hot=0.95, steps=4000)
    assert share > 0.5


def serve_one_by_one(mode: MergeTurns, steps: int, held_up_s: Mapping[int, float]) -> float:
    """Run requests that come when the last has gone, where LoRA costs 2 ms of 12 and a switch 50.

    Args:
        mode: that decides.
        steps: how many.
        held_up_s: what some unmerged steps take besides, by their number.

    Returns:
        The share of merged steps in the last quarter.
    """
    merged: AdapterDigest | None = None
    unmerged_steps, merged_steps = 0, 0
    for step in range(steps):
        number = step // 16
        live = [LiveRequest(RequestId(str(number)), AdapterDigest(f"adapter-{number % 7}"), True, 10)]
        choice = mode.choose(live)
        work = work_of(choice, live)
        step_s = 0.01 if not work.rows else 0.012 + held_up_s.get(unmerged_steps, 0.0)
        mode.ran(1, work, step_s, 0.05 * (choice.merged != merged))
        merged = choice.merged
        unmerged_steps += bool(work.rows)
        merged_steps += step >= 3 * steps // 4 and merged is not None
    return merged_steps / (steps // 4)


@pytest.mark.slow
@pytest.mark.parametrize("held_up_s", [{}, {0: 1.0}, {3: 1.0}, {8: 3.0}], ids=["none", "first", "fourth", "ninth"])
def test_delayed_step_does_not_make_merging_pay_forever(held_up_s: Mapping[int, float]) -> None:
    assert serve_one_by_one(MergeTurns(setup_of(max_batch=256)), 4000, held_up_s) < 0.2


def test_due_trial_does_not_shorten_plans_of_a_merged_adapter() -> None:
    mode, live = MergeTurns(setup_of()), live_of("AAAA")
    for _ in range(10):
        run(mode, live)
    assert mode.times.lora_steps_due == 8
    assert mode.choose(live).merged == A
    assert mode.steps_until_review() == mode.thresholds.steps_left == 22
    run(mode, live_of("BB"))
    assert mode.choose(live_of("BB")).merged is None, "nobody is left for whom A is merged"
    assert mode.steps_until_review() <= mode.times.lora_steps_due


def test_starving_adapters_pay_nothing_for_turns_they_could_not_take() -> None:
    mode = MergeTurns(setup_of(), credit_params=CreditParams(16, starves_above=20, normal_below=18))
    live = live_of("BAAA", illegal="B")
    run(mode, live)
    mode.credits.apply({A: -8, B: 8}, 1)
    choice = mode.choose(live)
    assert ids(batch_of(choice, live)) == ["B1", "A1", "A2", "A3"]
    mode.ran(1, BatchWork(0, 0, 3, {A: 3}, {A}), 0.05, 0.0)
    assert mode.credits[B] == 24, "its adapter is on its way"
    run(mode, live)
    assert mode.credits[B] == 22


@pytest.mark.parametrize(("together_s", "merged"), [(0.03, None), (0.2, A)])
def test_cost_of_mixed_steps_is_measured_before_turns_are_charged(
    together_s: float, merged: AdapterDigest | None
) -> None:
    """One adapter alone adds 20 ms a preset, so that eight seem to cost 170 ms; in turns they take 80."""
    mode = MergeTurns(setup_of(max_batch=16))
    for index in range(16):
        mode.times.note(1, BatchWork(0, 0, 1, {B: 1} if index % 2 else {}), 0.03 if index % 2 else 0.01)
    live = live_of("ACDEFGHI")
    mode.choose(live)
    mode.credits.apply({A: 40, C: -40}, 1)
    for _ in range(8):
        choice = mode.choose(live)
        assert (choice.merged, choice.requests) == (None, None)
        mode.times.note(1, work_of(choice, live), together_s)
    assert mode.choose(live).merged == merged


def test_base_model_need_not_be_measured_together_with_adapters() -> None:
    mode, live = MergeTurns(setup_of()), live_of("A-")
    for index in range(16):
        mode.times.note(1, BatchWork(0, 0, 1, {A: 1} if index % 2 else {}), 0.1 if index % 2 else 0.01)
    mode.choose(live)
    mode.credits.apply({A: 40, None: -40}, 1)
    assert mode.choose(live).merged == A


def test_assisted_step_does_not_change_estimated_step_times() -> None:
    mode, live = MergeTurns(setup_of()), live_of("AAAA")
    mode.choose(live)
    mode.ran(1, BatchWork(4, 40, 0, {A: 40}, {A}, is_assisted=True), 5.0, 0.0)
    assert mode.times._seen == [0, 0]


# --- one adapter at a time ---------------------------------------------------------------------------


def test_adapter_of_the_oldest_request_runs_until_its_requests_end() -> None:
    mode = OneAdapter(setup_of(), merged=True)
    live = live_of("BAAB")
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (B, ["B1", "B2"])
    live = live_of("AABBBBB")
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (B, ["B1", "B2", "B3", "B4"]), "later ones join"
    live = live_of("CAA")
    assert run(mode, live).merged == C
    assert mode.choose([]).merged == C, "nothing runs, so nothing is switched"
    assert run(mode, live_of("AC")).merged == A, "an idle replica ends the turn"


def test_unmerged_it_merges_nothing() -> None:
    live = live_of("ABA")
    choice = run(OneAdapter(setup_of(), merged=False), live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["A1", "A2"])


def test_the_base_model_takes_its_turn_with_nothing_merged() -> None:
    mode = OneAdapter(setup_of(), merged=True)
    assert run(mode, live_of("A-")).merged == A
    live = live_of("-B-")
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["-1", "-2"])


def test_adapter_off_the_device_is_chosen_but_not_merged() -> None:
    mode, live = OneAdapter(setup_of(), merged=True), live_of("AB", illegal="A")
    choice = mode.choose(live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["A1"])
    assert mode.choose(live_of("AB")).merged == A


def test_whole_models_hold_no_more_than_their_even_share_of_the_pool() -> None:
    mode = OneAdapter(setup_of(max_batch=8, known=4), merged=True, even_shares=True)  # 100 tokens each
    live = live_of("ABAAA", tokens=33)
    choice = mode.choose(live)
    assert (choice.merged, ids(batch_of(choice, live))) == (A, ["A1", "A2", "A3"])
    assert mode.steps_until_review() == 1
    grown = live_of("ABAAA", tokens=34)
    assert ids(batch_of(mode.choose(grown), grown)) == ["A1", "A2"]
    assert mode.steps_until_review() == (100 - 68) // 2 + 1
    long = live_of("AA", tokens=200)
    assert ids(batch_of(mode.choose(long), long)) == ["A1"]
    assert mode.steps_until_review() == float("inf")


def test_unmerged_only_runs_all_requests() -> None:
    mode = Unmerged(setup_of())
    assert mode.choose(live_of("ABC")) == ALL_REQUESTS
    assert not mode.follows_requests
    assert mode.steps_until_review() == float("inf")


@pytest.mark.parametrize("mode", policy_values("batching", *(f"whole-models(turn_s={s:g})" for s in (0, 0.1, 10))))
def test_modes_that_merge_declare_it(mode: str) -> None:
    merges = BATCHING[mode](setup_of()).choose(live_of("AAAAA")).merged is not None
    assert BATCHING.load(mode).merges == (merges or mode == "merge-paid")  # which merges only what has paid for it


def test_presets_name_batching_modes_that_exist() -> None:
    assert all(preset.batching in BATCHING for preset in PRESETS.values())
