"""What holds for every batching mode, and the unmerged mode."""

import pytest

from lorikeet.policies import BATCHING
from lorikeet.presets import PRESETS
from lorikeet.scheduling.batching.mode import ALL_REQUESTS, Unmerged
from tests.support.batching import live_of, setup_of
from tests.support.policies import policy_values


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
