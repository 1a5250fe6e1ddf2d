"""modes.1: merging leaves no trace in the weights, and none in the answers."""

import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.accept.inprocess import make_requests, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model, tiny_model
from benchmarks.accept.parity import Peer, PeerAnswer, compare
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.serve_2 import MAX_TIES
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.core.geometry import LORA_MODULES, PRODUCTS, ModelGeometry
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.merging import Merger
from lorikeet.engine.torch_executor import TorchExecutor
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.base import LoraWeights, Weight
from lorikeet.kernels.panels import PanelWeight
from lorikeet.models.config import read_model_config
from lorikeet.models.loading import load_weights
from lorikeet.models.weights import DecoderWeights, pack_weights
from lorikeet.rows import MergeBy

SWITCHES, CHECKED_EVERY = 10_000, 500
ATTENTION = ("q", "k", "v", "o")


class Shape(NamedTuple):
    """An adapter: its rank on some modules of every ``every``-th layer."""

    rank: int
    modules: tuple[str, ...]
    every: int = 1


SHAPES = {
    "qv-8": Shape(8, ("q", "v")),
    "qkvo-16": Shape(16, ATTENTION),
    "qkvo-64": Shape(64, ATTENTION),
    "all-24": Shape(24, LORA_MODULES),
    "mlp-32": Shape(32, ("gate", "up", "down"), every=2),
    "o-5": Shape(5, ("o",), every=3),
}


class Case(NamedTuple):
    """What is switched on; the default model, or a tiny one of two layers."""

    tiny: bool
    backend: str
    dtype: torch.dtype
    merge_by: MergeBy

    def __str__(self) -> str:
        model = "tiny" if self.tiny else "SmolLM2"
        return f"{model}-{self.backend}-{str(self.dtype).removeprefix('torch.')}-{self.merge_by}"


CASES = (
    Case(False, "native", torch.bfloat16, MergeBy.DELTA),
    *itertools.starmap(
        Case, itertools.product([True], ["native", "reference"], [torch.bfloat16, torch.float32], MergeBy)
    ),
)

ROWS = ("unmerged-only", "merged-only", "dlora", "dlora:vllm-uniform")
RANKS = {"a16": 16, "b64": 64, "c32": 32}
REQUESTS: dict[str | None, int] = {"a16": 14, "b64": 5, "c32": 3, None: 2}
"""Skewed, so that merging pays for a while; None is the base."""
PROMPT_TOKENS, ANSWER_TOKENS, MAX_RUNNING = 40, 48, 8


