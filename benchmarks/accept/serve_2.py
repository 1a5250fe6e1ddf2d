"""serve.2: a mixed batch says what transformers and PEFT say one at a time."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.accept.inprocess import replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.parity import Peer, PeerAnswer, compare
from benchmarks.accept.runs import StoredRuns
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica

REQUESTS, TOKENS, MAX_TIES, BF16_AGREEMENT = 32, 64, 2, 0.98
BASE_TOKENS = 16  # enough of the base's answer to see whether an adapter changes it
ATTENTION = ("q", "k", "v", "o")
ADAPTERS: dict[str, dict[str, Any]] = {
    "qv-8": {"rank": 8, "modules": ("q", "v")},
    "qv-16": {"rank": 16, "modules": ("q", "v")},
    "qv-64": {"rank": 64, "modules": ("q", "v")},
    "qkvo-8": {"rank": 8},
    "qkvo-32": {"rank": 32},
    "qkvo-128": {"rank": 128},
    "all-8": {"rank": 8, "modules": LORA_MODULES},
    "all-24": {"rank": 24, "modules": LORA_MODULES},
    "all-128": {"rank": 128, "modules": LORA_MODULES},
    "rslora-16": {"rank": 16, "rslora": True, "b_std": 0.01},
    "rslora-48": {"rank": 48, "modules": ("q", "v"), "rslora": True, "b_std": 0.01},
    "pattern-40": {"rank": 40, "modules": LORA_MODULES, "rank_pattern": {"q": 8, "down": 128, "v": 100}},
}
QUESTIONS = (
    "What is a lorikeet?",
    "Explain how a bicycle stays upright, step by step, to a curious child.",
    "Write a short letter to a friend who has moved to another city.",
    "List three reasons to learn a second language.",
    "How do bees find their way home?",
    "Describe a quiet morning in a harbour town, with as many details of sound as you can.",
    "What should one check before buying a used car?",
    "Summarise the water cycle in two sentences.",
)


@line(
    "serve.2",
    title="Parity of a mixed batch with transformers and PEFT",
    bound=f"fp32: no difference beyond ties, ties ≤ {MAX_TIES}; bf16: argmax agrees on ≥ {BF16_AGREEMENT:.0%} of "
    "positions, equal largest logits being one argmax",
)
def run(runs: StoredRuns) -> Result:
    """32 requests over 12 adapters and the base in one batch, fp32; then bf16 with the text given."""
    model = default_model()
    with tempfile.TemporaryDirectory(prefix="lorikeet-parity-") as scratch:
        folders = _write_adapters(model, Path(scratch))
        peer = runs.get("peer-fp32", lambda: _peer_answers(model, folders))
        fp32 = runs.get("fp32", lambda: _fp32(model, folders, peer))
        bf16 = runs.get("bf16", lambda: _bf16(model, folders, peer))
    ties_fit = fp32["ties"] <= MAX_TIES
    good = not fp32["different"] and ties_fit and fp32["one_batch"] and not fp32["adapters_without_effect"]
    passed = good and bf16["agreement"] >= BF16_AGREEMENT
    return Result(
        figure={"fp32": fp32, "bf16": bf16},
        passed=passed,
        cause="" if passed else f"different: {fp32['different']}, ties {fp32['ties']}, bf16 {bf16['agreement']:.4f}",
        notes="SmolLM2-135M-Instruct; the peer runs one request at a time. bf16: where several tokens share the peer's "
        "largest logit, each of them is its argmax; agreement_with_first, the stricter count, takes only the first "
        "of them and is not what the bound is held against. "
        "peer_with_itself is the peer with eager instead of SDPA attention, counted as agreement is",
    )


def _write_adapters(model: Path, scratch: Path) -> dict[str, Path]:
    geometry = _geometry(model)
    return {
        name: write_random_adapter(scratch / name, geometry, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def _geometry(model: Path) -> ModelGeometry:
    from lorikeet.models.config import read_model_config

    return read_model_config(model).geometry(4)


def _prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [QUESTIONS[i % len(QUESTIONS)] + f" This is question number {i}." for i in range(REQUESTS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
        for chat in chats
    ]


def _adapter_of(index: int) -> str | None:
    """Every 13th request runs on the base alone; the others take turns."""
    names = [None, *ADAPTERS]
    return names[index % len(names)]


def _peer_answers(model: Path, folders: Mapping[str, Path]) -> dict[str, Any]:
    peer = Peer(model, torch.float32, dict(folders))
    prompts = _prompts(model)
    answers = [peer.answer(prompt, _adapter_of(i), TOKENS) for i, prompt in enumerate(prompts)]
    bases = [peer.answer(prompt, None, BASE_TOKENS).token_ids for prompt in prompts]
    return {"answers": [answer._asdict() for answer in answers], "base": bases}


def _requests(
    built: Replica, folders: Mapping[str, Path], prompts: list[list[int]], tokens: int, prefix: str = "r"
) -> list[Request]:
    refs = {name: reference(name, folder, built.sizes.geometry) for name, folder in folders.items()}
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    requests = []
    for i, prompt in enumerate(prompts):
        name = _adapter_of(i)
        adapter = None if name is None else refs[name]
        requests.append(Request(RequestId(f"{prefix}{i}"), prompt, sampling, 0.0, adapter))
    return requests


def _fp32(model: Path, folders: Mapping[str, Path], peer: dict[str, Any]) -> dict[str, Any]:
    largest_batch = 0

    def note(stats: Any) -> None:
        nonlocal largest_batch
        largest_batch = max(largest_batch, stats.running)

    with replica(model, "float32", max_step_tokens=4096) as built:
        requests = _requests(built, folders, _prompts(model), TOKENS)
        tokens = run_all(built, requests, note)
    ours = [[token.token_id for token in tokens[request.request_id]] for request in requests]
    found = [compare(mine, PeerAnswer(**answer)) for mine, answer in zip(ours, peer["answers"], strict=True)]
    changed = {_adapter_of(i) for i, mine in enumerate(ours) if mine[:BASE_TOKENS] != peer["base"][i]}
    return {
        "different": [i for i, comparison in enumerate(found) if comparison.differs],
        "ties": sum(comparison.is_tie for comparison in found),
        "tokens_compared": sum(comparison.equal for comparison in found),
        "one_batch": largest_batch == REQUESTS,
        "adapters_without_effect": sorted(set(ADAPTERS) - changed),
    }


def _bf16(model: Path, folders: Mapping[str, Path], answers: dict[str, Any]) -> dict[str, Any]:
    """Both sides get the fp32 answers as text, and name the most likely next token at every position."""
    prompts = _prompts(model)
    texts = [prompt + answer["token_ids"] for prompt, answer in zip(prompts, answers["answers"], strict=True)]
    peer = Peer(model, torch.bfloat16, dict(folders))
    expected = [peer.best(text[:-1], _adapter_of(i), TOKENS) for i, text in enumerate(texts)]
    peer.use_attention("eager")
    otherwise = [peer.best(text[:-1], _adapter_of(i), TOKENS) for i, text in enumerate(texts)]
    ours: list[list[int]] = [[] for _ in texts]
    with replica(model, "bfloat16", max_step_tokens=4096) as built:
        for position in range(TOKENS):
            prefixes = [text[: len(text) - TOKENS + position] for text in texts]
            requests = _requests(built, folders, prefixes, 1, f"p{position}-")
            tokens = run_all(built, requests)
            for i, request in enumerate(requests):
                ours[i].append(tokens[request.request_id][0].token_id)
    best = [position for text in expected for position in text]
    chosen = [token for text in ours for token in text]
    itself = [position[0] for text in otherwise for position in text]
    fp32 = [token for answer in answers["answers"] for token in answer["token_ids"]]
    return {
        "agreement": _share(token in position for token, position in zip(chosen, best, strict=True)),
        "agreement_with_first": _share(token == position[0] for token, position in zip(chosen, best, strict=True)),
        "peer_with_itself": _share(token in position for token, position in zip(itself, best, strict=True)),
        "positions": len(best),
        "positions_with_several_best": sum(len(position) > 1 for position in best),
        "ours_with_fp32": _share(token == other for token, other in zip(chosen, fp32, strict=True)),
        "peer_with_fp32": _share(position[0] == other for position, other in zip(best, fp32, strict=True)),
    }


def _share(found: Iterable[bool]) -> float:
    values = list(found)
    return sum(values) / len(values)
