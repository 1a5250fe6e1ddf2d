"""Serves vLLM's routes for token ids: ``/inference/v1/generate``, and the rendering of chats for it."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from lorikeet.api.answer_writer import TokenReport, check_stream, respond, tokens_of
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes.completions import start_completion
from lorikeet.chat.logprobs import TokenNames, chat_logprobs
from lorikeet.chat.protocol import ChatCompletionRequest, refuse_unsupported
from lorikeet.chat.tokens_body import WORDS, TokensRequest
from lorikeet.client.client import RequestHandle
from lorikeet.core.plan import Token
from lorikeet.http.errors import in_words, not_supported
from lorikeet.http.model_routes import RENDER_CHAT, TOKENS
from lorikeet.http.routes import Routes
from lorikeet.serving.generation import OutputDelta
from lorikeet.serving.large_bodies import prepared_body

ROUTES = Routes()

_SAMPLING = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("prompt_logprobs", "logprob_token_ids", "logprobs_mode", "structured_outputs"),
)
"""Fields of a chat that are sampling parameters."""


class TokensFormat:
    """Writes the choices of ``/inference/v1/generate``.

    Args:
        report: the fields that describe tokens.
        handles: the requests of all choices.
    """

    id_prefix = "generate"
    object = "generate"
    chunk_object = "generate.chunk"
    needs_every_token = True
    is_plain = False

    def __init__(self, report: TokenReport, handles: Sequence[RequestHandle]) -> None:
        self._report = report
        self._handles = handles

    def envelope(self, index: int) -> dict[str, Any]:
        """Return the fields that describe the prompt."""
        return self._report.of_prompt(self._handles[index])

    def first(self, index: int) -> None:
        """Return None: a stream begins with its first tokens."""

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        return self._choice(delta.index, delta.tokens, delta)

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether a chunk adds tokens."""
        return bool(choice["token_ids"])

    def usage(self) -> dict[str, Any]:
        """Return no field."""
        return {}

    def complete(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return a complete choice."""
        return self._choice(index, tokens_of(deltas), deltas[-1])

    def _choice(self, index: int, tokens: Sequence[Token], last: OutputDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": [token.token_id for token in tokens],
            "logprobs": chat_logprobs(self._report.names, tokens) if self._report.logprobs else None,
            "finish_reason": last.finish_reason,
        }
        return choice if last.finish_reason is None else choice | {"stop_reason": last.stop_reason}


@ROUTES.add(TOKENS)
async def generate_tokens(http: Request, body: TokensRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Continue token ids by token ids, without any text."""
    completion = body.completion()
    sender = sender._replace(request_id=body.request_id or sender.request_id)
    prepared = prepared_body(http)
    with in_words(WORDS):
        check_stream(completion)
        started = await start_completion(service, completion, sender, prepared, default_max_tokens=None)
    generation, texts, model = started
    report = TokenReport(
        TokenNames(texts, as_ids=True),
        completion.logprobs is not None,
        completion.prompt_logprobs is not None,
        bool(body.return_token_ids),
    )
    answer = TokensFormat(report, [choice.handle for choice in generation.choices])
    named = {"request_id": sender.request_id}
    return await respond(http, completion, generation, answer, model, service.settings, named)


@ROUTES.add(RENDER_CHAT)
async def render_chat(http: Request, body: ChatCompletionRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Return the body of ``/inference/v1/generate`` for a conversation, whose prompt its template has written."""
    refuse_unsupported(body)
    prepared = prepared_body(http)
    target = prepared.target if prepared else await service.resolve(body, sender, generates=False)
    chat = (await service.chats.settings_of(target.chat)).for_body(body)
    (prompt,) = await service.encode_chat(body, chat, prepared)
    if prompt.images:
        raise not_supported("A prompt with images has no form in token ids alone; send it as a chat.", "messages")
    token_ids = prompt.token_ids
    given = body.model_dump(exclude_none=True, include=set(_SAMPLING))
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    given["stop_token_ids"] = sorted({*given.get("stop_token_ids", ()), *chat.limits.eos_token_ids})
    rendered = {
        "request_id": sender.request_id,
        "model": target.name,
        "token_ids": token_ids,
        "features": None,
        "sampling_params": {"max_tokens": chat.limits.max_model_len - len(token_ids)} | given,
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }
    return Response(msgspec.json.encode(rendered), media_type="application/json")