@line(
    "modes.1",
    title="Merged weights come and go without a trace, in their bits and in greedy answers",
    bound=f"after {SWITCHES:,} random switches all weights bit-identical to the start; fp32: no difference from "
    f"transformers and PEFT beyond ties, merged, unmerged and by turns, ties ≤ {MAX_TIES} in each run",
)
def run(runs: StoredRuns) -> Result:
    """Switch at random on all backends; then answer requests under rows that merge and one that does not."""
    switched = {str(case): runs.get(f"switches-{case}", partial(_switch_at_random, case)) for case in CASES}
    model = default_model()
    with tempfile.TemporaryDirectory(prefix="lorikeet-modes1-") as scratch:
        geometry = read_model_config(model).geometry(4)
        folders = {
            name: write_random_adapter(Path(scratch) / name, geometry, rank, modules=LORA_MODULES, seed=seed)
            for seed, (name, rank) in enumerate(RANKS.items())
        }
        peer = runs.get("peer", lambda: _peer_answers(model, folders))
        answers = {
            row: runs.get(f"answers-{row.replace(':', '-')}", partial(_answers, model, folders, row, peer["answers"]))
            for row in ROWS
        }
    failures = [f"{case}: {found['flaws']} flaws" for case, found in switched.items() if found["flaws"]]
    failures += [
        f"{row}: {found['different']} answers differ, {found['ties']} ties"
        for row, found in answers.items()
        if found["different"] or found["ties"] > MAX_TIES
    ]
    failures += _what_did_not_happen(answers)
    return Result(
        figure={
            "cases": len(switched),
            "switches": sum(found["switches"] for found in switched.values()),
            "flaws": sum(found["flaws"] for found in switched.values()),
            "SmolLM2_mean_switch_ms": switched[str(CASES[0])]["mean_ms"],
            "answers": sum(found["requests"] for found in answers.values()),
            "different": sum(found["different"] for found in answers.values()),
            "ties": sum(found["ties"] for found in answers.values()),
            "dlora_switches": answers["dlora"]["switches"],
            "dlora_requests_merged_and_unmerged": answers["dlora"]["by_turns"],
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"weights: {SWITCHES:,} switches each of SmolLM2-135M-Instruct (native, bf16) and of a model of two "
        f"layers on both backends, both dtypes and both ways to merge, among {len(SHAPES)} adapters that touch other "
        f"modules and layers with ranks of 5 to 64, and none; compared every {CHECKED_EVERY} switches, where the last "
        "adapter must have changed what it touches and nothing else. Answers: SmolLM2, fp32, "
        f"{sum(REQUESTS.values())} requests over ranks {', '.join(map(str, RANKS.values()))} on all modules and the "
        f"base, {ANSWER_TOKENS} tokens each, at most {MAX_RUNNING} at once; the peer runs one at a time",
        details={"switches": switched, "answers": answers},
    )


def _what_did_not_happen(answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name what the rows should have done, or agreement would say nothing."""
    missing = []
    if answers["unmerged-only"]["merged_steps"]:
        missing.append("unmerged-only merged")
    missing += [f"{row} never merged" for row in ROWS[1:] if not answers[row]["merged_steps"]]
    if not answers["dlora"]["by_turns"]:
        missing.append("under dlora no request ran both merged and unmerged")
    return missing


# --- bits --------------------------------------------------------------------------------------------


def _switch_at_random(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-modes1-") as scratch:
        folder = tiny_model(Path(scratch)) if case.tiny else default_model()
        config = read_model_config(folder)
        plain = load_weights(folder, config, case.dtype)
    geometry, cpu = config.geometry(case.dtype.itemsize), torch.device("cpu")
    kernels = choose_kernels(case.backend, case.dtype, cpu)
    packed = pack_weights(plain, kernels, keep_plain=True)
    merger = Merger(plain, packed, kernels, geometry, case.merge_by, cpu)
    adapters = {name: _adapter(geometry, case.dtype, shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    start = {place: elements.clone() for place, elements in _elements(packed).items()}
    order, flaws, seconds = random.Random(0), 0, 0.0
    for number in range(1, SWITCHES + 1):
        is_checked = number % CHECKED_EVERY == 0
        name = None if is_checked else order.choice([other for other in (None, *adapters) if other != merger.merged])
        if is_checked:
            flaws += _changed(packed, start) != _touched(adapters.get(merger.merged or ""))
        began_s = time.perf_counter()
        if name is None:
            merger.switch(None, None)
        else:
            merger.switch(AdapterDigest(name), adapters[name])
        seconds += time.perf_counter() - began_s
        if is_checked:
            flaws += bool(_changed(packed, start))
    return {"switches": SWITCHES, "flaws": flaws, "mean_ms": 1e3 * seconds / SWITCHES, "kernels": kernels.name}


def _adapter(geometry: ModelGeometry, dtype: torch.dtype, shape: Shape, seed: int) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)
    pieces = {}
    for layer in range(0, geometry.layers, shape.every):
        for module in shape.modules:
            size = geometry.modules[module]
            a = torch.randn(shape.rank, size.in_features, generator=generator) / size.in_features**0.5
            bt = torch.randn(shape.rank, size.out_features, generator=generator) * 0.02
            pieces[layer, module] = ((a.to(dtype), bt.to(dtype)),)
    return LoraWeights(pieces, geometry.layers)


def _elements(weights: DecoderWeights) -> dict[tuple[int, str], Tensor]:
    """Return every linear weight as it lies in memory."""
    found = {
        (number, product): _memory(getattr(layer, product))
        for number, layer in enumerate(weights.layers)
        for product in PRODUCTS
    }
    return found | {(len(weights.layers), "lm_head"): _memory(weights.lm_head)}


def _memory(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    assert isinstance(weight, PanelWeight)
    return weight.panels


def _changed(weights: DecoderWeights, start: Mapping[tuple[int, str], Tensor]) -> set[tuple[int, str]]:
    """Return the weights whose bits are not those of the start."""
    bits = {2: torch.int16, 4: torch.int32}
    return {
        place
        for place, elements in _elements(weights).items()
        if not torch.equal(elements.view(bits[elements.itemsize]), start[place].view(bits[elements.itemsize]))
    }


def _touched(adapter: LoraWeights | None) -> set[tuple[int, str]]:
    """Return the weights that an adapter changes."""
    places = adapter.pieces if adapter is not None else ()
    return {(layer, product) for layer, module in places for product, those in PRODUCTS.items() if module in those}


# --- answers -----------------------------------------------------------------------------------------


def _adapter_names() -> list[str | None]:
    """Return the adapter of each request, in an order in which all are mixed."""
    names = [name for name, count in REQUESTS.items() for _ in range(count)]
    random.Random(0).shuffle(names)
    return names


def _prompts() -> list[list[int]]:
    return [request.prompt_token_ids for request in make_requests("", len(_adapter_names()), PROMPT_TOKENS, 1)]


def _peer_answers(model: Path, folders: Mapping[str, Path]) -> dict[str, Any]:
    peer = Peer(model, torch.float32, dict(folders))
    pairs = zip(_prompts(), _adapter_names(), strict=True)
    return {"answers": [peer.answer(prompt, name, ANSWER_TOKENS)._asdict() for prompt, name in pairs]}


class _Plans:
    """What a run's plans asked for."""

    def __init__(self) -> None:
        self.steps = {True: 0, False: 0}
        self.requests: dict[bool, set[RequestId]] = {True: set(), False: set()}
        self.switches = 0

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Count one plan."""
        if plan.sequences:
            is_merged = plan.merged is not None
            self.steps[is_merged] += result.steps_run
            self.requests[is_merged].update(step.request_id for step in plan.sequences)
            self.switches += result.switch_s > 0


@contextmanager
def _noted_plans() -> Iterator[_Plans]:
    """Note every plan that a torch executor of this process runs meanwhile."""
    plans, execute = _Plans(), TorchExecutor.execute

    def noted(executor: TorchExecutor, plan: StepPlan) -> StepResult:
        result = execute(executor, plan)
        plans.note(plan, result)
        return result

    with mock.patch.object(TorchExecutor, "execute", noted):
        yield plans


def _answers(model: Path, folders: Mapping[str, Path], row: str, expected: Sequence[dict[str, Any]]) -> dict[str, Any]:
    longest = PROMPT_TOKENS + ANSWER_TOKENS
    with _noted_plans() as plans, replica(model, "float32", longest, row=row, max_running=MAX_RUNNING) as built:
        refs = {name: reference(name, folder, built.sizes.geometry) for name, folder in folders.items()}
        requests = [
            Request(
                RequestId(f"r{i}"),
                prompt,
                SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0),
                0.0,
                None if name is None else refs[name],
            )
            for i, (prompt, name) in enumerate(zip(_prompts(), _adapter_names(), strict=True))
        ]
        tokens = run_all(built, requests)
    ours = [[token.token_id for token in tokens[request.request_id]] for request in requests]
    found = [compare(mine, PeerAnswer(**answer)) for mine, answer in zip(ours, expected, strict=True)]
    return {
        "requests": len(requests),
        "different": sum(comparison.differs for comparison in found),
        "ties": sum(comparison.is_tie for comparison in found),
        "tokens_compared": sum(comparison.equal for comparison in found),
        "merged_steps": plans.steps[True],
        "unmerged_steps": plans.steps[False],
        "switches": plans.switches,
        "by_turns": len(plans.requests[True] & plans.requests[False]),
    }
