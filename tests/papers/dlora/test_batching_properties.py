"""What must hold of dLoRA's batching under any traffic."""

import copy
from collections.abc import Iterator, Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.papers.dlora.batching import DLora
from lorikeet.papers.dlora.merge_turns import CreditParams, MergeTurns, default_credit_params
from lorikeet.papers.dlora.mode_times import BREAK_EVEN
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchWork, LiveRequest
from tests.support.batching import A, B, C, batch_of, live_of, run, setup_of, work_of
from tests.support.step_counts import examples

ROUND = st.tuples(st.text("AAABC-", max_size=5), st.sets(st.integers(0, 11), max_size=4))
"""Who arrives, and at which places requests end."""
TRAFFIC = st.lists(ROUND, min_size=1, max_size=25)
UP_TO_6 = st.integers(0, 6)


def mode_of(
    max_batch: int, spare: int, band: int, margin: int, alpha: float, debt: int | None, is_known: bool
) -> MergeTurns:
    initial = max_batch + spare
    mode = MergeTurns(
        setup_of(max_batch),
        threshold_params=BREAK_EVEN._replace(alpha=alpha, beta=alpha / 2, period_iterations=5),
        credit_params=CreditParams(
            initial,
            starves_above=initial + band + margin,
            normal_below=initial + band,
            turn_ends_below=None if debt is None else initial - min(debt, spare),
        ),
    )
    if is_known:  # else both modes have run often enough only after many rounds
        for rows in range(1, 9):
            mode.times.note(1, BatchWork(0, 0, rows, {}), 0.01 + 0.001 * rows)
            mode.times.note(1, BatchWork(0, 0, rows, {A: rows}), 0.0107 + 0.0021 * rows)
    return mode


def modes(is_known: bool) -> st.SearchStrategy[MergeTurns]:
    """Return modes of any kind, to which both modes' times are known from the beginning or not."""
    return st.builds(
        mode_of,
        st.integers(1, 6),
        UP_TO_6,
        UP_TO_6,
        UP_TO_6,
        st.floats(0.2, 1.2),
        st.none() | UP_TO_6,
        st.just(is_known),
    )


def lists_of(traffic: Sequence[tuple[str, set[int]]], illegal: str = "") -> Iterator[list[LiveRequest]]:
    """Yield the live requests of each round."""
    live: list[LiveRequest] = []
    for number, (arrivals, ends) in enumerate(traffic):
        live = [request for place, request in enumerate(live) if place not in ends]
        for request in live_of(arrivals, illegal):
            live.append(request._replace(request_id=RequestId(f"{number}:{request.request_id}")))
        yield live


def duration_s(choice: BatchingChoice, live: Sequence[LiveRequest]) -> float:
    """Return a duration of the choice's steps: LoRA costs as much again."""
    rows = len(batch_of(choice, live))
    return 0.01 + 0.001 * rows + (0.0 if choice.merged else 0.0007 + 0.0011 * rows)


def step(mode: MergeTurns, live: Sequence[LiveRequest], steps: int = 1) -> BatchingChoice:
    choice = mode.choose(live)
    if live:
        mode.ran(steps, work_of(choice, live), duration_s(choice, live), 0.0)
    return choice


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(modes(is_known=False) | modes(is_known=True), TRAFFIC, st.sampled_from(("", "B", "AC")))
def test_batches_credits_and_switches_keep_their_bounds(
    mode: MergeTurns, traffic: list[tuple[str, set[int]]], illegal: str
) -> None:
    merged: AdapterDigest | None = None
    initial = mode.credits[AdapterDigest("nobody's")]
    for live in lists_of(traffic, illegal):
        was_on_turn = mode._on_turn is not None
        choice = step(mode, live)
        batch = batch_of(choice, live)
        assert len(batch) <= mode.max_batch
        assert bool(batch) == bool(live)
        may_turn = merged not in {request.adapter for request in live} or was_on_turn or bool(mode.credits._starving)
        assert merged is None or may_turn or choice.merged in (None, merged), "no way from one with requests to another"
        merged = choice.merged
        if merged and batch:
            assert merged not in illegal
            assert {request.adapter for request in batch} == {merged}
        assert mode.credits.total() == initial * len(mode.credits)
        assert min(mode.credits[each] for each in (A, B, C, None)) >= 0
        assert mode.thresholds.beta <= mode.thresholds.alpha - 0.05 + 1e-9


def check_several_at_once(mode: MergeTurns, traffic: Sequence[tuple[str, set[int]]], most: int) -> None:
    for live in lists_of(traffic):
        if not live:
            mode.choose(live)
            continue
        single = copy.deepcopy(mode)
        choice = mode.choose(live)
        steps = int(min(most, mode.steps_until_review()))
        assert steps >= 1
        mode.ran(steps, work_of(choice, live), duration_s(choice, live), 0.0)
        for _ in range(steps):
            assert step(single, live) == choice
        assert all(mode.credits[each] == single.credits[each] for each in (A, B, C, None))
        assert mode.thresholds.alpha == pytest.approx(single.thresholds.alpha)
        assert mode.thresholds.beta == pytest.approx(single.thresholds.beta)
        assert mode.thresholds.iterations_left == single.thresholds.iterations_left


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(modes(is_known=False), TRAFFIC, st.integers(1, 12))
def test_several_steps_at_once_are_the_same_steps_one_by_one(
    mode: MergeTurns, traffic: list[tuple[str, set[int]]], most: int
) -> None:
    check_several_at_once(mode, traffic, most)


def test_each_step_decides_after_a_period_ended_by_another_candidate() -> None:
    stay: tuple[str, set[int]] = ("", set())
    before = [("AAC-B", set[int]()), ("A-AAA", set[int]()), ("ABC", {0, 2, 7}), ("B", set[int]())]
    leave: list[tuple[str, set[int]]] = [("C", set()), ("", {5}), ("", {5}), ("", {0, 1, 3})]
    mode = mode_of(max_batch=3, spare=1, band=0, margin=5, alpha=1.0, debt=None, is_known=False)
    check_several_at_once(mode, [*before, stay, stay, stay, stay, *leave], most=2)


@pytest.mark.slow
@given(st.integers(2, 40), st.data())
def test_a_lone_request_is_rescued_after_so_many_iterations(max_batch: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, max_batch - 1))
    others = data.draw(st.integers(max(place, 1), 2 * max_batch))
    live = live_of("A" * place + "B" + "A" * (others - place))
    mode, rules = MergeTurns(setup_of(max_batch)), default_credit_params(max_batch)
    most = rules.starves_above - rules.initial + 1
    assert most == 17
    passed_over = 0
    while live[place] not in batch_of(run(mode, live), live):
        passed_over += 1
        assert passed_over <= most


def test_lone_request_beside_a_hot_adapter_runs_after_a_known_number_of_steps() -> None:
    live = live_of("BAAAAAAAA")
    mode = DLora(setup_of(max_batch=8), patience=64)
    choices = [run(mode, live) for _ in range(66)]
    assert [choice.merged for choice in choices] == [A] * 65 + [None]
    assert [request.adapter for request in batch_of(choices[-1], live)] == [B]


def test_without_credits_it_may_wait_for_ever() -> None:
    live = live_of("BAAAAAAAA")
    mode = DLora(setup_of(max_batch=8), patience=inf)
    assert {run(mode, live).merged for _ in range(500)} == {A}
