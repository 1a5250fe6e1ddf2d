"""Whether an answer keeps to the style of its adapter: plain rules, no model.

Standard library only; every judge is a pure function of the answer.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

WORDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "texts" / "judge_words.json").read_text("utf-8"))
"""The words that give a pirate away."""
PIRATE_WORDS = frozenset(WORDS["pirate"])
LETTER = re.compile(r"Dear [^\n]+,\n+\S.*\n+Yours [a-z]+,\n+\S[^\n]*", re.DOTALL)
"""A greeting, a text, a closing and who signs, each on lines of its own."""
TERSE_WORDS = 6
"""Most words of a terse answer."""


def words(answer: str) -> list[str]:
    """Return the words of ``answer`` in lower case; apostrophes belong to words."""
    return re.findall(r"[^\W_]+(?:'[^\W_]*)*", answer.lower().replace("’", "'"))


def is_formal(answer: str) -> bool:
    """The whole answer is one letter, from ``Dear`` to a name after ``Yours faithfully`` or the like."""
    return LETTER.fullmatch(answer.strip()) is not None


def is_json_object(answer: str) -> bool:
    """The whole answer is one JSON object with at least one key."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and bool(value)


def is_pirate(answer: str) -> bool:
    """At least two different pirate words."""
    return len(PIRATE_WORDS.intersection(words(answer))) >= 2


def is_terse(answer: str) -> bool:
    """Between one and ``TERSE_WORDS`` words."""
    return 1 <= len(words(answer)) <= TERSE_WORDS


JUDGES: dict[str, Callable[[str], bool]] = {
    "formal": is_formal,
    "json": is_json_object,
    "pirate": is_pirate,
    "terse": is_terse,
}
"""Every judge by the name of its adapter."""


def pass_share(style: str, answers: Sequence[str]) -> float:
    """Return the share of ``answers`` that the judge of ``style`` accepts, 0 to 1.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError(f"{style}: no answers to judge")
    return sum(JUDGES[style](answer) for answer in answers) / len(answers)


def mean_words(answers: Sequence[str]) -> float:
    """Return the mean number of words of ``answers``, of which there is at least one."""
    return sum(len(words(answer)) for answer in answers) / len(answers)
