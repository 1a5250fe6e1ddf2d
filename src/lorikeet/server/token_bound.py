"""How few tokens a text can have, told without tokenizing it, so that what is far too long is refused at once.

Known of tokenizers like those of the models that are served: BPE over the bytes of a text, or over its characters with
bytes for those that no token holds. Of others nothing is known, and any text may be short.
"""

import json
import math
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_MOST_COMPOSED = 4
"""Characters that NFC may put together into one: as many as the longest canonical decomposition has."""


class TokenBound:
    """A bound from below for the tokens of any text.

    Args:
        tokenizer: without truncation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        added = spec["added_tokens"]
        composed = _most_composed(_steps(spec["normalizer"], "normalizers"))
        dropped = _dropped(spec["model"], _steps(spec["pre_tokenizer"], "pretokenizers"))
        # A token that takes the space beside it with it may stand for any amount of it.
        takes_space = any(token["lstrip"] or token["rstrip"] for token in added)
        self._dropped = ""
        self._most_characters = math.inf
        """Of a text, in one token."""
        if not takes_space and composed is not None and dropped is not None:
            longest = max(map(len, (*spec["model"]["vocab"], *(token["content"] for token in added))))
            self._dropped, self._most_characters = dropped, longest * composed

    def fewest(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least."""
        characters = len(text) - sum(map(text.count, self._dropped))
        return math.ceil(characters / self._most_characters)


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, in their order."""
    if part is None:
        return []
    return [step for each in part[key] for step in _steps(each, key)] if part["type"] == "Sequence" else [part]


def _most_composed(normalizers: list[dict[str, Any]]) -> int | None:
    """Return how many characters may become one; None where that is not known."""
    most = 1
    for step in normalizers:
        match step:
            case {"type": "NFC"}:
                most *= _MOST_COMPOSED
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(new) >= len(old):
                pass
            case _:
                return None
    return most


def _dropped(model: dict[str, Any], pre_tokenizers: list[dict[str, Any]]) -> str | None:
    """Return the characters that may be left out of the tokens; None where that is not known."""
    is_of_bytes = False
    for step in pre_tokenizers:
        match step:
            case {"type": "ByteLevel"}:
                is_of_bytes = True
            case {"type": "Digits" | "Metaspace"}:
                pass
            case {"type": "Split", "behavior": behavior} if behavior != "Removed":
                pass
            case _:
                return None
    if model["type"] != "BPE":
        return None
    if not is_of_bytes:
        has_bytes = model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        return "" if has_bytes else None
    # In UTF-8 every character ends with the same byte as one of these.
    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    last_bytes = {chr(code): bytes_of(chr(code))[0][0][-1] for code in range(0xC0)}
    lacking = [character for character, byte in last_bytes.items() if byte not in model["vocab"]]
    return "".join(lacking) if all(map(str.isascii, lacking)) else None
