"""Checks grammars for an API process, as ``python -m lorikeet.chat.grammar_process``.

Grammars come from strangers. Some take seconds or gigabytes to compile, and some overflow the stack, which ends a
process; here the end of this process ends nothing else. The engine can compile a grammar that has passed.

The notation of the result is llguidance's own: a grammar in its Lark dialect, or a JSON object with several.
"""

import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from lorikeet.chat.json_schema import objects_in
from lorikeet.core.grammar_tokenizer import special_token_ids, with_token_ids, without_special_texts
from lorikeet.http.helper_main import run_helper

if TYPE_CHECKING:  # The module exists only for type checkers.
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"(?: |\n[ \t]{0,32})?"
"""Whitespace between the parts of JSON: nothing, a space, or a line break and indentation. More would let a model fill
its answer with spaces."""

_JSON_SPACE = r"[ \t\r\n]"
r"""All whitespace that JSON allows, which is less than ``\s``."""
_MAX_CHECK_S = 0.5
"""Of a core."""
_MAX_LENGTH_S = 0.1
"""Of a core, for the length of the longest answer."""
_MOST_BYTES_OF_A_LETTER = 4
_PATTERNS = '"patternProperties"'
_JSON_RULE = "%json "
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_POSITION = re.compile(r"^at \d+\(\d+\): ")
_LISTING = re.compile(r"\n *\d+ \| .*", re.DOTALL)
"""The lines of a grammar around an error, which the parser appends."""
_MAX_FORMATS = 16
_MEMORY_BYTES = 2**30
_MAX_FORCED = 512
"""Most forced tokens that a check follows."""
_STACK_BYTES = 16 * 2**20
"""Stack of a check, which is a quarter of the engine's."""


class GrammarKind(StrEnum):
    """Notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """A regular expression in the syntax of Rust's regex crate, which the whole answer must match."""
    CHOICE = "choice"
    """A JSON list of strings."""
    EBNF = "ebnf"
    """llama.cpp's GBNF, which vLLM and SGLang call EBNF, or Lark."""
    LARK = "lark"
    """llguidance's dialect of Lark, or a JSON object of several grammars that refer to each other."""


class Marker(msgspec.Struct, frozen=True):
    """Text of a marker; ``token`` is its id if it is a token that was added to the vocabulary."""

    text: str
    token: int | None = None


class Thoughts(msgspec.Struct, frozen=True):
    """Thoughts of a model before an answer that follows a grammar.

    Attributes:
        begin, end: markers around the thoughts.
        are_open: whether the prompt has begun the thoughts, so that the model must end them.
        most_tokens: number of tokens after which thoughts must end; None for any number. It needs ``end`` to be one
            token.
        stops: tokens that end an answer, which thoughts with a budget must not contain.
    """

    begin: Marker
    end: Marker
    are_open: bool = False
    most_tokens: int | None = None
    stops: tuple[int, ...] = ()


