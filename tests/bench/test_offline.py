from pathlib import Path

import pytest

from lorikeet.bench.offline import OfflineOptions, run_offline
from lorikeet.bench.statistics import median_interval


def test_a_comparison_runs_both_sides_on_the_same_work(model_folder: Path) -> None:
    options = OfflineOptions(
        model=str(model_folder),
        requests=5,
        prompt_tokens=7,
        output_tokens=4,
        adapters=3,
        peer="peft",
        pairs=3,
        dtype="float32",
    )
    report = run_offline(options)
    assert report["first_tokens_equal"] == 1.0
    assert len(report["ratios"]) == len(report["runs_s"]["peft"]) == 3
    assert report["ratio"] == sorted(report["ratios"])[1]
    assert report["ratio_interval"][0] <= report["ratio"] <= report["ratio_interval"][1]
    assert report["total_tok_s"] == pytest.approx(report["output_tok_s"] * 11 / 4)
    assert report["peer_total_tok_s"] == pytest.approx(report["peer_output_tok_s"] * 11 / 4)


def test_without_a_peer_there_is_no_ratio(model_folder: Path) -> None:
    options = OfflineOptions(model=str(model_folder), requests=2, prompt_tokens=3, output_tokens=2, adapters=1, pairs=1)
    assert "ratio" not in run_offline(options)


def test_an_unknown_peer_is_refused_before_anything_loads() -> None:
    with pytest.raises(ValueError, match="'vllm' is not one of: peft"):
        run_offline(OfflineOptions(model="/no/such/folder", peer="vllm"))


def test_the_interval_of_a_median_holds_it_and_narrows_with_equal_values() -> None:
    assert median_interval([2.0] * 5) == (2.0, 2.0)
    low, high = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1.0 <= low < 3.0 < high <= 5.0
