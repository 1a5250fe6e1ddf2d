"""Events, output, grammars and readers that all formats of tool calls share.

A parser is a generator that takes one letter at a time, so that it cannot depend on the cuts between deltas. The empty
string marks the end of the text.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lorikeet.chat.json_text import read_json, write_json

_T = TypeVar("_T")
Reads = Generator[None, str, _T]
"""Generator that takes letters, and returns a value at its end."""

END = ""
"""Mark that a parser gets, instead of a letter, at the end of the text."""
_SPACE = " \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": '"NaN"', "nan": '"NaN"'}
_WORDS |= {f"{sign}{word}": f'"{sign}Infinity"' for sign in ("", "-") for word in ("Infinity", "inf")}
"""JSON for words that models write although JSON has another word, or only a string."""
_HEX = "0123456789abcdefABCDEF"
_ESCAPES = '"\\/bfnrt'
_NO_CHARACTER = "\\ufffd"
_ARGUMENTS = ('"arguments"', '"parameters"')


class Call(NamedTuple):
    """Complete call of a function.

    Attributes:
        name: the function's name.
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begin of a call. ``index`` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | CallStart | CallArguments

Parameters = Mapping[str, Any]
"""JSON schema of a function's arguments."""


class Output:
    """Collects the events of a parser, and drops spaces and newlines beside calls but no other text.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._events: list[Event] = []
        self._raw: list[str] | None = None
        self._space = ""
        self._follows_call = False

    def see(self, letter: str) -> None:
        """Remember a letter while the parser suspects a call."""
        if self._raw is not None:
            self._raw.append(letter)

    def suspect(self, read: str = "") -> None:
        """Remember ``read`` and the next letters until a call begins or :meth:`give_back` is called."""
        if self._raw is None:
            self._raw = [read]

    def give_back(self) -> None:
        """Make the remembered text content, since it is not a call. A call that has begun leaves no such text."""
        raw = self._raw
        self._raw = None
        self.content("".join(raw or ()))

    def forget(self) -> None:
        """Drop the remembered text, which belongs to the calls before."""
        self._raw = None

    def content(self, text: str) -> None:
        """Add text outside calls."""
        text = self._space + text
        kept = text.rstrip(_SPACE)
        self._space = text[len(kept) :]
        if kept:
            self._add_text(kept.lstrip(_SPACE) if self._follows_call else kept)
            self._follows_call = False

    def start(self, name: str) -> None:
        """Begin a call."""
        self._raw = None
        self._space = ""
        self._follows_call = True
        self._events.append(CallStart(self.calls, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self._events.append(CallArguments(self.calls - 1, text))

    def take(self) -> list[Event]:
        """Return the events since the last call of this method."""
        events = self._events
        self._events = []
        return events

    def end(self) -> None:
        """End the text: make remembered and held-back text content, except spaces after calls."""
        self.give_back()
        if not self.calls:
            self._add_text(self._space)
        self._space = ""

    def _add_text(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + text)
        elif text:
            self._events.append(Content(text))


class Parser:
    """Finds the calls in an answer.

    Args:
        read: makes the generator of a format.
    """

    def __init__(self, read: Callable[[Output], Reads[None]]) -> None:
        self._output = Output()
        self._reads = self._run(read)
        next(self._reads)

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that it completes."""
        for letter in text:
            self._output.see(letter)
            self._reads.send(letter)
        return self._output.take()

    def finish(self) -> list[Event]:
        """Return the events of text held back, at the end of the text."""
        with suppress(StopIteration):
            self._reads.send(END)
        self._output.end()
        return self._output.take()

    def _run(self, read: Callable[[Output], Reads[None]]) -> Reads[None]:
        yield from read(self._output)
        yield from content_until(self._output)


