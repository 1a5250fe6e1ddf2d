"""Renders Jinja chat templates like transformers (https://huggingface.co/docs/transformers/chat_templating)."""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_END_MARK = str(secrets.randbits(128))
_END_SPACE = "  "
"""Mark the end of a message that is to be continued.

The mark has digits only, which no filter of a template changes. The spaces behind it are missing if the template strips
the message; a template may add one.
"""


_FAILURES_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that templates raise on unexpected messages, beside their own."""


class TemplateError(ValueError):
    """Raised when a template is missing or broken, or refuses the messages. The error text names the cause."""


DEFAULT, TOOL_USE, RAG = "default", "tool_use", "rag"
"""Names that templates have where a model has several."""
TEMPLATE_FILE, TEMPLATES_FILE = "chat_template.jinja", "chat_template.json"
TEMPLATES_FOLDER = "additional_chat_templates"

Content = str | list[dict[str, Any]]
"""Content of a message: text, or parts of the types ``text`` and ``image``."""

IMAGE_MARK = str(secrets.randbits(128))
"""Stands for an image in content that a template reads as text. The caller replaces it by the model's placeholder."""

_PROBE = "kea7lory3"
_PART_MARKS = ("'type'", '"type"')
"""Shows that a template has written a list of parts as it is."""


