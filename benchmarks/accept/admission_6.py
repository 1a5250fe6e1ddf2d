"""admission.6: how well the lengths of answers are predicted, at what cost, and if ``auto`` uses the better way."""

import asyncio
import random
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil

from benchmarks.accept.inprocess import THREADS, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.offline import interval_words
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from examples.styles import load_topics
from lorikeet.adapters.store import reference
from lorikeet.config import LengthPredictor, ServerSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.length_training import LoggedRequest, train_from_logs
from lorikeet.models.config import read_model_config
from lorikeet.scheduling.prediction.history import History
from lorikeet.scheduling.prediction.messages import Setup
from lorikeet.scheduling.prediction.training import in_true_quintile
from lorikeet.server.lengths import open_lengths
from lorikeet.server.predictor_process import PredictorProcess
from lorikeet.server.protocol import ChatMessage
from lorikeet.server.texts import Texts

LEAST_TRAIN, LEAST_HELD_OUT = 600, 300
MAX_TOKENS, TEMPERATURE, SEED = 128, 0.7, 7
FORMS_EACH = 2
HELD_OUT_TOPICS = 1 / 3
PART_REQUESTS = 200
SERVED, CLIENTS = 200, 8
LIMITS_S = (0.02, ServerSettings().length_predictor_timeout_s)
"""On answers of the predictor process, while serving."""

FORMS = (
    "{prompt}",
    "Tell me about {topic}.",
    "{prompt} Explain it to a child.",
    "In a few words: {prompt}",
    "Write three sentences about {topic}.",
    "{prompt} Please give an example.",
    "Hello! I have a question. {prompt}",
    "List three facts about {topic}.",
    "Write a short poem about {topic}.",
    "{prompt} Answer in one word.",
)
_RESAMPLES = 4_000


class Asked(NamedTuple):
    """A request of the traffic; ``held_out`` if its topic is not learned from."""

    adapter: str | None
    content: str
    held_out: bool


