"""Train an adapter of the default model by reinforcement, against a running server: ``python examples/grpo.py``.

The policy learns to answer questions in one word. TRL's asynchronous GRPO samples from the server, and syncs only the
adapter, each version under its own name. Start the server with what TRL needs, and run this in an environment with TRL:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 lorikeet serve --dtype float32 --logprobs-mode processed_logprobs \
        --generation-config vllm
    pip install trl peft requests aiohttp && python examples/grpo.py
"""

import argparse
import os
import statistics
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

if not torch.cuda.is_available():
    from trl_on_cpu import run_without_cuda

    run_without_cuda()

ASK = "Answer with one word only."
QUESTIONS = (
    *("Name a fruit.", "Name a colour.", "Name an animal.", "Name a country.", "Name a city.", "Name a planet."),
    *("What is the opposite of hot?", "What do bees make?", "What falls from clouds?", "What is two plus two?"),
    *("Which season comes after winter?", "What do cows drink?"),
)


def one_word(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return 1 for an answer of one word, 1/2 for two words, and so on; 0 for none."""
    counts = [len(completion[-1]["content"].split()) for completion in completions]
    return [1.0 / count if count else 0.0 for count in counts]


def main() -> None:
    """Train, and print the mean reward of the first and the last steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="the server's model, or its folder"
    )
    parser.add_argument("--out", default="grpo-policy", help="folder for the adapter; the server must read it")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.response_template = qwen3_template  # ChatML; TRL knows the templates of some models only
    prompts = [[{"role": "user", "content": f"{question} {ASK}"}] for question in QUESTIONS]
    on_gpu = torch.cuda.is_available()
    trainer = AsyncGRPOTrainer(
        model=options.model,
        processing_class=tokenizer,
        reward_funcs=one_word,
        train_dataset=Dataset.from_dict({"prompt": prompts}).shuffle(seed=options.seed),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=AsyncGRPOConfig(
            output_dir=options.out,
            vllm_server_base_url=options.url,
            seed=options.seed,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_inflight_tasks=8,
            max_completion_length=16,
            max_staleness=2,
            learning_rate=5e-4,
            token_budget=0,
            gradient_checkpointing=False,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            report_to=[],
            save_strategy="no",
        ),
    )
    trainer.train()
    trainer.save_model(options.out)
    rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
    ends = [statistics.mean(part) for part in (rewards[:10], rewards[-10:])]
    print(f"mean reward of the first 10 steps {ends[0]:.3f}, of the last 10 {ends[1]:.3f}: × {ends[1] / ends[0]:.2f}")


if __name__ == "__main__":
    main()
