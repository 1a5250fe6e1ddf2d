"""Messages to a prompt: the checkpoint's Jinja template, rendered as transformers renders it, without importing it.

Reference: https://huggingface.co/docs/transformers/chat_templating
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorikeet.models.checkpoint import read_object

_END_OF_TEXT, _SPACE = str(secrets.randbits(128)), "  "
"""Mark where the text of a message ends that is to be continued. Digits: no filter of a template changes them. The
spaces behind them are gone where a template takes away what a message ends with; a template may add one.
"""


class TemplateError(ValueError):
    """There is no template, or it refused the messages; the message says which and why."""


class _GenerationBlocks(Extension):
    """Accepts ``{% generation %}``, which marks answers for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: ``bos_token`` and the like, which templates name.
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
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render_open(self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]) -> str:
        """Return the prompt that ends with the text of the last message, which the answer continues.

        Args:
            messages: at least one.
            extra: as in :meth:`render`.

        Raises:
            TemplateError: as :meth:`render`, or the template leaves the last message out.
        """
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + _END_OF_TEXT + _SPACE}]
        text, mark, rest = self.render(marked, add_generation_prompt=False, extra=extra).rpartition(_END_OF_TEXT)
        if not mark:
            raise TemplateError("the chat template does not show the last message, so it cannot be continued")
        if not rest.startswith(_SPACE):
            text = text.rstrip()
        # A template may show it twice.
        return text.replace(_END_OF_TEXT + _SPACE, "").replace(_END_OF_TEXT, "")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        """Return the prompt for ``messages``; ``extra`` holds further variables of the template.

        Raises:
            TemplateError: the template refuses the messages or fails on them.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


def read_chat_template(folder: Path, override: str = "") -> ChatTemplate | None:
    """Read the template of a model folder.

    Args:
        folder: with ``chat_template.jinja`` or ``tokenizer_config.json``.
        override: file to use instead.

    Returns:
        None if the model has none (a base model).

    Raises:
        TemplateError: the file given is missing, or the template does not compile.
        ModelConfigError: ``tokenizer_config.json`` cannot be read.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_object(config_file) if config_file.is_file() else {}
    source: Any
    if override:
        if not Path(override).is_file():
            raise TemplateError(f"chat template {override}: no such file")
        source = Path(override).read_text()
    elif (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text()
    else:
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens named ``…_token``; each is a string or an object with ``content``."""
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
    """JSON as is: Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