ANY_TEXT = r"start: /(.|\n)*/"
"""Grammar of all texts, in llguidance's notation."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """Grammar in the form of a request.

    Attributes:
        kind: notation of ``text``.
        text: the grammar.
        param: the field of the grammar, for errors.
        function: the only function that the grammar may call, for errors; empty for several or none.
        whitespace: regex of the whitespace that JSON may have between its parts; empty for no whitespace.
        thoughts: thoughts that may precede the answer; None for no thoughts.
        least_tokens: number of tokens that an answer needs before its end.
    """

    kind: GrammarKind
    text: str
    param: str
    whitespace: str = WHITESPACE
    thoughts: Thoughts | None = None
    least_tokens: int = 0
    function: str = ""


class GrammarSetup(msgspec.Struct, frozen=True):
    """Setup of a process.

    Attributes:
        tokenizer: content of ``tokenizer.json``; empty if ``file`` names the file.
        file: path of ``tokenizer.json``.
        vocabulary: width of the logits.
        eos_token_ids: tokens that end an answer.
    """

    vocabulary: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str = ""
    file: str = ""


class GrammarChecked(msgspec.Struct, frozen=True):
    """Result of a check: a usable grammar, or an error.

    Attributes:
        grammar: the grammar in llguidance's notation.
        error: the reason why the grammar cannot be used; empty for a usable grammar.
        first: a bit for each token that may begin an answer, the lowest bit of a byte first. They include end tokens if
            an answer may be empty.
    """

    grammar: str = ""
    error: str = ""
    first: bytes = b""


class GrammarReader:
    """Checks grammars one after the other.

    Args:
        tokenizer: the model's tokenizer, which treats the texts of special tokens as ordinary texts.
        special: ids of the special tokens by their texts, for grammars that refer to them.
    """

    def __init__(self, tokenizer: LLTokenizer, special: Mapping[str, int] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def check(self, spec: GrammarSpec) -> GrammarChecked:
        """Compile a grammar and compute its first mask; ignore unknown formats of strings."""
        checked = self._compile(spec)
        for _ in range(_MAX_FORMATS):
            unknown = _UNKNOWN_FORMAT.search(checked.error) if spec.kind is GrammarKind.JSON_SCHEMA else None
            if unknown is None:
                break
            text = json.dumps(_without_format(json.loads(spec.text), unknown[1]))
            spec = msgspec.structs.replace(spec, text=text)
            checked = self._compile(spec)
        return checked

    def _compile(self, spec: GrammarSpec) -> GrammarChecked:
        began_s = time.thread_time()
        try:
            grammar = notation(_by_id(spec, self._special))
        except (ValueError, RecursionError) as error:
            return GrammarChecked(error=str(error) or "the grammar is nested too deeply")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if time.thread_time() - began_s <= _MAX_CHECK_S:
            _follow_forced(matcher)
        if matcher.is_error():
            return GrammarChecked(error=_reason(matcher.get_error(), spec))
        if time.thread_time() - began_s > _MAX_CHECK_S:
            return GrammarChecked(error="the grammar takes too long to compile; simplify it, above all its repetitions")
        if spec.least_tokens and not can_have_bytes(spec, grammar):
            least = spec.least_tokens
            return GrammarChecked(error=f"min_tokens is {least}, but no answer that follows this has so many tokens")
        return GrammarChecked(grammar, first=bytes(first))


def can_have_bytes(spec: GrammarSpec, grammar: str) -> bool:
    """Return whether an answer may have at least ``least_tokens`` bytes; True if unknown.

    Args:
        spec: the grammar in the form of a request.
        grammar: the grammar in llguidance's notation.
    """
    least = spec.least_tokens
    if spec.thoughts is not None or spec.kind is GrammarKind.LARK:  # Special tokens have no bytes.
        return True
    if spec.kind is GrammarKind.CHOICE:
        return any(len(choice.encode()) >= least for choice in json.loads(spec.text))
    if spec.kind is GrammarKind.REGEX:
        is_ascii = not _may_match(spec, r"(.|\n)*[^\x00-\x7f](.|\n)*")
        letters = least if is_ascii else -(-least // _MOST_BYTES_OF_A_LETTER)
        return _may_match(spec, rf"(.|\n){{{letters},}}")
    return _reaches(grammar, least)


def _may_match(spec: GrammarSpec, other: str) -> bool:
    """Return whether a text may match both a grammar's regex and another regex; True if unknown."""
    grammar = f"start: BOTH\nBOTH: /{_as_lark(spec.text)}/ & /{other}/"
    matcher = LLMatcher(_of_bytes(), grammar, log_level=0)
    if matcher.is_error():
        return True
    matcher.compute_bitmask()
    return not matcher.is_error()


def _reaches(grammar: str, least: int) -> bool:
    """Return whether a text of this many bytes may begin an answer; True if a short search does not decide it."""
    began_s = time.thread_time()
    paths = [_next_bytes(LLMatcher(_of_bytes(), grammar, log_level=0))]
    while paths:
        if time.thread_time() - began_s > _MAX_LENGTH_S:
            return True
        then = next(paths[-1], None)
        if then is None:
            paths.pop()
        elif then.is_error() or len(paths) >= least:
            return True
        else:
            paths.append(_next_bytes(then))
    return False


