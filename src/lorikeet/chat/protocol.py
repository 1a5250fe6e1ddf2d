"""Defines the bodies of requests, and refuses fields that are not implemented.

Types are strict; sampling.py checks fields that need more than a type. Only the first faulty entry of a list or map is
reported: millions of reports would block the event loop, and every stream, for most of a minute.
"""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lorikeet.chat.mixtures import MAX_PARTS, of_fields
from lorikeet.core.provenance import EXPECTED, EXPECTED_IN_WORDS, is_expected_digest
from lorikeet.http.errors import bad_request, invalid_body, not_supported

Count = Annotated[int, Field(ge=1, le=2**31)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
Temperature = Annotated[float, Field(ge=0, le=1e6)]
Penalty = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Range of factors on logits; a factor outside it would make them zero or infinite in fp32."""


def _check_digest(value: str) -> str:
    if not is_expected_digest(value):
        raise PydanticCustomError("digest", EXPECTED_IN_WORDS)
    return value


ExpectedDigest = Annotated[str, AfterValidator(_check_digest), Field(json_schema_extra={"pattern": EXPECTED})]
"""Digest of the weights that must make the answer, or its beginning."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


MAX_TEMPLATE = 2**18
"""Most characters of a chat template in a body, as in the files of an adapter."""


class Body(BaseModel):
    """Base of all bodies. It keeps unknown fields, so that the ones that change the answer can be refused by name.

    Attributes:
        refused: refused fields of one API, in the form of ``_FIELDS``.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = MappingProxyType({})


_B = TypeVar("_B", bound=Body)


def validated(kind: type[_B], value: Any) -> _B:
    """Return a value as a body of a kind.

    Raises:
        ApiError: 400, a field is not valid; the message names the first one.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise invalid_body([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from error


def usage_wanted(at_the_end: object, along: object) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether every chunk has it.

    Args:
        at_the_end: the body's ``include_usage``.
        along: the body's ``continuous_usage_stats``, which implies the usage at the end unless ``at_the_end`` is false.
    """
    wanted = along is True if at_the_end is None else at_the_end is True
    return wanted, wanted and along is True


class StreamOptions(Body):
    """OpenAI's ``stream_options``, with vLLM's extension."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class LoraScale(Body):
    """Adapter of llama.cpp's ``lora``, by its name or its index in ``/v1/adapters``."""

    id: Annotated[int, Field(ge=0, lt=2**31)] | Annotated[str, Field(min_length=1)]
    scale: float = 1.0


class MergedAdapters(Body):
    """LoRAX' ``merged_adapters``, whose ``linear`` strategy adds up the changes of the adapters."""

    ids: Annotated[list[str], Field(max_length=MAX_PARTS)]
    weights: Annotated[list[float], Field(max_length=MAX_PARTS)] | None = None
    merge_strategy: Literal["linear"] | None = None


class GenerationBody(Body):
    """Fields of both completions and chat completions. None means that the request lacks the field."""

    model: str | None = None
    lora_path: str | None = None
    lora: Annotated[list[LoraScale], Field(max_length=MAX_PARTS)] | None = None
    merged_adapters: MergedAdapters | None = None
    adapter_parameters: MergedAdapters | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    service_tier: str | None = None
    user: str | None = None
    expect_digest: ExpectedDigest | None = None
    return_weight_versions: bool | None = None

    @field_validator("stream_options")
    @classmethod
    def _options_need_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        # A faulty stream field is missing in the data, and has its own report.
        if value is not None and "stream" in info.data and not info.data["stream"]:
            raise PydanticCustomError("stream_options", "only allowed with stream: true")
        return value

    @model_validator(mode="after")
    def _name_the_mixture(self) -> Self:
        """Write a mixture that other fields request into ``model``, where all routes expect it."""
        try:
            mixture = of_fields(self.lora, self.merged_adapters or self.adapter_parameters)
        except ValueError as error:
            field = "lora" if self.lora else "merged_adapters"
            raise PydanticCustomError("mixture", "{why}", {"why": str(error), "field": field}) from error
        if mixture:
            self.model = f"{self.model}:{mixture}" if self.model else mixture  # The form is base:adapter.
            self.lora = self.merged_adapters = self.adapter_parameters = None
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the body."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices_per_prompt(self) -> int:
        """Number of sequences that are generated for each prompt."""
        return self.n or 1

    @property
    def truncates(self) -> bool:
        """Whether the body cuts prompts to a length."""
        return self.truncate_prompt_tokens is not None

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        """Most tokens to generate, or None, and the name of the field."""
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        return self.max_completion_tokens, "max_completion_tokens"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self._usage[0]

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk has usage."""
        return self._usage[1]

    @property
    def _usage(self) -> tuple[bool, bool]:
        options = self.stream_options or StreamOptions()
        return usage_wanted(options.include_usage, options.continuous_usage_stats)


class CompletionRequest(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)]
        | None
    ) = None
    prompt_embeds: str | Annotated[list[str], Field(max_length=128, fail_fast=True)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    add_special_tokens: bool | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_not_given(cls, value: Any) -> Any:
        return None if value is False else value  # Chats use false.

    @field_validator("prompt_embeds")
    @classmethod
    def _none_is_not_given(cls, value: str | list[str] | None) -> str | list[str] | None:
        return value if isinstance(value, str) else value or None

    @property
    def choices_per_prompt(self) -> int:
        """Number of sequences that are generated for each prompt; the best ``n`` are returned."""
        return self.best_of or self.n or 1


def check_prompt_embeds(body: CompletionRequest) -> None:
    """Check that a body with embeddings has no field that needs the tokens of its prompts.

    Raises:
        ApiError: 400, the body has such a field.
    """
    wanted = {
        "prompt": bool(body.prompt),
        "echo": bool(body.echo),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_token_ids": bool(body.return_token_ids),
        "truncate_prompt_tokens": body.truncates,
        "max_tokens": body.most_tokens[0] == 0,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise bad_request(f"{name} needs the tokens of a prompt, which prompt_embeds lacks.", name)


def prompts_of(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Return the prompts of a body, which has four forms, as one sequence of texts or lists of token ids.

    Raises:
        ApiError: 400, the body has no prompt.
    """
    if body.prompt is None:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("The prompt is empty; at least one token is needed.", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    strings = [entry for entry in prompt if isinstance(entry, str)]
    return strings or [entry for entry in prompt if isinstance(entry, list)]


class ImageUrl(Body):
    """URL of an image.

    Attributes:
        url: a ``data:`` URL, or one that the server fetches.
        where: the image's place in a body of another API, for errors; None for the place in the chat.
    """

    url: str
    where: str | None = None


class ContentPart(Body):
    """Part of a message's content: text or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class CalledFunction(Body):
    """Name and arguments of a call; arguments are JSON text or its value."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """Call in an earlier answer."""

    id: str | None = None
    function: CalledFunction


_WITH_CONTENT = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages need content, as at OpenAI. An answer may have calls instead."""


class ChatMessage(Body):
    """Message of a conversation. The template gets further fields (``name``, ``tool_call_id``).

    ``images`` is Ollama's: images in base64, which come before the content.
    """

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    images: Annotated[list[str], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.role in _WITH_CONTENT:
            raise PydanticCustomError("content", "a message of the role {role} needs content", {"role": self.role})
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class Function(Body):
    """Function that a model may call; ``parameters`` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _describes_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and (
            value.get("type", "object") != "object"
            or not isinstance(value.get("properties", {}), dict)
            or not isinstance(value.get("required", []), list)
        ):
            raise PydanticCustomError("parameters", "must be the JSON schema of an object")
        return value


class Tool(Body):
    """Tool that a model may use; only functions are supported."""

    type: Literal["function"] = "function"
    function: Function


class ToolName(Body):
    """Name in a ``tool_choice``."""

    name: str


class NamedTool(Body):
    """Choice of a function by its name, for ``tool_choice``."""

    type: Literal["function"] = "function"
    function: ToolName


class ChatOptions(Body):
    """Options of the prompt of messages.

    ``chat_template_kwargs`` may also contain the two fields on the end of the prompt, and overrides them, as in vLLM.
    """

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=1024)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def own_template(self) -> str:
        """The Jinja source in ``chat_template``; empty if the field is missing, or names one of the model's templates.

        A source without braces would write the same prompt for every conversation.
        """
        return self.chat_template if self.chat_template and "{" in self.chat_template else ""

    @model_validator(mode="before")
    @classmethod
    def _end_by_kwargs(cls, data: Any) -> Any:
        kwargs = data.get("chat_template_kwargs") if isinstance(data, dict) else None
        if not isinstance(kwargs, dict):
            return data
        names = ("add_generation_prompt", "continue_final_message")
        return data | {name: kwargs[name] for name in names if kwargs.get(name) is not None}

    @field_validator("continue_final_message")
    @classmethod
    def _has_one_end(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise PydanticCustomError("continue_final_message", "needs add_generation_prompt: false")
        return value


class ChatFields(ChatOptions):
    """Messages, and options of the chat template."""

    messages: Messages


class ChatCompletionRequest(GenerationBody, ChatFields):
    """Body of ``POST /v1/chat/completions``."""

    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**20)] | None = None

    @field_validator("thinking_token_budget")
    @classmethod
    def _without_budget(cls, value: int | None) -> int | None:
        """Read -1 as no budget, as vLLM does."""
        return None if value == -1 else value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _is_a_choice(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("none", "auto", "required"):
            raise PydanticCustomError("tool_choice", "must be none, auto, required or an object that names a function")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_among_the_tools(cls, value: str | NamedTool | None, info: ValidationInfo) -> str | NamedTool | None:
        tools = info.data.get("tools", ...)  # Faulty tools are missing in the data, and have their own report.
        if value in (None, "none", "auto") or tools is ...:
            return value
        if not tools:
            raise PydanticCustomError("tool_choice", "needs tools")
        if isinstance(value, NamedTool) and value.function.name not in {tool.function.name for tool in tools}:
            raise PydanticCustomError(
                "tool_choice", "no tool is called {name}", {"name": repr(value.function.name[:128])}
            )
        return value


class TokenizeRequest(ChatOptions):
    """Body of ``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


class LoadAdapter(Body):
    """Body of ``POST /v1/load_lora_adapter`` (vLLM) and ``/load_lora_adapter`` (SGLang).

    The adapter's files show whether the weights of experts have three dimensions.
    """

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    pinned: bool = False


class UnloadAdapter(Body):
    """Body of the two unload routes."""

    lora_name: str = ""
    lora_int_id: int | None = None


class NewAdapter(Body):
    """Body of ``POST /v1/adapters``: a source, another adapter's name, or the versions of a split with their shares.

    The last six fields override the adapter's files; None keeps the files' values.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)] | None = None
    alias_of: Annotated[str, Field(min_length=1)] | None = None
    versions: dict[str, float] | None = None
    shadow: dict[str, float] | None = None
    replace: bool = False
    chat_template: str | None = None
    system_prompt: str | None = None
    generation_config: dict[str, Any] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    examples: list[str] | None = None


class AdapterChange(Body):
    """Body of ``PATCH /v1/adapters/{name}``; None changes nothing."""

    model_config = ConfigDict(extra="forbid")

    pinned: bool | None = None
    warm: bool | None = None
    versions: dict[str, float] | None = None
    shadow: dict[str, float] | None = None


class DynamoSource(Body):
    """Source of an adapter in Dynamo's body."""

    uri: Annotated[str, Field(min_length=1)]


class DynamoAdapter(Body):
    """Body of ``POST /v1/loras``."""

    lora_name: Annotated[str, Field(min_length=1)]
    source: DynamoSource


SPECIAL_TOKENS = "The chat template writes the special tokens; adding more is not supported."
_TOOLS = "Tools are for chat completions."
_FUNCTIONS = "functions and function_call are not supported; use tools and tool_choice."
_BEAM = "Beam search is not supported."
_ADAPTER = "is not supported; name the adapter in model."

_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _FUNCTIONS),
    "function_call": (("none", "auto"), _FUNCTIONS),
    "use_beam_search": ((False,), _BEAM),
    "best_of": ((1,), "best_of above 1 is not supported in chats; set n, and choose between the answers."),
    "suffix": (("",), "Completing before a suffix is not supported."),
    "prompt_embeds": ((), "Prompts as embeddings are for /v1/completions."),
    "logits_processors": (([],), "Logits processors are not supported."),
    "modalities": ((["text"],), "Only text is supported."),
    "audio": ((), "Audio is not supported."),
    "chat_template": ((), "A chat template is for chats."),
    "documents": (([],), "Documents are for chat completions; put them into a message."),
    "spaces_between_special_tokens": ((True,), "spaces_between_special_tokens=false is not supported."),
    # The base model would answer instead of the adapter if these three were ignored.
    "lora": (([],), f"llama.cpp's lora {_ADAPTER}"),
    "adapter_id": (("",), f"LoRAX's adapter_id {_ADAPTER}"),
    "adapter_source": (("",), f"LoRAX's adapter_source {_ADAPTER}"),
    "add_special_tokens": ((False,), SPECIAL_TOKENS),
    "session_params": ((), "Sessions are not supported."),
    "stop_regex": (([], ""), "Stopping at a regular expression is not supported; use stop."),
    "thinking_token_budget": ((-1,), "A budget for thoughts is for chats."),
    "kv_transfer_params": (({},), "Moving KV by a request is not supported."),
    "ec_transfer_params": (({},), "Moving embeddings by a request is not supported."),
    "custom_logit_processor": (("",), "Logits processors are not supported."),
    "repetition_detection": ((), "Ending repetitive answers early is not supported; use frequency_penalty."),
    "watermarking": ((False,), "Watermarks are not supported."),
    "return_hidden_states": ((False,), "Hidden states are not returned."),
    "input_embeds": ((), "Prompts as embeddings are not supported."),
}
"""Values, by field, that change nothing, as null does in all fields, and the error message for other values."""


def is_known(kind: type[Body], name: str) -> bool:
    """Return whether bodies of a kind have a field, or refuse it by name."""
    return name in kind.model_fields or name in kind.refused or name in _FIELDS


def refuse_unsupported(body: Body) -> None:
    """Check the fields of a body that its class lacks.

    Raises:
        ApiError: 501, a field requests a feature that is not implemented; the message names the first one.
    """
    for name, value in (body.model_extra or {}).items():
        known = type(body).refused.get(name) or _FIELDS.get(name)
        if known is None or value is None:
            continue
        neutral, message = known
        if value not in neutral:
            raise not_supported(message, name)


_MAYBE_SURROGATE = re.compile(
    rb"\x00"  # JSON may be UTF-16 or UTF-32.
    rb"|\xed[\xa0-\xbf]"
    rb"|\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F])"
)
"""Matches the bytes that every lone surrogate in JSON needs; most bodies have none and need no further check.

Each alternative begins with another literal byte, so that the search skips to these bytes.
"""


def may_hold_surrogates(body: bytes) -> bool:
    """Return whether :func:`refuse_lone_surrogates` must check a body."""
    return _MAYBE_SURROGATE.search(body) is not None


def refuse_lone_surrogates(body: bytes, value: Any) -> None:
    """Check that all text of a body can be written as UTF-8.

    Args:
        body: the bytes of the body.
        value: the value of the body.

    Raises:
        ApiError: 400, a text cannot be written; the message names the first field.
    """
    if not may_hold_surrogates(body):
        return
    for field, content in value.items() if isinstance(value, dict) else ():
        try:
            json.dumps({field: content}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            name = field.encode(errors="backslashreplace").decode()
            code = ord(error.object[error.start])
            raise bad_request(f"{name}: half a character, the lone surrogate U+{code:04X}.", name) from None
