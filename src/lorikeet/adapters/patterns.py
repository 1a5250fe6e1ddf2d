"""Regular expressions of adapters' configs, which come from strangers: what they match, within a time limit.

They are PEFT's (https://github.com/huggingface/peft), in the dialect of ``re``, whose matches can take for ever.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import inf
from typing import NamedTuple, TypeVar

import regex  # type: ignore[import-untyped]

from lorikeet.adapters.errors import AdapterError

_MATCH_TIMEOUT_S = 1.0
_ALL_TIMEOUT_S = 10.0
"""Of all matches of one check together."""
_MAX_PATTERN_CHARS = 20_000
_NAME = re.compile(r"(\w+\.)*layers\.\d+\.\w+\.\w+")
"""What matches, as an expression for the end of a module's name, that end alone, although a dot is any letter."""

T = TypeVar("T")


class _Limit(NamedTuple):
    """When all matches must have ended, and the file that their patterns stand in."""

    file: str
    deadline_s: float


_NO_LIMIT = _Limit("an adapter's config", inf)
_limit: ContextVar[_Limit] = ContextVar("limit of all matches", default=_NO_LIMIT)


@contextmanager
def limited_matching(file: str) -> Iterator[None]:
    """Bound the time that all matches take together within; whichever is under way then ends with AdapterError.

    Args:
        file: where the patterns stand, for the message.
    """
    token = _limit.set(_Limit(file, time.monotonic() + _ALL_TIMEOUT_S))
    try:
        yield
    finally:
        _limit.reset(token)


def first_of(values: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name, ``default`` if none does.

    Raises:
        AdapterError: one takes too long, or is no regular expression.
    """
    patterns = tuple(values)
    named, others = _sorted_out(patterns)
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    best = min((named[end] for end in ends if end in named), default=len(patterns))
    for place in others:
        if place > best:
            break
        if _match(compiled(ending(patterns[place])).match, patterns[place], name) is not None:
            return values[patterns[place]]
    return values[patterns[best]] if best < len(patterns) else default


def matches_whole(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` matches all of a module's name; errors as of :func:`first_of`."""
    return _match(compiled(pattern).fullmatch, pattern, name) is not None


def layer_index(pattern: str, name: str) -> int | None:
    """Return the number behind what ``pattern`` matches in a module's name; errors as of :func:`first_of`."""
    match = _match(compiled(before_index(pattern)).match, pattern, name)
    return None if match is None else int(match["idx"])


def ending(pattern: str) -> str:
    """Return the expression for names that end with what ``pattern`` matches."""
    return rf"(.*\.)?({pattern})$"


def before_index(pattern: str) -> str:
    """Return the expression for names in which a number stands behind what ``pattern`` matches."""
    return rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> "regex.Pattern[str]":
    """Compile with ``regex``, which can time out.

    Raises:
        AdapterError: it is no regular expression, or too long.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise AdapterError(f"a pattern of {len(pattern)} characters is too long")
    try:
        re.compile(pattern)  # the dialect is re's: what it refuses, PEFT could not have used
        return regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{pattern!r} is not a regular expression: {error}") from error


@lru_cache(maxsize=16)
def _sorted_out(patterns: tuple[str, ...]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the places of those that are names of modules, which need no expression, and of the others."""
    named = {pattern: place for place, pattern in reversed(list(enumerate(patterns))) if _NAME.fullmatch(pattern)}
    return named, tuple(place for place, pattern in enumerate(patterns) if pattern not in named)


def _match(match: "Callable[..., regex.Match[str] | None]", pattern: str, name: str) -> "regex.Match[str] | None":
    limit = _limit.get()
    left_s = limit.deadline_s - time.monotonic()
    try:
        if left_s <= 0:
            raise TimeoutError
        return match(name, timeout=min(_MATCH_TIMEOUT_S, left_s), concurrent=True)
    except TimeoutError as error:
        whose = f"the pattern {pattern!r} takes" if left_s > _MATCH_TIMEOUT_S else "the patterns all together take"
        raise AdapterError(f"{limit.file}: {whose} too long to match {name!r}") from error
