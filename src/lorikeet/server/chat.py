"""``POST /v1/chat/completions``."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorikeet.core.plan import Token
from lorikeet.server.answers import respond
from lorikeet.server.dependencies import From, JsonBody, Parts
from lorikeet.server.errors import bad_request
from lorikeet.server.generation import Piece
from lorikeet.server.logprobs import chat_logprobs
from lorikeet.server.protocol import ChatCompletionRequest
from lorikeet.server.service import Job
from lorikeet.server.texts import Texts
from lorikeet.server.unsupported import refuse_unsupported

router = APIRouter(dependencies=[JsonBody])


class ChatFormat:
    """See :class:`lorikeet.server.answers.Format`."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, texts: Texts, *, logprobs: bool) -> None:
        self._texts = texts
        self.needs_every_token = logprobs

    def first(self, index: int) -> dict[str, Any]:
        """The role comes in a chunk of its own."""
        return self._choice(index, "delta", {"role": "assistant", "content": ""}, None, None) | {"logprobs": None}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of one chunk."""
        delta = {"content": piece.text} if piece.text else {}
        choice = self._choice(piece.index, "delta", delta, piece.finish_reason, piece.stop_reason)
        return choice | {"logprobs": self._logprobs(piece.tokens)}

    def complete(self, index: int, text: str, tokens: list[Token], last: Piece) -> dict[str, Any]:
        """Return a whole choice."""
        message = {"role": "assistant", "content": text}
        choice = self._choice(index, "message", message, last.finish_reason, last.stop_reason)
        return choice | {"logprobs": self._logprobs(tokens)}

    def _choice(
        self,
        index: int,
        key: str,
        content: dict[str, str],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, key: content, "finish_reason": finish_reason}
        return choice if finish_reason is None else choice | {"stop_reason": stop_reason}

    def _logprobs(self, tokens: tuple[Token, ...] | list[Token]) -> dict[str, Any] | None:
        return chat_logprobs(self._texts, tokens) if self.needs_every_token else None


@router.post("/v1/chat/completions")
async def chat_completions(http: Request, body: ChatCompletionRequest, parts: Parts, sender: From) -> Response:
    """Answer a conversation."""
    refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    target = parts.models.resolve(body.model, body.lora_path)

    async def encode() -> list[list[int]]:
        token_ids = await parts.texts.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=body.chat_template_kwargs or {},
            continue_final_message=bool(body.continue_final_message),
            limits=parts.limits,
        )
        return [token_ids]

    job = Job(
        prompts=1,
        encode=encode,
        prompt_param="messages",
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generation = await parts.start(body, target, job, sender)
    return await respond(http, body, generation, ChatFormat(parts.texts, logprobs=bool(body.logprobs)), target.name)
