"""Answers that follow a grammar, drawn at random from its masks."""

import random
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from lorikeet.chat.grammar_process import GrammarReader
from lorikeet.core.grammar_tokenizer import special_token_ids, without_special_texts
from tests.support.api_server import END, TOKENIZER

VOCABULARY = TOKENIZER.get_vocab_size()
PARSER = LLTokenizer(without_special_texts(TOKENIZER.to_str()), n_vocab=VOCABULARY, eos_token=[END])
CLOSING = {TOKENIZER.encode(text).ids[0] for text in '"}],:0'} | {END}
"""Tokens that come more often than others, so that strings and lists end."""


def grammar_reader() -> GrammarReader:
    """Return what checks grammars for the tokenizer of these tests."""
    return GrammarReader(PARSER, special_token_ids(TOKENIZER.to_str()))


class Drawn(NamedTuple):
    """An answer.

    Attributes:
        text: of its tokens.
        is_complete: whether it ends where the grammar does.
        error: why it cannot go on; empty if it can.
    """

    text: str
    is_complete: bool
    error: str = ""


def draw_answer(grammar: str, choose: random.Random, most_tokens: int = 200, closing: float = 0.6) -> Drawn:
    """Draw an answer of at most so many tokens.

    Args:
        grammar: that was checked.
        choose: draws the tokens.
        most_tokens: after which it is cut off.
        closing: how often one of ``CLOSING`` comes where it may.
    """
    matcher, tokens = LLMatcher(PARSER, grammar, log_level=0), list[int]()
    while len(tokens) < most_tokens:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return Drawn(TOKENIZER.decode(tokens, skip_special_tokens=False), False, matcher.get_error())
        allowed = [token for token in range(VOCABULARY) if mask[token // 8] >> (token % 8) & 1]
        if not allowed:
            return Drawn(TOKENIZER.decode(tokens, skip_special_tokens=False), False, "no token may come")
        ends = [token for token in allowed if token in CLOSING]
        token = choose.choice(ends if ends and choose.random() < closing else allowed)
        if token == END:
            return Drawn(TOKENIZER.decode(tokens, skip_special_tokens=False), True)
        matcher.consume_token(token)
        tokens.append(token)
    return Drawn(TOKENIZER.decode(tokens, skip_special_tokens=False), False)
