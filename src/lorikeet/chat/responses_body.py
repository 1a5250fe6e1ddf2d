"""Defines the bodies of OpenAI's responses API, and turns them into chats.

The API: https://platform.openai.com/docs/api-reference/responses.
"""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, TypeAdapter

from lorikeet.chat.ignored_parts import ignored_tools
from lorikeet.chat.protocol import Body, ChatCompletionRequest, Count, GenerationBody, validated
from lorikeet.chat.responses_tools import (
    ResponsesTool,
    ServedTool,
    as_arguments,
    chat_name,
    kinds_of_tools,
    served_tools,
)
from lorikeet.http.errors import ApiError, bad_request, not_supported

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "Conversations are not supported; use previous_response_id."),
    "prompt": ((), "Stored prompts are not supported; send the input itself."),
    "context_management": (([],), "Managing the context is not supported."),
    "enable_response_messages": ((False,), "Messages of the chat are not returned; read input_items."),
    "previous_input_messages": (([],), "The responses API takes input, and previous_response_id."),
    "logprobs": ((False,), "Request log probabilities by include: message.output_text.logprobs."),
    "echo": ((False,), "echo has no place in this answer; use /v1/chat/completions."),
    "messages": (([],), "The responses API takes input; messages are for /v1/chat/completions."),
}
"""Values of a field that change nothing, and the error message for others; see ``protocol._FIELDS``."""

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = {
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
"""Accepted values of ``include``. Only the first has an effect; answers always or never have the others."""
_TEXTS = ("input_text", "output_text", "text", "refusal")
_OTHER_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "truncate_prompt_tokens": "truncation",
}
"""Names, in this API, of a chat's fields."""


class InputPart(Body):
    """Part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


Parts = Annotated[list[InputPart], Field(fail_fast=True)]


class InputItem(Body):
    """Item of an input: a message, a call, its result, or thoughts; the default type is a message."""

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None


_ITEMS = TypeAdapter(list[InputItem])


class TextConfig(Body):
    """Form of the answer."""

    format: dict[str, Any] | None = None


class ReasoningConfig(Body):
    """Amount of thoughts before the answer."""

    effort: str | None = None


class ResponsesRequest(GenerationBody):
    """Body of ``POST /v1/responses``, which may also have fields of chat completions that this API lacks."""

    refused = _REFUSED

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def ignored(self) -> list[str]:
        """The parts of the body that are left out: tools that neither the server nor the client runs."""
        return ignored_tools(kinds_of_tools(self.tools or ()))

    @property
    def served(self) -> dict[str, ServedTool]:
        """The tools that the model may call, by their names in the chat."""
        return served_tools(self.tools or ())

    @property
    def items(self) -> list[InputItem]:
        """Items of the input."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def conversation(self, previous: bytes) -> bytes:
        """Return the conversation up to the answer, as a JSON array of items.

        Args:
            previous: the conversation that the body continues, its answer included, as such an array.
        """
        own = [{"type": "message", **item.model_dump(exclude_unset=True)} for item in self.items]
        return joined(previous, msgspec.json.encode(own))

    def chat(self, previous: bytes) -> ChatCompletionRequest:
        """Return the body as a chat.

        Args:
            previous: the conversation that the body continues; see :meth:`conversation`.

        Raises:
            ApiError: 400 or 501, a field is not valid or not supported.
        """
        if unknown := set(self.include or ()) - _INCLUDABLE:
            raise bad_request(f"include: the value {min(unknown)[:100]!r} is unknown.", "include")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        earlier = _ITEMS.validate_json(previous) if previous else []
        given = self.model_dump(exclude_unset=True, include=set(GenerationBody.model_fields) - {"stream_options"})
        fields = given | {"messages": instructions + _messages([*earlier, *self.items]), **self._tool_fields()}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        fields["include_reasoning"] = self.include_reasoning
        fields["chat_template_kwargs"] = self._template_fields()
        return validated(ChatCompletionRequest, fields)

    def _template_fields(self) -> dict[str, Any]:
        effort = None if self.reasoning is None else self.reasoning.effort
        fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            fields["enable_thinking"] = False
        return fields | (self.chat_template_kwargs or {})

    def _tool_fields(self) -> dict[str, Any]:
        tools = list(self.served.values())
        choice = self.tool_choice
        if self.tools and not tools:
            raise not_supported(f"tools.0: tools of type {self.tools[0].type[:100]!r} are not supported.", "tools")
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "allowed_tools":
                allowed = [each.get("name") for each in choice.get("tools") or () if isinstance(each, dict)]
                tools = [tool for tool in tools if tool.is_named(allowed)]
                choice = choice.get("mode", "auto")
            elif kind in ("function", "custom"):
                name = chat_name(choice.get("name"), choice.get("namespace"))
                choice = {"type": "function", "function": {"name": name}}
            else:
                raise not_supported(f"tool_choice: {str(kind)[:100]!r} is not supported.", "tool_choice")
        fields: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}
        return fields | (
            {"tools": [{"type": "function", "function": tool.function} for tool in tools]} if tools else {}
        )


