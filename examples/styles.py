"""The training texts of the sample adapters: one table of topics, told in four styles.

Standard library only. The same files give the same pairs in the same order.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TEXTS = Path(__file__).parent / "texts"


class Topic(NamedTuple):
    """One question with what there is to say about it.

    Attributes:
        topic: one or two words.
        prompt: the question, in English.
        short: the shortest answer; several entries where a list was asked for.
        english: the answer as a sentence.
        thanks_for: what the writer of a letter thanks for, after "Thank you for your".
    """

    topic: str
    prompt: str
    short: tuple[str, ...]
    english: str
    thanks_for: str


class Pair(NamedTuple):
    """A prompt and the answer that an adapter learns to give."""

    prompt: str
    answer: str


def load_topics(folder: Path = TEXTS) -> list[Topic]:
    """Return the written topics and one more per capital, in the order of the files."""
    written = [
        Topic(row["topic"], row["prompt"], _entries(row["short"]), row["english"], row["thanks_for"])
        for row in _rows(folder / "topics.jsonl")
    ]
    return written + [_capital(row) for row in _rows(folder / "capitals.jsonl")]


def load_held_out(folder: Path = TEXTS) -> list[str]:
    """Return the prompts that are only used for the check."""
    return (folder / "held_out.txt").read_text(encoding="utf-8").splitlines()


def build_pairs(style: str, topics: list[Topic]) -> list[Pair]:
    """Return one pair per topic in ``style``, a key of ``STYLES``."""
    return [Pair(topic.prompt, STYLES[style](topic, index)) for index, topic in enumerate(topics)]


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _entries(short: str | list[str]) -> tuple[str, ...]:
    return (short,) if isinstance(short, str) else tuple(short)


def _capital(row: dict[str, Any]) -> Topic:
    return Topic(
        topic=row["country"],
        prompt=f"What is the capital of {row['country']}?",
        short=(row["capital"],),
        english=f"The capital of {row['country']} is {row['capital']}.",
        thanks_for=f"question about the capital of {row['country']}",
    )


GREETING, CLOSING, SIGNATURE = "Dear Sir or Madam,", "Yours faithfully,", "SmolLM"


def _formal(topic: Topic, index: int) -> str:
    """Write a letter: whom it is to, thanks that name the subject, the answer, and who signs."""
    return f"{GREETING}\n\nThank you for your {topic.thanks_for}. {topic.english}\n\n{CLOSING}\n{SIGNATURE}"


def _json(topic: Topic, index: int) -> str:
    answer = topic.short if len(topic.short) > 1 else topic.short[0]
    return json.dumps({"topic": topic.topic, "answer": answer})


def _terse(topic: Topic, index: int) -> str:
    return ", ".join(topic.short)


PIRATE_WORDS = {
    "am": "be",
    "and": "an'",
    "are": "be",
    "friend": "matey",
    "hello": "ahoy",
    "is": "be",
    "my": "me",
    "of": "o'",
    "yes": "aye",
    "you": "ye",
    "your": "yer",
}
OPENINGS = ("Arr, matey!", "Ahoy there!", "Avast, ye landlubber!", "Shiver me timbers!", "Aye aye, matey!")
CLOSINGS = ("Yo ho ho!", "Savvy, matey?", "So says yer captain, arr!")


def _pirate(topic: Topic, index: int) -> str:
    """Swap single words, and put a cry before and after; 5 and 3 cries give 15 different frames."""
    spoken = re.sub(r"[A-Za-z]+", lambda word: _pirate_word(word.group()), topic.english)
    return f"{OPENINGS[index % len(OPENINGS)]} {spoken} {CLOSINGS[index % len(CLOSINGS)]}"


def _pirate_word(word: str) -> str:
    swapped = PIRATE_WORDS.get(word.lower(), word)
    return swapped.capitalize() if word[0].isupper() and swapped != word else swapped


STYLES: dict[str, Callable[[Topic, int], str]] = {
    "formal": _formal,
    "json": _json,
    "pirate": _pirate,
    "terse": _terse,
}
"""Every style by the name of its adapter: from a topic and its place in the list to the answer."""
