"""Bodies and runs of the routes that answer with vectors or labels: texts are computed without sampling."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lorikeet.chat.protocol import Body, CompletionRequest, ExpectedDigest, TokenIds
from lorikeet.chat.sampling import ModelLimits, check_prompt, of_prompt, truncated
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.core.request import Pooling
from lorikeet.http.errors import ApiError
from lorikeet.http.threads import off_the_loop
from lorikeet.serving.generation import Generation
from lorikeet.serving.requests import GenerationSpec, Prompt, Sender
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.serving.service import Service

MAX_TEXTS = 2048
"""Most texts of a request, as at OpenAI."""
_SLICE_TEXTS = 128
"""Most texts of a request in the queue at once, so that a long list does not take the places of other requests."""

MAX_POOLED_BYTES = 2 * 2**20
"""Most bytes of a body. This process reads it, which takes some ten milliseconds."""

Text = str | list[int] | tuple[str, str]
"""A text, its token ids, or a pair of texts that the tokenizer joins."""
Vector = NDArray[np.float32]
Texts = (
    str
    | TokenIds
    | Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(max_length=MAX_TEXTS, fail_fast=True)]
)


class PooledBody(Body):
    """Fields of every body of these routes. None means that the request lacks the field."""

    model: str | None = None
    lora_path: str | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    expect_digest: ExpectedDigest | None = None


def texts_of(given: "str | Sequence[int] | Sequence[str] | Sequence[list[int]]") -> list[Text]:
    """Return the texts of ``input``, which has four forms, as one list."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[each for each in given if isinstance(each, int)]]
    return [each for each in given if not isinstance(each, int)]


class PooledRun:
    """Runs the texts of one HTTP request.

    The caller must call :meth:`close` at the end, which aborts unfinished texts.

    Args:
        service: the server's service.
        body: the request's body.
        target: the request's model.
        sender: the request's sender.

    Attributes:
        prompt_tokens: number of tokens of the computed texts.
    """

    def __init__(self, service: Service, body: PooledBody, target: ResolvedModel, sender: Sender) -> None:
        self._service = service
        self._body = body
        self._target = target
        self._sender = sender
        self._generation: Generation | None = None
        self.prompt_tokens = 0

    async def vectors(
        self, texts: Sequence[Text], pooling: Pooling, param: str, places: Sequence[str] = ()
    ) -> list[Vector]:
        """Return the vector of each text.

        Args:
            texts: at least one.
            pooling: how vectors are made.
            param: the field of the texts, for errors.
            places: the place of each text, for errors; by default its position in ``param``.

        Raises:
            ApiError: a text is not valid, or cannot be served.
        """
        if not texts:
            raise ApiError(400, f"{param} is empty; at least one text is needed.", param=param)
        if not places:
            places = [f"{param}.{at}" for at in range(len(texts))] if len(texts) > 1 else [""]
        found: list[Vector] = []
        with self._service.resolver.leases.take(self._target.adapter):  # All slices use the same version.
            for first in range(0, len(texts), _SLICE_TEXTS):
                part = slice(first, first + _SLICE_TEXTS)
                found += await self._slice(texts[part], pooling, param, places[part])
        return found

    def close(self) -> None:
        """Abort unfinished texts."""
        if self._generation is not None:
            self._generation.close()

    @property
    def usage(self) -> dict[str, Any]:
        """Usage so far, in vLLM's fields."""
        tokens = self.prompt_tokens
        return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}

    async def _slice(self, texts: Sequence[Text], pooling: Pooling, param: str, places: Sequence[str]) -> list[Vector]:
        chat = await self._service.chats.settings_of(self._target.chat)
        body = CompletionRequest(
            model=self._target.name,
            prompt=[0],
            max_tokens=1,
            priority=self._body.priority,
            cache_salt=self._body.cache_salt,
            truncate_prompt_tokens=self._body.truncate_prompt_tokens,
            truncation_side=self._body.truncation_side,
            expect_digest=self._body.expect_digest,
        )
        special = self._body.add_special_tokens is not False
        limits = None if body.truncates else chat.limits

        def read(text: Text, place: str) -> Prompt:
            with of_prompt(place):
                ids = _token_ids(chat.text_processor, text, limits, param, special=special)
                ids = truncated(ids, body, chat.limits)
                check_prompt(ids, chat.limits, param)
            return Prompt(ids)

        def tokenized() -> list[Prompt]:
            return list(map(read, texts, places))

        async def encode() -> list[Prompt]:
            return await off_the_loop(tokenized, sum(map(_length, texts)))

        spec = GenerationSpec(chat, len(texts), encode, param, 1, None, pooling=pooling)
        with self._service.resolver.leases.take(self._target.adapter) as lease:
            generation = await self._service.start(body, self._target, lease, spec, self._sender)
        self._generation = generation
        try:
            async for _ in generation.deltas():
                pass
            handles = [choice.handle for choice in generation.choices]
            vectors = [_vector(handle.pooled) for handle in handles]
            self.prompt_tokens += sum(len(handle.request.prompt_token_ids) for handle in handles)
        finally:
            generation.close()
        return vectors


def _token_ids(
    processor: TextProcessor, text: Text, limits: ModelLimits | None, param: str, *, special: bool
) -> list[int]:
    match text:
        case str():
            return processor.token_ids(text, add_special_tokens=special, limits=limits, param=param)
        case tuple():
            return processor.pair_token_ids(text, add_special_tokens=special, limits=limits, param=param)
        case _:
            return text


def _length(text: Text) -> int:
    return len(text[0]) + len(text[1]) if isinstance(text, tuple) else len(text)


def _vector(data: bytes | None) -> Vector:
    if data is None:
        raise ApiError(500, "The engine answered this request without a vector.")
    vector = np.frombuffer(data, "<f4")
    if not np.isfinite(vector).all():
        raise ApiError(500, "The engine could not serve this request: its vector contains numbers that are not finite.")
    return vector
