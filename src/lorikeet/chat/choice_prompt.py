"""Extracts the text of a body by which ``model: "auto"`` chooses an adapter."""

from collections.abc import Sequence

from lorikeet.chat.conversation import content_text
from lorikeet.chat.messages_body import CountTokensRequest, MessagesRequest
from lorikeet.chat.nearest_examples import used_part
from lorikeet.chat.protocol import (
    Body,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    TokenizeRequest,
    prompts_of,
)
from lorikeet.chat.responses_body import ResponsesRequest
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.chat.tokens_body import TokensRequest

CHOOSING_BODIES = (
    CompletionRequest,
    TokensRequest,
    ChatCompletionRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    TokenizeRequest,
)
"""Bodies with a prompt by which an adapter can be chosen."""

_MOST_TOKENS = 4000
"""Token ids of a longer prompt that are decoded, half of them at each end."""


def choice_prompt(body: Body, texts: TextProcessor) -> str:
    """Return the text by which ``auto`` chooses: the part that counts of :func:`_prompt`.

    Args:
        body: the body, whose fields have valid types.
        texts: decodes prompts of token ids.

    Raises:
        ApiError: a field is not valid.
    """
    return used_part(_prompt(body, texts))


def _prompt(body: Body, texts: TextProcessor) -> str:
    """Return a conversation's last message of the user, or the first prompt of a completion; empty without text.

    System prompts are left out: most are the same for all tasks, and would make all prompts alike.
    """
    match body:
        case CompletionRequest():
            return "" if body.prompt_embeds is not None else _text(prompts_of(body)[0], texts)
        case TokensRequest():
            return _text(body.token_ids, texts)
        case ChatCompletionRequest():
            return _last_of_user(body.messages)
        case MessagesRequest():
            return _last_of_user(body.chat().messages)
        case CountTokensRequest():
            return _last_of_user(body.tokenize_body().messages or ())
        case ResponsesRequest():
            return _last_of_user(body.chat(b"").messages)
        case TokenizeRequest():
            return body.prompt or _last_of_user(body.messages or ())
    raise TypeError(f"{type(body).__name__} has no prompt")


def _text(prompt: str | list[int], texts: TextProcessor) -> str:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > _MOST_TOKENS:
        prompt = prompt[: _MOST_TOKENS // 2] + prompt[-_MOST_TOKENS // 2 :]
    return texts.decode(prompt, skip_special_tokens=True)


def _last_of_user(messages: Sequence[ChatMessage]) -> str:
    return next((content_text(each) for each in reversed(messages) if each.role == "user"), "")
