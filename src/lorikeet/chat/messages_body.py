"""Defines the bodies of Anthropic's messages API, and turns them into chats.

The API: https://docs.anthropic.com/en/api/messages.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from lorikeet.chat.ignored_parts import ignored_tools
from lorikeet.chat.protocol import (
    Body,
    ChatCompletionRequest,
    Count,
    GenerationBody,
    StopString,
    TokenizeRequest,
    validated,
)
from lorikeet.http.errors import bad_request, not_supported

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "Containers are not supported."),
    "mcp_servers": (([],), "MCP servers are not supported; call them from the client."),
    "logprobs": ((False,), "logprobs has no place in this answer; use /v1/chat/completions."),
    "echo": ((False,), "echo has no place in this answer; use /v1/chat/completions."),
}
"""Values of a field that change nothing, and the error message for others; see ``protocol._FIELDS``."""


class ImageBlockSource(Body):
    """Source of an image: its data in base64, or its URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ContentBlock(Body):
    """Part of a message: text, an image, thoughts, a call or its result."""

    type: str
    text: str | None = None
    source: ImageBlockSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | Annotated[list[ContentBlock], Field(fail_fast=True)] | None" = None


Blocks = Annotated[list[ContentBlock], Field(fail_fast=True)]


class MessageParam(Body):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolParam(Body):
    """Tool that the model may use; a tool without a type is a function."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Body):
    """Tools that the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Switch for thoughts before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(Body):
    """Form of the answer."""

    format: dict[str, Any] | None = None


class ContextEdit(Body):
    """A rule that takes parts out of long conversations."""

    type: str
    keep: str | dict[str, Any] | None = None


class ContextManagement(Body):
    """The rules that take parts out of long conversations."""

    edits: Annotated[list[ContextEdit], Field(fail_fast=True)] | None = None


class MessagesPrompt(Body):
    """Fields of a body that form the prompt."""

    refused = _REFUSED

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[ToolParam], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None

    @property
    def ignored(self) -> list[str]:
        """The parts of the body that are left out: tools that the server cannot run, and edits that change nothing."""
        edits = [] if self.context_management is None else self.context_management.edits or []
        tools = ignored_tools((tool.type or "", _is_function(tool)) for tool in self.tools or ())
        return [*tools, *(["context_management"] if edits else [])]

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of a chat that make the same prompt.

        Raises:
            ApiError: 400 or 501, content or a tool is not valid or not supported.
        """
        self._check_edits()
        fields: dict[str, Any] = {"messages": self._chat_messages()}
        last = self.messages[-1]
        if last.role == "assistant" and not _calls(last.content):
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tools and not (self.tool_choice is not None and self.tool_choice.type == "none"):
            fields["tools"] = self._functions(self.tools)
        kwargs = {**(self.chat_template_kwargs or {})}
        if self.thinking is not None and self.thinking.type != "adaptive":
            kwargs.setdefault("enable_thinking", self.thinking.type == "enabled")
        return fields | {"chat_template_kwargs": kwargs}

    def _functions(self, tools: list[ToolParam]) -> list[dict[str, Any]]:
        functions = [_chat_tool(tool, at) for at, tool in enumerate(tools) if _is_function(tool)]
        if not functions:
            kind = (tools[0].type or "")[:100]
            raise not_supported(f"tools.0: tools of type {kind!r} are not supported; define a function.", "tools")
        return functions

    def _check_edits(self) -> None:
        """Check that no rule of ``context_management`` would change the prompt.

        Raises:
            ApiError: 501, a rule would.
        """
        edits = [] if self.context_management is None else self.context_management.edits or []
        for at, edit in enumerate(edits):
            if not _changes_nothing(edit, self.messages):
                raise not_supported(
                    f"context_management.edits.{at}: {edit.type[:100]!r} would change the prompt, and editing "
                    "the context is not supported; send shorter messages.",
                    "context_management",
                )

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _chat_parts(self.system, "system")})
        for at, message in enumerate(self.messages):
            where = f"messages.{at}"
            if isinstance(message.content, str):
                messages.append({"role": message.role, "content": message.content})
            elif message.role == "assistant":
                messages.append(_assistant_message(message.content, where))
            else:
                messages += _user_messages(message.role, message.content, where)
        return messages


class CountTokensRequest(MessagesPrompt):
    """Body of ``POST /v1/messages/count_tokens``."""

    lora_path: str | None = None

    def tokenize_body(self) -> TokenizeRequest:
        """Return the same body for ``/tokenize``; see :meth:`prompt_fields` for errors."""
        return validated(TokenizeRequest, self.prompt_fields() | {"model": self.model})


class MessagesRequest(GenerationBody, MessagesPrompt):
    """Body of ``POST /v1/messages``, which may also have fields of chat completions that Anthropic lacks."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] | None = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatCompletionRequest:
        """Return the body as a chat.

        Raises:
            ApiError: 400 or 501, a field, content or a tool is not valid or not supported.
        """
        given = self.model_dump(exclude_unset=True, include=set(GenerationBody.model_fields) - {"stream_options"})
        fields = given | self.prompt_fields() | self._tool_choice()
        if self.stop_sequences:
            fields["stop"] = [*self.stops, *self.stop_sequences]
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        if form is not None:
            if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
                raise bad_request("output_config.format: must be a json_schema with a schema.", "output_config")
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": form["schema"]},
            }
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["include_reasoning"] = False
        return validated(ChatCompletionRequest, fields)

    def _tool_choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if choice is None:
            return {}
        fields: dict[str, Any] = {}
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            if not choice.name:
                raise bad_request("tool_choice: the type tool needs a name.", "tool_choice")
            return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
        return fields | {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}[choice.type]}


