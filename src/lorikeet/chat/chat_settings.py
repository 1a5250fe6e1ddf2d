"""Writes and reads the conversations with one model, by its chat settings."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lorikeet.adapters.chat import AdapterChat
from lorikeet.chat.chat_output import AnswerReader, ToolUse
from lorikeet.chat.grammar_process import ANY_TEXT, GrammarKind, GrammarSpec, Marker, Thoughts
from lorikeet.chat.protocol import ChatOptions
from lorikeet.chat.reasoning import REASONING_FORMATS, ReasoningFormat
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.structured_output import MAX_GRAMMAR_BYTES
from lorikeet.chat.text_processor import PromptStyle, TextProcessor, tool_format_of
from lorikeet.chat.tool_parsers.base import CallGrammar, Parameters, ToolFormat
from lorikeet.core.chat_template import TOOL_USE
from lorikeet.core.images import ImageTokens
from lorikeet.http.errors import bad_request

THOUGHTS_BUDGET = "thinking_token_budget"
_PROMPT_END_TOKENS = 16
"""Last tokens of a prompt in which thoughts may be opened; a marker may be several tokens."""


@dataclass(frozen=True)
class ChatSettings:
    """Chat template, parsers and defaults of a model.

    Attributes:
        text_processor: the model's tokenizer and chat template.
        limits: the model's limits and sampling defaults.
        system_prompt: the system prompt of conversations without one.
        tool_parser: name of the format of tool calls; empty for the template's format.
        reasoning_parser: name of the format of thoughts; empty if thoughts stay in the content.
        own: settings that include a chat template or tokens of an adapter's or a request's own; else None. Another
            process then renders the prompts, since the template comes from a stranger.
    """

    text_processor: TextProcessor
    limits: ModelLimits
    system_prompt: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    own: AdapterChat | None = None

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's tool calls; None if its template uses an unknown format."""
        if self.own is not None and self.own.chat_template:
            template = self.own.other_templates.get(TOOL_USE, self.own.chat_template)
            return tool_format_of(template, self.own.knows_tools, self.tool_parser)
        return self.text_processor.tool_format(self.tool_parser)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """Format of the model's thoughts; None if they stay in the content."""
        return REASONING_FORMATS[self.reasoning_parser] if self.reasoning_parser else None

    def for_body(self, body: ChatOptions) -> "ChatSettings":
        """Return the settings of a conversation, whose body may have its own chat template."""
        if not body.own_template:
            return self
        return replace(self, own=with_template(self.own or AdapterChat(), body, self.system_prompt, self.tool_parser))

    def style(self, body: ChatOptions) -> PromptStyle:
        """Return the style in which the messages of ``body`` become a prompt."""
        return prompt_style(body, self.system_prompt, self.tool_parser, self.limits.image_tokens)

    def check_tools(self, use: ToolUse | None) -> None:
        """Check that tool calls of this model can be read.

        Raises:
            ApiError: 400, the format is unknown.
        """
        if use is not None and self.tool_format is None:
            raise bad_request(
                "tools: the chat template of this model writes tool calls in an unknown format; name the format with "
                "--tool-call-parser.",
                "tools",
            )

    def grammar(
        self, use: ToolUse | None, content: GrammarSpec | None, *, has_budget: bool = False
    ) -> GrammarSpec | None:
        """Return the grammar of an answer; None if it may be any text.

        Args:
            use: the functions that the answer may call.
            content: the grammar that the body requests. An answer with functions follows it or calls a function; an
                answer that must call a function ignores it.
            has_budget: whether thoughts have a budget, which needs a grammar.

        Raises:
            ApiError: 400, ``content`` is not a JSON schema and functions may be called, or the functions are too many.
        """
        without_calls = content or (GrammarSpec(GrammarKind.LARK, ANY_TEXT, THOUGHTS_BUDGET) if has_budget else None)
        if use is None:
            return without_calls
        tool_format = self.tool_format
        is_free = content is None and not use.is_forced
        if tool_format is None or (is_free and not use.is_strict and not has_budget):
            return without_calls
        schema = None
        if content is not None and not use.is_forced:
            if content.kind is not GrammarKind.JSON_SCHEMA:
                only = "with tools an answer can only follow a JSON schema"
                raise bad_request(f"{content.param}: {only}.", content.param)
            schema = json.loads(content.text)
        text = self._call_grammar(tool_format, use.functions, use.parallel, schema, is_free)
        if len(text) > MAX_GRAMMAR_BYTES:
            most = f"at most {MAX_GRAMMAR_BYTES} are allowed for an answer that must follow them"
            raise bad_request(f"tools: {len(text)} characters; {most}.", "tools")
        return GrammarSpec(GrammarKind.LARK, text, "tools")

    def grammars_of_functions(self, use: ToolUse | None) -> Iterator[GrammarSpec]:
        """Yield the grammar of a call of each function alone."""
        tool_format = self.tool_format
        if use is None or tool_format is None:
            return
        for name, schema in use.functions.items():
            text = self._call_grammar(tool_format, {name: schema}, parallel=False)
            yield GrammarSpec(GrammarKind.LARK, text, "tools", function=name)

    def _call_grammar(
        self,
        tool_format: ToolFormat,
        functions: Mapping[str, Parameters],
        parallel: bool,
        content: Any = None,
        is_free: bool = False,
    ) -> str:
        builder = CallGrammar(functions, parallel, self.text_processor.special_token_id, content, is_free)
        try:
            return tool_format.grammar(builder)
        except ValueError as error:
            raise bad_request(f"tools: {error} in this model's format.", "tools") from error

    def why_unbounded(self) -> str | None:
        """Return why thoughts cannot have a budget; None if they can."""
        if self.reasoning is None:
            return "the thoughts of this model are not separated; name their format with --reasoning-parser."
        end = self.reasoning.end
        if self.text_processor.added_token_id(end) is None:
            return f"{end!r}, which ends the thoughts of this model, is several tokens; use max_tokens."
        return None

    def thoughts(self, prompt: list[int], most_tokens: int | None = None) -> Thoughts | None:
        """Return the thoughts that may precede an answer that follows a grammar.

        Args:
            prompt: token ids of the prompt.
            most_tokens: budget of the thoughts; None for no budget. A budget needs :meth:`why_unbounded` to be None.
        """
        reasoning = self.reasoning
        prompt_end = self._prompt_end(prompt)
        if reasoning is None or reasoning.is_closed(prompt_end):
            return None
        # Qwen3's markers are added tokens that are not special, but a grammar must name them as tokens, too.
        begin, end = (Marker(text, self.text_processor.added_token_id(text)) for text in reasoning.markers)
        return Thoughts(begin, end, reasoning.is_open(prompt_end), most_tokens, self.limits.eos_token_ids)

    def kept_tokens(self, use: ToolUse | None) -> frozenset[int]:
        """Return the special tokens that stay in the text of an answer, since parsers need them."""
        formats = (self.tool_format if use is not None else None, self.reasoning)
        markers = (marker for each in formats if each is not None for marker in each.markers)
        token_ids = map(self.text_processor.special_token_id, markers)
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    def reader(self, use: ToolUse | None, prompt: list[int], *, include_reasoning: bool) -> AnswerReader | None:
        """Return the reader of one choice; None if its text is the content unchanged.

        Args:
            use: the functions that the choice may call.
            prompt: token ids of the prompt.
            include_reasoning: whether to report thoughts.
        """
        reasoning = self.reasoning
        if use is None and reasoning is None:
            return None
        tool_format = None if use is None else self.tool_format
        prompt_end = self._prompt_end(prompt)
        return AnswerReader(use, tool_format, reasoning, prompt_end, include_reasoning=include_reasoning)

    def _prompt_end(self, prompt: list[int]) -> str:
        """Return the last words of a prompt, in which thoughts may be opened or closed."""
        return "" if self.reasoning is None else self.text_processor.decode(prompt[-_PROMPT_END_TOKENS:])


def with_template(chat: AdapterChat, body: ChatOptions, system_prompt: str, tool_parser: str) -> AdapterChat:
    """Return the settings of a conversation whose body has its own chat template.

    Args:
        chat: the settings of its model that differ from the base's.
        body: the body.
        system_prompt: the system prompt of conversations without one.
        tool_parser: name of the format of tool calls; empty for the template's format.
    """
    return msgspec.structs.replace(
        chat,
        chat_template=body.own_template,
        knows_tools="tools" in body.own_template,
        other_templates={},
        system_prompt=system_prompt,
        tool_call_parser=tool_parser,
    )


def prompt_style(
    body: ChatOptions, system_prompt: str, tool_parser: str, image_tokens: ImageTokens | None = None
) -> PromptStyle:
    """Return the style in which the messages of ``body`` become a prompt, given the settings of its model."""
    return PromptStyle(
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=(body.chat_template_kwargs or {}) | ({"documents": body.documents} if body.documents else {}),
        tools=() if getattr(body, "tool_choice", None) == "none" else body.tools or (),
        system_prompt=system_prompt,
        tool_parser=tool_parser,
        template="" if body.own_template else body.chat_template or "",
        image_tokens=image_tokens,
    )
