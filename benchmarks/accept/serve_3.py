"""serve.3: every architecture gives transformers' logits, and two ranks the tokens of one."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.accept.inprocess import DEVICE_VARIABLE, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.parity import TIE
from benchmarks.accept.runs import StoredRuns
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import SingleGroup
from tests.models.arenas import Arena
from tests.models.checkpoints import SIZES, VARIANTS, make_checkpoint, oracle_logits

BOUND, MAX_TIES, TOKENS, MIN_DISTINCT = 1e-4, 2, 32, 4
PARALLEL: tuple[tuple[str, int, int], ...] = (("llama", 2, 2), ("llama", 1, 2), ("llama", 2, 4), ("qwen3", 1, 2))
"""(variant, KV heads, ranks): divided, and copied where there are fewer than ranks."""


@line(
    "serve.3",
    title="Logits of every architecture; tensor parallelism",
    bound=f"logits within {BOUND:g} in fp32; tokens of several ranks are those of one (ties ≤ {MAX_TIES}), "
    f"with at least {MIN_DISTINCT} distinct answers",
)
def run(runs: StoredRuns) -> Result:
    """Tiny random checkpoints: in one prefill, in chunks and in decodes; then on several ranks with adapters."""
    errors = runs.get("logits", lambda: {variant: _largest_error(variant) for variant in VARIANTS})
    parallel = runs.get("ranks", lambda: {"cases": [_ranks(*case) for case in _cases()]})["cases"]
    left_out = len(PARALLEL) - len(parallel)
    different = sum(case["different"] for case in parallel)
    ties = sum(case["ties"] for case in parallel)
    worst = float(torch.tensor(list(errors.values())).max())  # unlike Python's, this max keeps NaN
    distinct = min((case["distinct_answers"] for case in parallel), default=MIN_DISTINCT)
    exact = all(error <= BOUND for error in errors.values())
    passed = exact and not different and ties <= MAX_TIES and distinct >= MIN_DISTINCT
    return Result(
        figure={"largest_logit_error": worst, "by_variant": errors, "ranks": parallel, "ties": ties},
        passed=passed,
        cause=""
        if passed
        else f"largest error {worst:.2e}, {different} sequences differ, {ties} ties, {distinct} distinct answers",
        notes=f"{left_out} cases of several ranks left out: this machine has not as many GPUs" if left_out else "",
    )


def _cases() -> list[tuple[str, int, int]]:
    """Return those of several ranks that there are devices for."""
    on_gpus = os.environ.get(DEVICE_VARIABLE, "cpu").startswith("cuda")
    return [case for case in PARALLEL if not on_gpus or case[2] <= torch.cuda.device_count()]


def _random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, SIZES["vocab_size"], (count,), generator=generator)]


def _largest_error(variant: str) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        model = make_checkpoint(Path(scratch), variant)
        config = read_model_config(Path(scratch))
        decoder = Decoder(config, load_weights(Path(scratch), config, torch.float32), ReferenceKernels(), SingleGroup())
    arena, prompt = Arena.make(config), _random_tokens(40, seed=1)
    expected = oracle_logits(model, prompt)
    whole = decoder.forward(arena.batch([("whole", prompt)]), arena.kv)
    cuts = [0, 9, 10, 23, *range(24, 41)]
    stepped = [decoder.forward(arena.batch([("stepped", prompt[a:b])]), arena.kv) for a, b in pairwise(cuts)]
    return float((torch.stack([whole, torch.cat(stepped)]) - expected).abs().max())


def _ranks(variant: str, kv_heads: int, ranks: int) -> dict[str, Any]:
    """Compare greedy tokens of mixed adapters; the gap between the two best logits tells what is a tie."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "base"
        make_checkpoint(folder, variant, num_key_value_heads=kv_heads)
        geometry = read_model_config(folder).geometry(4)
        adapters = {
            "narrow": write_random_adapter(Path(scratch) / "narrow", geometry, 3, modules=("q", "o"), b_std=0.3),
            "wide": write_random_adapter(Path(scratch) / "wide", geometry, 16, modules=LORA_MODULES, b_std=0.3),
        }
        alone = _answers(folder, adapters, 1)
        together = _answers(folder, adapters, ranks)
    different = ties = 0
    for name, (tokens, gaps) in alone.items():
        first = next((i for i, (a, b) in enumerate(zip(tokens, together[name][0], strict=True)) if a != b), None)
        if first is not None:
            ties += gaps[first] < TIE
            different += gaps[first] >= TIE
    return {
        "variant": variant,
        "kv_heads": kv_heads,
        "ranks": ranks,
        "sequences": len(alone),
        "different": different,
        "ties": ties,
        "distinct_answers": len({tuple(tokens) for tokens, _ in alone.values()}),
    }


def _answers(
    folder: Path, adapters: Mapping[str, Path], ranks: int
) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=2)
    with replica(folder, "float32", tensor_parallel=ranks, threads=1, memory_bytes=2**22, max_step_tokens=24) as built:
        refs = {name: reference(name, path, built.sizes.geometry) for name, path in adapters.items()}
        requests = [
            Request(RequestId(f"{name}-{i}"), _random_tokens(10 + 5 * i, i), sampling, 0.0, refs.get(name))
            for name in ("base", "narrow", "wide")
            for i in range(3)
        ]
        found = run_all(built, requests)
    return {
        name: ([token.token_id for token in tokens], [token.top[0][1] - token.top[1][1] for token in tokens])
        for name, tokens in found.items()
    }
