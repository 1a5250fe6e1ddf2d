"""Text while it arrives equals text all at once; stop strings are found wherever they are split."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lorikeet.api.text_processor import IncrementalDetokenizer, StopScanner, TextProcessor
from tests.api.fakes import byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL, BYTE_FALLBACK = byte_level_tokenizer(), byte_fallback_tokenizer()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


def streamed(tokenizer: Tokenizer, context: list[int], token_ids: list[int], *, skip: bool = True) -> str:
    stream = TextProcessor(tokenizer, None).stream(context, skip_special_tokens=skip)
    return "".join([*(stream.push(token_id) for token_id in token_ids), stream.flush()])


@TOKENIZERS
@given(text=st.text(max_size=40))
def test_any_text_streams_as_it_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    assert streamed(tokenizer, [], token_ids) == tokenizer.decode(token_ids)


@given(
    token_ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40),
    context=st.sampled_from(["", "hello", "日本語 🦜", "<|im_start|>", "x\ufffd", "\ufffd" * 30]),
    skip=st.booleans(),
)
def test_any_tokens_stream_to_what_decoding_at_once_adds(token_ids: list[int], context: str, skip: bool) -> None:
    before = BYTE_LEVEL.encode(context).ids
    text = streamed(BYTE_LEVEL, before, token_ids, skip=skip)
    whole = BYTE_LEVEL.decode(before + token_ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(before, skip_special_tokens=skip) + text == whole


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    pieces = [stream.push(BYTE_LEVEL.token_to_id(byte)) for byte in ("ð", "Ł", "¦", "Ĭ")]
    assert pieces == ["", "", "", "🦊"]


def test_a_character_that_never_becomes_whole_is_shown_at_the_end() -> None:
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    assert stream.push(BYTE_LEVEL.token_to_id("ð")) == ""
    assert stream.flush() == "�"
    assert stream.flush() == ""


def test_the_first_word_keeps_the_space_that_the_prompt_calls_for() -> None:
    world = BYTE_FALLBACK.token_to_id("▁world")
    assert streamed(BYTE_FALLBACK, [], [world]) == "world"
    assert streamed(BYTE_FALLBACK, BYTE_FALLBACK.encode("hello").ids, [world]) == " world"


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "answer"),
    [
        (BYTE_FALLBACK, "🦜🦜", " world"),
        (BYTE_FALLBACK, "hello 🦜🦜", " world"),
        (BYTE_FALLBACK, "🦜 hello", " world"),
        (BYTE_LEVEL, "x\ufffd", "hello"),
        (BYTE_LEVEL, "hello" + "\ufffd" * 30, "hello"),
    ],
)
def test_nothing_of_the_prompt_is_shown(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    token_ids = fallback("▁world") if tokenizer is BYTE_FALLBACK else tokenizer.encode(answer).ids
    assert streamed(tokenizer, tokenizer.encode(prompt).ids, token_ids) == answer


def fallback(*tokens: str) -> list[int]:
    found = [BYTE_FALLBACK.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def test_a_byte_that_makes_no_character_is_shown_and_the_answer_goes_on() -> None:
    token_ids = fallback("<0xE4>", "<0xB8>", "<0xAD>", "<0xE4>", "▁world", "▁the", "<0xC3>", "<0xA9>", ",")
    assert streamed(BYTE_FALLBACK, [], token_ids) == "中� world theé,"


def test_an_end_in_the_middle_of_a_character_spoils_none_that_was_shown() -> None:
    parrot = fallback("<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>")
    assert streamed(BYTE_FALLBACK, [], parrot + parrot[:2]) == "🦜��"
    assert streamed(BYTE_FALLBACK, parrot, parrot[:2]) == "��"


@given(
    token_ids=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=40),
    context=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=30),
    skip=st.booleans(),
)
def test_no_tokens_end_a_stream(token_ids: list[int], context: list[int], skip: bool) -> None:
    for tokenizer in (BYTE_FALLBACK, BYTE_LEVEL):
        streamed(tokenizer, context, token_ids, skip=skip)


def scan(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include=include)
    text = ""
    for piece in pieces:
        shown, stop = scanner.push(piece)
        text += shown
        if stop is not None:
            return text, stop
    return text + scanner.release(), None


def reference(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[: at + (len(stop) if include else 0)], stop


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    pieces=st.lists(st.text("abc", min_size=1, max_size=1), max_size=20),
    include=st.booleans(),
)
def test_a_stop_string_is_found_as_soon_as_the_text_holds_one(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    whole = "".join(pieces)
    ends = [end for end in range(len(whole) + 1) if any(stop in whole[:end] for stop in stops)]
    seen = whole[: ends[0]] if ends else whole
    assert scan(stops, pieces, include=include) == reference(stops, seen, include=include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    pieces=st.lists(st.text("abc", max_size=5), max_size=10),
)
def test_nothing_shown_is_ever_part_of_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    text, _ = scan(stops, pieces)
    assert not any(stop in text for stop in stops)
    assert "".join(pieces).startswith(text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3, unique=True),
    whole=st.text("abc", max_size=30),
    free=st.integers(0, 12),
)
def test_stop_string_starting_before_the_minimum_counts_if_it_ends_after(
    stops: list[str], whole: str, free: int
) -> None:
    scanner, text, stop = StopScanner(stops), "", None
    for at, letter in enumerate(whole):
        shown, stop = scanner.push(letter, may_stop=at >= free)
        text += shown
        if stop is not None:
            break
    else:
        text += scanner.release()
    ended = {end: [each for each in stops if whole[:end].endswith(each)] for end in range(free + 1, len(whole) + 1)}
    end = next((end for end, found in ended.items() if found), None)
    expected = None if end is None else max(ended[end], key=len)
    assert (text, stop) == (whole if end is None or expected is None else whole[: end - len(expected)], expected)


def test_long_stop_strings_cost_little_whatever_the_text() -> None:
    looked: list[int] = []

    class Counting(str):
        def __getitem__(self, key: Any) -> str:
            looked.append(1)
            return super().__getitem__(key)

    scanner = StopScanner([Counting("a" * 500 + "b" + "a" * 500 + "c"), Counting("ab" * 500 + "c")])
    text = "a" * 2000 + "ab" * 1000
    assert scanner.push(text) == (text[:-1000], None)
    assert len(looked) < 2 * 4 * len(text), "letters of stop strings"


def test_text_that_only_looked_like_a_stop_string_is_released() -> None:
    scanner = StopScanner(["<end>"])
    assert scanner.push("a<en") == ("a", None)
    assert scanner.push("large") == ("<enlarge", None)
    assert scanner.release() == ""


def test_of_two_stop_strings_the_one_that_starts_first_counts() -> None:
    assert scan(["b", "abc"], ["xabcd"]) == ("x", "abc")
