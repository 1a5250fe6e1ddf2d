"""Reads the chat template, tokenizer settings and defaults of an adapter's folder.

The folder may come from an untrusted user, so it is read in the reader process (see ``adapters.reader``),
which has limits of memory and time.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.adapters.chat import (
    MAX_TOKEN_CHARS,
    NO_OVERRIDES,
    AdapterChat,
    AddedToken,
    ChatOverrides,
    GenerationDefaults,
)
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import read_json
from lorikeet.adapters.task_files import TASK_FILES, read_task

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FILE = "chat_template.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
SETTINGS_FILE = "lorikeet.toml"

CHAT_FILES = {
    TEMPLATE_FILE: 2**18,
    TEMPLATES_FILE: 2**20,
    **dict.fromkeys((f"additional_chat_templates/{name}.jinja" for name in ("tool_use", "rag")), 2**18),
    TOKENIZER_CONFIG_FILE: 2**22,
    TOKENIZER_FILE: 2**26,
    GENERATION_FILE: 2**18,
    SETTINGS_FILE: 2**18,
    **TASK_FILES,
}
"""Files that are read if they are there, with their largest sizes in bytes."""

_MAX_ADDED_TOKENS = 20_000
_MAX_EOS = 64
_MAX_TEMPLATES = 16
_TOKEN_KEYS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def read_chat(folder: Path, overrides: ChatOverrides = NO_OVERRIDES, labels: int = 0) -> AdapterChat:
    """Read the files of ``CHAT_FILES`` that a folder contains.

    Args:
        folder: the adapter's folder.
        overrides: settings that replace those of the files.
        labels: number of labels of the adapter's score head, 0 without one.

    Raises:
        AdapterError: a file is too large or not valid. The message names the file.
    """
    settings = _settings(folder)
    tokenizer = _json(folder, TOKENIZER_CONFIG_FILE)
    template, others = _templates(folder, tokenizer, settings, overrides)
    generation = _json(folder, GENERATION_FILE)
    return AdapterChat(
        chat_template=template,
        knows_tools=_compiled(template, others),
        other_templates=others,
        special_tokens=_special_tokens(tokenizer) if template else {},
        pad_token=_content(tokenizer.get("pad_token"))[:MAX_TOKEN_CHARS],
        eos_token=_content(tokenizer.get("eos_token"))[:MAX_TOKEN_CHARS],
        added_tokens=_added_tokens(folder, tokenizer),
        generation=_generation(generation, settings.generation, overrides.generation),
        eos_token_ids=_eos(generation.get("eos_token_id")),
        system_prompt=_first(overrides.system_prompt, settings.system_prompt),
        tool_call_parser=_first(overrides.tool_call_parser, settings.tool_call_parser),
        reasoning_parser=_first(overrides.reasoning_parser, settings.reasoning_parser),
        task=read_task(folder, labels),
        examples=next((each for each in (overrides.examples, settings.examples) if each is not None), ()),
    )


def _first(*values: str | None) -> str:
    return next((value for value in values if value is not None), "")


def _json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name, CHAT_FILES[name]) if (folder / name).is_file() else {}


def _text_of(path: Path) -> str:
    """Return the text of a template or settings file."""
    most = CHAT_FILES.get(path.name, CHAT_FILES[TEMPLATE_FILE])
    try:
        with path.open("rb") as stream:
            content = stream.read(most + 1)
        if len(content) > most:
            raise AdapterError(f"{path.name}: larger than {most} bytes")
        return content.decode()
    except UnicodeDecodeError as error:
        raise AdapterError(f"{path.name}: is not UTF-8") from error


def _settings(folder: Path) -> ChatOverrides:
    if not (folder / SETTINGS_FILE).is_file():
        return NO_OVERRIDES
    try:
        return msgspec.convert(tomllib.loads(_text_of(folder / SETTINGS_FILE)), ChatOverrides)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise AdapterError(f"{SETTINGS_FILE}: {error}") from error


def _templates(
    folder: Path, tokenizer: Mapping[str, Any], settings: ChatOverrides, overrides: ChatOverrides
) -> tuple[str, dict[str, str]]:
    """Return the chat template (empty if there is none), and the adapter's other templates by name."""
    # The import takes time, and few adapters have a template.
    from lorikeet.core.chat_template import TemplateError, default_and_others, template_files, templates_in

    given = next((each for each in (overrides.chat_template, settings.chat_template) if each is not None), None)
    if given is not None:
        named = {"default": given} if given else {}
    else:
        files = template_files(folder)
        if len(files) > _MAX_TEMPLATES:
            raise AdapterError(f"{len(files)} chat templates, at most {_MAX_TEMPLATES} are read")
        named = {name: _text_of(path) for name, path in files.items()}
        try:
            named = named or templates_in(_json(folder, TEMPLATES_FILE)) or templates_in(tokenizer)
        except TemplateError as error:
            raise AdapterError(f"{TOKENIZER_CONFIG_FILE}: {error}") from error
    if sum(map(len, named.values())) > CHAT_FILES[TEMPLATE_FILE]:
        raise AdapterError(f"chat_template: more than {CHAT_FILES[TEMPLATE_FILE]} characters")
    return default_and_others(named)


