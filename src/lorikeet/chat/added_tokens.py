"""Adds the tokens that a folder's files list to a tokenizer, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken as TokenizersToken
from tokenizers import Tokenizer

from lorikeet.adapters.chat import AddedToken
from lorikeet.adapters.errors import AdapterError

_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def differing_tokens(tokenizer: Tokenizer, listed: Sequence[AddedToken]) -> list[AddedToken]:
    """Return the listed tokens that a tokenizer lacks, has with another text or id, or treats differently."""
    known = tokenizer.get_added_tokens_decoder()
    flags = _FLAGS if tokenizer.normalizer is not None else tuple(flag for flag in _FLAGS if flag != "normalized")

    def is_same(token: AddedToken) -> bool:
        found = known.get(token.id)
        return (
            found is not None
            and found.content == token.content
            and all(getattr(found, flag) == getattr(token, flag) for flag in flags)
        )

    return [token for token in listed if not is_same(token)]


def with_tokens(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> Tokenizer:
    """Return a copy of a tokenizer with further tokens, which replace tokens of the same id or text.

    Raises:
        AdapterError: a token would get a wrong id.
    """
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    ids = {token.id for token in added}
    texts = {token.content for token in added}
    kept = [entry for entry in spec["added_tokens"] if entry["id"] not in ids and entry["content"] not in texts]
    given = [
        {"id": token.id, "content": token.content, **{flag: getattr(token, flag) for flag in _FLAGS}} for token in added
    ]
    replaced = {entry["content"] for entry in spec["added_tokens"]} - {entry["content"] for entry in kept}
    spec["added_tokens"] = sorted([*kept, *given], key=lambda entry: entry["id"])
    vocabulary = spec["model"].get("vocab")
    if isinstance(vocabulary, dict):
        by_id = {token_id: text for text, token_id in vocabulary.items()}
        in_vocabulary = [token for token in added if token.id in by_id]
        for text in [*(by_id[token.id] for token in in_vocabulary), *(replaced & vocabulary.keys())]:
            vocabulary.pop(text, None)
        vocabulary |= {token.content: token.id for token in in_vocabulary}
    made = _made(spec)
    misplaced = [token for token in added if made.token_to_id(token.content) != token.id]
    if misplaced and isinstance(vocabulary, dict):  # Ids beyond the vocabulary have no gaps; ids within it may.
        vocabulary |= {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
        made = _made(spec)
    for entry in spec["added_tokens"]:
        if (found := made.token_to_id(entry["content"])) != entry["id"]:
            raise AdapterError(
                f"its tokenizer has {entry['content'][:100]!r} as token {entry['id']}, which would be {found} in the "
                "base's"
            )
    return made


def _made(spec: Mapping[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # The library raises no narrower class.
        raise AdapterError(f"its added tokens do not fit the base tokenizer: {error}") from error


def add_named_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special: Sequence[str]) -> None:
    """Add the tokens of ``tokenizer_config.json`` that ``tokenizer.json`` lacks, as transformers does.

    Args:
        tokenizer: the tokenizer, which is changed in place.
        config: content of the file, with tokens under ``added_tokens_decoder``.
        special: texts of the special tokens that the file names, such as the end token.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    entries = sorted(listed.items(), key=lambda pair: int(pair[0])) if isinstance(listed, dict) else []
    for _, entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            flags = {flag: bool(entry.get(flag, False)) for flag in _FLAGS}
            flags["special"] |= entry["content"] in special
            tokenizer.add_tokens([TokenizersToken(entry["content"], **flags)])
            known.add(entry["content"])
    plain = {token.content: token for token in tokenizer.get_added_tokens_decoder().values() if not token.special}
    for text in special:
        if text in plain:
            flags = {flag: getattr(plain[text], flag) for flag in _FLAGS}
            tokenizer.add_tokens([TokenizersToken(text, **{**flags, "special": True})])
        elif text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([text])