@dataclass(frozen=True)
class ToolFormat:
    """Format of calls in a family of models.

    Attributes:
        name: vLLM's name of its parser.
        markers: texts that may be special tokens, and stay in the text of an answer.
        hints: texts; a chat template of this family contains one of them.
        reader: returns a generator that finds calls, given the schemas of the functions by name.
        write: returns the text of calls in this format.
        grammar: returns a grammar of one call, or of one or more calls; raises ValueError if a call cannot be written.
        id_letters: number of letters of a call's id; 0 for any number.
    """

    name: str
    markers: tuple[str, ...]
    hints: tuple[str, ...]
    reader: Callable[[Mapping[str, Parameters]], Callable[[Output], Reads[None]]]
    write: Callable[[Sequence[Call]], str]
    grammar: "Callable[[CallGrammar], str]"
    id_letters: int = 0

    def parser(self, functions: Mapping[str, Parameters]) -> Parser:
        """Return a parser of one answer, given the schemas of the functions by name."""
        return Parser(self.reader(functions))


class CallGrammar:
    """Builds a grammar in llguidance's dialect of Lark.

    Args:
        functions: schemas of the functions that may be called, by name.
        parallel: whether an answer may contain several calls.
        token_id: returns the id of a special token; None for other text.
        content: JSON schema of an answer without calls; None if the answer must call.
        is_free: whether any text may replace calls, or precede them where the format allows it.
    """

    def __init__(
        self,
        functions: Mapping[str, Parameters],
        parallel: bool,
        token_id: Callable[[str], int | None],
        content: Any = None,
        is_free: bool = False,
    ) -> None:
        self.functions = functions
        self.parallel = parallel
        self._token_id = token_id
        self._content = content
        self._is_free = is_free
        self._rules: list[str] = []

    def marker(self, text: str) -> str:
        """Return a symbol for a marker: its special token, or its text if it is not a token."""
        token_id = self._token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def rule(self, body: str) -> str:
        """Add a rule; return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a lexeme; return its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def json(self, schema: Any) -> str:
        """Return a symbol for a JSON value, written with one space after each comma and colon."""
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        described = {} if schema is True else schema
        return self.rule("%json " + json.dumps({**described, "x-guidance": style}))

    def json_property(self, schema: Parameters, name: str) -> str:
        """Return a symbol for the JSON value of a property, which may refer to definitions in ``schema``."""
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        of_property = schema["properties"][name]
        return self.json({**(of_property if isinstance(of_property, dict) else {}), **definitions})

    def call_object(self, key: str = "arguments") -> str:
        """Return a symbol for a call as a JSON object."""
        calls = [
            " ".join((literal(_opening(name, key)), self.json(as_object(schema)), literal("}")))
            for name, schema in self.functions.items()
        ]
        return self.rule(" | ".join(calls))

    def several(self, call: str, separator: str = "") -> str:
        """Return a symbol for one call, or for one or more with a separator between them."""
        between = f"{literal(separator)} " if separator else ""
        return f"{call} ({between}{call})*" if self.parallel else call

    def build_behind_text(self, marker: str, body: str, separator: str = "", *, is_list: bool = False) -> str:
        """Return the grammar of calls that may follow text.

        Args:
            marker: text or special token that begins each call, or all calls.
            body: symbol for the text behind the marker.
            separator: text between two calls.
            is_list: whether ``body`` contains all calls.
        """
        if not self._is_free:
            call = self.rule(f"{self.marker(marker)} {body}")
            return self.build(call if is_list else self.several(call, separator))
        if self._token_id(marker) is not None:
            self._rules.append(f"before: TEXT {self.marker(marker)}")
        else:  # A lazy lexeme ends as early as possible, so that text does not continue through the marker.
            self._rules.append(f"before[lazy]: TEXT {literal(marker)}")
        return self.build(f"(before {body}){'*' if self.parallel else '?'} TEXT")

    def build_alone(self, calls: str, other: str) -> str:
        """Return the grammar of calls that are a whole answer; ``other`` is a regex of all answers without calls."""
        if not self._is_free:
            return self.build(calls)
        self._rules.append(f"OTHER: {other}")
        return self.build(f"{calls} | OTHER")

    def build(self, start: str) -> str:
        """Return the whole grammar, given the rule of its start."""
        if self._content is not None:
            start = f"({start}) | {self.json(self._content)}"
        lines = [f"start: {start}"]
        if self._is_free:
            lines.append(r"TEXT: /(.|\n)*/")
        return "\n".join(["%llguidance {}", *lines, *self._rules])


def literal(text: str) -> str:
    """Return the literal of a text in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def as_object(schema: Parameters) -> dict[str, Any]:
    """Return a function's schema as an object's, without further properties unless the schema allows them."""
    only = {"additionalProperties": False} if "properties" in schema or not schema else {}
    return {"type": "object", "properties": {}, **only, **schema}


