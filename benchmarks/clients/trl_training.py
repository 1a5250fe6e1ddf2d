"""Trains a LoRA by TRL's ``AsyncGRPOTrainer``, unchanged, on a CPU: ``python trl_training.py URL MODEL FOLDER STEPS``.

It runs in the environment of the client ``trl`` (``benchmarks.clients``). After every sync it prints, as JSON, the
adapter's name, the digest that the server has for it, and a folder with the trainer's own copy of the weights.

``examples/trl_on_cpu.py`` lists what of TRL is replaced, since it demands CUDA.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import requests
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from trl_on_cpu import run_without_cuda

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
