"""What a model thinks is told apart from what it answers, however the text is cut."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.chat.reasoning import REASONING_FORMATS


def read(name: str, pieces: Iterable[str], prompt_end: str = "") -> tuple[str, str]:
    """Return thoughts and answer of a text that arrives in these pieces."""
    parser = REASONING_FORMATS[name].parser(prompt_end)
    parts = [parser.push(piece) for piece in pieces]
    parts.append(parser.finish())
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "thoughts", "answer"),
    [
        ("qwen3", "", "<think>\nhm\n</think>\n\nYes.\n", "hm", "Yes.\n"),
        ("qwen3", "<think>\n", "hm</think>Yes.", "hm", "Yes."),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("qwen3", "", " Yes, 1 < 2.", "", " Yes, 1 < 2."),
        ("qwen3", "", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("qwen3", "", "<think>on and on", "on and on", ""),
        ("qwen3", "", "<thin", "", "<thin"),
        ("deepseek_r1", "", "hm</think>\nYes.", "hm", "Yes."),
        ("deepseek_r1", "", "<think>hm, 1 </ 2</think>Yes.", "hm, 1 </ 2", "Yes."),
        ("deepseek_r1", "", "on and on", "on and on", ""),
        ("deepseek_r1", "</think>", "Yes.", "", "Yes."),
        ("mistral", "", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
        ("granite", "", "Here is my thought process:\nhm\nHere is my response: Yes.", "hm", "Yes."),
    ],
)
def test_thoughts_are_separated(name: str, prompt_end: str, text: str, thoughts: str, answer: str) -> None:
    assert read(name, [text], prompt_end) == (thoughts, answer)
    assert read(name, text, prompt_end) == (thoughts, answer)


FRAGMENTS = ["<think>", "</think>", "<th", "</th", "<", "ink>", " ", "\n", "text", "é", "[THINK]", "[/THINK]", "[/"]


@pytest.mark.slow
@settings(max_examples=50)
@given(
    name=st.sampled_from(["qwen3", "deepseek_r1", "mistral"]),
    prompt_end=st.sampled_from(["", "<think>\n"]),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join),
    at=st.integers(0, 60),
)
def test_cuts_between_deltas_do_not_change_thoughts_and_answer(name: str, prompt_end: str, text: str, at: int) -> None:
    whole = read(name, [text], prompt_end)
    assert read(name, text, prompt_end) == whole
    assert read(name, [text[:at], text[at:]], prompt_end) == whole
