"""Prepares a ``tokenizer.json`` for the parser of grammars."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_UNWRITABLE = "\U0010ffff"
"""Begins the name of a special token: a noncharacter, which no text has."""
_QUOTED_OR_NAMED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|<[^<>\s"\[]+>')
"""Strings, regular expressions and comments of a Lark grammar, and names of tokens."""


def without_special_texts(tokenizer_json: str) -> str:
    """Return a tokenizer that encodes the texts of special tokens with ordinary tokens.

    The parser tokenizes text that a grammar forces. If the text is the name of a special token, such as the choice
    ``<|im_end|>``, the parser's tokenizer would return the special token, which the grammar does not allow. So special
    tokens get names that do not occur in texts. Their ids do not change, and grammars refer to special tokens by id.
    """
    spec: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    renamed = {entry["content"]: _UNWRITABLE + entry["content"] for entry in spec["added_tokens"] if entry["special"]}
    for entry in spec["added_tokens"]:
        entry["content"] = renamed.get(entry["content"], entry["content"])
    vocabulary = spec["model"].get("vocab")
    if isinstance(vocabulary, dict):
        spec["model"]["vocab"] = {renamed.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif vocabulary:
        spec["model"]["vocab"] = [[renamed.get(text, text), *rest] for text, *rest in vocabulary]
    if (unknown := spec["model"].get("unk_token")) is not None:
        spec["model"]["unk_token"] = renamed.get(unknown, unknown)
    return msgspec.json.encode(spec | {"post_processor": None}).decode()


def special_token_ids(tokenizer_json: str) -> dict[str, int]:
    """Return the ids of the special tokens, by text."""
    spec: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    return {entry["content"]: entry["id"] for entry in spec["added_tokens"] if entry["special"]}


def with_token_ids(grammar: str, special: Mapping[str, int]) -> str:
    """Return a Lark grammar that refers to special tokens by their ids instead of their texts."""

    def by_id(found: re.Match[str]) -> str:
        token_id = special.get(found[0])
        return found[0] if token_id is None else f"<[{token_id}]>"

    return _QUOTED_OR_NAMED.sub(by_id, grammar)