def _compiled(template: str, others: Mapping[str, str]) -> bool:
    """Check that templates compile, and return whether the template for tools explains tools to the model."""
    if not template:
        return False
    from lorikeet.core.chat_template import ChatTemplate, TemplateError

    try:
        return ChatTemplate(template, {}, others).choose(tools=True).knows_tools
    except (TemplateError, RecursionError, SyntaxError) as error:
        raise AdapterError(str(error)) from error


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    tokens = {key: _content(value) for key, value in tokenizer.items() if key.endswith("_token")}
    return {key: text for key, text in tokens.items() if text and len(key) + len(text) <= MAX_TOKEN_CHARS}


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _added_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Return the added tokens, which since transformers 5 are only in ``tokenizer.json``."""
    listed: Any = tokenizer.get("added_tokens_decoder")
    where = TOKENIZER_CONFIG_FILE
    if isinstance(listed, dict):
        entries = [{**entry, "id": key} for key, entry in listed.items() if isinstance(entry, dict)]
    elif (folder / TOKENIZER_FILE).is_file():
        where = TOKENIZER_FILE
        content = (folder / TOKENIZER_FILE).read_bytes()
        try:
            entries = msgspec.json.decode(content, type=_TokenizerFile).added_tokens
        except (msgspec.DecodeError, RecursionError) as error:
            raise AdapterError(f"{where}: {error}") from error
    else:
        return ()
    if len(entries) > _MAX_ADDED_TOKENS:
        raise AdapterError(f"{where}: {len(entries)} added tokens, at most {_MAX_ADDED_TOKENS} are read")
    named = _special_tokens(tokenizer).values()  # These tokens are special even if the list differs.
    entries = [{**entry, "special": True} if entry.get("content") in named else entry for entry in entries]
    known = ("id", "content", *_TOKEN_KEYS)
    try:
        return tuple(
            msgspec.convert({key: entry[key] for key in known if key in entry}, AddedToken, strict=False)
            for entry in entries
        )
    except msgspec.ValidationError as error:
        raise AdapterError(f"{where}: added tokens: {error}") from error


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[dict[str, Any]] = []


def _generation(config: Mapping[str, Any], *overrides: GenerationDefaults) -> GenerationDefaults:
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(GenerationDefaults):
        values = [getattr(each, field.name) for each in reversed(overrides)]
        given[field.name] = next((value for value in values if value is not None), config.get(field.name))
    try:
        return msgspec.convert(given, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise AdapterError(f"{GENERATION_FILE}: {error}") from error


def _eos(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if len(listed) > _MAX_EOS or not all(isinstance(each, int) and 0 <= each < 2**31 for each in listed):
        raise AdapterError(f"{GENERATION_FILE}: eos_token_id is neither a token id nor a list of at most {_MAX_EOS}")
    return tuple(listed)
