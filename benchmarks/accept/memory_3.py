"""memory.3: whatever a row moves, and however little memory there is, the answers stay the same."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.accept.inprocess import make_requests, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.memory_common import LINK_BYTES_PER_S, part_name
from benchmarks.accept.models import default_model
from benchmarks.accept.parity import Peer, PeerAnswer, compare
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.serve_2 import MAX_TIES
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.memory_bench import fill_host
from lorikeet.config import EngineSettings
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.memory.packing import pack
from lorikeet.models.config import read_model_config
from lorikeet.rows import ROWS, MemorySplit, Row

CONVERSATIONS, TURNS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 3, 44, 44
RANKS = {"a16": 16, "b64": 64, "c32": 32, "d64": 64, "e16": 16}
LONGEST_TOKENS = TURNS * (PROMPT_TOKENS + ANSWER_TOKENS)
BLOCK_TOKENS = EngineSettings().block_tokens


class Pressure(NamedTuple):
    """How much memory there is, as shares of all that is ever used; None for two requests."""

    device: float | None
    host: float


PRESSURES = {"roomy": Pressure(1.5, 0.0), "tight": Pressure(0.6, 1.5), "two": Pressure(None, 0.25)}


@line(
    "memory.3",
    title="fp32 greedy answers under every row, with room for all, for a part, and for two requests",
    bound=f"no difference from transformers and PEFT beyond ties, ties ≤ {MAX_TIES} in each run",
)
def run(runs: StoredRuns) -> Result:
    """Answer conversations by the peer, then by every row under every pressure."""
    model = default_model()
    with tempfile.TemporaryDirectory(prefix="lorikeet-memory3-") as scratch:
        geometry = read_model_config(model).geometry(4)
        folders = {
            name: write_random_adapter(Path(scratch) / name, geometry, rank, seed=seed)
            for seed, (name, rank) in enumerate(RANKS.items())
        }
        peer = runs.get("peer", lambda: _peer_answers(model, folders))
        found = {
            f"{row}, {pressure}": runs.get(
                f"{part_name(row)}-{pressure}",
                partial(_answers, model, geometry, folders, row, PRESSURES[pressure], peer["turns"]),
            )
            for pressure, row in product(PRESSURES, ROWS)
        }
    failures = [
        f"{name}: {run['different']} of {run['requests']} answers differ, {run['ties']} ties"
        for name, run in found.items()
        if run["different"] or run["ties"] > MAX_TIES
    ]
    small = [run for name, run in found.items() if name.endswith("two")]
    if not any(run["preemptions"] for run in small) or not any(run["kv_to_host"] for run in found.values()):
        failures.append("no run was short of memory")
    return Result(
        figure={
            "runs": len(found),
            "answers": sum(run["requests"] for run in found.values()),
            "different": sum(run["different"] for run in found.values()),
            "ties": sum(run["ties"] for run in found.values()),
            "preemptions": sum(run["preemptions"] for run in found.values()),
            "KV blocks to the host": sum(run["kv_to_host"] for run in found.values()),
            "transfers to the device": sum(run["to_device"] for run in found.values()),
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"SmolLM2-135M-Instruct; {CONVERSATIONS} conversations of {TURNS} turns over adapters of ranks "
        f"{', '.join(map(str, RANKS.values()))} on q, k, v, o and the base, all of a turn at once, {ANSWER_TOKENS} "
        f"tokens each; {len(ROWS)} rows, each with room for everything and no host tier, for 60 % and a host tier "
        "for everything, and with room for two requests (in a static split as much as its smaller part needs) and "
        f"a quarter on the host; link {LINK_BYTES_PER_S / 1e9:g} GB/s",
        details=found,
    )


def _adapter_of(conversation: int) -> str | None:
    names = [None, *RANKS]
    return names[conversation % len(names)]


def _said(turn: int) -> list[list[int]]:
    """What the users say in a turn."""
    return [r.prompt_token_ids for r in make_requests("", CONVERSATIONS, PROMPT_TOKENS, 1, seed=turn)]


def _peer_answers(model: Path, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return for each turn the prompts and the answers; the next turn's prompts hold both."""
    peer = Peer(model, torch.float32, dict(folders))
    texts: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    turns = []
    for turn in range(TURNS):
        prompts = [text + said for text, said in zip(texts, _said(turn), strict=True)]
        answers = [peer.answer(prompt, _adapter_of(i), ANSWER_TOKENS) for i, prompt in enumerate(prompts)]
        turns.append({"prompts": prompts, "answers": [answer._asdict() for answer in answers]})
        texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    return {"turns": turns}


def _answers(
    model: Path,
    geometry: ModelGeometry,
    folders: Mapping[str, Path],
    row: str,
    pressure: Pressure,
    turns: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    block_bytes = geometry.block_bytes(BLOCK_TOKENS)
    device, host = _blocks(geometry, ROWS[row], pressure)
    settings = {
        "row": row,
        "memory_bytes": device * block_bytes,
        "host_memory_bytes": host * block_bytes,
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "max_step_tokens": 256,
    }
    found = {"requests": 0, "different": 0, "ties": 0}
    with replica(model, "float32", LONGEST_TOKENS, **settings) as built:
        refs = {name: reference(name, folder, built.sizes.geometry) for name, folder in folders.items()}
        fill_host(built.engine, tuple(refs.values()))
        for number, turn in enumerate(turns):
            requests = [
                Request(
                    RequestId(f"{number}-{i}"),
                    prompt,
                    SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0),
                    0.0,
                    None if (name := _adapter_of(i)) is None else refs[name],
                )
                for i, prompt in enumerate(turn["prompts"])
            ]
            tokens = run_all(built, requests)
            for request, answer in zip(requests, turn["answers"], strict=True):
                ours = [token.token_id for token in tokens[request.request_id]]
                comparison = compare(ours, PeerAnswer(**answer))
                found["requests"] += 1
                found["different"] += comparison.differs
                found["ties"] += comparison.is_tie
        stats = built.engine.stats()
    routes = stats.memory.transfers
    return {
        **found,
        "device_blocks": device,
        "host_blocks": host,
        "preemptions": stats.preemptions,
        "kv_to_host": routes["device-host"].bytes // block_bytes if "device-host" in routes else 0,
        "to_device": sum(route.transfers for name, route in routes.items() if name.endswith("-device")),
    }


def _blocks(geometry: ModelGeometry, row: Row, pressure: Pressure) -> tuple[int, int]:
    """Return the blocks of both tiers."""
    elements = geometry.block_elements(BLOCK_TOKENS)
    modules = ("q", "k", "v", "o")
    sizes = [
        pack(dict.fromkeys(modules, (rank,) * geometry.layers), geometry, elements).blocks for rank in RANKS.values()
    ]
    sequence = math.ceil(LONGEST_TOKENS / BLOCK_TOKENS) + 1
    everything = sum(sizes) + CONVERSATIONS * sequence
    host = round(pressure.host * everything)
    two = 2 * (sequence + max(sizes))
    is_static = row.memory_split is MemorySplit.STATIC
    if is_static:
        two = math.ceil(max(2 * max(sizes) / row.adapter_share, 2 * sequence / (1 - row.adapter_share))) + 1
    return (two if pressure.device is None else max(two, round(pressure.device * everything))), host
