"""A text has at least the tokens that the bound says, whatever it is and however it is tokenized."""

import unicodedata
from collections.abc import Callable
from sys import maxunicode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from lorikeet.chat.text_processor import _MAX_COMPOSED, TokenLowerBound
from tests.support.fakes import byte_fallback_tokenizer, byte_level_tokenizer

Change = Callable[[Tokenizer], None]


def composing() -> Tokenizer:
    """As Qwen's: NFC, and a pattern that splits."""
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Digits(True), byte_level])
    return tokenizer


def lacking() -> Tokenizer:
    """As SmolLM2's: some control characters are in no token, and left out."""
    shown = pre_tokenizers.ByteLevel.alphabet()
    left_out = {pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(c)[0][0] for c in "\x04\x06"}
    vocabulary = {byte: number for number, byte in enumerate(sorted({*shown} - left_out))}
    vocabulary["aa"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def of_characters() -> Tokenizer:
    """As Llama 2's: characters, spaces as ``▁``, bytes for what is in no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    model = models.BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=[("▁", "a")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KNOWN = {"byte-level": byte_level_tokenizer(), "nfc": composing(), "lacking": lacking(), "characters": of_characters()}
BOUNDS = {name: TokenLowerBound(tokenizer) for name, tokenizer in KNOWN.items()}
ANY_TEXT = st.text(max_size=60) | st.text(st.sampled_from("a \x04\u0301\u0308\u0345αω가각ᄀ\n9"), max_size=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
@given(text=ANY_TEXT)
@example(text="hello world, the lorikeet is a small parrot" * 20)
@example(text="\x04\x06" * 300)
@example(text="α\u0313\u0301\u0345" * 300)
@example(text=" " * 300)
@example(text="<|im_start|>" * 30)
def test_token_count_is_at_least_the_lower_bound(name: str, text: str) -> None:
    assert BOUNDS[name].lower_bound(text) <= len(KNOWN[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", KNOWN)
def test_a_long_text_has_many(name: str) -> None:
    assert BOUNDS[name].lower_bound("lorikeet " * 10_000) > 1000


def test_composed_characters_are_within_the_bound() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(maxunicode + 1)) == _MAX_COMPOSED


def _strip(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def _shorten(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("  ", " ")


def _leave_space_out(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer])


def _remove(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split("x", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])


def _take_space(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


def _drop(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Digits()


def _know_words_alone(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")


@pytest.mark.parametrize("change", [_strip, _shorten, _leave_space_out, _remove, _take_space, _drop, _know_words_alone])
def test_bound_is_zero_for_steps_that_may_drop_text(change: Change) -> None:
    tokenizer = byte_level_tokenizer()
    change(tokenizer)
    assert TokenLowerBound(tokenizer).lower_bound("x" * 10**6) == 0
    assert TokenLowerBound(byte_fallback_tokenizer()).lower_bound("x" * 10**6) == 0
