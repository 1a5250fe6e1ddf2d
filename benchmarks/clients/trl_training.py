"""Trains a LoRA by TRL's ``AsyncGRPOTrainer``, unchanged, on a CPU: ``python trl_training.py URL MODEL FOLDER STEPS``.

It runs in the environment of the client ``trl`` (``benchmarks.clients``). After every sync it prints, as JSON, the
adapter's name, the digest that the server has for it, and a folder with the trainer's own copy of the weights.

What demands CUDA or the package vllm is replaced; nothing else of TRL is:

* ``packing._flash_attn``: FlashAttention over packed sequences, by torch's attention, one sequence after another;
* ``async_grpo_trainer.get_peak_flops_per_device``: asks the GPU its name; only for a metric;
* ``async_rollout_worker.is_vllm_available``: the check that vllm is installed, whose code this path never calls.
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import requests
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)


class TorchAttention:
    """Computes on the CPU what TRL takes from a kernel of FlashAttention."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        *_: int,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Return causal attention ``[tokens, heads, head_dim]`` of packed sequences, aligned at their ends."""

        def parts(packed: torch.Tensor, ends: torch.Tensor) -> Iterable[torch.Tensor]:
            return (part.transpose(0, 1)[None] for part in packed.split(ends.diff().tolist()))

        found = []
        for q, k, v in zip(parts(query, query_ends), parts(key, key_ends), parts(value, key_ends), strict=True):
            rows, columns = q.shape[2], k.shape[2]
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            found.append(attended[0].transpose(0, 1))
        return torch.cat(found)


def run_without_cuda() -> None:
    """Replace what demands CUDA or the package vllm."""
    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_rollout_worker.is_vllm_available = lambda *_, **__: True


run_without_cuda()  # The process of the rollouts imports this module, too.


class ReportSyncs(TrainerCallback):
    """Prints the digest of every version that was synced, and saves the trainer's own copy."""

    def __init__(self, trainer: AsyncGRPOTrainer, url: str, folder: Path) -> None:
        self._trainer = trainer
        self._url = url
        self._folder = folder

    def on_step_end(self, *_: Any, **__: Any) -> None:
        name = f"{self._trainer._lora_name}-v{self._trainer.model_version}"
        served = requests.get(f"{self._url}/v1/adapters/{name}", timeout=60).json()
        copy = self._folder / "copies" / name
        self._trainer.model.save_pretrained(copy)
        print(json.dumps({"synced": name, "digest": served["digest"], "folder": str(copy)}), flush=True)


def share_of_letter(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Reward the letter a."""
    texts = [completion[-1]["content"] for completion in completions]
    return [text.lower().count("a") / max(1, len(text)) for text in texts]


def main() -> None:
    """Train, and print the log of the last step."""
    url, model, out, steps = sys.argv[1:5]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # ChatML; TRL knows the templates of some models only
    questions = ("Say hi.", "Name a fruit.", "Name a colour.", "Count to three.")
    trainer = AsyncGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=share_of_letter,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": each}] for each in questions]}),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=AsyncGRPOConfig(
            output_dir=out,
            max_steps=int(steps),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-3,
            token_budget=0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            vllm_server_base_url=url,
        ),
    )
    trainer.add_callback(ReportSyncs(trainer, url, Path(out)))
    trainer.train()
    print(json.dumps({"log": next(each for each in reversed(trainer.state.log_history) if "reward" in each)}))


if __name__ == "__main__":
    main()
