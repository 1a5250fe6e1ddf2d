"""Measures how often `model: "auto"` chooses the right adapter: ``python -m benchmarks.auto_model``.

The tasks are in ``benchmarks/data/auto_model.toml``; ``--tasks`` names another file, such as that of the tasks for
tuning. With ``--server``, the base model of a running server makes vectors of all texts (``/v1/embeddings``), and the
choice by them and by both is printed beside the server's choice, which is by words.
"""

import argparse
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import httpx
import numpy as np
from numpy.typing import NDArray

from lorikeet.chat.nearest_examples import NearestExamples

TASKS = Path(__file__).parent / "data" / "auto_model.toml"
_NEAREST = 3
_TEXTS_AT_ONCE = 32

Similarities = NDArray[np.float64]
"""Similarities of every text (examples first) and every example."""


@dataclass(frozen=True)
class Tasks:
    """Tasks with examples and test prompts.

    Attributes:
        examples: examples of prompts by task, which an adapter's folder would have.
        prompts: test prompts with the right task; empty for a prompt of no task.
        near: the tasks of pairs that are easily confused.
    """

    examples: dict[str, list[str]]
    prompts: list[tuple[str, str]]
    near: frozenset[str]

    @property
    def texts(self) -> list[str]:
        """All examples and prompts."""
        return [*(text for each in self.examples.values() for text in each), *(prompt for prompt, _ in self.prompts)]


def read_tasks(path: Path = TASKS) -> Tasks:
    """Read tasks from a file in which each line of a text is one prompt."""
    content = tomllib.loads(path.read_text())
    tasks: Mapping[str, dict[str, str]] = dict(sorted(content["tasks"].items()))
    prompts = [(prompt, name) for name, task in tasks.items() for prompt in task["prompts"].splitlines()]
    return Tasks(
        {name: task["examples"].splitlines() for name, task in tasks.items()},
        prompts + [(prompt, "") for prompt in content["nothing"].splitlines()],
        frozenset(name for name, task in tasks.items() if "near" in task),
    )


def shares(tasks: Tasks, chosen: Sequence[str]) -> dict[str, float]:
    """Return the shares of right choices: of all prompts, of those of a task, of near tasks, and of none."""
    right = [(name, name == choice) for (_, name), choice in zip(tasks.prompts, chosen, strict=True)]
    kinds: dict[str, Callable[[str], bool]] = {
        "all": lambda name: True,
        "a task": bool,
        "near tasks": lambda name: name in tasks.near,
        "no task": lambda name: not name,
    }
    return {kind: fmean(is_right for name, is_right in right if fits(name)) for kind, fits in kinds.items()}


def similarities_by_words(tasks: Tasks) -> Similarities:
    """Return the similarities of every text and every example, as the server computes them."""
    nearest = NearestExamples(tasks.examples)
    return np.array([nearest.similarities(text) for text in tasks.texts])


def similarities_by_vectors(tasks: Tasks, url: str) -> tuple[Similarities, float]:
    """Return the same by vectors of a server's base model, and the seconds for the vector of one text."""
    texts = tasks.texts
    with httpx.Client(base_url=url, timeout=600) as http:

        def embed(some: Sequence[str]) -> list[list[float]]:
            reply = http.post("/v1/embeddings", json={"model": "", "input": list(some)})
            reply.raise_for_status()
            return [each["embedding"] for each in reply.json()["data"]]

        parts = [embed(texts[at : at + _TEXTS_AT_ONCE]) for at in range(0, len(texts), _TEXTS_AT_ONCE)]
        began_s = time.perf_counter()
        for text in texts[:_TEXTS_AT_ONCE]:
            embed([f"{text} "])
        alone_s = (time.perf_counter() - began_s) / _TEXTS_AT_ONCE
    vectors = np.array([each for part in parts for each in part])
    examples = sum(map(len, tasks.examples.values()))
    vectors -= vectors[:examples].mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors[:examples].T, alone_s


def choices(tasks: Tasks, similarities: Similarities) -> list[str]:
    """Return choices by similarities, with the rule and the way of learning the threshold of the server."""
    names = [name for name, examples in tasks.examples.items() for _ in examples]
    known = len(names)
    alone = similarities[:known].copy()
    np.fill_diagonal(alone, np.nan)
    right = []
    foreign = []
    for name, row in zip(names, alone, strict=True):
        similar = _by_task(names, row)
        own = similar.pop(name)
        foreign.append(max(similar.values()))
        right += [own] if own > foreign[-1] else []

    def is_separated(least: float) -> float:
        return float(np.sum(np.array(right) >= least) + np.sum(np.array(foreign) < least))

    threshold = max(sorted(right), key=is_separated)
    chosen = []
    for row in similarities[known:]:
        similar = _by_task(names, row)
        best = max(similar, key=lambda name: similar[name])
        chosen.append(best if similar[best] >= threshold else "")
    return chosen


def _by_task(names: Sequence[str], similarities: Similarities) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for name, similarity in zip(names, similarities, strict=True):
        if not np.isnan(similarity):
            found.setdefault(name, []).append(float(similarity))
    return {name: fmean(sorted(each)[-_NEAREST:]) for name, each in found.items()}


def main() -> None:
    """Print the shares of right choices beside the oracle's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=Path, default=TASKS, help="file of tasks")
    parser.add_argument("--server", default="", help="URL of a server whose base model makes vectors, for comparison")
    parser.add_argument("--wrong", action="store_true", help="print the prompts of wrong choices")
    options = parser.parse_args()
    tasks = read_tasks(options.tasks)
    began_s = time.perf_counter()
    nearest = NearestExamples(tasks.examples)
    built_s = time.perf_counter()
    chosen = [nearest.nearest(prompt).name for prompt, _ in tasks.prompts]
    alone_s = (time.perf_counter() - built_s) / len(chosen)
    rows = {"the right task (oracle)": [name for _, name in tasks.prompts], "words (the server)": chosen}
    if options.server:
        words = similarities_by_words(tasks)
        vectors, vector_s = similarities_by_vectors(tasks, options.server)
        rows["the base's vectors"] = choices(tasks, vectors)
        rows["both"] = choices(tasks, words / words.std() + vectors / vectors.std())
    rows["always the base"] = [""] * len(chosen)
    print(f"{len(tasks.examples)} tasks, {len(tasks.near)} of them near another, {len(chosen)} prompts; right choices:")
    for title, row in rows.items():
        print(f"  {title:24}" + ", ".join(f"{kind} {share:6.1%}" for kind, share in shares(tasks, row).items()))
    print(f"words: {1e3 * (built_s - began_s):.0f} ms to read the examples, {1e3 * alone_s:.2f} ms for a prompt")
    if options.server:
        print(f"vectors: {1e3 * vector_s:.2f} ms for a prompt")
    if options.wrong:
        for (prompt, name), choice in zip(tasks.prompts, chosen, strict=True):
            if name != choice:
                print(f"  {name or 'none'}, chosen {choice or 'none'}: {prompt}")


if __name__ == "__main__":
    main()
