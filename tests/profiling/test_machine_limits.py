from pathlib import Path

import pytest
import torch

from lorikeet.models.config import read_model_config
from lorikeet.profiling.machine_limits import (
    LimitMeter,
    MachineLimits,
    ModelCost,
    decode_limit_tok_s,
    median_limits,
    model_cost,
    prefill_limit_tok_s,
    work_ceilings,
)

LIMITS = MachineLimits(threads=1, read_gb_s=1.0, gemm_gflops={1: 0.1, 4: 1.0, 512: 2.0})


@pytest.mark.slow
def test_every_rate_is_measured_with_torchs_threads() -> None:
    limits = LimitMeter(torch.bfloat16, rows=(2, 1, 2)).measure()
    assert limits.threads == torch.get_num_threads()
    assert list(limits.gemm_gflops) == [1, 2]
    assert min(limits.read_gb_s, *limits.gemm_gflops.values()) > 0


def test_the_median_is_taken_of_each_rate_by_itself() -> None:
    measured = [MachineLimits(1, read, {1: gemm}) for read, gemm in ((1.0, 30.0), (2.0, 10.0), (9.0, 20.0))]
    assert median_limits(measured) == MachineLimits(1, 2.0, {1: 20.0})


def test_parameters_count_linear_modules_and_the_output_layer(model_folder: Path) -> None:
    cost = model_cost(read_model_config(model_folder), 2, ranks=(8, 16), modules=("q", "v"))
    attention, mlp = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48
    assert cost.layer_parameters == 2 * (attention + mlp)
    assert cost.head_parameters == 128 * 32
    assert cost.adapter_parameters == tuple(rank * 2 * (32 + 32 + 32 + 16) for rank in (8, 16))


def test_one_stream_is_bound_by_reading_every_weight_once() -> None:
    base = ModelCost(400, 100, (), dtype_bytes=2)
    assert decode_limit_tok_s(base, LIMITS, 1) == pytest.approx(1e9 / 1000)
    assert decode_limit_tok_s(ModelCost(400, 100, (50,), 2), LIMITS, 1) == pytest.approx(1e9 / 1100)


def test_batch_bound_counts_its_flops_and_prefill_those_of_the_layers() -> None:
    base = ModelCost(400, 100, (), dtype_bytes=2)
    assert decode_limit_tok_s(base, LIMITS, 4) == pytest.approx(1e9 / 1000)
    assert prefill_limit_tok_s(base, LIMITS) == pytest.approx(2e9 / 800)


def test_adapters_cost_the_longer_of_reading_and_multiplying() -> None:
    base_s = 4 * 1000 / 1e9
    read_bound = decode_limit_tok_s(ModelCost(400, 100, (50, 5000), 2), LIMITS, 4)
    assert read_bound == pytest.approx(4 / (base_s + 2 * 4 * 2525 / 1e9))
    one_adapter = decode_limit_tok_s(ModelCost(400, 100, (50,), 8), LIMITS, 4)
    assert one_adapter == pytest.approx(4 / (base_s + max(8 * 50, 2 * 4 * 50) / 1e9))


def test_a_whole_run_prefills_and_then_decodes_all_tokens_but_the_first() -> None:
    cost = ModelCost(400, 100, (), dtype_bytes=2)
    found = work_ceilings(cost, LIMITS, requests=4, prompt_tokens=10, output_tokens=3)
    seconds = 4 * 10 / found.prefill_tok_s + 4 * 2 / found.decode_tok_s
    assert found.output_tok_s == pytest.approx(12 / seconds)
    assert found.total_tok_s == pytest.approx(52 / seconds)


def test_a_run_of_one_token_each_is_bound_by_prefill_alone() -> None:
    cost = ModelCost(400, 100, (), dtype_bytes=2)
    found = work_ceilings(cost, LIMITS, requests=4, prompt_tokens=10, output_tokens=1)
    assert found.total_tok_s == pytest.approx(found.prefill_tok_s * 11 / 10)
