"""Chat templates: Jinja, rendered as transformers does (https://huggingface.co/docs/transformers/chat_templating)."""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_END_MARK, _END_SPACE = str(secrets.randbits(128)), "  "
"""Mark the end of a message that is to be continued. The mark has digits only, which no filter of a template changes.
The spaces behind it are missing if the template strips the message; a template may add one.
"""


_FAILURES_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What templates raise on messages that they do not expect, beside their own errors."""


class TemplateError(ValueError):
    """The template is missing or broken, or it refused the messages; the error text says which."""


class _GenerationBlocks(Extension):
    """Accepts ``{% generation %}``, which marks answers for training, and renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: variables such as ``bos_token``.

    Attributes:
        knows_tools: whether it explains tools to the model.
        knows_calls: whether it writes the calls in earlier answers.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.knows_calls = "tool_calls" in source
        self._knows_developer = "developer" in source

    def render_open(self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]) -> str:
        """Return the prompt that ends with the text of the last message, for an answer that continues it.

        Args:
            messages: at least one.
            extra: as in :meth:`render`.

        Raises:
            TemplateError: as :meth:`render`, or the template leaves out the last message.
        """
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + _END_MARK + _END_SPACE}]
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
        """Return the prompt for ``messages``; ``extra`` holds further variables of the template.

        OpenAI's role ``developer`` is ``system`` to a template that does not know it.

        Raises:
            TemplateError: the template refuses the messages or fails on them.
        """
        variables = {**self.special_tokens, "tools": None, "documents": None, **extra}
        known = messages if self._knows_developer else map(_as_system, messages)
        variables |= {"messages": list(known), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, *_FAILURES_OF_TEMPLATES) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens under keys that end in ``_token``; each is a string or an object with ``content``."""
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
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def template_in(config: Mapping[str, Any]) -> str:
    """Return the template in a ``tokenizer_config.json``, the default one of several; empty if there is none."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found or ""
