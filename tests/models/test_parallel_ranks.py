"""Tensor-parallel ranks give the logits of a single rank, adapters included."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorikeet.models.config import read_model_config
from lorikeet.models.parallel import SingleRankGroup
from tests.models.checkpoints import make_checkpoint, oracle_logits
from tests.models.ranks import adapter_factors, run_steps

PATHS = {module: f"self_attn.{module}_proj" for module in ("q", "k", "v", "o")} | {
    module: f"mlp.{module}_proj" for module in ("gate", "up", "down")
}


def logits_of_ranks(folder: Path, size: int, scratch: Path) -> Tensor:
    """Run ``size`` processes joined by gloo and return rank 0's logits."""
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.models.ranks",
                folder,
                scratch / "meeting",
                str(rank),
                str(size),
                scratch / "out",
            ],
            cwd=root,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, errors
    return torch.load(scratch / "out")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("llama-biases", 2),
        ("llama-biases", 4),
        ("qwen3-biases", 2),
        ("qwen2", 4),
        ("qwen3-5", 2),
        ("granite-hybrid", 2),
    ],
    ids=["two-ranks", "kv-heads-copied", "qk-norm", "qkv-bias-copied", "delta-rule", "state-space"],
)
def test_ranks_give_the_logits_of_one(variant: str, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint(folder, variant)
    alone = run_steps(folder, SingleRankGroup())
    torch.testing.assert_close(logits_of_ranks(folder, size, tmp_path), alone, atol=1e-4, rtol=0)


def test_adapter_on_all_modules_equals_the_merged_model(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama-biases")
    found = run_steps(tmp_path, SingleRankGroup())
    torch.testing.assert_close(found[[0, 1, 2, 3, 4, 9]], oracle_logits(model, [5, 6, 7, 8, 9, 1]), atol=1e-4, rtol=0)
    with torch.no_grad():
        for (layer, module), (a, bt) in adapter_factors(read_model_config(tmp_path)).items():
            model.get_submodule(f"model.layers.{layer}.{PATHS[module]}").weight += bt.T @ a
    torch.testing.assert_close(found[[5, 6, 7, 8, 10]], oracle_logits(model, [5, 6, 7, 8, 9]), atol=1e-4, rtol=0)