def content_until(output: Output, *markers: str) -> Reads[str]:
    """Pass letters on as content; return the first marker, or ``END`` at the end of the text."""
    return (yield from passed_until(output.content, *markers))


def structure_until(output: Output, *markers: str) -> Reads[str]:
    """Pass text between the parts of calls on as content, so that nothing is lost, up to a whole marker or ``END``."""
    text: list[str] = []
    marker = yield from passed_until(
        text.append, *markers, at_end=lambda held: None if len(held) > 1 else text.append(held)
    )
    if "".join(text).strip(_SPACE):
        output.content("".join(text))
    return marker


def text_until(*markers: str) -> Reads[tuple[str, str]]:
    """Return the text before the first marker, and the marker, or ``END`` at the end of the text."""
    text: list[str] = []
    marker = yield from passed_until(text.append, *markers)
    return "".join(text), marker


def passed_until(sink: Callable[[str], None], *markers: str, at_end: Callable[[str], None] | None = None) -> Reads[str]:
    """Pass letters on; return the first marker, or ``END`` at the end of the text.

    Args:
        sink: takes the letters before the marker, as soon as they cannot begin one.
        markers: texts that end the letters.
        at_end: takes the beginning of a marker at the end of the text; ``sink`` by default.
    """
    held = ""
    while letter := (yield):
        held += letter
        while held and not any(marker.startswith(held) for marker in markers):
            sink(held[0])
            held = held[1:]
        if held in markers:
            return held
    if held:
        (at_end or sink)(held)
    return END


def after_space() -> Reads[str]:
    """Skip spaces; return the next letter."""
    while (letter := (yield)) and letter in _SPACE:
        pass
    return letter


def rest_of(first: str, *markers: str) -> Reads[str]:
    """Return the marker that ``first``, already read, and the next letters form; empty if they form none."""
    found = first
    while found not in markers:
        if not any(marker.startswith(found) for marker in markers):
            return ""
        letter = yield
        if not letter:
            return ""
        found += letter
    return found


def end_tag(first: str, *markers: str) -> Reads[str]:
    """Return the marker that ``first``, already read, and the next letters form, or its beginning if the text ends.

    The result is empty if they form none, and for one letter, which may be text.
    """
    found = first
    while found not in markers:
        if not any(marker.startswith(found) for marker in markers):
            return ""
        letter = yield
        if not letter:
            return found if len(found) > 1 else ""
        found += letter
    return found


def json_string() -> Reads[str]:
    """Return a JSON string with its quotes, the first already read; at the end of the text, its beginning."""
    text: list[str] = []
    yield from _passed_string(text.append)
    return "".join(text)


def json_container(first: str, sink: Callable[[str], None]) -> Reads[bool]:
    """Pass on an array or object whose bracket ``first`` was read; return whether it is complete."""
    sink(first)
    depth = 1
    while depth:
        letter = yield
        word = ""
        while letter and letter not in '{}[],:"' and letter not in _SPACE:
            word += letter
            letter = yield
        sink(_as_json_word(word) if letter else word)
        if not letter:
            return False
        if letter == '"':
            letter = yield from _passed_string(sink)
            if not letter:
                return False
            continue
        depth += (letter in "{[") - (letter in "}]")
        sink(letter)
    return True


def _as_json_word(word: str) -> str:
    """Return a number or a name in JSON's form."""
    return _WORDS.get(word, word)


def _passed_string(sink: Callable[[str], None]) -> Reads[str]:
    """Pass on a string in JSON's form, with whole characters; return its last quote. The first was read."""
    sink('"')
    half = ""  # The escape of the first half of a character waits here for the second.
    letter = yield
    while letter and letter != '"':
        piece, letter = yield from _piece_of_string(letter)
        first = half
        half = ""
        if _is_half(piece, 0xDC00):
            sink(first + piece if first else _NO_CHARACTER)
            continue
        if first:
            sink(_NO_CHARACTER)
        if _is_half(piece, 0xD800):
            half = piece
        else:
            sink(piece)
    if half:
        sink(_NO_CHARACTER)
    if letter:
        sink(letter)
    return letter