def _is_function(tool: ToolParam) -> bool:
    """Return whether a tool is a function of the client; Anthropic's own tools have other types."""
    return tool.type in (None, "custom")


_CLEARED = (("clear_thinking_", "thinking", "thinking_turns", 1), ("clear_tool_uses_", "tool_use", "tool_uses", 3))
"""How the types of edits begin: the blocks that they clear, the unit of ``keep``, and how many they keep by default."""


def _changes_nothing(edit: ContextEdit, messages: list[MessageParam]) -> bool:
    """Return whether a rule keeps everything that the messages have."""
    for begin, kind, unit, kept in _CLEARED:
        if not edit.type.startswith(begin):
            continue
        keep = edit.keep
        if keep == "all":
            return True
        if isinstance(keep, dict):
            if keep.get("type") != unit or not isinstance(keep.get("value"), int):
                return False
            kept = keep["value"]
        blocks = [block for each in messages if not isinstance(each.content, str) for block in each.content]
        return sum(block.type == kind for block in blocks) <= kept
    return False


def _chat_tool(tool: ToolParam, at: int) -> dict[str, Any]:
    if tool.input_schema is None:
        raise bad_request(f"tools.{at}: a tool needs an input_schema.", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _calls(content: str | list[ContentBlock]) -> bool:
    return not isinstance(content, str) and any(block.type == "tool_use" for block in content)


def _chat_parts(content: str | list[ContentBlock] | None, where: str) -> str | list[dict[str, Any]]:
    """Return text and images in the form of a chat.

    Raises:
        ApiError: 400, the content is something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return [_chat_part(block, f"{where}.content.{at}") for at, block in enumerate(content)]


def _chat_part(block: ContentBlock, where: str) -> dict[str, Any]:
    if block.type == "image":
        return {"type": "image", "image_url": {"url": _image_url(block.source, where), "where": f"{where}.source"}}
    if block.type != "text":
        raise bad_request(f"{where}: only text is supported, not content of type {block.type[:100]!r}.", "messages")
    if block.text is None:
        raise bad_request(f"{where}: a text block lacks its text.", "messages")
    return {"type": "text", "text": block.text}


def _image_url(source: ImageBlockSource | None, where: str) -> str:
    """Return the source of an image as a URL.

    Raises:
        ApiError: 400, the source is in another form than base64 or a URL.
    """
    if source is not None and source.type == "base64" and source.data is not None:
        return f"data:{source.media_type or ''};base64,{source.data}"
    if source is not None and source.type == "url" and source.url is not None:
        return source.url
    raise bad_request(f"{where}: an image needs a source of the type base64 with data, or url with url.", "messages")


def _user_messages(role: str, blocks: list[ContentBlock], where: str) -> list[dict[str, Any]]:
    """Return the results of calls as separate messages before the rest, in the form of a chat."""
    results = [block for block in blocks if block.type == "tool_result"]
    messages: list[dict[str, Any]] = []
    for block in results:
        if not block.tool_use_id:
            raise bad_request(f"{where}: a tool_result lacks its tool_use_id.", "messages")
        content = _chat_parts(block.content, where)
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest or not results:
        messages.append({"role": role, "content": _chat_parts(rest, where)})
    return messages


def _assistant_message(blocks: list[ContentBlock], where: str) -> dict[str, Any]:
    texts = [block for block in blocks if block.type not in ("thinking", "redacted_thinking", "tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": _chat_parts(texts, where)}
    if thoughts := "".join(block.thinking or "" for block in blocks if block.type == "thinking"):
        message["reasoning"] = thoughts
    calls = [block for block in blocks if block.type == "tool_use"]
    for block in calls:
        if not block.name:
            raise bad_request(f"{where}: a tool_use lacks its name.", "messages")
    if calls:
        message["tool_calls"] = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}
            for block in calls
        ]
    return message
