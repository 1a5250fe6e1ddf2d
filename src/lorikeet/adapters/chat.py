"""The chat settings of adapters that differ from the base model's."""

from typing import Annotated

import msgspec

from lorikeet.adapters.task import AdapterTask

MAX_TOKEN_CHARS = 512
"""Longest added token."""
MAX_EXAMPLE_CHARS = 2000
"""Longest example of a prompt."""

Examples = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_EXAMPLE_CHARS)], ...],
    msgspec.Meta(min_length=2, max_length=64),
]
"""Examples of prompts. With a single one, nothing shows how much an adapter's prompts differ from each other."""


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Defaults of sampling fields. None means the base model's default."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] | None = None


class AddedToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token that a tokenizer adds to its model's vocabulary. The fields are those of ``tokenizer.json``."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    content: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN_CHARS)]
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class AdapterChat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The chat settings of an adapter that differ from the base model's.

    The default has none.

    Attributes:
        chat_template: Jinja source that compiles; empty for the base's template.
        knows_tools: whether the template explains tools to the model.
        other_templates: further templates by name, such as ``tool_use``.
        special_tokens: variables of the template, such as ``bos_token``.
        pad_token: padding token. It needs an embedding only if it ends answers.
        eos_token: text of a further token that ends answers, besides ``eos_token_ids``; empty for none.
        added_tokens: tokens that the adapter's tokenizer adds.
        generation: defaults of sampling fields.
        eos_token_ids: tokens that end an answer in addition to the base's.
        system_prompt: system prompt for conversations that have none.
        tool_call_parser: name of the format of tool calls. Empty if the template determines the format.
        reasoning_parser: name of the format of reasoning. Empty for the base's format.
        task: the adapter's tasks besides text (vectors and labels).
        examples: examples of the adapter's prompts, by which ``model: "auto"`` chooses it.
    """

    chat_template: str = ""
    knows_tools: bool = False
    other_templates: dict[str, str] = {}
    special_tokens: dict[str, str] = {}
    pad_token: str = ""
    eos_token: str = ""
    added_tokens: tuple[AddedToken, ...] = ()
    generation: GenerationDefaults = GenerationDefaults()
    eos_token_ids: tuple[int, ...] = ()
    system_prompt: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    task: AdapterTask = AdapterTask()
    examples: tuple[str, ...] = ()


class ChatOverrides(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Chat settings from ``lorikeet.toml``, or from a route that adds an adapter.

    None keeps the settings of other files.
    """

    chat_template: str | None = None
    system_prompt: str | None = None
    generation: GenerationDefaults = GenerationDefaults()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    examples: Examples | None = None


NO_OVERRIDES = ChatOverrides()


def as_text(chat: AdapterChat) -> str:
    """Return ``chat`` as JSON, which is empty if all settings are the base's."""
    return "" if chat == AdapterChat() else msgspec.json.encode(chat).decode()
