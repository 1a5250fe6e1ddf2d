"""What all formats of tool calls share: events, output, and readers of the parts of a call.

A parser is a generator that takes one letter at a time, so that it cannot depend on how a text is cut into deltas. The
end of the text is the empty string.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lorikeet.chat.json_text import read_json, write_json

_T = TypeVar("_T")
Reads = Generator[None, str, _T]
"""Takes letters, and returns a value in the end."""

END = ""
"""What a parser gets instead of a letter at the end of the text."""
_SPACE = " \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": '"NaN"', "nan": '"NaN"'}
_WORDS |= {f"{sign}{word}": f'"{sign}Infinity"' for sign in ("", "-") for word in ("Infinity", "inf")}
"""What models write where JSON has another word, or only a string can say it."""
_HEX = "0123456789abcdefABCDEF"
_ESCAPES = '"\\/bfnrt'
_NO_CHARACTER = "\\ufffd"
_ARGUMENTS = ('"arguments"', '"parameters"')


class Call(NamedTuple):
    """A complete call.

    Attributes:
        name: of the function.
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is part of no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. ``index`` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | CallStart | CallArguments

Parameters = Mapping[str, Any]
"""JSON schema of a function's arguments."""


class Output:
    """Collects the events of a parser. Spaces and newlines beside calls are left out, all other text is kept.

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
        """Remember a letter while it is open whether it is part of a call."""
        if self._raw is not None:
            self._raw.append(letter)

    def suspect(self, read: str = "") -> None:
        """Remember what follows, and ``read``, which was read already, until a call begins or :meth:`give_back`."""
        if self._raw is None:
            self._raw = [read]

    def give_back(self) -> None:
        """What was remembered is no call: make it content. Nothing is remembered if a call has begun meanwhile."""
        raw = self._raw
        self._raw = None
        self.content("".join(raw or ()))

    def forget(self) -> None:
        """What was remembered belongs to the calls before."""
        self._raw = None

    def content(self, text: str) -> None:
        """Add text that is part of no call."""
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
        """Return the events since the last time."""
        events = self._events
        self._events = []
        return events

    def end(self) -> None:
        """The text has ended: what is remembered or held back is content, except spaces after calls."""
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
        read: the generator of a format.
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
        """Return the events of text held back, at the end."""
        with suppress(StopIteration):
            self._reads.send(END)
        self._output.end()
        return self._output.take()

    def _run(self, read: Callable[[Output], Reads[None]]) -> Reads[None]:
        yield from read(self._output)
        yield from content_until(self._output)


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: vLLM's name of its parser.
        markers: texts that may be special tokens, and are kept in the text of an answer.
        hints: texts of which a chat template of this family has one.
        reader: returns a generator that finds calls, given the schemas of the functions by name.
        write: returns calls as the model writes them.
        grammar: returns a grammar of one call, or of one or more calls; raises ValueError if a call cannot be written.
        id_letters: number of letters of a call's id; 0 for any.
    """

    name: str
    markers: tuple[str, ...]
    hints: tuple[str, ...]
    reader: Callable[[Mapping[str, Parameters]], Callable[[Output], Reads[None]]]
    write: Callable[[Sequence[Call]], str]
    grammar: "Callable[[CallGrammar], str]"
    id_letters: int = 0

    def parser(self, functions: Mapping[str, Parameters]) -> Parser:
        """Return a parser of one answer; ``functions`` has their schemas by name."""
        return Parser(self.reader(functions))


class CallGrammar:
    """Builds a grammar in llguidance's dialect of Lark.

    Args:
        functions: those that may be called, with their schemas.
        parallel: whether there may be several calls.
        token_id: returns the id of a special token, None of other text.
        content: JSON schema that an answer without calls follows; None if it must call.
        is_free: whether there may be any text instead of calls, or before them where the format allows that.
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
        """Return a symbol for a marker: the special token, if there is one, or its text."""
        token_id = self._token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def rule(self, body: str) -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a lexeme, and return its name."""
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
        """Return one call, or one or more of them with a separator between."""
        between = f"{literal(separator)} " if separator else ""
        return f"{call} ({between}{call})*" if self.parallel else call

    def build_behind_text(self, marker: str, body: str, separator: str = "", *, is_list: bool = False) -> str:
        """Return the grammar of calls that may follow text.

        Args:
            marker: text or special token that begins a call, or all of them.
            body: what follows the marker.
            separator: text between two calls.
            is_list: whether ``body`` has all calls.
        """
        if not self._is_free:
            call = self.rule(f"{self.marker(marker)} {body}")
            return self.build(call if is_list else self.several(call, separator))
        if self._token_id(marker) is not None:
            self._rules.append(f"before: TEXT {self.marker(marker)}")
        else:  # a lazy lexeme ends as soon as it can, so that text does not run on through its end
            self._rules.append(f"before[lazy]: TEXT {literal(marker)}")
        return self.build(f"(before {body}){'*' if self.parallel else '?'} TEXT")

    def build_alone(self, calls: str, other: str) -> str:
        """Return the grammar of calls that are a whole answer; ``other`` is a regex of all answers that are none."""
        if not self._is_free:
            return self.build(calls)
        self._rules.append(f"OTHER: {other}")
        return self.build(f"{calls} | OTHER")

    def build(self, start: str) -> str:
        """Return the grammar, given the calls."""
        if self._content is not None:
            start = f"({start}) | {self.json(self._content)}"
        lines = [f"start: {start}"]
        if self._is_free:
            lines.append(r"TEXT: /(.|\n)*/")
        return "\n".join(["%llguidance {}", *lines, *self._rules])