def joined(*arrays: bytes) -> bytes:
    """Return one JSON array of the entries of several, which have no outer spaces; empty bytes have no entries."""
    return b"[" + b",".join(array[1:-1] for array in arrays if len(array) > 2) + b"]"


def in_these_words(error: ApiError) -> ApiError:
    """Return an error of the chat with this API's name of the field."""
    param = _OTHER_NAMES.get(error.param or "")
    if param is None:
        return error
    message = error.message.replace(str(error.param), param)
    return ApiError(error.status, message, param=param, type=error.type, headers=error.headers)


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """Return the ``response_format`` of a chat for a form of this API."""
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
    return form


def _messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """Return items as messages of a chat; thoughts and calls join the assistant's message beside them.

    Raises:
        ApiError: 400 or 501, an item is not valid or not supported.
    """
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where = f"input.{at}"
        match item.type or "message":
            case "message" if item.role:
                content = _content(item.content, where)
                last = messages[-1] if messages else {}
                if item.role == "assistant" and last.get("role") == "assistant" and "content" not in last:
                    last["content"] = content
                else:
                    messages.append({"role": item.role, "content": content})
            case "function_call" | "custom_tool_call" as kind if item.name and item.call_id:
                is_custom = kind == "custom_tool_call"
                arguments = as_arguments(item.input or "") if is_custom else item.arguments or "{}"
                function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistants_message(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output" if item.call_id:
                output = _content(item.output, where)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case "reasoning":
                parts = [] if item.content is None or isinstance(item.content, str) else item.content
                messages.append({"role": "assistant", "reasoning": "".join(part.text or "" for part in parts)})
            case "message" | "function_call" | "custom_tool_call" as kind:
                needed = "role" if kind == "message" else "name and call_id"
                raise bad_request(f"{where}: a {kind} needs {needed}.", "input")
            case "function_call_output" | "custom_tool_call_output" as kind:
                raise bad_request(f"{where}: a {kind} needs call_id.", "input")
            case kind:
                raise not_supported(f"{where}: items of type {kind[:100]!r} are not supported.", "input")
    return messages


def _assistants_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: str | list[InputPart] | None, where: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if part.type == "input_image":
            place = f"{where}.content.{index}"
            if part.image_url is None:
                given = "a file_id cannot be read; send " if part.file_id is not None else "an input_image needs "
                raise bad_request(f"{place}: {given}image_url.", "input")
            parts.append({"type": part.type, "image_url": {"url": part.image_url, "where": f"{place}.image_url"}})
            continue
        if part.type not in _TEXTS:
            raise bad_request(f"{where}: only text is supported, not content of type {part.type[:100]!r}.", "input")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise bad_request(f"{where}: a part of its content lacks its text.", "input")
        parts.append({"type": "text", "text": text})
    return parts
