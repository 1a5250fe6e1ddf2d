"""Reads the text of an answer as it arrives, and separates thoughts, content and tool calls."""

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorikeet.chat.protocol import ChatCompletionRequest, NamedTool
from lorikeet.chat.reasoning import ReasoningFormat, ReasoningParser
from lorikeet.chat.tool_parsers.base import CallArguments, CallStart, Content, Event, Parameters, Parser, ToolFormat

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24


class ToolUse(NamedTuple):
    """Functions that an answer may call.

    Attributes:
        functions: schemas of the arguments, by the function's name.
        is_forced: whether the answer must call a function.
        is_named: whether the request names the function to call.
        parallel: whether the answer may contain several calls.
        is_strict: whether arguments must follow the schemas even in optional calls.
    """

    functions: Mapping[str, Parameters]
    is_forced: bool = False
    is_named: bool = False
    parallel: bool = True
    is_strict: bool = False


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """Return the functions that an answer may call; None for a plain chat."""
    if not body.tools or body.tool_choice == "none":
        return None
    functions = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return ToolUse({name: functions[name]}, is_forced=True, is_named=True, parallel=False)
    return ToolUse(
        functions,
        body.tool_choice == "required",
        parallel=body.parallel_tool_calls is not False,
        is_strict=any(tool.function.strict for tool in body.tools),
    )


@dataclass
class CallPart:
    """Part of a tool call.

    Attributes:
        index: position of the call in the answer.
        call_id, name: id and function of the call in its first part; None in later parts.
        arguments: further JSON text of the arguments.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the part as an entry of ``tool_calls`` in a chunk."""
        function = {"arguments": self.arguments}
        if self.call_id is None:
            return {"index": self.index, "function": function}
        return {
            "index": self.index,
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, **function},
        }


def whole_calls(parts: list[CallPart]) -> list[dict[str, Any]]:
    """Return the calls of a complete message, from their parts in order."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.call_id is not None:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += part.arguments
    return calls


@dataclass
class AnswerPart:
    """Thoughts, content and calls that a delta adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerReader:
    """Reads the text of one choice.

    Args:
        use: the functions that it may call; None for no functions.
        tool_format: the model's format of calls; needed with ``use``.
        reasoning: the model's format of thoughts; None if thoughts stay in the content.
        prompt_end: the last words of the prompt.
        include_reasoning: whether to report thoughts.

    Attributes:
        has_calls: whether the choice has called a function.
        reasoning_tokens: tokens of thoughts so far; None if thoughts are not separated.
    """

    def __init__(
        self,
        use: ToolUse | None,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        prompt_end: str,
        *,
        include_reasoning: bool = True,
    ) -> None:
        self.has_calls = False
        self._use = use
        self._format = tool_format
        self._tools: Parser | None = None if use is None or tool_format is None else tool_format.parser(use.functions)
        self._reasoning: ReasoningParser | None = None if reasoning is None else reasoning.parser(prompt_end)
        self._include_reasoning = include_reasoning
        self.reasoning_tokens = None if reasoning is None else 0

    def push(self, text: str, tokens: int = 0) -> AnswerPart:
        """Add the text of ``tokens`` tokens; return the part that it completes."""
        thoughts, text = ("", text) if self._reasoning is None else self._reasoning.push(text)
        if self._reasoning is not None and self._reasoning.is_thinking:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + tokens
        return self._part(thoughts, [Content(text)] if self._tools is None else self._tools.push(text))

    def finish(self) -> AnswerPart:
        """Return the part that was held back, at the end of the text."""
        thoughts, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        events: list[Event] = [Content(text)] if self._tools is None else self._tools.push(text) + self._tools.finish()
        return self._part(thoughts, events)

    def _part(self, thoughts: str, events: list[Event]) -> AnswerPart:
        part = AnswerPart(reasoning=thoughts if self._include_reasoning else "")
        for event in events:
            match event:
                case Content(text):
                    part.content += text
                case CallStart(index, name) if self._is_wanted(index):
                    self.has_calls = True
                    part.calls.append(CallPart(index, self._new_id(), name))
                case CallArguments(index, text) if self._is_wanted(index):
                    if not part.calls or part.calls[-1].index != index:
                        part.calls.append(CallPart(index))
                    part.calls[-1].arguments += text
        return part

    def _is_wanted(self, index: int) -> bool:
        return index == 0 or (self._use is not None and self._use.parallel)

    def _new_id(self) -> str:
        assert self._format is not None
        if not self._format.id_letters:
            return "call_" + _letters(_ID_LENGTH)
        return _letters(self._format.id_letters)


def _letters(count: int) -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(count))
