"""Turns a body's fields for structured output into a grammar, and checks it before use.

The fields come from OpenAI (``response_format``), vLLM (``structured_outputs``, and the older ``guided_*``) and SGLang
(``regex``, ``ebnf``, ``json_schema``).
"""

import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lorikeet.chat.grammar_process import (
    WHITESPACE,
    GrammarChecked,
    GrammarKind,
    GrammarSetup,
    GrammarSpec,
    json_options,
)
from lorikeet.chat.protocol import GenerationBody
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.http.errors import bad_request, not_supported
from lorikeet.http.helper_processes import HelperProcesses
from lorikeet.http.logs import log

MAX_GRAMMAR_BYTES = 2**17
"""Most bytes of one grammar in a body."""
_MAX_ALL_BYTES = 2**24
"""Most bytes of a request's grammars over all its sequences; each sequence is sent with its own copy."""
_CHECK_S = 10.0
_MAX_CHECKED = 128
_ANY_OBJECT = '{"type":"object"}'

_OPTIONS = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "backend"}
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def grammar_spec(body: GenerationBody) -> GrammarSpec | None:
    """Return the grammar that a body requests; None without one.

    Raises:
        ApiError: 400, fields contradict each other, or a field is not valid; 501, a form is not supported.
    """
    found = [spec for spec in (_response_format(body), _structured_outputs(body), *_single_fields(body)) if spec]
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(spec.param for spec in found))
        raise bad_request(f"An answer can follow only one grammar, but the body has {names}.", found[1].param)
    if not found:
        return None
    (spec,) = found
    if len(spec.text) > MAX_GRAMMAR_BYTES:
        most = f"at most {MAX_GRAMMAR_BYTES} are allowed"
        raise bad_request(f"{spec.param}: {len(spec.text)} characters; {most}.", spec.param)
    return spec


def json_schema(schema: Any, param: str, options: Mapping[str, Any] | None = None) -> GrammarSpec:
    """Return the grammar of JSON that a schema describes.

    Args:
        schema: the schema as an object or as text.
        param: the field of the schema, for errors.
        options: vLLM's ``disable_any_whitespace``, ``disable_additional_properties`` and ``whitespace_pattern``.

    Raises:
        ApiError: 400, ``schema`` is not a JSON schema.
    """
    options = options or {}
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict | bool):
            raise bad_request(f"{param}: a JSON schema must be an object.", param)
        if options.get("disable_additional_properties"):
            schema = _closed(schema)
        text = json.dumps(schema)
    except json.JSONDecodeError as error:
        raise bad_request(f"{param}: not valid JSON: {error}.", param) from error
    except RecursionError:
        raise bad_request(f"{param}: nested too deeply.", param) from None
    whitespace = "" if options.get("disable_any_whitespace") else options.get("whitespace_pattern") or WHITESPACE
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, param, whitespace)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it lists."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema and "patternProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _response_format(body: GenerationBody) -> GrammarSpec | None:
    wanted = body.response_format
    if wanted is None or wanted.get("type") == "text":
        return None
    match wanted.get("type"):
        case "json_object":
            return json_schema(wanted.get("schema") or _ANY_OBJECT, "response_format")
        case "json_schema":
            described = wanted.get("json_schema")
            if not isinstance(described, dict) or described.get("schema") is None:
                raise bad_request("response_format.json_schema: must be an object with a schema.", "response_format")
            return json_schema(described["schema"], "response_format")
        case "structural_tag":
            return structural_tag(wanted, "response_format")
        case kind:
            raise bad_request(
                f"response_format.type: {kind!r} must be one of text, json_object, json_schema and structural_tag.",
                "response_format",
            )


