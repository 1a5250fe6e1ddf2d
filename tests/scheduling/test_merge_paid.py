"""Merging with a bound on what it may cost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm
from lorikeet.presets import Preset
from lorikeet.scheduling.batching.merge_paid import REGRET_SHARE, MergePaid
from lorikeet.scheduling.batching.mode import BatchingSetup, BatchWork, LiveRequest
from tests.support.scripted import Bench, adapter, request

A, B = AdapterDigest("a"), AdapterDigest("b")
BASE_S, RANK = 0.01, 16


def mode() -> MergePaid:
    return MergePaid(BatchingSetup(8, KernelForm.UNPADDED, lambda digest: RANK, lambda: 2, 1000))


class Engine:
    """Steps of decodes whose times follow a rule, under a mode; and what they would take if nothing were merged."""

    def __init__(self, lora_s: float, switch_s: float) -> None:
        self.mode, self.merged = mode(), None
        self.lora_s, self.switch_s = lora_s, switch_s
        self.took_s = self.unmerged_s = 0.0
        self.switches = self.count = 0

    def step(self, adapters: list[AdapterDigest | None]) -> None:
        """Run a step of decodes; every tenth one is a prefill of 50 tokens."""
        self.count += 1
        live = [LiveRequest(RequestId(str(number)), each, True, 10) for number, each in enumerate(adapters)]
        choice = self.mode.choose(live)
        assert choice.requests is None, "nobody waits"
        assert choice.merged is None or set(adapters) == {choice.merged}
        switch_s = self.switch_s if choice.merged != self.merged else 0.0
        self.switches += choice.merged != self.merged
        self.merged = choice.merged
        tokens = 1 if self.count % 10 else 50
        rows = {} if choice.merged else {each: tokens * adapters.count(each) for each in adapters if each is not None}
        with_adapter = sum(each is not None for each in adapters)
        plain_s = BASE_S + 1e-4 * len(adapters) * tokens
        step_s = plain_s + (self.lora_s * with_adapter if rows else 0.0)
        decodes, prefill = (len(adapters), 0) if tokens == 1 else (0, tokens * len(adapters))
        self.mode.ran(1, BatchWork(len(adapters) - decodes, prefill, decodes, rows, set(adapters)), step_s, switch_s)
        self.took_s += step_s + switch_s
        self.unmerged_s += plain_s + self.lora_s * with_adapter


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "ab", "base"]), st.integers(1, 200)), min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-4, 2e-3, 1e-2]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.integers(0, 100),
)
def test_whatever_comes_it_loses_little_against_never_merging(
    phases: list[tuple[str, int]], lora_s: float, switch_s: float, seed: int
) -> None:
    engine, draw = Engine(lora_s, switch_s), random.Random(seed)
    of: dict[str, list[AdapterDigest | None]] = {"a": [A], "b": [B], "ab": [A, B], "base": [None]}
    for _ in range(20):
        engine.step([A, None])
        engine.step([None])
    for kind, steps in phases:
        for _ in range(steps):
            engine.step(of[kind] * draw.randint(1, 3))
    first_trial_s = 2 * switch_s
    assert engine.took_s - engine.unmerged_s <= 2 * first_trial_s + REGRET_SHARE * engine.took_s + 0.05


def test_a_long_run_of_one_adapter_is_merged_and_gains() -> None:
    engine = Engine(lora_s=5e-3, switch_s=0.1)
    for _ in range(3000):
        engine.step([A, A])
    assert engine.merged == A
    assert engine.took_s < 0.6 * engine.unmerged_s
    assert engine.mode.net_s == pytest.approx(engine.unmerged_s - engine.took_s, rel=0.2)


@pytest.mark.slow
def test_where_it_cannot_pay_it_is_tried_once() -> None:
    engine = Engine(lora_s=1e-6, switch_s=0.1)
    for turn in range(4000):
        engine.step([A] if turn % 200 < 150 else [A, B])
    assert engine.switches == 2


def test_answers_under_an_engine_are_those_without_merging() -> None:
    found = []
    for name in ("unmerged", "merge-paid"):
        bench = Bench(preset=Preset(batching=name), switch_s=0.001)
        refs = [adapter("a"), adapter("b")]
        for number in range(6):
            ref = refs[number == 5]
            bench.engine.submit(request(str(number), [number + 1, 2, 3], adapter=ref, max_tokens=40))
        bench.run()
        found.append(bench.tokens)
    assert found[0] == found[1]
