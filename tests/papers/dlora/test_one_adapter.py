"""Batching modes that run one adapter at a time."""

from lorikeet.papers.dlora.one_adapter import OneAdapter
from tests.support.batching import A, B, C, batch_of, ids, live_of, run, setup_of


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
