"""Train a small hybrid and two adapters of it with PEFT: ``python examples/train_hybrid.py --out hybrid``.

The base has Qwen3.5's shape: three of four layers have a gated delta rule, whose state passes from token to token. With
the tokenizer of the default model it has about 7 million parameters. It learns to answer the questions of ``texts/``
with a sentence, and reads the answers of the other styles as texts without a question, so that it knows their words.
The adapters answer the same questions as a pirate, and with a JSON object.

Seeded; about a quarter of an hour on two busy cores.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from styles import Pair, Topic, build_pairs, load_topics
from torch import Tensor
from train_adapters import IGNORED_LABEL, Example, batches, encode, run_epochs
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from lorikeet.models.default import default_cache_dir, prepare_default_model

STYLES = ("json", "pirate")
"""The adapters' styles."""
LINEARS = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""All linear layers: of the gated delta rule; of attention and the MLPs."""
RANK = 16
BATCH_PAIRS = 16
ANSWERS_PER_TEXT = 4
"""Answers of a style in one text that the base reads."""
LEARNING_RATE = 3e-3
"""The largest; it rises at the start and falls to zero."""


class Lengths(NamedTuple):
    """Numbers of passes over the texts.

    Attributes:
        base: of the base.
        adapter: of each adapter.
    """

    base: int = 50
    adapter: int = 25


def make_base(vocabulary: int, hidden: int = 128, layers: int = 4) -> Any:
    """Return a base with random weights.

    Args:
        vocabulary: number of the tokenizer's tokens.
        hidden: elements of a hidden state, a multiple of 32.
        layers: number of layers, a multiple of 4.
    """
    heads = hidden // 32
    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        max_position_embeddings=2048,
        initializer_range=hidden**-0.5,
        tie_word_embeddings=True,
    )
    return Qwen3_5ForCausalLM(config)


def plain_pairs(topics: Sequence[Topic]) -> list[Pair]:
    """Return each question with its answer as a sentence."""
    return [Pair(topic.prompt, topic.english) for topic in topics]


def encode_texts(tokenizer: Any, pairs: Sequence[Pair]) -> list[Example]:
    """Tokenize answers without their questions, several in a text. All tokens of a text count in the loss."""
    answers = [pair.answer for pair in pairs]
    texts = ["\n".join(answers[i : i + ANSWERS_PER_TEXT]) for i in range(0, len(answers), ANSWERS_PER_TEXT)]
    return [Example(ids, ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]


def used_tokens(examples: Sequence[Example]) -> Tensor:
    """Return the tokens of texts, each once, int64 ``[n]``."""
    return torch.tensor(sorted({token for example in examples for token in example.input_ids}))


def answer_loss(decoder: Any, used: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the answers' tokens.

    Args:
        decoder: the causal model, whose output layer is its embedding. The embeddings of other tokens than the used
            ones are 0, and so are their logits. They count as one logit, so that few rows are multiplied.
        used: tokens of all texts, rising.
        ids, labels: see ``train_adapters.batches``.
    """
    hidden = decoder.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = labels[:, 1:] != IGNORED_LABEL
    logits = hidden[counted] @ decoder.lm_head.weight[used].T
    others = decoder.config.vocab_size - len(used)
    of_others = logits.new_full((len(logits), 1), others).log()
    places = torch.searchsorted(used, labels[:, 1:][counted])
    return torch.nn.functional.cross_entropy(torch.cat([logits, of_others], dim=1), places)


def train(
    decoder: Any,
    weights: Sequence[Tensor],
    examples: list[Example],
    used: Tensor,
    epochs: int,
    pad_id: int,
    report: Callable[[str], None],
) -> None:
    """Train ``weights``, and report the mean loss of each epoch.

    Args:
        decoder: the causal model that the weights are part of.
        weights: the parameters to train.
        examples: the texts.
        used: tokens of all texts of the base and of the adapters.
        epochs: number of passes over the texts.
        pad_id: token of padding.
        report: called with a line for each epoch.
    """
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    steps = epochs * -(-len(examples) // BATCH_PAIRS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)

    def losses() -> Iterator[Tensor]:
        for ids, labels in batches(examples, pad_id, chance, BATCH_PAIRS):
            yield answer_loss(decoder, used, ids, labels)

    run_epochs(epochs, losses, weights, optimizer, schedule, report)


def train_all(
    tokenizer: Any,
    topics: list[Topic],
    out: Path,
    base: Any,
    lengths: Lengths,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Train a base and its adapters, and save them in ``base`` and the adapters' names below ``out``."""
    pairs = {"base": plain_pairs(topics)} | {style: build_pairs(style, topics) for style in STYLES}
    examples = {name: [encode(tokenizer, pair) for pair in each] for name, each in pairs.items()}
    used = used_tokens([example for each in examples.values() for example in each])
    examples["base"] += [each for style in STYLES for each in encode_texts(tokenizer, pairs[style])]
    pad_id = tokenizer.pad_token_id
    with torch.no_grad():
        kept = base.model.embed_tokens.weight[used].clone()
        base.model.embed_tokens.weight.zero_()
        base.model.embed_tokens.weight[used] = kept
    report(f"base: {sum(each.numel() for each in base.parameters()) / 1e6:.1f} million parameters")
    train(base, list(base.parameters()), examples["base"], used, lengths.base, pad_id, report)
    folder = out / "base"
    base.name_or_path = str(folder)
    for config in (base.config, base.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = pad_id
    base.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    base.float()
    for style in STYLES:
        report(f"{style}:")
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(LINEARS), task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        train(model.get_base_model(), weights, examples[style], used, lengths.adapter, pad_id, report)
        model.save_pretrained(out / style, save_embedding_layers=False)
        base = model.unload()


def main(
    out: Annotated[Path, typer.Option(help="Where base and adapters go.")],
    model: Annotated[Path | None, typer.Option(help="Folder with the tokenizer; default: the default model.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    base_epochs: Annotated[int, typer.Option(help="Passes over the texts for the base.")] = Lengths().base,
    adapter_epochs: Annotated[int, typer.Option(help="Passes over the texts for an adapter.")] = Lengths().adapter,
) -> None:
    """Train a small hybrid and its adapters."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model or prepare_default_model(default_cache_dir()))
    base = make_base(len(tokenizer))
    lengths = Lengths(base_epochs, adapter_epochs)
    console = Console()
    train_all(tokenizer, load_topics(), out, base, lengths, console.print)
    flags = " ".join(f"--lora-modules {style}={out / style}" for style in STYLES)
    console.print(f"lorikeet serve {out / 'base'} {flags}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