@line(
    "admission.6",
    title="Predicted lengths of the sample adapters' answers, held-out traffic",
    bound="a table with intervals; auto uses the one with the smaller mean error",
)
def run(runs: StoredRuns) -> Result:
    """Generate the answers, learn from some, predict the others, and serve with what was learned."""
    traffic = make_traffic()
    asked, held_out = ([each for each in traffic if each.held_out is part] for part in (False, True))
    lengths = {
        name: _lengths(runs, name, requests) for name, requests in (("learned-from", asked), ("held-out", held_out))
    }
    with tempfile.TemporaryDirectory(prefix="lorikeet-admission6-") as scratch:
        head_file = Path(scratch) / "head.safetensors"
        tokenizer_file = default_model() / "tokenizer.json"
        prompts = {name: _prompts(requests) for name, requests in (("learned-from", asked), ("held-out", held_out))}
        log = [
            LoggedRequest(prompt, tokens, each.adapter)
            for each, prompt, tokens in zip(asked, prompts["learned-from"], lengths["learned-from"], strict=True)
        ]
        head = train_from_logs(log, tokenizer_file, THREADS)
        head.write(head_file)
        learned = runs.get("learned", lambda: asyncio.run(_ask(head_file, held_out, prompts["held-out"])))
        served = {
            f"{limit_s * 1e3:g} ms": runs.get(
                f"served-{limit_s * 1e3:g}ms",
                lambda limit_s=limit_s: _serve(head_file, held_out[:SERVED], limit_s, Path(scratch)),  # type: ignore[misc]
            )
            for limit_s in LIMITS_S
        }
        auto = asyncio.run(_auto(head_file, tokenizer_file))
    history = _by_history(asked, lengths["learned-from"], held_out, lengths["held-out"])
    table = {
        name: _figures(predicted, lengths["held-out"], lengths["learned-from"])
        for name, predicted in (("history", history), ("learned", learned["predicted"]))
    }
    off = {
        name: np.abs(np.asarray(predicted, float) - lengths["held-out"])
        for name, predicted in (("history", history), ("learned", learned["predicted"]))
    }
    gain = _interval(off["learned"] - off["history"], np.mean)
    better = "learned" if off["learned"].mean() < off["history"].mean() else "history"
    first = next(iter(served))
    failures = [
        *([f"auto uses {auto}, and {better} has the smaller mean error"] if auto != better else []),
        *([f"{len(asked)} requests to learn from"] if len(asked) < LEAST_TRAIN else []),
        *([f"{len(held_out)} requests held out"] if len(held_out) < LEAST_HELD_OUT else []),
    ]
    return Result(
        figure={
            **{f"{name}: {key}": words for name, row in table.items() for key, words in row["words"].items()},
            "learned minus history, mean error in tokens": (
                f"{off['learned'].mean() - off['history'].mean():.2f} ({interval_words(gain)})"
            ),
            "auto uses": auto,
            "CPU share of the predictor process while serving": f"{served[first]['cpu_share']:.3f}",
            "CPU ms a prediction, alone": learned["cpu_ms"],
            "ms until a prediction, alone": f"{learned['median_ms']:.1f} (P95 {learned['p95_ms']:.1f})",
            **{
                f"predictions in time while serving, limit {limit}": f"{found['in_time']:.2f}"
                for limit, found in served.items()
            },
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{len(asked)} requests to learn from and {len(held_out)} held out, on other topics, to the base model "
        f"and the four sample adapters alike; SmolLM2-135M-Instruct, temperature {TEMPERATURE}, natural end, at most "
        f"{MAX_TOKENS} tokens (so ended {_share_cut(lengths['held-out']):.0%} of those held out); intervals: bootstrap "
        "over held-out requests, 95 %; quintiles are those of the lengths learned from; history is told of each answer "
        "before the next question; layers and trees were chosen on other answers to questions of the same table, so "
        "the figures of learned are somewhat kind to it; the head compared itself on the last fifth of its log: mean "
        f"error {head.about.learned.mean_tokens:.1f}, history {head.about.history.mean_tokens:.1f}. Serving: {SERVED} "
        f"of the requests held out, {CLIENTS} at once; the share is of the CPU time of all processes of the server: "
        f"{served[first]['cpu_s']:.1f} of {served[first]['all_cpu_s']:.1f} s",
        details={"table": {name: row["values"] for name, row in table.items()}, "served": served},
    )


def make_traffic() -> list[Asked]:
    """Return all requests in the order in which they come: every topic, in some forms, to every adapter."""
    generator, topics = random.Random(SEED), load_topics()
    held_out = set(generator.sample(range(len(topics)), round(len(topics) * HELD_OUT_TOPICS)))
    traffic = [
        Asked(adapter, form.format(prompt=topic.prompt, topic=topic.topic), number in held_out)
        for number, topic in enumerate(topics)
        for adapter in (None, *_adapters())
        for form in generator.sample(FORMS, FORMS_EACH)
    ]
    generator.shuffle(traffic)
    return traffic


def _adapters() -> list[str]:
    return sorted(file.parent.name for file in (ROOT / SAMPLES).glob("*/adapter_config.json"))


def _prompts(requests: Sequence[Asked]) -> list[list[int]]:
    texts = Texts.read(default_model())
    rendered = (
        texts.chat_prompt([ChatMessage(role="user", content=each.content)], add_generation_prompt=True, extra={})
        for each in requests
    )
    return [texts.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in rendered]


def _lengths(runs: StoredRuns, name: str, requests: Sequence[Asked]) -> list[int]:
    """Return the lengths of the answers, generated and stored a part at a time."""
    lengths: list[int] = []
    for number, begin in enumerate(range(0, len(requests), PART_REQUESTS)):
        part = requests[begin : begin + PART_REQUESTS]
        lengths += runs.get(f"{name}-{number}", lambda part=part, begin=begin: _generate(part, begin))["output_tokens"]  # type: ignore[misc]
    return lengths


def _generate(requests: Sequence[Asked], begin: int) -> dict[str, Any]:
    config = read_model_config(default_model())
    refs: dict[str | None, AdapterRef | None] = {
        name: reference(name, ROOT / SAMPLES / name, config.geometry(2)) for name in _adapters()
    }
    made = [
        Request(
            RequestId(str(begin + number)),
            prompt,
            SamplingParams(
                MAX_TOKENS, SEED + begin + number, temperature=TEMPERATURE, stop_token_ids=config.eos_token_ids
            ),
            0.0,
            refs.get(each.adapter),
        )
        for number, (each, prompt) in enumerate(zip(requests, _prompts(requests), strict=True))
    ]
    with replica(default_model(), "bfloat16", max_model_tokens=512) as built:
        answers = run_all(built, made)
    return {"output_tokens": [len(answers[request.request_id]) for request in made]}


# --- the two predictors ------------------------------------------------------------------------------


def _by_history(
    before: Sequence[Asked], lengths_before: Sequence[int], requests: Sequence[Asked], lengths: Sequence[int]
) -> list[int]:
    history, predicted = History(), []
    for each, tokens in zip(before, lengths_before, strict=True):
        history.add(each.adapter, tokens)
    for each, tokens in zip(requests, lengths, strict=True):
        predicted.append(history.predict(each.adapter) or 1)
        history.add(each.adapter, tokens)
    return predicted


async def _ask(head_file: Path, requests: Sequence[Asked], prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Ask a predictor process that has the machine to itself, one question after the other."""
    process = PredictorProcess(Setup(str(head_file), str(default_model() / "tokenizer.json")), timeout_s=60.0)
    try:
        await process.wait_until_ready()
        began_s, predicted, waited_s = process.cpu_s, [], []
        for each, prompt in zip(requests, prompts, strict=True):
            start_s = time.perf_counter()
            predicted.append(await process.predict(prompt, each.adapter))
            waited_s.append(time.perf_counter() - start_s)
        cpu_s = process.cpu_s - began_s
    finally:
        await process.close()
    return {
        "predicted": predicted,
        "cpu_ms": cpu_s / len(requests) * 1e3,
        "median_ms": float(np.median(waited_s)) * 1e3,
        "p95_ms": float(np.quantile(waited_s, 0.95)) * 1e3,
    }


async def _auto(head_file: Path, tokenizer_file: Path) -> str:
    """Return which one ``auto`` uses."""
    settings = ServerSettings(length_predictor=LengthPredictor.AUTO, length_predictor_file=str(head_file))
    lengths, _ = open_lengths(settings, tokenizer_file)
    await lengths.close()
    return "history" if lengths.process is None else "learned"


# --- serving -----------------------------------------------------------------------------------------


def _serve(head_file: Path, requests: Sequence[Asked], limit_s: float, scratch: Path) -> dict[str, Any]:
    """Serve with the head and a limit on its answers; return CPU times and who predicted, once it was ready."""
    flags = [flag for name in _adapters() for flag in ("--lora-modules", f"{name}={SAMPLES / name}")]
    flags += ["--adapter-dir", str(SAMPLES), "--store-dir", str(scratch / "store")]
    flags += ["--length-predictor", "learned", "--length-predictor-file", str(head_file)]
    flags += ["--length-predictor-timeout", str(limit_s)]
    with running_server(flags, scratch / "serve.log") as server:
        while not _metric(server, "predictor_cpu_seconds_total"):
            time.sleep(0.1)
        before = _counts(server)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(lambda pair: _chat(server, *pair), enumerate(requests)))
        after = _counts(server)
    counted = {name: after[name] - before[name] for name in before}
    return {
        **counted,
        "cpu_share": counted["cpu_s"] / counted["all_cpu_s"],
        "in_time": counted["learned"] / (counted["learned"] + counted["history"] + counted["none"]),
    }


def _chat(server: RunningServer, number: int, asked: Asked) -> None:
    model = asked.adapter or default_model().name
    server.chat(model, asked.content, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, seed=number)


def _counts(server: RunningServer) -> dict[str, float]:
    made = {by: _metric(server, "length_predictions_total", f'by="{by}",') for by in ("learned", "history", "none")}
    parent = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return {
        **made,
        "late": _metric(server, "predictor_late_total"),
        "refused": _metric(server, "predictor_refused_total"),
        "cpu_s": _metric(server, "predictor_cpu_seconds_total"),
        "all_cpu_s": sum(each.user + each.system for each in times),
    }


def _metric(server: RunningServer, name: str, labels: str = "") -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(rf"^lorikeet:{name}{{{labels}.*}} (\S+)$", page, re.MULTILINE)
    assert found is not None, f"the server has no metric lorikeet:{name}"
    return float(found[1])


# --- figures -----------------------------------------------------------------------------------------


def _figures(predicted: Sequence[int], true: Sequence[int], all_lengths: Sequence[int]) -> dict[str, Any]:
    """Return the row of a predictor, as words and as values with intervals."""
    off = np.abs(np.asarray(predicted, float) - np.asarray(true, float))
    samples: dict[str, tuple[np.ndarray, Any]] = {
        "in the true quintile": (in_true_quintile(predicted, true, all_lengths).astype(float), np.mean),
        "mean error, tokens": (off, np.mean),
        "median error, share": (off / np.asarray(true, float), np.median),
    }
    values = {key: (float(reduce(each)), *_interval(each, reduce)) for key, (each, reduce) in samples.items()}
    return {
        "values": values,
        "words": {key: f"{value:.3g} ({interval_words((low, high))})" for key, (value, low, high) in values.items()},
    }


def _interval(values: np.ndarray, reduce: Any) -> tuple[float, float]:
    """Return the bootstrap percentile interval of ``reduce`` over requests."""
    places = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(reduce(values[places], axis=1), [0.025, 0.975])
    return float(low), float(high)


def _share_cut(lengths: Sequence[int]) -> float:
    return sum(tokens >= MAX_TOKENS for tokens in lengths) / len(lengths)