def _structured_outputs(body: GenerationBody) -> GrammarSpec | None:
    wanted = {key: value for key, value in (body.structured_outputs or {}).items() if value is not None}
    if unknown := wanted.keys() - _OPTIONS - set(_CONSTRAINTS):
        raise bad_request(f"structured_outputs: the field {min(unknown)!r} is unknown.", "structured_outputs")
    given = [name for name in _CONSTRAINTS if wanted.get(name, False) is not False]
    if len(given) > 1:
        raise bad_request(f"structured_outputs: {' and '.join(given)} exclude each other.", "structured_outputs")
    if not given:
        return None
    (name,) = given
    param = f"structured_outputs.{name}"
    value = wanted[name]
    if name == "json_object":
        return json_schema(_ANY_OBJECT, param, wanted)
    if name == "structural_tag":
        try:
            tag = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise bad_request(f"{param}: not valid JSON: {error}.", param) from error
        return structural_tag(tag, param)
    return _constraint(name, value, param, wanted)


def _single_fields(body: GenerationBody) -> list[GrammarSpec]:
    options = {"whitespace_pattern": body.guided_whitespace_pattern}
    fields = (
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("json_schema", "json", body.json_schema),
        ("regex", "regex", body.regex),
        ("ebnf", "grammar", body.ebnf),
    )
    return [_constraint(name, value, param, options) for param, name, value in fields if value is not None]


def _constraint(name: str, value: Any, param: str, options: Mapping[str, Any]) -> GrammarSpec:
    if name == "json":
        return json_schema(value, param, options)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise bad_request(f"{param}: must be a list of strings that are not empty.", param)
        return GrammarSpec(GrammarKind.CHOICE, json.dumps(value), param)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{param}: must be a string that is not empty.", param)
    return GrammarSpec(GrammarKind.REGEX if name == "regex" else GrammarKind.EBNF, value, param)


def structural_tag(tag: Any, param: str) -> GrammarSpec:
    """Return the grammar of free text with tagged parts that follow schemas.

    Args:
        tag: ``structures``, each with ``begin``, ``schema`` and ``end``, and ``triggers``, texts that begin each
            ``begin``. A trigger in the text must continue with one of the structures.
        param: the field of the tag, for errors.

    Raises:
        ApiError: 400, the tag has another form; 501, its form is not supported.
    """
    if isinstance(tag, dict) and "format" in tag:
        raise not_supported(f"{param}: structural tags with a format are not supported; use structures.", param)
    try:
        known = msgspec.convert(tag, _StructuralTag)
    except msgspec.ValidationError as error:
        raise bad_request(f"{param}: {error}.", param) from error
    parts = []
    for structure in known.structures:
        trigger = next((each for each in known.triggers if each and structure.begin.startswith(each)), None)
        if trigger is None:
            raise bad_request(f"{param}: {structure.begin!r} does not begin with a trigger.", param)
        parts.append(TaggedPart(trigger, structure.begin, json_schema(structure.schema, param).text, structure.end))
    if not parts:
        raise bad_request(f"{param}: structures must not be empty.", param)
    return tagged_text(parts, param)


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] = {}


class _StructuralTag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


class TaggedPart(msgspec.Struct, frozen=True):
    """Part of an answer that follows a JSON schema.

    Attributes:
        trigger: text that must continue with this part, or with another part of the same trigger.
        begin: text before the JSON, which begins with ``trigger``.
        schema: JSON schema, as text.
        end: text after the JSON.
        token: id of a trigger that is a special token of the model; None for text.
    """

    trigger: str
    begin: str
    schema: str
    end: str
    token: int | None = None


def tagged_text(parts: Sequence[TaggedPart], param: str) -> GrammarSpec:
    """Return the grammar of free text in which every trigger continues with one of its parts.

    Args:
        parts: at least one.
        param: the field of the parts, for errors.
    """
    triggers = list(dict.fromkeys((part.trigger, part.token) for part in parts))
    names = " | ".join(f"part_{at}" for at in range(len(triggers)))
    lines = ["%llguidance {}", f"start: ({names})* TEXT", r"TEXT: /(.|\n)*/"]
    for at, trigger in enumerate(triggers):
        of_trigger = [part for part in parts if (part.trigger, part.token) == trigger]
        bodies = " | ".join(
            f"{literal(part.begin[len(part.trigger) :])} {json_rule(part.schema)} {literal(part.end)}"
            for part in of_trigger
        )
        text, token = trigger
        lines.append(f"part_{at}: trigger_{at} ({bodies})")
        # A lazy lexeme ends as early as possible, so that text does not continue through a trigger.
        lines.append(
            f"trigger_{at}[lazy]: TEXT {literal(text)}" if token is None else f"trigger_{at}: TEXT <[{token}]>"
        )
    return GrammarSpec(GrammarKind.LARK, "\n".join(lines), param)