def _next_bytes(matcher: LLMatcher) -> Iterator[LLMatcher]:
    """Yield the matcher behind each byte that may come next; one with an error if that cannot be computed."""
    if matcher.is_error():
        yield matcher
        return
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        yield matcher
        return
    for byte in range(256):
        if mask[byte // 8] >> (byte % 8) & 1:
            then = matcher.deep_copy()
            then.consume_token(byte)
            yield then


def _follow_forced(matcher: LLMatcher) -> None:
    """Read the text that begins every answer, so that the matcher has its error if no answer can continue it.

    An example is a schema whose objects must contain one another without end.
    """
    followed = 0
    while followed < _MAX_FORCED and not matcher.is_error():
        forced = matcher.compute_ff_tokens()
        if not forced:
            return
        matcher.consume_tokens(forced)
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()
        followed += len(forced)


def _reason(error: str, spec: GrammarSpec) -> str:
    """Return a parser's error without its state, which may follow, and without lines that the sender did not write."""
    reason = error.partition("\n<")[0]
    if spec.kind is not GrammarKind.EBNF:
        reason = _POSITION.sub("", _LISTING.sub("", reason))
    return "no answer can follow the grammar" if reason.startswith("NoExtension") else reason


def _by_id(spec: GrammarSpec, special: Mapping[str, int]) -> GrammarSpec:
    """Return the grammar with references to special tokens by their ids."""
    if spec.kind is not GrammarKind.EBNF:
        return spec
    return msgspec.structs.replace(spec, text=with_token_ids(spec.text, special))


def notation(spec: GrammarSpec) -> str:
    """Return a grammar in llguidance's notation.

    Raises:
        ValueError: the text does not fit its kind.
    """
    answer = _notation_of_answer(spec)
    return answer if spec.thoughts is None else _behind_thoughts(spec.thoughts, answer)


def _notation_of_answer(spec: GrammarSpec) -> str:
    if spec.kind is GrammarKind.JSON_SCHEMA:
        text = spec.text
        if _PATTERNS in text:
            text = json.dumps(without_covered_patterns(json.loads(text)))
        return LLMatcher.grammar_from_json_schema(text, defaults=json_options(spec.whitespace))
    if spec.kind is GrammarKind.CHOICE:
        return choice_grammar(json.loads(spec.text))
    if spec.kind is GrammarKind.LARK:
        return _with_plain_schemas(spec.text) if _PATTERNS in spec.text else spec.text
    if spec.kind is GrammarKind.REGEX:
        return f"start: /{_as_lark(spec.text)}/"
    return grammar_from("ebnf", spec.text)


def _as_lark(regex: str) -> str:
    """Return a regex for a grammar. Only ASCII's digits, letters and spaces match, since a model chooses rare ones."""
    return regex_to_lark(regex, "dws")


def _behind_thoughts(thoughts: Thoughts, answer: str) -> str:
    """Return a grammar of thoughts and an answer, given the answer's grammar in llguidance's notation."""
    grammars = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    begin = _symbol(thoughts.begin)
    end = thoughts.end
    most = thoughts.most_tokens
    if most is not None:
        before = f"any{{0,{most}}} " if most else ""
        others = ",".join(map(str, (end.token, *thoughts.stops)))
        text = f"text: {before}<[{end.token}]>\nany: <[^{others}]>"
    elif end.token is not None:
        text = f"text: TEXT <[{end.token}]>"
    else:  # A lazy lexeme ends as early as possible, so that thoughts do not continue beyond their end.
        text = f"text[lazy]: TEXT {json.dumps(end.text)}"
    start = f"{begin}? text SPACE? @answer" if thoughts.are_open else f"({begin} text SPACE?)? @answer"
    lines = ["%llguidance {}", f"start: {start}", text, r"TEXT: /(.|\n)*/", r"SPACE: /\s+/"]
    own = {"lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [own, {**grammars[0], "name": "answer"}, *grammars[1:]]})


def without_covered_patterns(schema: Any) -> Any:
    """Return a schema without the patterns that match only names of its own properties.

    No further property can have such a name, and the parser would reach a dead end there.
    """
    schema = copy.deepcopy(schema)
    for each in objects_in(schema):
        names = each.get("properties")
        patterns = each.get("patternProperties")
        if isinstance(names, dict) and isinstance(patterns, dict):
            needed = {pattern: of for pattern, of in patterns.items() if not _only_matches(pattern, names)}
            # A property that matches a pattern must also follow the pattern's schema.
            for pattern in patterns.keys() - needed.keys():
                for name in names:
                    if _matches(pattern, name) and names[name] != patterns[pattern]:
                        names[name] = {"allOf": [names[name], patterns[pattern]]}
            each["patternProperties"] = needed
    return schema


def _with_plain_schemas(grammar: str) -> str:
    """Return a grammar in Lark whose schemas lack the patterns that match only names of properties."""
    parts = []
    end = 0
    while (at := grammar.find(_JSON_RULE, end)) >= 0:
        begin = at + len(_JSON_RULE)
        schema, after = json.JSONDecoder().raw_decode(grammar, begin)
        parts += [grammar[end:begin], json.dumps(without_covered_patterns(schema))]
        end = after
    return "".join(parts) + grammar[end:]


def _string_matcher(pattern: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return LLMatcher(_of_bytes(), grammar, log_level=0)


@lru_cache(1)
def _of_bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _matches(pattern: str, name: str) -> bool:
    matcher = _string_matcher(pattern)
    text = json.dumps(name, ensure_ascii=False).encode()
    return not matcher.is_error() and matcher.try_consume_tokens([*text]) == len(text)


def _only_matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches only texts in ``names``: no other letter may ever follow."""
    texts = [json.dumps(name, ensure_ascii=False).encode() for name in names]
    followers: dict[bytes, set[int]] = {}
    for text in texts:
        for at in range(len(text)):
            followers.setdefault(text[:at], set()).add(text[at])
    matcher = _string_matcher(pattern)
    left = [(b"", matcher)]
    while left:
        prefix, matcher = left.pop()
        if matcher.is_error():
            return False
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return False
        allowed = {byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1}
        if not allowed <= followers.get(prefix, set()):
            return False
        for byte in allowed:
            then = matcher.deep_copy()
            then.consume_token(byte)
            text = prefix + bytes([byte])
            if text not in texts:
                left.append((text, then))
    return True


def _symbol(marker: Marker) -> str:
    return json.dumps(marker.text) if marker.token is None else f"<[{marker.token}]>"


def _without_format(schema: Any, name: str) -> Any:
    """Return a schema without the format ``name`` of its strings."""
    if isinstance(schema, list):
        return [_without_format(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_format(each, name) for key, each in schema.items() if (key, each) != ("format", name)}


def json_options(whitespace: str) -> "JsonCompileOptions":
    """Return llguidance's options for JSON with ``whitespace`` between its parts."""
    whitespace = whitespace.replace(r"\s", _JSON_SPACE)
    return {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}


def choice_grammar(choices: list[str]) -> str:
    """Return the grammar of a choice between strings, in llguidance's notation."""
    return "start: " + " | ".join(map(json.dumps, choices))


def main() -> None:
    """Check grammars from standard input until the input ends."""
    run_helper(_prepare, _MEMORY_BYTES)


def _prepare(setup_message: bytes) -> Callable[[bytes], bytes]:
    setup = msgspec.msgpack.decode(setup_message, type=GrammarSetup)
    content = setup.tokenizer or Path(setup.file).read_text()
    tokenizer = LLTokenizer(
        without_special_texts(content), n_vocab=setup.vocabulary, eos_token=list(setup.eos_token_ids)
    )
    reader = GrammarReader(tokenizer, special_token_ids(content))
    threading.stack_size(_STACK_BYTES)
    thread = ThreadPoolExecutor(1)
    thread.submit(int).result()

    def answer(message: bytes) -> bytes:
        spec = msgspec.msgpack.decode(message, type=GrammarSpec)
        return msgspec.msgpack.encode(thread.submit(reader.check, spec).result())

    return answer


if __name__ == "__main__":
    main()
