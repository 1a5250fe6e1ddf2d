"""Continues prompts: ``POST /v1/completions``."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import Request
from starlette.responses import Response

from lorikeet.api.answer_writer import TokenReport, check_stream, respond, tokens_of
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.logprobs import TextOffsets, completion_logprobs, echoed_tokens
from lorikeet.chat.prompt_embeds import read_prompt_embeds, token_count
from lorikeet.chat.protocol import CompletionRequest, check_prompt_embeds, prompts_of, refuse_unsupported
from lorikeet.chat.sampling import truncated
from lorikeet.chat.structured_output import grammar_spec
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.client.client import RequestHandle
from lorikeet.core.plan import Token
from lorikeet.core.request import PromptEmbeds
from lorikeet.http.errors import bad_request
from lorikeet.http.model_routes import COMPLETIONS
from lorikeet.http.routes import Routes
from lorikeet.serving.generation import Generation, OutputDelta
from lorikeet.serving.large_bodies import PreparedBody, prepared_body
from lorikeet.serving.requests import GenerationSpec, Prompt, Sender
from lorikeet.serving.service import Service

ROUTES = Routes()

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """Writes the choices of ``/v1/completions``.

    Args:
        report: the fields that describe tokens.
        handles: the requests of all choices.
        echoes: the text of each prompt, which opens its choices; empty without an echo.
        choices: number of choices of each prompt.
        skip_special_tokens: whether texts leave special tokens out.
    """

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        report: TokenReport,
        handles: Sequence[RequestHandle],
        *,
        echoes: list[str],
        choices: int,
        skip_special_tokens: bool,
    ) -> None:
        self._report = report
        self._handles = handles
        self._skip_special_tokens = skip_special_tokens
        self._echoes = echoes
        self._choices = choices
        self._offsets: dict[int, TextOffsets] = {}
        self.needs_every_token = report.needs_every_token
        self.is_plain = not report.needs_every_token

    def envelope(self, index: int) -> dict[str, Any]:
        """Return no field: each choice describes its prompt itself."""
        return {}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice with the echo of the prompt and the prompt's token ids, where the body requests them."""
        if not (self._echoes or self._report.token_ids):
            return None
        logprobs = self._logprobs(index, ()) if self._echoes else None
        choice = _choice(index, self._echo(index), logprobs, None, None)
        prompt = self._handles[index].request.prompt_token_ids
        return choice | {"token_ids": [], "prompt_token_ids": prompt} if self._report.token_ids else choice

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        logprobs = self._logprobs(delta.index, delta.tokens)
        choice = _choice(delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        return choice | {"token_ids": self._report.ids(delta.tokens)} if self._report.token_ids else choice

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether a chunk adds text."""
        return bool(choice["text"])

    def usage(self) -> dict[str, Any]:
        """Return no field."""
        return {}

    def complete(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return a complete choice."""
        tokens = tokens_of(deltas)
        last = deltas[-1]
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        choice = _choice(index, text, self._logprobs(index, tokens), last.finish_reason, last.stop_reason)
        return choice | self._report.of_prompt(self._handles[index]) | {"token_ids": self._report.ids(tokens)}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return the log probabilities of the next tokens; the first call adds the prompt's if the prompt is echoed."""
        if not self._report.logprobs:
            return None
        offsets = self._offsets.get(index)
        echoed = list[Token]()
        if offsets is None:
            names = self._report.names
            handle = self._handles[index]
            offsets = TextOffsets(names.text_processor, skip_special_tokens=self._skip_special_tokens)
            self._offsets[index] = offsets
            if self._echoes:
                echoed = echoed_tokens(handle.request.prompt_token_ids, handle.prompt_logprobs)
        return completion_logprobs(self._report.names, [*echoed, *tokens], offsets, echoed=len(echoed))


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


class StartedCompletion(NamedTuple):
    """A running completion.

    Attributes:
        generation: the running generation, which the holder must close.
        texts: text processor of its model.
        model: name to report.
    """

    generation: Generation
    texts: TextProcessor
    model: str


async def start_completion(
    service: Service,
    body: CompletionRequest,
    sender: Sender,
    prepared: PreparedBody | None = None,
    *,
    default_max_tokens: int | None = _DEFAULT_MAX_TOKENS,
) -> StartedCompletion:
    """Submit the prompts of a body.

    Args:
        service: the server's service.
        body: the body; its prompts and sampling fields are checked here.
        sender: the request's sender.
        prepared: the parts that another process has read of a large body.
        default_max_tokens: limit on an answer if the body sets none; None for all of the context's space.

    Raises:
        ApiError: the body is not valid, or cannot be served.
    """
    if prepared:
        target = prepared.target
        lease = prepared.lease
    else:
        target, lease = await service.lease(body, sender)
    with lease:
        chat = await service.chats.settings_of(target.chat)
        spec = _completion_spec(body, chat, prepared, default_max_tokens)
        generation = await service.start(body, target, lease, spec, sender)
    return StartedCompletion(generation, chat.text_processor, target.name)


def _completion_spec(
    body: CompletionRequest, chat: ChatSettings, prepared: PreparedBody | None, default_max_tokens: int | None
) -> GenerationSpec:
    """Return the specification of a completion; see :func:`start_completion` for errors."""
    embeds: Sequence[PromptEmbeds] = prepared.embeds if prepared else ()
    if body.prompt_embeds is not None and not prepared:
        check_prompt_embeds(body)
        embeds = read_prompt_embeds(body.prompt_embeds, chat.limits.hidden, chat.limits.max_model_len)
    if embeds and not prepared:
        prompts: Sequence[str | list[int]] = [[0] * token_count(each, chat.limits.hidden) for each in embeds]
    else:
        prompts = prepared.prompts if prepared else prompts_of(body)

    async def encode() -> list[Prompt]:
        if prepared:
            return list(map(Prompt, prepared.prompts))
        special = body.add_special_tokens is not False
        limits = None if body.truncates else chat.limits
        encoded = await chat.text_processor.encode(prompts, add_special_tokens=special, limits=limits)
        return [Prompt(truncated(token_ids, body, chat.limits)) for token_ids in encoded]

    return GenerationSpec(
        chat=chat,
        prompts=len(prompts),
        encode=encode,
        prompt_param="prompt",
        default_max_tokens=default_max_tokens,
        logprobs=0 if body.logprobs is None and body.choices_per_prompt > (body.n or 1) else body.logprobs,
        prompt_logprobs=body.logprobs if body.prompt_logprobs is None and body.echo else body.prompt_logprobs,
        arrival_s=prepared.arrival_s if prepared else None,
        grammar=grammar_spec(body),
        embeds=embeds,
    )


@ROUTES.add(COMPLETIONS)
async def completions(http: Request, body: CompletionRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Continue one prompt or several."""
    refuse_unsupported(body)
    _check_choices(body)
    prepared = prepared_body(http)
    generation, texts, model = await start_completion(service, body, sender, prepared)
    handles = [choice.handle for choice in generation.choices]
    try:
        echoes = list(prepared.texts) if prepared else []
        if body.echo and not prepared:
            own = [handle.request.prompt_token_ids for handle in handles[:: body.choices_per_prompt]]
            echoes = await texts.decode_all(own if body.truncates else prompts_of(body))
    except BaseException:
        generation.close()
        raise
    answer = CompletionFormat(
        TokenReport.of(body, texts, service.settings, logprobs=body.logprobs is not None),
        handles,
        echoes=echoes,
        choices=body.choices_per_prompt,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return await respond(http, body, generation, answer, model, service.settings)


def _check_choices(body: CompletionRequest) -> None:
    """Check ``best_of``, and that a body combines ``stream`` only with fields that streams support.

    Raises:
        ApiError: 400, a check failed.
    """
    check_stream(body)
    if body.best_of is None:
        return
    if body.best_of < (body.n or 1):
        raise bad_request(f"best_of is {body.best_of}, less than n.", "best_of")
    if body.stream and body.best_of > (body.n or 1):
        raise bad_request("A stream cannot wait for the best of several answers.", "best_of")
