"""Measures the cost of adapters on experts: ``python -m benchmarks.experts``.

A mixture of experts and a dense model of as many active parameters run by the modules of transformers, with random
weights, in turns: time of a decode step without adapters, and with one adapter for each sequence. In the mixture an
adapter changes all experts, so that each token uses those of the experts that it chose.

A step reads each expert that any of its tokens chose, and the dense model reads its layers once for all tokens. So the
table also shows by which factor the mixture reads more expert weights, if experts are chosen evenly.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine_backend import LorikeetBackend
from benchmarks.harness import THREADS, in_turns, print_setup, print_table, ratios, with_interval
from benchmarks.offline_backends import OfflineBatch
from lorikeet.config import EngineSettings, ModelSettings, Settings

HEADS = 8
KV_HEADS = 4
HEAD_DIM = 128
VOCABULARY = 2048
MIXTURE = "mixture"
DENSE = "dense"
PROMPT_TOKENS = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--active", type=int, default=8, help="experts of a token")
    parser.add_argument("--inner", type=int, default=256, help="inner features of an expert")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters, on attention and on each expert")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences at once")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    print_setup()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {name: _side(folder / name, name, options) for name in (MIXTURE, DENSE)}
        for side in sides.values():
            stack.callback(side.close)
        rows = [_compare(sides, batch, adapted, options) for batch in options.batches for adapted in (False, True)]
    sizes = f"{options.layers} layers of {options.hidden}; {options.active} of {options.experts} experts"
    print_table(
        f"{sizes} of {options.inner}, or {options.active * options.inner}; {options.dtype}, {options.threads} threads: "
        "milliseconds of a decode step",
        ["sequences", "adapters", MIXTURE, DENSE, f"{MIXTURE} / {DENSE}", "weights read"],
        rows,
    )


def _side(folder: Path, name: str, options: argparse.Namespace) -> LorikeetBackend:
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if name == MIXTURE else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if name == MIXTURE else "qwen3",
        "hidden_size": options.hidden,
        "intermediate_size": options.active * options.inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "dtype": options.dtype,
    }
    if name == MIXTURE:
        config |= {
            "num_experts": options.experts,
            "num_experts_per_tok": options.active,
            "moe_intermediate_size": options.inner,
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    adapters = [_write_adapter(folder / f"{i}", name, i, options) for i in range(max(options.batches))]
    return LorikeetBackend(
        Settings(
            ModelSettings(
                model=str(folder),
                dtype=options.dtype,
                model_impl="transformers",
                load_format="dummy",
                max_model_len=256,
            ),
            EngineSettings(max_num_seqs=max(options.batches), threads=options.threads, host_memory_bytes=0),
        ),
        adapters,
    )


def _write_adapter(folder: Path, name: str, seed: int, options: argparse.Namespace) -> Path:
    """Write an adapter of random weights on attention and on all experts, or on the dense layers."""
    generator = torch.Generator().manual_seed(seed)
    hidden = options.hidden
    inner = options.inner
    rank = options.rank
    queries = HEADS * HEAD_DIM
    keys = KV_HEADS * HEAD_DIM
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    modules = {f"self_attn.{module}": (*sizes, 1) for module, sizes in attention.items()}
    modules["self_attn.o_proj"] = (queries, hidden, 1)
    if name == MIXTURE:
        modules["mlp.experts.base_layer"] = (hidden, 2 * inner, options.experts)
        modules["mlp.experts"] = (inner, hidden, options.experts)
    else:
        modules |= {f"mlp.{module}": (hidden, options.active * inner, 1) for module in ("gate_proj", "up_proj")}
        modules["mlp.down_proj"] = (options.active * inner, hidden, 1)
    tensors = {}
    for layer in range(options.layers):
        for module, (inputs, outputs, experts) in modules.items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(rank * experts, inputs, generator=generator) / inputs**0.5
            tensors[f"{key}.lora_A.weight"] = a
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank * experts, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    config["target_modules"] = sorted(module.split(".")[-1] for module in modules if "experts" not in module)
    if name == MIXTURE:
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _compare(sides: dict[str, LorikeetBackend], batch: int, adapted: bool, options: argparse.Namespace) -> list[object]:
    def step_s(side: LorikeetBackend, number: int) -> float:
        prompts = [[(7 * i + 13 * j + number) % VOCABULARY for j in range(PROMPT_TOKENS)] for i in range(batch)]
        adapters: list[int | None] = [i if adapted else None for i in range(batch)]
        found = side.run(OfflineBatch(prompts, adapters, options.output_tokens))
        assert found.decode_tok_s is not None
        return batch / found.decode_tok_s

    calls: dict[str, Callable[[int], float]] = {name: partial(step_s, side) for name, side in sides.items()}
    times = in_turns(calls, options.rounds)
    read = options.experts * (1 - (1 - options.active / options.experts) ** batch)
    return [
        batch,
        "one each" if adapted else "none",
        *(with_interval([1000 * each for each in times[name]]) for name in (MIXTURE, DENSE)),
        with_interval(ratios(times[MIXTURE], times[DENSE])),
        f"{read / options.active:.2g} x",
    ]


if __name__ == "__main__":
    main()
