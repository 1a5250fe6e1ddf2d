"""``POST /v1/completions``."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorikeet.core.plan import Token
from lorikeet.server.answers import respond
from lorikeet.server.dependencies import From, JsonBody, Parts
from lorikeet.server.errors import bad_request, not_supported
from lorikeet.server.generation import Piece
from lorikeet.server.logprobs import completion_logprobs
from lorikeet.server.protocol import CompletionRequest
from lorikeet.server.service import Job
from lorikeet.server.texts import Texts
from lorikeet.server.unsupported import refuse_unsupported

router = APIRouter(dependencies=[JsonBody])

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """See :class:`lorikeet.server.answers.Format`.

    Args:
        texts: the model's.
        logprobs: whether to report them.
        echoes: text that opens the choices of each prompt; empty for none.
        choices: how many each prompt has.
    """

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, texts: Texts, *, logprobs: bool, echoes: list[str], choices: int) -> None:
        self._texts = texts
        self._echoes = echoes
        self._choices = choices
        self._offsets: dict[int, int] = {}
        self.needs_every_token = logprobs

    def first(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed."""
        return _choice(index, self._echo(index), None, None, None) if self._echoes else None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of one chunk."""
        logprobs = self._logprobs(piece.index, piece.tokens)
        return _choice(piece.index, piece.text, logprobs, piece.finish_reason, piece.stop_reason)

    def complete(self, index: int, text: str, tokens: list[Token], last: Piece) -> dict[str, Any]:
        """Return a whole choice."""
        text = self._echo(index) + text
        return _choice(index, text, self._logprobs(index, tokens), last.finish_reason, last.stop_reason)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _logprobs(self, index: int, tokens: tuple[Token, ...] | list[Token]) -> dict[str, Any] | None:
        if not self.needs_every_token:
            return None
        offset = self._offsets.get(index, 0)
        logprobs = completion_logprobs(self._texts, tokens, offset)
        self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return logprobs


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


@router.post("/v1/completions")
async def completions(http: Request, body: CompletionRequest, parts: Parts, sender: From) -> Response:
    """Continue one or several prompts."""
    refuse_unsupported(body)
    if body.echo and body.logprobs is not None:
        raise not_supported("echo together with logprobs is not supported yet.", "echo")
    target = parts.models.resolve(body.model, body.lora_path)
    prompts = _prompts(body)

    async def encode() -> list[list[int]]:
        special = body.add_special_tokens is not False
        return await parts.texts.encode(prompts, add_special_tokens=special, limits=parts.limits)

    job = Job(
        prompts=len(prompts),
        encode=encode,
        prompt_param="prompt",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )
    generation = await parts.start(body, target, job, sender)
    try:
        echoes = await parts.texts.decode_all(prompts) if body.echo else []
    except BaseException:
        generation.close()
        raise
    answer = CompletionFormat(parts.texts, logprobs=body.logprobs is not None, echoes=echoes, choices=body.n or 1)
    return await respond(http, body, generation, answer, target.name)


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Bring the four forms of ``prompt`` into one."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("The prompt is empty; at least one token is needed.", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    strings = [entry for entry in prompt if isinstance(entry, str)]
    return strings or [entry for entry in prompt if isinstance(entry, list)]