def literal(text: str) -> str:
    """Return a text as it is written in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def as_object(schema: Parameters) -> dict[str, Any]:
    """Return a function's schema as one of an object, which has no other properties unless the schema allows them."""
    only = {"additionalProperties": False} if "properties" in schema or not schema else {}
    return {"type": "object", "properties": {}, **only, **schema}


def content_until(output: Output, *markers: str) -> Reads[str]:
    """Pass letters on as content; return the first marker, ``END`` if there is none."""
    return (yield from _until(markers, output.content))


def structure_until(output: Output, *markers: str) -> Reads[str]:
    """Pass text within calls on as content, since nothing may be lost; a marker that is cut off is none."""
    text: list[str] = []
    marker = yield from _until(markers, text.append, lambda held: None if len(held) > 1 else text.append(held))
    if "".join(text).strip(_SPACE):
        output.content("".join(text))
    return marker


def text_until(*markers: str) -> Reads[tuple[str, str]]:
    """Return the text before the first marker, and the marker; ``END`` if there is none."""
    text: list[str] = []
    marker = yield from _until(markers, text.append)
    return "".join(text), marker


def _until(
    markers: tuple[str, ...], sink: Callable[[str], None], at_end: Callable[[str], None] | None = None
) -> Reads[str]:
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
    """Return the next letter that is no space."""
    while (letter := (yield)) and letter in _SPACE:
        pass
    return letter


def rest_of(first: str, *markers: str) -> Reads[str]:
    """Return the marker that begins with ``first``, which was read, and the next letters; empty for none."""
    found = first
    while found not in markers:
        if not any(marker.startswith(found) for marker in markers):
            return ""
        letter = yield
        if not letter:
            return ""
        found += letter
    return found


def json_string() -> Reads[str]:
    """Return a JSON string with its quotes, of which the first was read; at the end of the text what there is of it."""
    text: list[str] = []
    yield from _passed_string(text.append)
    return "".join(text)


def json_container(first: str, sink: Callable[[str], None]) -> Reads[bool]:
    """Pass an array or object on, whose bracket ``first`` was read; return whether it is complete."""
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
    """Return a number or a name as JSON has it."""
    return _WORDS.get(word, word)


def _passed_string(sink: Callable[[str], None]) -> Reads[str]:
    """Pass a string on as JSON has it, with whole characters; return its last quote. The first was read."""
    sink('"')
    half = ""  # the escape of the first half of a character, which waits for the second
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
    """Return a letter or an escape of a string as JSON has it, and the next letter."""
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
    """Whether an escape stands for half a character: the first half from U+D800 on, the second from U+DC00 on."""
    return len(piece) == 6 and piece.startswith("\\u") and begin <= int(piece[2:], 16) < begin + 0x400


def json_value(first: str) -> Reads[tuple[str, str]]:
    """Return a JSON value whose letter ``first`` was read, and the next letter after it that is no space."""
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
    """Read a call as an object with ``name`` and ``arguments`` or ``parameters``, whose brace was read.

    Returns:
        Whether it was one, and is complete. Else ``Output.give_back`` makes what does not belong to a call content.
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
    """Return arguments as an object, empty if they are none: some models write a string that holds JSON, or null."""
    if value in ("null", '""'):
        return "{}"
    text = _text_of(value)
    if not text:
        return value if value.startswith("{") else ""
    try:  # text within a string has not been read as JSON yet
        inner = read_json(text)
    except ValueError:
        return text if text.lstrip(_SPACE).startswith("{") else ""
    return write_json(inner) if isinstance(inner, dict) else ""


def call_as_json(call: Call, key: str = "arguments") -> str:
    """Return a call as a JSON object."""
    return _opening(call.name, key) + call.arguments + "}"


def _opening(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
