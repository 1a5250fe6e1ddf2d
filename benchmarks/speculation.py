"""Measures drafts: steps and time of answers with and without drafts, and whether the answers are equal.

``python -m benchmarks.speculation [--answers N] [--dtype float32]``. Two servers answer the same chats in turns, one
after the other. One server drafts, as by default, and the other does not. Repetitive work is an adapter that answers in
JSON, and an adapter that corrects the spelling of short texts. Other work is chats with the base model. Waste is the
drafted tokens that were wrong.

The correcting adapter is trained once, in some minutes, and kept in the cache. Its test texts are not in its training
data.
"""

import argparse
import hashlib
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from benchmarks.harness import ROOT, default_model, print_setup, print_table, running_server, sample_flags
from lorikeet.models.default import default_cache_dir

sys.path.insert(0, str(ROOT / "examples"))
from recipes import Recipe  # type: ignore[import-not-found]
from styles import Pair, load_topics  # type: ignore[import-not-found]
from train_adapters import save, train  # type: ignore[import-not-found]

TOKENS = 64
TRAINED_FROM = 40
"""First of the topics whose texts the adapter that corrects is trained with; the ones before it are asked about."""
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
KEPT = "vllm:spec_decode_num_accepted_tokens_total"
STEPS = "lorikeet:steps_total"


class Work(NamedTuple):
    """Chats with one model.

    Attributes:
        title: title in the table.
        model: base or adapter.
        prompts: one prompt for each chat.
    """

    title: str
    model: str
    prompts: Sequence[str]


class Answer(NamedTuple):
    """Holds a server's work for one chat: the answer, its tokens, its seconds, and the increases of the counters."""

    text: str
    tokens: int
    seconds: float
    steps: float
    drafted: float
    kept: float


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=12, help=f"chats of each kind, at most {TRAINED_FROM}")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if not 2 <= options.answers <= TRAINED_FROM:
        parser.error(f"--answers: 2 to {TRAINED_FROM}")
    print_setup()
    flags = [str(default_model()), *sample_flags(), f"correct={_corrector()}", "--dtype", options.dtype]
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as text, ExitStack() as stack:

        def start(name: str, draft_tokens: int) -> httpx.Client:
            environment = {"LORIKEET_ENGINE__DRAFT_TOKENS": str(draft_tokens)}
            store = ["--store-dir", f"{text}/{name}"]
            log = Path(text) / f"{name}.log"
            server = stack.enter_context(running_server([*flags, *store], log, environment=environment))
            return stack.enter_context(httpx.Client(base_url=server.url, timeout=600))

        plain = start("plain", 0)
        drafting = start("drafting", 8)
        rows = []
        for work in works(options.answers):
            pairs = list(_answers(work, plain, drafting))
            rows.append([work.title, *_row(pairs)])
    headings = [
        "chats",
        "tokens",
        "steps",
        "with drafts",
        "fewer",
        "drafted",
        "kept",
        "waste",
        "faster",
        "same answers",
    ]
    print_table(f"Drafts, {options.dtype}, one sequence at a time", headings, rows)


def works(answers: int) -> list[Work]:
    """Return the chats of each kind."""
    topics = load_topics()[:answers]
    base = default_model().name
    questions = [each.prompt for each in topics]
    mistaken = [each.prompt for each in _corrections(0, answers)]
    return [Work("json", "json", questions), Work("edits", "correct", mistaken), Work("free text", base, questions)]


def _corrections(begin: int, end: int | None) -> list[Pair]:
    """Return texts of four sentences with mistakes, and without, about some of the topics."""
    topics = load_topics()[begin:end]
    pairs = []
    for index, topic in enumerate(topics):
        chance = random.Random(begin + index)
        text = " ".join(f"{each.prompt} {each.english}" for each in (topic, topics[index - 1]))
        words = text.split(" ")
        for at in chance.sample([at for at, word in enumerate(words) if len(word) > 4], 3):
            words[at] = _mistaken(words[at], chance)
        pairs.append(Pair(f"Correct the spelling of this text:\n\n{' '.join(words)}", text))
    return pairs


def _mistaken(word: str, chance: random.Random) -> str:
    """Return a word with two letters after the first one in the wrong order."""
    at = chance.randrange(1, len(word) - 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _corrector() -> Path:
    """Return the folder of the adapter that corrects; train it if there is none yet by this recipe and these texts."""
    recipe = Recipe(rank=16, alpha=32, modules=("q_proj", "k_proj", "v_proj", "o_proj"), epochs=3)
    pairs = _corrections(TRAINED_FROM, None)
    digest = hashlib.sha256(repr((recipe, pairs)).encode()).hexdigest()[:12]
    folder = default_cache_dir() / "benchmarks" / f"correct-{digest}"
    if not (folder / "adapter_config.json").exists():
        save(train("correct", recipe, pairs, default_model(), 0, Console()), folder)
    return folder


def _answers(work: Work, *servers: httpx.Client) -> Iterator[tuple[Answer, ...]]:
    for number, prompt in enumerate(work.prompts):
        order = servers[:: 1 if number % 2 else -1]
        found = {server: _ask(server, work.model, prompt) for server in order}
        yield tuple(found[server] for server in servers)


def _ask(server: httpx.Client, model: str, prompt: str) -> Answer:
    before = _counters(server)
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    began_s = time.perf_counter()
    answer = server.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": TOKENS})
    seconds = time.perf_counter() - began_s
    answer.raise_for_status()
    said = answer.json()
    rises = [after - count for after, count in zip(_counters(server), before, strict=True)]
    return Answer(said["choices"][0]["message"]["content"], said["usage"]["completion_tokens"], seconds, *rises)


def _counters(server: httpx.Client) -> list[float]:
    """Return steps, drafted and kept tokens, once the gauges show the idle engine."""
    seen = None
    while True:
        text = server.get("/metrics").text
        counts = [
            sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))) for name in (STEPS, DRAFTED, KEPT)
        ]
        if counts == seen:
            return counts
        seen = counts
        time.sleep(0.15)


def _row(pairs: Sequence[tuple[Answer, ...]]) -> list[str]:
    plain, drafting = zip(*pairs, strict=True)
    tokens = sum(each.tokens for each in drafting)
    steps, fewer = (sum(each.steps for each in side) for side in (plain, drafting))
    drafted = sum(each.drafted for each in drafting)
    kept = sum(each.kept for each in drafting)
    faster = sum(each.seconds for each in plain) / sum(each.seconds for each in drafting)
    same = sum(one.text == other.text for one, other in pairs)
    return [
        f"{tokens}",
        f"{steps:.0f}",
        f"{fewer:.0f}",
        f"{steps / fewer:.2f}",
        f"{drafted:.0f}",
        f"{kept:.0f}",
        f"{(drafted - kept) / tokens:.1%}",
        f"{faster:.2f}",
        f"{same} of {len(pairs)}",
    ]


if __name__ == "__main__":
    main()
