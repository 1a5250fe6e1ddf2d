"""Text while it arrives equals text all at once; stop strings are found wherever they are split."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lorikeet.chat.logprobs import TextOffsets, TokenNames, completion_logprobs
from lorikeet.chat.text_processor import IncrementalDetokenizer, StopScanner, TextProcessor
from lorikeet.core.chat_template import ChatTemplate
from lorikeet.core.plan import Token
from lorikeet.models.json_section import ModelConfigError
from tests.support.api_server import TEMPLATE, TOKENIZER, Running, count_calls_off_the_loop
from tests.support.chat_requests import CHAT
from tests.support.fakes import byte_fallback_tokenizer, byte_level_tokenizer

pytestmark = pytest.mark.slow

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


def streamed(tokenizer: Tokenizer, context: list[int], token_ids: list[int], *, skip: bool = True) -> str:
    stream = TextProcessor(tokenizer, None).stream(context, skip_special_tokens=skip)
    return "".join([*(stream.push(token_id) for token_id in token_ids), stream.flush()])


@TOKENIZERS
@given(text=st.text(max_size=40))
def test_streamed_text_equals_the_encoded_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    assert streamed(tokenizer, [], token_ids) == tokenizer.decode(token_ids)


@given(
    token_ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40),
    context=st.sampled_from(["", "hello", "日本語 🦜", "<|im_start|>", "x\ufffd", "\ufffd" * 30]),
    skip=st.booleans(),
)
def test_streamed_tokens_equal_their_text_decoded_together(token_ids: list[int], context: str, skip: bool) -> None:
    before = BYTE_LEVEL.encode(context).ids
    text = streamed(BYTE_LEVEL, before, token_ids, skip=skip)
    whole = BYTE_LEVEL.decode(before + token_ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(before, skip_special_tokens=skip) + text == whole


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    pieces = [stream.push(BYTE_LEVEL.token_to_id(byte)) for byte in ("ð", "Ł", "¦", "Ĭ")]
    assert pieces == ["", "", "", "🦊"]


def test_incomplete_character_is_shown_at_the_end() -> None:
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    assert stream.push(BYTE_LEVEL.token_to_id("ð")) == ""
    assert stream.flush() == "�"
    assert stream.flush() == ""


def test_first_word_keeps_its_space_after_the_prompt() -> None:
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
def test_detokenizer_does_not_show_the_prompt(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    token_ids = fallback("▁world") if tokenizer is BYTE_FALLBACK else tokenizer.encode(answer).ids
    assert streamed(tokenizer, tokenizer.encode(prompt).ids, token_ids) == answer


def fallback(*tokens: str) -> list[int]:
    found = [BYTE_FALLBACK.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def test_invalid_utf8_byte_is_shown_and_the_answer_continues() -> None:
    token_ids = fallback("<0xE4>", "<0xB8>", "<0xAD>", "<0xE4>", "▁world", "▁the", "<0xC3>", "<0xA9>", ",")
    assert streamed(BYTE_FALLBACK, [], token_ids) == "中� world theé,"


def test_end_within_a_character_keeps_the_text_already_shown() -> None:
    parrot = fallback("<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>")
    assert streamed(BYTE_FALLBACK, [], parrot + parrot[:2]) == "🦜��"
    assert streamed(BYTE_FALLBACK, parrot, parrot[:2]) == "��"


@given(
    token_ids=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=40),
    context=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=30),
    skip=st.booleans(),
)
def test_any_tokens_can_be_streamed(token_ids: list[int], context: list[int], skip: bool) -> None:
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
def test_shown_text_never_contains_part_of_a_stop_string(stops: list[str], pieces: list[str]) -> None:
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
    scanner = StopScanner(stops)
    text = ""
    stop = None
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


def test_stop_string_that_starts_first_counts() -> None:
    assert scan(["b", "abc"], ["xabcd"]) == ("x", "abc")


# --- Long texts: what they hold up, what is counted of them, and what is refused before it is tokenized ---

TEXTS = TextProcessor(TOKENIZER, ChatTemplate(TEMPLATE, {}))
LONG = " ".join(f"hello world {number}" for number in range(50_000))
MEDIUM = LONG[:60_000]
"""Longer texts come in bodies that are read in another process."""


def goes_on_during(work: Callable[[], object]) -> bool:
    """Return whether another thread came to run before ``work`` was done, which must let it."""
    begin = threading.Event()
    went_on = threading.Event()

    def other() -> None:
        begin.wait()
        went_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # who computes is not interrupted
    try:
        begin.set()
        work()
        return went_on.is_set()
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()


def test_event_loop_runs_while_a_long_text_is_tokenized() -> None:
    assert not goes_on_during(lambda: sum(range(1_000_000))), "Python itself lets nobody"
    assert goes_on_during(lambda: TEXTS.token_ids(LONG, add_special_tokens=True))


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (byte_level_tokenizer(), "hello \ufffd 日本語🦊 \x00\xa0\xad"),
        (byte_fallback_tokenizer(), "日本🦜"),
    ],
    ids=["byte-level", "byte-fallback"],
)
def test_token_bytes_make_up_the_text_even_of_split_characters(tokenizer: Tokenizer, text: str) -> None:
    texts = TextProcessor(tokenizer, None)
    tokens = [texts.token(token_id) for token_id in tokenizer.encode(text).ids]
    assert any(token.text.startswith("bytes:\\x") for token in tokens), "a character is split"
    assert bytes(byte for token in tokens for byte in token.utf8).decode().removeprefix(" ") == text


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer()], ids=["bytes", "fallback"])
@given(text=st.text("helo wrd 日🦜\n\ufffd", min_size=1, max_size=20), skip=st.booleans())
def test_tokens_of_logprobs_spell_the_text_at_their_offsets(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    texts = TextProcessor(tokenizer, None)
    context = tokenizer.encode("hello").ids
    token_ids = tokenizer.encode(f"hello{text}").ids
    if token_ids[: len(context)] != context:
        return
    token_ids = token_ids[len(context) :]
    logprobs = completion_logprobs(
        TokenNames(texts), [Token(each, -1.0) for each in token_ids], TextOffsets(texts, skip_special_tokens=skip)
    )
    stream = texts.stream(context, skip_special_tokens=skip)
    shown = "".join([*map(stream.push, token_ids), stream.flush()])
    assert bytes(byte for each in token_ids for byte in texts.token(each).utf8).decode() == shown == text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert shown[offset:].startswith(token) or token.startswith("bytes:\\x")
        assert offset < len(shown)


def test_hidden_tokens_do_not_change_offsets() -> None:
    hello = TOKENIZER.encode("hello").ids
    end = TOKENIZER.token_to_id("<|im_end|>")
    for skip, place in ((True, 5), (False, 5 + len("<|im_end|>"))):
        offsets = TextOffsets(TEXTS, skip_special_tokens=skip)
        assert [offsets.add(each) for each in (*hello, end, *hello)][len(hello) + 1] == place


def test_every_alternative_has_a_unique_key() -> None:
    tokenizer = byte_fallback_tokenizer()
    texts = TextProcessor(tokenizer, None)
    letter = next(word for word in tokenizer.get_vocab() if len(word) == 1 and word.isascii())
    ids = [tokenizer.token_to_id(name) for name in (letter, f"<0x{ord(letter):02X}>", "<0xE6>", "<0x97>")]
    token = Token(ids[0], -1.0, tuple((each, -2.0) for each in ids))
    (top,) = completion_logprobs(TokenNames(texts), [token], TextOffsets(texts, skip_special_tokens=True))[
        "top_logprobs"
    ]
    assert len(top) == len(set(ids)) == 4
    assert "bytes:\\xe6" in top


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_error_names_the_unreadable_file(name: str, tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelConfigError, match=re.escape(str(tmp_path / name))):
        TextProcessor.read(tmp_path)


def test_event_loop_runs_while_many_tokens_are_decoded() -> None:
    token_ids = TOKENIZER.encode_batch_fast([LONG])[0].ids * 8
    assert goes_on_during(lambda: TEXTS.decode(token_ids))


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": MEDIUM}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": MEDIUM}]}]}, "messages"),
        ("/v1/completions", {"prompt": MEDIUM}, "prompt"),
        ("/v1/completions", {"prompt": ["hello", MEDIUM]}, "prompt"),
    ],
)
async def test_too_long_text_is_refused_before_tokenization(
    server: Running, path: str, content: dict[str, Any], param: str
) -> None:
    class Refusing:
        def encode_batch_fast(self, texts: list[str], **_: bool) -> list[Any]:
            assert texts != [MEDIUM], "tokenized"
            return TOKENIZER.encode_batch_fast(texts)

    server.service.text_processor.tokenizer = Refusing()  # type: ignore[assignment]
    reply = await server.http.post(path, json={"model": "base", **content})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert "maximum context length is 256 tokens. However, your request has at least " in error["message"]
    assert server.service.gate.active == 0


async def test_longest_fitting_prompt_is_answered_and_any_can_be_tokenized(server: Running) -> None:
    longest = max((word for word in TOKENIZER.get_vocab() if word.isascii()), key=len)
    reply = await server.http.post("/v1/completions", json={"prompt": longest * 255, "max_tokens": 1})
    assert (reply.status_code, reply.json()["usage"]["prompt_tokens"]) == (200, 255)
    for text in (MEDIUM, LONG[:400_000]):
        reply = await server.http.post("/tokenize", json={"prompt": text})
        assert reply.json()["tokens"] == TOKENIZER.encode(text).ids


@pytest.mark.parametrize(
    "content",
    [
        {"messages": [{"role": "user", "content": "x", "reasoning": "y" * 5000}]},
        {"messages": [{"role": "user", "content": "x", "notes": [{"y": [1] * 5000}]}]},
        {"messages": [{"role": "y" * 5000, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "y"}] * 2200}]},
        {"messages": [{"role": "user", "content": ""}] * 2000},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"y" * 5000: 1}},
    ],
)
async def test_whole_template_input_decides_if_it_runs_off_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]
) -> None:
    calls = count_calls_off_the_loop(monkeypatch)
    assert (await server.http.post("/tokenize", json=content)).status_code == 200
    assert len(calls) == 1
    few = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "me", "notes": [None]}]}
    assert (await server.http.post("/tokenize", json=few)).status_code == 200
    assert len(calls) == 1


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_may_contain_hidden_text(include: bool) -> None:
    scanner = StopScanner(("<|end|>\n", "b<|x|>c"), include=include)
    shown = ""
    for text, is_hidden in (("a", False), ("<|end|>", True), ("b", False), ("<|x|>", True), ("d", False)):
        piece, stop = scanner.push(text, is_hidden=is_hidden)
        assert stop is None
        shown += piece
    assert shown == "abd", "what is hidden is found, and not shown"
    assert scanner.push("b") == ("", None)
    assert scanner.push("<|x|>", is_hidden=True) == ("", None)
    assert scanner.push("c.") == ("b<|x|>c" if include else "", "b<|x|>c")