def _piece_of_string(first: str) -> Reads[tuple[str, str]]:
    """Return a letter or an escape of a string in JSON's form, and the next letter."""
    if first != "\\":
        return (first if first >= " " else json.dumps(first)[1:-1]), (yield)
    kind = yield
    if not kind:
        return first, END
    if kind != "u":
        return (first if kind in _ESCAPES else "\\\\") + kind, (yield)
    digits = ""
    letter = yield
    while letter and letter in _HEX and len(digits) < 4:
        digits += letter
        letter = yield
    return ("\\u" if len(digits) == 4 or not letter else "\\\\u") + digits, letter


def _is_half(piece: str, begin: int) -> bool:
    """Return whether an escape is half a character: the first half from U+D800 on, the second from U+DC00 on."""
    return len(piece) == 6 and piece.startswith("\\u") and begin <= int(piece[2:], 16) < begin + 0x400


def json_value(first: str) -> Reads[tuple[str, str]]:
    """Return a JSON value whose letter ``first`` was read, and the next letter after it and its spaces."""
    if first and first in "{[":
        text: list[str] = []
        is_complete = yield from json_container(first, text.append)
        return "".join(text), (yield from after_space()) if is_complete else END
    if first == '"':
        string = yield from json_string()
        return string, (yield from after_space())
    if not first or first in ",}]":
        return "", first
    value = first
    letter = yield
    while letter and letter not in ",}]" and letter not in _SPACE:
        value += letter
        letter = yield
    return value, (yield from after_space()) if letter and letter in _SPACE else letter


def call_object(output: Output) -> Reads[bool]:
    """Read a call from an object with ``name`` and ``arguments`` or ``parameters``, whose brace was read.

    Returns:
        Whether the object was a complete call. Otherwise ``Output.give_back`` makes text outside a call content.
    """
    output.suspect("{")
    name = ""
    arguments = ""
    has_begun = False
    letter = yield from after_space()
    while letter == '"':
        key = yield from json_string()
        if (yield from after_space()) != ":":
            return False
        letter = yield from after_space()
        if key in _ARGUMENTS and letter == "{" and name and not has_begun:
            output.start(name)
            has_begun = True
            if not (yield from json_container("{", output.arguments)):
                return False
            output.suspect()
            letter = yield from after_space()
        else:
            value, letter = yield from json_value(letter)
            if key == '"name"' and not name:
                name = _text_of(value)
                if not name:
                    return False
            elif key in _ARGUMENTS and not arguments:
                arguments = _object_of(value)
            if name and arguments and not has_begun:
                output.start(name)
                output.arguments(arguments)
                has_begun = True
                output.suspect(letter)
        if letter != ",":
            break
        letter = yield from after_space()
    if has_begun and letter == "}":
        output.forget()
        return True
    return False


def call_list(output: Output) -> Reads[bool]:
    """Read an array of calls whose bracket was read; return whether it is complete."""
    letter = yield from after_space()
    while letter == "{":
        if not (yield from call_object(output)):
            return False
        output.suspect()
        letter = yield from after_space()
        if letter == ",":
            letter = yield from after_space()
    if letter == "]" and output.calls > 0:
        output.forget()
        return True
    return False


def _text_of(value: str) -> str:
    """Return the text of a JSON string; empty for anything else."""
    try:
        text = read_json(value)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _object_of(value: str) -> str:
    """Return arguments as an object, empty for other values. Some models write a string with JSON, or null."""
    if value in ("null", '""'):
        return "{}"
    text = _text_of(value)
    if not text:
        return value if value.startswith("{") else ""
    try:  # Text within a string has not been read as JSON yet.
        inner = read_json(text)
    except ValueError:
        return text if text.lstrip(_SPACE).startswith("{") else ""
    return write_json(inner) if isinstance(inner, dict) else ""


def call_as_json(call: Call, key: str = "arguments") -> str:
    """Return a call as a JSON object."""
    return _opening(call.name, key) + call.arguments + "}"


def _opening(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
