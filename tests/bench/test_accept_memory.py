"""What the lines of the memory make of their runs."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accept import memory_large
from benchmarks.accept.memory_4 import _failures, _ratios
from benchmarks.accept.memory_5 import _check
from benchmarks.accept.memory_6 import BELOW, BEYOND, Repeat, _share_of_limit, confirmed, failures_of, ratios, shares
from benchmarks.accept.memory_common import DISCARDING, OURS, RIVALS, S_LORA, STATIC, paired, part_name
from benchmarks.accept.memory_page import memory_page, reduction
from benchmarks.accept.pytest_runs import run_tests


def times(ttft_s: list[float], tpot_s: list[float | None]) -> dict[str, Any]:
    return {"ttft_s": ttft_s, "tpot_s": tpot_s}


def figures(ttft_s: float, **changes: Any) -> dict[str, Any]:
    given = {"ttft_mean_s": ttft_s, "ttft_p95_s": 2 * ttft_s, "tpot_mean_s": 0.02, "adapter_hit_rate": 0.5}
    given |= {"kv_hit_rate": None, "invalid_kv_share": 0.25, "requests": 9, "completed": 9}
    given["transfers"] = {"host-device": {"bytes": 3 * 2**20}, "source-device": {"bytes": 2**20}}
    return given | changes


def test_requests_without_a_figure_anywhere_are_left_out_of_a_pair() -> None:
    ours, theirs = [times([1, 2, 3], [0.1, None, 0.3])], [times([4, 5, 6], [0.4, 0.5, 0.6])]
    assert paired(ours, theirs, "tpot_s") == ([[0.1, 0.3]], [[0.4, 0.6]])
    assert paired(ours, theirs, "ttft_s") == ([[1, 2, 3]], [[4, 5, 6]])


@pytest.mark.parametrize(
    ("rival", "ttft", "tpot", "complaints"),
    [
        (S_LORA, 0.5, 1.0, []),
        (S_LORA, 0.7, 1.0, ["TTFT is 0.70"]),
        (STATIC, 0.7, 0.9, []),
        (STATIC, 1.0, 1.1, ["TTFT is 1.00", "TPOT is 1.10"]),
    ],
)
def test_a_rival_must_be_beaten_by_its_own_bound(rival: str, ttft: float, tpot: float, complaints: list[str]) -> None:
    theirs = [times([1.0, 2.0, 3.0], [0.1, 0.2, 0.3])] * 2
    ours = [times([ttft, 2 * ttft, 3 * ttft], [0.1 * tpot, 0.2 * tpot, 0.3 * tpot])] * 2
    found = _failures(rival, _ratios(ours, theirs))
    assert [text.split(" ×")[0] for text in found] == complaints


def test_the_model_is_off_by_the_ratio_of_ratios_of_means() -> None:
    live = {OURS: [{"figures": {"ttft_mean_s": s}} for s in (1.0, 3.0)], STATIC: [{"figures": {"ttft_mean_s": 4.0}}]}
    modelled = {OURS: [{"figures": {"ttft_mean_s": 3.0}}], STATIC: [{"figures": {"ttft_mean_s": 5.0}}]}
    assert _check(STATIC, "ttft_mean_s", live, modelled) == {
        "what": "TTFT ÷ vllm-static",
        "live": 0.5,
        "modelled": 0.6,
        "error": pytest.approx(0.2),
        "seconds": {OURS: [2.0, 3.0], STATIC: [4.0, 5.0]},
    }


def test_peaks_are_medians_over_profiles_and_must_be_confirmed_in_most_repeats() -> None:
    def repeat(rivals_peak: float, below: float, beyond: float) -> Repeat:
        peaks = {OURS: 6.0} | dict.fromkeys(RIVALS, rivals_peak)
        return Repeat(0.3, peaks, {row: {BELOW: below, BEYOND: beyond} for row in peaks}, {}, [], [])

    good = [repeat(2.0, 0.7, 1.3), repeat(3.0, 0.8, 1.2), repeat(6.0, 2.0, 0.9)]
    assert ratios(good) == dict.fromkeys(RIVALS, 2.0)
    assert shares(good)[OURS] == {BELOW: 0.8, BEYOND: 1.2}
    assert confirmed(good, OURS) == 2
    assert failures_of(good) == []
    # One that errs low and one that errs high do not make up for each other, though both medians are right.
    bad = [repeat(5.0, 0.7, 1.3), repeat(5.0, 1.2, 1.8), repeat(5.0, 0.5, 0.9)]
    assert shares(bad)[OURS] == {BELOW: 0.7, BEYOND: 1.3}
    complaint = "'s peak is not confirmed live: 0.70, 1.20, 0.50 of the limit below it, 1.30, 1.80, 0.90 beyond"
    assert failures_of(bad) == [f"1.20 × {S_LORA}", *(f"{row}{complaint}" for row in (OURS, *RIVALS))]
    assert failures_of([repeat(5.1, 0.5, 2.0)]) == [f"1.18 × {S_LORA}", f"1.18 × {DISCARDING}"]


def test_the_limit_of_a_probe_drifts_with_the_machine() -> None:
    assert _share_of_limit({"figures": {"ttft_mean_s": 0.33}, "drift": 0.1}, 0.3) == pytest.approx(1.0)
    assert _share_of_limit({"figures": {"ttft_mean_s": 0.27}, "drift": -0.1}, 0.3) == pytest.approx(1.0)


def test_reductions_are_means_over_the_loads() -> None:
    case = {"loads": {OURS: [figures(1.0), figures(3.0)], STATIC: [figures(2.0), figures(4.0)]}}
    assert reduction(case, STATIC, "ttft_mean_s") == pytest.approx((0.5 + 0.25) / 2)


def test_the_page_has_a_line_for_every_row_split_and_case() -> None:
    both = {"low": figures(0.2), "high": figures(0.4)}
    failed = {"low": figures(0.2, ttft_mean_s=None, tpot_mean_s=None, completed=0), "high": figures(0.4)}
    check = {"what": "TTFT ÷ x", "live": 0.5, "modelled": 0.55, "error": 0.1, "as_profiled": 0.6}
    check["seconds"] = {OURS: [0.1, 0.11]}
    loads = {OURS: [figures(0.1)], STATIC: [figures(0.2)], S_LORA: [figures(0.4)]}
    case = {"scenario": "agent", "adapters": 20, "peaks": {OURS: 4.0, STATIC: 2.0, S_LORA: None}, "loads": loads}
    page = memory_page("words", (1.0, 2.0), [check], {OURS: both, "elora:wom": both}, {0.2: both, 0.05: failed}, [case])
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert "| TTFT ÷ x | 0.500 | 0.550 | +10.0% | 0.600 | elora 100.0 → 110.0 |" in rows
    (ablation,) = (row for row in rows if row.startswith("| elora:wom "))
    assert ablation.startswith("| elora:wom | 200 | 400 | 1.00 | 1.00 | 1.51 (VIII-E) | 20.0 | 1.00 | 1.34 |")
    assert ablation.endswith("| 50% |  | 25% (paper 49%) | 4 | 0 |")
    assert "| 0.05 |  |  |  |  | 9 |" in rows
    assert "| agent | 20 | vllm-static | 50% | 44% | 0% | 38% | 4.0 | 2.0 | 100% | 79% | 25% |" in rows
    assert "| agent | 20 | elora:s-lora | 75% | 53% | 0% | 31% | 4.0 | none |  | 50% | 25% |" in rows


def test_rows_are_named_in_files_without_colons() -> None:
    assert part_name("vllm-static:discard") == "vllm-static-discard"


def test_the_large_setting_asks_for_nothing_longer_than_its_model_takes() -> None:
    work = memory_large._work("chatbot", 20, 2.0)
    assert len(work.requests) > 100
    assert work.longest_tokens <= 4096
    assert {request.adapter for request in work.requests} <= set(work.names)


def test_tests_are_counted_by_name_and_missing_ones_are_told(tmp_path: Path) -> None:
    file = tmp_path / "test_told.py"  # one that imports little
    file.write_text(
        "import pytest\n\n"
        "@pytest.mark.parametrize('number', [1, 3, 4])\ndef test_odd(number):\n    assert number % 2\n\n"
        "def test_other():\n    pass\n"
    )
    done = run_tests([f"{file}::test_odd"])
    assert done.passed == {"test_told::test_odd": 2}
    assert done.failed == ["test_told::test_odd[4]"]
    with pytest.raises(RuntimeError, match="pytest ended with code"):
        run_tests([f"{file}::test_that_there_is_not"])
