"""From pieces to HTTP: one JSON object, or a stream of chunks. The two routes differ only in their format."""

import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from lorikeet.core.plan import Token
from lorikeet.server.disconnect import EventStream, WhileThere
from lorikeet.server.errors import ApiError
from lorikeet.server.generation import Generation, Piece
from lorikeet.server.protocol import Generation as GenerationBody
from lorikeet.server.threads import off_the_loop

_DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one route writes its answers.

    Attributes:
        id_prefix: start of the answer's id.
        object: its kind when complete.
        chunk_object: its kind in a stream.
        needs_every_token: a chunk must be sent even if its tokens made no text visible.
    """

    id_prefix: str
    object: str
    chunk_object: str
    needs_every_token: bool

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a stream, if there is one."""
        ...

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of a stream's chunk."""
        ...

    def complete(self, index: int, text: str, tokens: list[Token], last: Piece) -> dict[str, Any]:
        """Return a whole choice; ``last`` says how it ended."""
        ...


async def respond(http: Request, body: GenerationBody, generation: Generation, answer: Format, model: str) -> Response:
    """Answer with what ``generation`` brings, and close it in the end.

    Errors before the first token become an HTTP status; later ones an event in the stream.

    Args:
        http: the request, its body read.
        body: says whether and how to stream.
        generation: under way.
        answer: the route's format.
        model: name to report.
    """
    head = {
        "id": f"{answer.id_prefix}-{http.state.request_id}",
        "object": answer.chunk_object if body.stream else answer.object,
        "created": int(time.time()),
        "model": model,
    }

    async def make() -> Response:
        if not body.stream:
            whole = await _collect(generation, answer, head)
            generation.close()  # before a client that reads slowly has read it
            return Response(whole, media_type="application/json")
        events = _events(generation, answer, body, head)
        return EventStream(_chain(await anext(events), events), generation.sent_until_s)

    return WhileThere(make, generation.close)


async def _collect(generation: Generation, answer: Format, head: dict[str, Any]) -> bytes:
    texts: dict[int, list[str]] = {choice.index: [] for choice in generation.choices}
    tokens: dict[int, list[Token]] = {choice.index: [] for choice in generation.choices}
    last: dict[int, Piece] = {}
    async for piece in generation.pieces():
        texts[piece.index].append(piece.text)
        tokens[piece.index].extend(piece.tokens)
        last[piece.index] = piece

    def write() -> bytes:
        choices = [answer.complete(index, "".join(texts[index]), tokens[index], last[index]) for index in texts]
        return msgspec.json.encode(head | {"choices": choices, "usage": _usage(generation)})

    listed = tokens.values() if answer.needs_every_token else ()
    return await off_the_loop(write, sum(1 + len(token.top) for each in listed for token in each))


async def _events(
    generation: Generation, answer: Format, body: GenerationBody, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    begun: set[int] = set()

    def chunk(choice: dict[str, Any], completion_tokens: int) -> bytes:
        value = head | {"choices": [choice]}
        if body.wants_continuous_usage:
            prompt_tokens = len(generation.choices[choice["index"]].handle.request.prompt_token_ids)
            value["usage"] = _counts(prompt_tokens, completion_tokens)
        return _event(value)

    try:
        async for piece in generation.pieces():
            event = b""
            if piece.index not in begun:
                begun.add(piece.index)
                opening = answer.first(piece.index)
                event = b"" if opening is None else chunk(opening, 0)
            if piece.text or piece.finish_reason or answer.needs_every_token or body.wants_continuous_usage:
                event += chunk(answer.chunk(piece), piece.completion_tokens)
            if event:
                yield event
    except ApiError as error:
        if not begun:
            raise
        yield _event(error.body()) + _DONE
        return
    if body.wants_usage:
        yield _event(head | {"choices": [], "usage": _usage(generation)})
    yield _DONE


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(generation: Generation) -> dict[str, Any]:
    """Count every prompt once, however many choices it has; what one computed, the next ones found."""
    prompts: dict[int, tuple[int, int]] = {}
    for choice in generation.choices:
        token_ids, cached_tokens = choice.handle.request.prompt_token_ids, choice.handle.timings.cached_tokens
        known = prompts.get(id(token_ids), (0, cached_tokens))
        prompts[id(token_ids)] = len(token_ids), min(known[1], cached_tokens)
    prompt_tokens, cached_tokens = map(sum, zip(*prompts.values(), strict=True))
    usage = _counts(prompt_tokens, sum(choice.completion_tokens for choice in generation.choices))
    return usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
