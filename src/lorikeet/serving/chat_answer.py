"""Starts the answer to a conversation and reads it as it arrives, for all chat APIs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lorikeet.chat.chat_output import AnswerPart, AnswerReader, ToolUse, tool_use
from lorikeet.chat.chat_settings import THOUGHTS_BUDGET, ChatSettings
from lorikeet.chat.protocol import ChatCompletionRequest, GenerationBody
from lorikeet.chat.structured_output import grammar_spec
from lorikeet.core.plan import Token
from lorikeet.http.errors import bad_request, not_supported
from lorikeet.serving.generation import Generation
from lorikeet.serving.large_bodies import PreparedBody
from lorikeet.serving.requests import GenerationSpec, Sender
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.serving.service import Service


class AnswerStep(NamedTuple):
    """The part of an answer that one output of the engine added.

    Attributes:
        part: thoughts, content and calls.
        tokens: new tokens.
        finish_reason: ``stop``, ``length`` or ``abort`` in the last step, else None.
        stop_reason: the stop string or the named stop token that ended the answer.
    """

    part: AnswerPart
    tokens: tuple[Token, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class ChatAnswer:
    """A running answer to a conversation. The holder must close the answer's generation.

    Attributes:
        target: the model.
        chat: settings of the model.
        use: the functions that the answer may call; None without functions.
        generation: the running generation.
        readers: the reader of each choice, by index; empty if the texts are the content without changes.
    """

    target: ResolvedModel
    chat: ChatSettings
    use: ToolUse | None
    generation: Generation
    readers: list[AnswerReader]

    async def steps(self) -> AsyncIterator[AnswerStep]:
        """Yield the steps of the answer's only choice, until the choice has finished.

        Raises:
            ApiError: see ``Generation.deltas``.
        """
        async for delta in self.generation.deltas():
            part = AnswerPart(delta.text)
            if self.readers:
                part = self.readers[delta.index].push(delta.text)
            if self.readers and delta.finish_reason is not None:
                part = _joined(part, self.readers[delta.index].finish())
            yield AnswerStep(part, delta.tokens, delta.finish_reason, delta.stop_reason)


def _joined(first: AnswerPart, second: AnswerPart) -> AnswerPart:
    return AnswerPart(first.content + second.content, first.reasoning + second.reasoning, [*first.calls, *second.calls])


async def start_chat(
    service: Service, body: ChatCompletionRequest, sender: Sender, prepared: PreparedBody | None
) -> ChatAnswer:
    """Accept a conversation and start to answer it.

    Args:
        service: the server's service.
        body: the conversation; without messages if another process has read them.
        sender: the origin of the request.
        prepared: the prompt, if another process has read it.

    Raises:
        ApiError: the request cannot be accepted, or a field is not valid.
    """
    if prepared:
        target = prepared.target
        lease = prepared.lease
    else:
        target, lease = await service.lease(body, sender)
    with lease:
        chat = (await service.chats.settings_of(target.chat)).for_body(body)
        use: ToolUse | None = None
        if body.tools:
            use = tool_use(body)
            chat.check_tools(use)
        generation = await service.start(body, target, lease, _spec(service, body, chat, use, prepared), sender)
    try:
        readers = [
            chat.reader(
                use, choice.handle.request.prompt_token_ids, include_reasoning=body.include_reasoning is not False
            )
            for choice in generation.choices
        ]
    except BaseException:
        generation.close()
        raise
    return ChatAnswer(target, chat, use, generation, [reader for reader in readers if reader is not None])


def _spec(
    service: Service,
    body: ChatCompletionRequest,
    chat: ChatSettings,
    use: ToolUse | None,
    prepared: PreparedBody | None,
) -> GenerationSpec:
    """Return the specification of an answer. See :func:`start_chat` for errors."""
    budget = body.thinking_token_budget
    if budget is not None and (reason := chat.why_unbounded()):
        raise bad_request(f"{THOUGHTS_BUDGET}: {reason}", THOUGHTS_BUDGET)
    content = grammar_spec(body)
    return GenerationSpec(
        chat=chat,
        prompts=1,
        encode=partial(service.encode_chat, body, chat, prepared),
        prompt_param="messages",
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        arrival_s=prepared.arrival_s if prepared else None,
        kept_tokens=chat.kept_tokens(use),
        grammar=chat.grammar(use, content, has_budget=budget is not None),
        function_grammars=partial(chat.grammars_of_functions, use),
        thoughts=partial(chat.thoughts, most_tokens=budget),
    )


def check_one_answer(body: GenerationBody) -> None:
    """Refuse fields that an API with a single answer of blocks cannot express.

    Raises:
        ApiError: 501.
    """
    fields = {
        "n": (body.n or 1) > 1,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_token_ids": bool(body.return_token_ids),
        "return_weight_versions": bool(body.return_weight_versions),
    }
    for name, is_set in fields.items():
        if is_set:
            raise not_supported(f"{name} has no place in this answer; use /v1/chat/completions.", name)
