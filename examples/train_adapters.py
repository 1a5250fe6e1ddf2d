"""Train the sample adapters with PEFT: ``python examples/train_adapters.py [NAME ...]``.

Seeded and on one CPU thread, so a second run on the same machine gives the same files. The loss counts the answer
tokens only; prompts are rendered as the server renders them, with the default system message of the chat template.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from peft import LoraConfig, get_peft_model
from recipes import BASE_MODEL, RECIPES, Recipe
from rich.console import Console
from styles import Pair, build_pairs, load_topics
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.models.default import default_cache_dir, prepare_default_model

ADAPTERS = Path(__file__).parent / "adapters"
BATCH_PAIRS = 4
CONFIG_KEYS = (
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "r",
    "rank_pattern",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
)
"""What describes a plain LoRA adapter; PEFT also writes the unused settings of some twenty other methods."""
IGNORED_LABEL = -100
"""What torch's cross entropy leaves out."""


class Example(NamedTuple):
    """Token ids of prompt and answer; labels are the same ids, ``IGNORED_LABEL`` over the prompt."""

    input_ids: list[int]
    labels: list[int]


def encode(tokenizer: Any, pair: Pair) -> Example:
    """Tokenize a pair; the answer ends with the end-of-turn token, so that the adapter learns to stop."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": pair.prompt}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(rendered, add_special_tokens=False).input_ids
    answer = [*tokenizer(pair.answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return Example(prompt + answer, [IGNORED_LABEL] * len(prompt) + answer)


def batches(
    examples: list[Example], pad_id: int, chance: random.Random, pairs: int = BATCH_PAIRS
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one epoch of shuffled (input_ids, labels), int64, [pairs, tokens], padded on the right.

    The padding needs no mask: attention is causal, so no answer token sees what follows it.
    """
    order = chance.sample(examples, len(examples))
    for start in range(0, len(order), pairs):
        batch = order[start : start + pairs]
        width = max(len(example.input_ids) for example in batch)
        ids = [example.input_ids + [pad_id] * (width - len(example.input_ids)) for example in batch]
        labels = [example.labels + [IGNORED_LABEL] * (width - len(example.labels)) for example in batch]
        yield torch.tensor(ids), torch.tensor(labels)


def answer_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over the answer tokens; the output layer runs for these alone."""
    decoder = model.get_base_model()
    hidden = decoder.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = labels[:, 1:] != IGNORED_LABEL
    return torch.nn.functional.cross_entropy(decoder.lm_head(hidden[counted]), labels[:, 1:][counted])


def train(name: str, recipe: Recipe, pairs: Sequence[Pair], folder: Path, seed: int, console: Console) -> Any:
    """Return the trained PEFT model of one adapter, over the base model in ``folder``."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.modules),
        use_rslora=recipe.rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    examples = [encode(tokenizer, pair) for pair in pairs]
    steps = recipe.epochs * -(-len(examples) // BATCH_PAIRS)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    chance = random.Random(seed)

    def losses() -> Iterator[torch.Tensor]:
        for ids, labels in batches(examples, tokenizer.pad_token_id, chance):
            yield answer_loss(model, ids, labels)

    run_epochs(recipe.epochs, losses, weights, optimizer, schedule, lambda line: console.print(f"{name}: {line}"))
    return model


def run_epochs(
    epochs: int,
    losses: Callable[[], Iterator[torch.Tensor]],
    weights: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    report: Callable[[str], None],
) -> None:
    """Take a step for each loss of each epoch, and report the mean loss of an epoch.

    Args:
        epochs: number of epochs.
        losses: yields the losses of an epoch, each computed after the step before it.
        weights: the parameters that are trained.
        optimizer, schedule: of the parameters.
        report: called with a line for each epoch.
    """
    for epoch in range(epochs):
        found = []
        for loss in losses():
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            found.append(loss.item())
        report(f"epoch {epoch + 1} of {epochs}, loss {sum(found) / len(found):.3f}")


def save(model: Any, folder: Path) -> None:
    """Write the adapter in bf16 and with a clean config."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's empty model card; examples/README.md is ours
    clean_config(folder / "adapter_config.json")


def clean_config(file: Path) -> None:
    """Rewrite PEFT's config with ``CONFIG_KEYS`` alone, the public name of the base, and modules in a fixed order."""
    config = json.loads(file.read_text())
    kept = {key: config[key] for key in CONFIG_KEYS}
    kept["base_model_name_or_path"] = BASE_MODEL
    kept["target_modules"] = sorted(config["target_modules"])
    file.write_text(json.dumps(kept, indent=2) + "\n")


def main(
    adapters: Annotated[list[str], typer.Argument(help="Which ones to train.")] = list(RECIPES),  # noqa: B006
    model: Annotated[Path | None, typer.Option(help="Folder of the base; default: the default model.")] = None,
    out: Annotated[Path, typer.Option(help="Where the adapters go.")] = ADAPTERS,
    seed: Annotated[int, typer.Option(help="Of the weights' start and the order of the texts.")] = 0,
) -> None:
    """Train sample adapters, one after the other; a few minutes each."""
    torch.set_num_threads(1)
    console = Console()
    folder = model or prepare_default_model(default_cache_dir())
    for name in adapters:
        pairs = build_pairs(name, load_topics())
        save(train(name, RECIPES[name], pairs, folder, seed, console), out / name)
        console.print(f"{name}: saved in {out / name}")


if __name__ == "__main__":
    typer.run(main)
