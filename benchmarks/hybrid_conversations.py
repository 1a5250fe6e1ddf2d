"""Measures the TTFT of later turns of conversations on a hybrid: ``python -m benchmarks.hybrid_conversations``.

A hybrid of Qwen3.5's shape, three of four layers with a gated delta rule, and a model of Qwen3's shape with attention
in all layers have the same number of parameters, with random weights. Both answer the same conversations, in turns and
one request at a time. Each conversation has its own adapter. From the second turn on, a prompt begins with tokens that
were computed before: the hybrid needs a snapshot of its state for them, and their KV in the layers with attention.

The last table shows what snapshots take of the pool, in which they are kept and evicted like KV.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.harness import THREADS, print_setup, print_table, ratios, with_interval
from lorikeet.adapters.store import reference
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.driver import wait_for_work

HYBRID = "hybrid"
ATTENTION = "attention"
HEAD_DIM = 64
KV_HEADS = 2
FULL_EVERY = 4
"""One of so many layers of the hybrid has attention."""
MLP = ("gate_proj", "up_proj", "down_proj")
LIMIT = 1.3
"""Largest ratio of both models' TTFT that is wanted."""


class Turn(NamedTuple):
    """An answered request.

    Attributes:
        ttft_s: seconds until the first token.
        tokens: the answer.
    """

    ttft_s: float
    tokens: list[int]


class Side:
    """A model with its adapters, in an engine of this process.

    Args:
        name: ``HYBRID`` or ``ATTENTION``.
        folder: where the model's config and the adapters are written.
        inner: inner features of an MLP.
        options: the program's options.

    Attributes:
        most_snapshot_bytes: largest size of the snapshots on the device and on the host.
    """

    def __init__(self, name: str, folder: Path, inner: int, options: argparse.Namespace) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_of(name, inner, options)))
        settings = Settings(
            ModelSettings(
                model=str(folder),
                dtype=options.dtype,
                model_impl=options.model_impl,
                load_format="dummy",
                max_model_len=_longest(options),
            ),
            EngineSettings(
                max_num_seqs=8,
                threads=THREADS,
                memory_bytes=options.memory_mib * 2**20,
                host_memory_bytes=options.host_mib * 2**20,
                draft_tokens=0,
            ),
        )
        self._replica = build_replica(settings)
        self.notes = self._replica.notes
        self._refs = [self._adapter(folder / f"adapter-{i}", inner, i, options) for i in range(options.adapters)]
        self._clock = MonotonicClock()
        self._answered = 0
        self.most_snapshot_bytes = (0, 0)

    def _adapter(self, folder: Path, inner: int, seed: int, options: argparse.Namespace) -> AdapterRef:
        write_adapter(folder, inner, seed, options)
        return reference(folder.name, folder, self._replica.sizes.geometry)

    def answer(self, prompt: list[int], adapter: int, output_tokens: int) -> Turn:
        """Answer one request alone.

        Raises:
            RuntimeError: the request failed.
        """
        engine = self._replica.engine
        self._answered += 1
        request_id = RequestId(f"turn-{self._answered}")
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        began_s = self._clock.now()
        engine.submit(Request(request_id, prompt, sampling, began_s, self._refs[adapter]))
        tokens: list[int] = []
        ttft_s = 0.0
        while engine.has_requests:
            outputs = engine.step()
            for output in outputs.tokens:
                ttft_s = ttft_s or self._clock.now() - began_s
                tokens += [token.token_id for token in output.tokens]
            for event in outputs.events:
                if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                    raise RuntimeError(f"{event.request_id}: {event.error}")
            if not engine.is_busy:
                wait_for_work(engine, self._clock, math.inf)
        kept = engine.stats().memory.snapshots
        if kept is not None:
            sizes = (kept.device_bytes, kept.host_bytes)
            self.most_snapshot_bytes = max(self.most_snapshot_bytes, sizes, key=sum)
        return Turn(ttft_s, tokens)

    def stats(self) -> Any:
        """Return the engine's statistics."""
        return self._replica.engine.stats()

    def close(self) -> None:
        """Close the engine."""
        self._replica.engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--inner", type=int, default=1536, help="inner features of the hybrid's MLP")
    parser.add_argument("--heads", type=int, default=8, help="heads of linear attention, of 64")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--adapters", type=int, default=100, help="conversations, each with its own adapter")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first-tokens", type=int, default=150, help="new tokens of the first prompt")
    parser.add_argument("--new-tokens", type=int, default=75, help="new tokens of a later prompt")
    parser.add_argument("--output-tokens", type=int, default=30)
    parser.add_argument("--memory-mib", type=int, default=768, help="memory for adapters, KV and states")
    parser.add_argument("--host-mib", type=int, default=768)
    parser.add_argument("--model-impl", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    if options.layers % FULL_EVERY:
        parser.error(f"--layers must be a multiple of {FULL_EVERY}")
    print_setup()
    inner = {HYBRID: options.inner, ATTENTION: inner_of_same_size(options)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {}
        for name in (HYBRID, ATTENTION):
            sides[name] = Side(name, folder / name, inner[name], options)
            stack.callback(sides[name].close)
            print(f"{name}: {sides[name].notes[0]}; {parameters_of(name, inner[name], options) / 1e6:.1f} M parameters")
        found = converse(sides, options)
        _print_times(found, options)
        _print_memory(sides, options)


def config_of(name: str, inner: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a model."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM" if name == HYBRID else "Qwen3ForCausalLM"],
        "model_type": "qwen3_5_text" if name == HYBRID else "qwen3",
        "hidden_size": options.hidden,
        "intermediate_size": inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": options.vocabulary,
        "max_position_embeddings": _longest(options),
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "dtype": options.dtype,
    }
    if name == HYBRID:
        of_layers = range(1, options.layers + 1)
        config |= {
            "layer_types": ["full_attention" if i % FULL_EVERY == 0 else "linear_attention" for i in of_layers],
            "linear_num_key_heads": options.heads,
            "linear_num_value_heads": options.heads,
            "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM,
        }
    return config


def _longest(options: argparse.Namespace) -> int:
    tokens = options.first_tokens + (options.turns - 1) * options.new_tokens + options.turns * options.output_tokens
    return -(-(tokens + 1) // 64) * 64


def parameters_of(name: str, inner: int, options: argparse.Namespace) -> int:
    """Return the number of parameters of a model."""
    import transformers

    values = config_of(name, inner, options)
    (architecture,) = values["architectures"]
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**values))
    return sum(parameter.numel() for parameter in model.parameters())