def json_rule(schema: str, whitespace: str = WHITESPACE) -> str:
    """Return the symbol for JSON of a schema in a rule of a grammar.

    Args:
        schema: JSON schema, as text; ``true`` for any JSON.
        whitespace: regex of the whitespace; see ``GrammarSpec``.
    """
    described = json.loads(schema)
    return "%json " + json.dumps({**({} if described is True else described), "x-guidance": json_options(whitespace)})


def literal(text: str) -> str:
    """Return the symbol for a text in a rule of a grammar; empty for an empty text."""
    return json.dumps(text) if text else ""


class GrammarChecks:
    """Checks grammars in another process, and remembers the results.

    Args:
        text_processor: the model's text processor.
        limits: the model's limits.
    """

    def __init__(self, text_processor: TextProcessor, limits: ModelLimits) -> None:
        self._text_processor = text_processor
        self._limits = limits
        self._processes = HelperProcesses("lorikeet.chat.grammar_process", self._setup, most=1)
        self._checked: OrderedDict[GrammarSpec, GrammarChecked] = OrderedDict()

    async def check(self, spec: GrammarSpec, sequences: int) -> GrammarChecked:
        """Check a grammar and return the result, which the engine can use.

        Args:
            spec: the grammar.
            sequences: number of sequences of the request.

        Raises:
            ApiError: 400, the grammar cannot be compiled or met, or takes too long; the message names the field.
        """
        if not self._limits.eos_token_ids:
            raise bad_request("This model has no end token, so its answers cannot follow a grammar.", spec.param)
        checked = self._checked.pop(spec, None) or await self._ask(spec)
        self._checked[spec] = checked
        if len(self._checked) > _MAX_CHECKED:
            self._checked.popitem(last=False)
        if checked.error:
            where = f"{spec.param}: {spec.function}" if spec.function else spec.param
            raise bad_request(f"{where}: {_one_line(checked.error)}", spec.param)
        if len(checked.grammar) * sequences > _MAX_ALL_BYTES:
            raise bad_request(f"{spec.param}: too large for a request of {sequences} sequences.", spec.param)
        return checked

    async def check_each(self, specs: Iterable[GrammarSpec]) -> None:
        """Check the grammars of single functions, whose common grammar has an error, to name the faulty function.

        Raises:
            ApiError: 400, one of the first grammars has an error.
        """
        end_s = time.monotonic() + _CHECK_S
        for spec in specs:
            if time.monotonic() > end_s:
                return
            await self.check(spec, 1)

    async def close(self) -> None:
        """End the process of the checks."""
        await self._processes.close()

    async def _ask(self, spec: GrammarSpec) -> GrammarChecked:
        try:
            answer = await self._processes.ask(msgspec.msgpack.encode(spec), timeout_s=_CHECK_S)
        except (EOFError, OSError, TimeoutError) as error:
            log.warning("a grammar was not compiled", param=spec.param, bytes=len(spec.text), reason=repr(error))
            return GrammarChecked(error="the grammar takes too much memory or time to compile, or is nested too deeply")
        return msgspec.msgpack.decode(answer, type=GrammarChecked)

    def _setup(self) -> bytes:
        texts = self._text_processor
        limits = self._limits
        eos = tuple(token_id for token_id in limits.eos_token_ids if token_id < limits.vocabulary)
        if texts.origin is not None:
            file = str(texts.origin[0] / "tokenizer.json")
            return msgspec.msgpack.encode(GrammarSetup(limits.vocabulary, eos, file=file))
        return msgspec.msgpack.encode(GrammarSetup(limits.vocabulary, eos, texts.tokenizer.to_str()))


def _one_line(error: str) -> str:
    line = " ".join(error.split())
    return line if line.endswith(".") else f"{line}."
