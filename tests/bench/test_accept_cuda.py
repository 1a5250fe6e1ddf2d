"""What is measured on a GPU, on a CPU with a model of two layers; and how it is judged."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.accept import cuda_3, cuda_4, cuda_elsewhere, cuda_rows, dlora_cases, memory_8, memory_common
from benchmarks.accept.cuda_3 import COLD_ROWS, judge_cold, judge_loads, judge_steps
from benchmarks.accept.gpu_rig import GpuRig, why_no_gpu
from benchmarks.accept.lines import Line, Result
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.choices import Range
from lorikeet.bench.model_shapes import MODEL_SHAPES, write_model_shape
from lorikeet.core.garbage import long_lived
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.models.config import read_model_config

LIMITS = {"copy_bytes_per_s": 1e12, "gemm_flops": 1e14, "link_bytes_per_s": 5e10}
SMALL = MODEL_SHAPES["llama-2-7b"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10240,
    "max_position_embeddings": 256,
}
SIZES: dict[str, Any] = {
    "ADAPTERS": 5,
    "PREFILL_TOKENS": 64,
    "DECODES": ((1, 16), (4, 8)),
    "STEPS": 8,
    "LORA_ROWS": (2, 4),
    "OVERHEAD_DISTINCT": 2,
    "OVERHEAD_ROWS": 4,
    "OVERHEAD_CONTEXT": 16,
    "LOAD_PAIRS": 2,
    "LOADS": 2,
    "COLD_RANKS": (4, 8),
    "COLD_TOKENS": (8, 16),
    "COLD_REPEATS": 1,
}
LOADS = {"EVERY_S": 0.02, "DECODES": 2, "LONGEST_TOKENS": 250}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuRig:
    """Small enough for a CPU."""
    monkeypatch.setitem(MODEL_SHAPES, "small", SMALL)
    for module, values in ((cuda_3, SIZES), (memory_8, LOADS)):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    engine = {"memory_bytes": 2**24, "host_memory_bytes": 2**23, "max_step_tokens": 64, "link_bytes_per_s": 1e6}
    engine["max_repeat"] = 1  # on a GPU every step is told whatever this is
    return GpuRig(tmp_path, "small", device="cpu", **engine)


def test_the_shapes_are_those_of_the_models_they_are_named_after(tmp_path: Path) -> None:
    billions = {"llama-2-7b": 6.74, "llama-3-8b": 8.03, "qwen3-8b": 8.19}
    for name, parameters in billions.items():
        config = read_model_config(write_model_shape(tmp_path / name, name))
        layer = sum(shape.in_features * shape.out_features for shape in config.module_shapes().values())
        total = config.layers * layer + 2 * config.vocab_size * config.hidden_size
        assert total / 1e9 == pytest.approx(parameters, rel=0.002)
    with pytest.raises(ValueError, match="'gpt' is not one of llama-2-7b"):
        write_model_shape(tmp_path, "gpt")


def test_steps_are_measured_and_judged(rig: GpuRig) -> None:
    found = cuda_3.measure_steps(rig)
    assert [each["rows"] for each in found["decodes"]] == [1, 4]
    assert all(len(each["s"]) >= 1 for each in found["decodes"])
    assert len(found["prefill_s"]) == 5
    assert all(len(each["pairs"]) >= 4 for each in found["lora"])
    assert len(found["prefill_pairs"]) == 5
    assert len(judge_steps(found, LIMITS).figure) == 2 + 1 + 2 + 2 + 1


def test_loads_are_measured_and_judged(rig: GpuRig) -> None:
    found = cuda_3.measure_gpu_loads(rig)
    assert len(found["loads_s"]) == 1 + 2 * 2
    assert all(tpot_s > 0 for pair in found["tpot_pairs_s"] for tpot_s in pair)
    assert len(found["tpot_pairs_s"]) == 2
    of_a_layer = 64 * (64 + 48 + 48 + 64)  # rank × inputs and outputs of q, k, v and o
    assert found["load_bytes"] == 2 * 2 * of_a_layer
    assert judge_loads(found, LIMITS).figure.keys() == {"a load", "TPOT with a load a second", "steps beside a load"}


def test_cold_starts_are_measured_and_judged(rig: GpuRig) -> None:
    found = cuda_3.measure_cold(rig)
    assert set(found) == set(COLD_ROWS)
    for points in found.values():
        assert set(points) == {"4 x 8", "4 x 16", "8 x 8", "8 x 16"}
        assert all(first_s > 0 for point in points.values() for first_s in point["ttft_s"])
    assert all(load_s > 0 for load_s in found[cuda_3.ON_DEMAND]["4 x 8"]["load_s"])
    assert not any(found[cuda_3.ON_DEMAND]["8 x 16"]["host_layers"])
    assert any(point["host_layers"][0] for point in found[cuda_3.ASSIST].values())
    assert len(judge_cold(found, LIMITS).figure) == 4


def test_a_decode_is_held_against_the_bytes_that_it_reads() -> None:
    found = {
        "decodes": [
            {"rows": 1, "context": 8, "bytes": 8e9, "s": [0.010]},
            {"rows": 32, "context": 8, "bytes": 7e9, "s": [0.010]},
        ],
        "prefill_s": [1.0],
        "prefill_flops": 6.6e13,
        "lora": [
            {"rows": 8, "bytes": 1e9, "pairs": [[0.0114, 0.0101]]},
            {"rows": 100, "bytes": 1e9, "pairs": [[0.0115, 0.0100]]},
        ],
        "overhead": {"8": [[1.079, 1.0]], "100": [[2.0, 1.0]]},
        "prefill_pairs": [[1.13, 1.0]],
    }
    assert judge_steps(found, LIMITS).failures == [
        "decode, 32 rows: 70% of the limit, 10.00 ms at 8 tokens",
        "LoRA, 100 adapters: 1.50 × the limit, 1.50 ms",
        "of a prefill, adapters: +13.0%",
    ]


def test_a_load_is_held_against_the_link_and_tpot_with_loads_against_that_without() -> None:
    found = {"loads_s": [0.010], "load_bytes": 4.1e8, "overlapping_s": [1.2], "others_s": [1.0]}
    found["tpot_pairs_s"] = [(1.02, 1.0)]
    assert judge_loads(found, LIMITS).failures == []
    found |= {"load_bytes": 3.9e8, "tpot_pairs_s": [(1.04, 1.0), (2.0, 1.0), (1.0, 1.0)]}
    assert judge_loads(found, LIMITS).failures == [
        "a load: 78% of the link, 10.0 ms",
        "TPOT with a load a second: 1.040 × that without",
    ]


def test_cold_starts_are_held_against_the_load() -> None:
    def point(ttft_s: float, load_s: float = 0.0, host_layers: int = 0) -> dict[str, Any]:
        return {"8 x 64": {"ttft_s": [ttft_s], "load_s": [load_s], "host_layers": [host_layers]}}

    good = (point(0.02), point(0.03, 0.01), point(0.025), point(0.025, 0.0, 9), point(0.03))
    found = dict(zip(COLD_ROWS, good, strict=True))
    assert judge_cold(found, LIMITS).failures == []
    found |= {cuda_3.ON_DEMAND: point(0.033, 0.01), cuda_3.ASSIST: point(0.029), cuda_3.AUTO: point(0.032, 0.0, 9)}
    assert judge_cold(found, LIMITS).failures == [
        "rank 8 x 64 tokens: a cold start does not cost its load",
        "rank 8 x 64 tokens: assisted is too slow",
        "rank 8 x 64 tokens: auto is not the better",
    ]


def test_rows_are_run_at_a_share_of_their_peak_and_set_beside_what_is_printed(
    rig: GpuRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_profile("a100-80-llama-2-7b")

    def small_profile(rig: GpuRig) -> CostProfile:
        return msgspec.structs.replace(
            profile, geometry=rig.config.geometry(2), vocabulary=rig.config.vocab_size, max_model_tokens=256
        )

    phases = dlora_cases.PHASES._replace(prompt_tokens=Range(4, 9), output_tokens=Range(2, 5))
    for module, name, value in (
        (cuda_rows, "REQUESTS", 6),
        (cuda_rows, "LENGTH_SCALE", 1 / 128),
        (cuda_rows, "gpu_profile", small_profile),
        (memory_common, "ADAPTERS", 3),
        (memory_common, "RANKS", (4, 8)),
        (memory_common, "MOST_TOKENS", 200),
        (dlora_cases, "PHASES", phases),
    ):
        monkeypatch.setattr(module, name, value)
    with long_lived():  # each of a hundred runs would search all of this process for garbage
        found = cuda_rows.measure_rows(rig, StoredRuns("cuda.3", tmp_path, "code"))
    assert {name: tuple(made["rows"]) for name, made in found.items()} == {
        name: each.rows for name, each in cuda_rows.COMPARISONS.items()
    }
    for name, made in found.items():
        assert made["rate"] == cuda_rows.COMPARISONS[name].load * made["peaks"][cuda_rows.COMPARISONS[name].rows[1]]
        for run in made["rows"].values():
            assert run["completed"] >= 6
            assert 0 < run["ttft_p95_s"] <= run["ttft_p99_s"]
            assert 0 < run["tpot_mean_s"] <= run["tpot_p99_s"]
    words = cuda_rows.rows_figure(found)
    assert len(words) == 8 + 3
    assert "TPOT 38% less than vllm-static, peak 79% higher" in words["memory.4, printed"]
    assert "P99 TTFT 81%, P50 48% less" in words["admission.3, printed"]


@pytest.mark.usefixtures("small_arena")
def test_an_engine_is_measured_beside_peft_on_the_same_random_weights(
    rig: GpuRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"REQUESTS": 3, "PROMPT_TOKENS": 6, "OUTPUT_TOKENS": 4, "ADAPTERS": 2}.items():
        monkeypatch.setattr(cuda_elsewhere, name, value)
    found = cuda_elsewhere.measure_peft(rig, "cpu")
    assert found["ratio"] > 0
    assert found["first_tokens_equal"] > 0.5  # other weights would agree on one in ten thousand


def test_lines_run_with_engines_on_the_device_and_say_why_they_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Line:
        def run(runs: StoredRuns) -> Result:
            if name == "serve.3":
                raise RuntimeError(os.environ["LORIKEET_ENGINE__DEVICE"])
            return Result(figure=0, passed=name != "serve.2")  # not met, and it does not say why

        return Line(name, "", "", run)

    monkeypatch.setattr(cuda_elsewhere, "find_line", find)
    found = cuda_elsewhere.measure_lines("tpu")
    assert "LORIKEET_ENGINE__DEVICE" not in os.environ
    judged = cuda_3.judge_lines(found)
    assert judged.figure == {"lines met": "6 of 8"}
    assert judged.failures == ["serve.2 on the GPU: ", "serve.3 on the GPU: RuntimeError: tpu"]


def test_an_engine_less_than_ten_times_as_fast_as_peft_is_a_failure() -> None:
    found = {"ratio": 9.9, "ratio_interval": (9.0, 10.5), "output_tok_s": 1000.0, "first_tokens_equal": 1.0}
    assert cuda_3.judge_peft(found).failures == [
        "beside PEFT: 9.9 × (9.0 to 10.5), 1,000 tokens/s; first tokens equal for 100%"
    ]
    assert cuda_3.judge_peft(found | {"ratio": 10.0}).failures == []


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_and_the_line_says_so(tmp_path: Path) -> None:
    for runner in (cuda_3, cuda_4):
        result = runner.run(StoredRuns("cuda", tmp_path, "code"))
        assert not result.passed
        assert result.cause == "torch sees no CUDA device on this machine"