def inner_of_same_size(options: argparse.Namespace) -> int:
    """Return the inner features with which the model with attention has the hybrid's number of parameters."""
    more = parameters_of(HYBRID, options.inner, options) - parameters_of(ATTENTION, options.inner, options)
    return options.inner + round(more / (3 * options.hidden * options.layers) / 32) * 32


def write_adapter(folder: Path, inner: int, seed: int, options: argparse.Namespace) -> None:
    """Write an adapter of random weights on the MLPs, which both models have."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(options.layers):
        for module in MLP:
            sizes = (inner, options.hidden) if module == "down_proj" else (options.hidden, inner)
            key = f"base_model.model.model.layers.{layer}.mlp.{module}"
            a = torch.randn(options.rank, sizes[0], generator=generator) / sizes[0] ** 0.5
            tensors[f"{key}.lora_A.weight"] = a
            tensors[f"{key}.lora_B.weight"] = torch.randn(sizes[1], options.rank, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": options.rank, "lora_alpha": 2 * options.rank, "target_modules": list(MLP)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def converse(sides: dict[str, Side], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Hold all conversations with each side, and return TTFT in seconds by side, turn and conversation.

    Users say the same to both sides; what the sides answered before is in their own prompts.
    """
    generator = torch.Generator().manual_seed(1)

    def said(tokens: int) -> list[int]:
        return torch.randint(3, options.vocabulary, (tokens,), generator=generator).tolist()

    history = {name: [list[int]() for _ in range(options.adapters)] for name in sides}
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(options.turns):
        for times in found.values():
            times.append([])
        for conversation in range(options.adapters):
            new = said(options.new_tokens if number else options.first_tokens)
            order = list(sides)[:: 1 if conversation % 2 else -1]
            for name in order:
                before = history[name][conversation]
                before += new
                turn = sides[name].answer(list(before), conversation, options.output_tokens)
                before += turn.tokens
                found[name][number].append(turn.ttft_s)
    return found


def _print_times(found: dict[str, list[list[float]]], options: argparse.Namespace) -> None:
    def row(title: object, hybrid: list[float], attention: list[float]) -> list[object]:
        times = [with_interval([1000 * each for each in side]) for side in (hybrid, attention)]
        return [title, *times, with_interval(ratios(hybrid, attention))]

    rows = [
        row(number + 1, hybrid, attention)
        for number, (hybrid, attention) in enumerate(zip(found[HYBRID], found[ATTENTION], strict=True))
    ]
    later = [[each for turn in found[name][1:] for each in turn] for name in (HYBRID, ATTENTION)]
    rows.append(row("2 to last", *later))
    print_table(
        f"{options.adapters} conversations, each with an adapter; {options.new_tokens} new tokens a turn, "
        f"{options.output_tokens} answered; {options.dtype}, {THREADS} threads: milliseconds to the first token",
        ["turn", HYBRID, ATTENTION, f"{HYBRID} / {ATTENTION}"],
        rows,
    )
    ratio = statistics.median(ratios(*later))
    print(f"later turns: {ratio:.2f} x attention, wanted at most {LIMIT}\n")


def _print_memory(sides: dict[str, Side], options: argparse.Namespace) -> None:
    rows = []
    for name, side in sides.items():
        stats = side.stats()
        memory = stats.memory
        device_bytes, host_bytes = side.most_snapshot_bytes
        kept = memory.snapshots
        rows.append(
            [
                name,
                f"{100 * stats.prefix_hits_tokens / stats.prefix_queries_tokens:.0f} %",
                *(
                    ("-",) * 4
                    if kept is None
                    else (
                        f"{kept.state_bytes / 2**20:.2f}",
                        f"{device_bytes / 2**20:.0f} ({100 * device_bytes / memory.device.total:.0f} %)",
                        f"{host_bytes / 2**20:.0f}",
                        f"{kept.taken}, {kept.used}",
                    )
                ),
            ]
        )
    print_table(
        f"{options.memory_mib} MiB for adapters, KV and states, {options.host_mib} MiB on the host",
        [
            "",
            "prompt tokens found",
            "MiB of a state",
            "most MiB of snapshots",
            "on the host",
            "taken, used",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