class ContentForm(StrEnum):
    """The form in which a template reads the content of a message."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"
    NEITHER = "neither"
    """The template leaves the content out."""


class _GenerationBlocks(Extension):
    """Accepts the tag ``{% generation %}``, which marks answers for training, and renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: variables such as ``bos_token``.
        others: further templates of the same model by name, which :meth:`choose` finds.

    Attributes:
        knows_tools: whether the template explains tools to the model.
        knows_documents: whether the template reads documents.
        knows_calls: whether the template renders the calls in earlier answers.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], others: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.knows_tools = "tools" in variables
        self.knows_documents = "documents" in variables
        self.others = {name: ChatTemplate(text, special_tokens) for name, text in (others or {}).items()}
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.knows_calls = "tool_calls" in source
        self._knows_developer = "developer" in source
        self._forms: dict[str, ContentForm] = {}

    def choose(self, *, name: str = "", tools: bool = False, documents: bool = False) -> "ChatTemplate":
        """Return the template for a request, like transformers.

        Args:
            name: name of the template. Empty for the template that fits the request.
            tools: whether the model may use tools.
            documents: whether the request has documents.

        Raises:
            TemplateError: there is no template of this name.
        """
        if name and name != DEFAULT:
            if name not in self.others:
                names = ", ".join((DEFAULT, *self.others))
                raise TemplateError(f"this model has no chat template {name[:100]!r}, only {names}")
            return self.others[name]
        wanted = [RAG] if documents else []
        wanted += [TOOL_USE] if tools else []
        return self if name else next((self.others[each] for each in wanted if each in self.others), self)

    def form_of(self, role: str) -> ContentForm:
        """Return the form in which the template reads the content of messages of a role.

        Other servers look for loops over the content in the template's source. Here short conversations are rendered in
        both forms. This also finds macros and filters, and shows whether the text appears in the prompt.
        """
        form = self._forms.get(role)
        if form is None:
            form = self._forms[role] = self._probed_form(role)
        return form

    @property
    def leaves_text_out(self) -> bool:
        """Whether the template leaves the text of users out of prompts."""
        return self.form_of("user") is ContentForm.NEITHER

    @cached_property
    def reads_arguments_as_text(self) -> bool:
        """Whether the template expects the arguments of earlier calls as JSON text instead of an object."""

        def prompt(arguments: Any) -> str | None:
            call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": arguments}}
            user, answer = (_said(role, text, self) for role, text in (("user", "a"), ("assistant", "")))
            result = {**_said("tool", "a", self), "tool_call_id": "call12345", "name": "f"}
            messages = [user, {**answer, "tool_calls": [call]}]
            return self._probe([*messages, result]) or self._probe(messages)

        if not self.knows_calls:
            return False
        as_object, as_text = prompt({_PROBE: 1}), prompt(json.dumps({_PROBE: 1}))
        if as_object is None or as_text is None:
            return as_object is None and as_text is not None
        return f"{{'{_PROBE}'" in as_object and f'{{"{_PROBE}"' in as_text

    def _probed_form(self, role: str) -> ContentForm:
        is_refused = True
        for make in _CONVERSATIONS.get(role, (_first,)):
            as_text = self._probe(make({"role": role, "content": _PROBE}, self))
            as_parts = self._probe(make({"role": role, "content": [{"type": "text", "text": _PROBE}]}, self))
            reads_text = _PROBE in (as_text or "")
            reads_parts = _PROBE in (as_parts or "") and not any(mark in (as_parts or "") for mark in _PART_MARKS)
            if reads_text and reads_parts:
                return ContentForm.EITHER
            if reads_text or reads_parts:
                return ContentForm.TEXT if reads_text else ContentForm.PARTS
            is_refused = is_refused and (as_text is None or as_parts is None)
        if role != "user":
            return self.form_of("user")
        return ContentForm.TEXT if is_refused else ContentForm.NEITHER

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        """Return the prompt for test messages; None if the template refuses them."""
        variables = {**self.special_tokens, "tools": None, "documents": None}
        with suppress(jinja2.TemplateError, *_FAILURES_OF_TEMPLATES):
            return self._template.render(variables | {"messages": messages, "add_generation_prompt": True})
        return None

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in the form that the template reads."""
        if message["role"] == "developer" and not self._knows_developer:
            message = {**message, "role": "system"}
        content = message.get("content")
        if isinstance(content, str | list):
            message = {**message, "content": in_form(content, self.form_of(message["role"]))}
        if message.get("tool_calls") and self.reads_arguments_as_text:
            message = {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        return message

    def render_open(self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]) -> str:
        """Return the prompt that ends with the last message's text, for an answer that continues the message.

        Args:
            messages: at least one message.
            extra: see :meth:`render`.

        Raises:
            TemplateError: the template refuses the messages, fails on them, or leaves out the last one.
        """
        *before, last = messages
        marked = [*before, {**last, "content": with_end(last["content"], _END_MARK + _END_SPACE)}]
        text, mark, rest = self.render(marked, add_generation_prompt=False, extra=extra).rpartition(_END_MARK)
        if not mark:
            raise TemplateError("the chat template leaves out the last message, so it cannot be continued")
        if not rest.startswith(_END_SPACE):
            text = text.rstrip()
        # A template may write the message twice.
        return text.replace(_END_MARK + _END_SPACE, "").replace(_END_MARK, "")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        """Return the prompt for ``messages``. ``extra`` has further variables of the template.

        Content, and arguments of calls, are converted to the form that the template reads. OpenAI's role ``developer``
        becomes ``system`` for a template that does not know it.

        Raises:
            TemplateError: the template refuses the messages or fails on them.
        """
        variables = {**self.special_tokens, "tools": None, "documents": None, **extra}
        known = list(map(self._message, messages))
        variables |= {"messages": known, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, *_FAILURES_OF_TEMPLATES) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


def _said(role: str, text: str, template: ChatTemplate) -> dict[str, Any]:
    """Return a message in the form that the template reads."""
    form = ContentForm.PARTS if template.form_of("user") is ContentForm.PARTS else ContentForm.TEXT
    return {"role": role, "content": in_form(text, form)}


def _first(message: dict[str, Any], template: ChatTemplate) -> list[dict[str, Any]]:
    return [message]


def _behind_system(message: dict[str, Any], template: ChatTemplate) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "a"}, message]


def _before_user(message: dict[str, Any], template: ChatTemplate) -> list[dict[str, Any]]:
    return [message, _said("user", "a", template)]


def _between_users(message: dict[str, Any], template: ChatTemplate) -> list[dict[str, Any]]:
    return [_said("user", "a", template), message, _said("user", "b", template)]


def _behind_call(message: dict[str, Any], template: ChatTemplate) -> list[dict[str, Any]]:
    arguments: Any = "{}" if template.reads_arguments_as_text else {}
    call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {**_said("assistant", "", template), "tool_calls": [call]}
    return [_said("user", "a", template), answer, {**message, "tool_call_id": "call12345", "name": "f"}]


_CONVERSATIONS = {
    "user": (_first, _behind_system),
    "system": (_before_user,),
    "developer": (_before_user,),
    "assistant": (_between_users,),
    "tool": (_behind_call,),
}
"""By role: conversations in which the content of one message is looked for."""


def in_form(content: Content, form: ContentForm) -> Content:
    """Return content in the form that a template reads. For text, parts are joined with newlines, like in vLLM."""
    if form is ContentForm.PARTS and isinstance(content, str):
        return [{"type": "text", "text": content}]
    return text_of(content) if form in (ContentForm.TEXT, ContentForm.NEITHER) else content


def text_of(content: Content) -> str:
    """Return content as one text, with a mark for each image."""
    return content if isinstance(content, str) else "\n".join(part.get("text", IMAGE_MARK) for part in content)


def with_end(content: Content, end: str) -> Content:
    """Return content with ``end`` appended."""
    if isinstance(content, str):
        return content + end
    *before, last = content or [{"type": "text", "text": ""}]
    if "text" not in last:
        return [*before, last, {"type": "text", "text": end}]
    return [*before, {**last, "text": last["text"] + end}]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with the arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens under keys that end in ``_token``. Each token is a string, or an object with ``content``."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def templates_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates under ``chat_template`` of a JSON file, by name.

    A single template is called ``default``.

    Raises:
        TemplateError: the value is not in a form that transformers writes: a text, a list of objects with ``name`` and
            ``template``, or an object of texts.
    """
    found = config.get("chat_template")
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (KeyError, TypeError) as error:
            raise TemplateError("chat_template is neither a template nor a list of templates") from error
    named = {DEFAULT: found} if isinstance(found, str) else found or {}
    if not isinstance(named, dict) or not all(isinstance(each, str) for pair in named.items() for each in pair):
        raise TemplateError("chat_template is neither a template nor a list of templates")
    return {name: source for name, source in named.items() if source}


def template_files(folder: Path) -> dict[str, Path]:
    """Return the template files in a folder by name. Each file has one template."""
    found = {path.stem: path for path in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))}
    return found | ({DEFAULT: folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).is_file() else {})


def default_and_others(templates: Mapping[str, str], wanted: str = DEFAULT) -> tuple[str, dict[str, str]]:
    """Return the template ``default``, or the first if there is no ``default``, and the other templates."""
    if not templates:
        return "", {}
    name = wanted if wanted in templates else next(iter(templates))
    return templates[name], {other: source for other, source in templates.items() if other != name}
