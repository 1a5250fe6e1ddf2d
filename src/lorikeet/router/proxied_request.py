"""A request on its way through a router.

Its body says which model it asks for and how long prompt and answer will be. Its state is shared by the task that
proxies it and by the backend router that places it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from lorikeet.api.body_structure import BodyStructure, check_structure
from lorikeet.api.errors import ApiError, bad_request
from lorikeet.api.large_bodies import SMALL_BODY_BYTES
from lorikeet.cluster.routing.fleet import RequestAverages
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.memory.tree import block_keys
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backends import Backend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_MAX_TOKENS = 16
"""Of a completion whose body does not say; OpenAI's, vLLM's and Lorikeet's."""

_KEY_BYTES, _KEY_TOKENS = 64, 16
"""Of one block of a prompt, where routing compares prompts: text by its bytes, or token ids."""
_MOST_KEYS = 1024
"""Of a longer prompt the start is compared."""


_MOST = BodyStructure(depth=100, containers=2**16, keys=2**18, values=2**21)
"""Of a large body, which would hold up every stream while it is decoded."""


class RequestBody:
    """The body of a completion or a chat completion.

    Args:
        path: ``COMPLETIONS`` or ``CHAT``.
        content: the body.

    Attributes:
        fields: of the body, those that nobody here knows included.
        content: as it came.

    Raises:
        ApiError: 400, it is no JSON object, or names its model by something else than text.
    """

    def __init__(self, path: str, content: bytes) -> None:
        if len(content) > SMALL_BODY_BYTES:
            check_structure(content, _MOST)
        try:
            fields = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise bad_request(f"The body is not valid JSON: {error}.") from error
        if not isinstance(fields, dict):
            raise bad_request("The body must be a JSON object.")
        if not isinstance(fields.get("model"), str | None):
            raise bad_request("model: not a string.", "model")
        self.path = path
        self.fields: dict[str, Any] = fields
        self.content = content

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.path == CHAT

    @property
    def model(self) -> str:
        """What it asks for; empty for whatever the backend takes then."""
        return self.fields.get("model") or ""

    @property
    def streams(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.fields.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the answer, None for no limit of its own."""
        limits = [self.fields.get("max_tokens")]
        if self.is_chat:
            limits.insert(0, self.fields.get("max_completion_tokens"))
        said = next((limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool)), None)
        return DEFAULT_MAX_TOKENS if said is None and not self.is_chat else said


class PromptLengths:
    """Guesses tokens of prompts from their characters, by those that have been counted by a backend."""

    def __init__(self) -> None:
        self._characters, self._tokens = 400.0, 100.0  # as if one had been seen

    def tokens(self, body: RequestBody) -> int:
        """Return the tokens of a prompt: exact for token ids, a guess for text."""
        ids, characters = _size(body)
        return max(1, ids + round(characters * self._tokens / self._characters))

    def learn(self, body: RequestBody, tokens: int) -> None:
        """Take in how many tokens a backend has counted."""
        ids, characters = _size(body)
        if characters and not ids:
            self._characters = 0.99 * self._characters + characters
            self._tokens = 0.99 * self._tokens + tokens


def _size(body: RequestBody) -> tuple[int, int]:
    """Return token ids and characters of a prompt."""
    prompt = body.fields.get("messages" if body.is_chat else "prompt")
    if isinstance(prompt, str):
        return 0, len(prompt)
    if not isinstance(prompt, list) or not prompt:
        return 0, 0
    if isinstance(prompt[0], int):
        return len(prompt), 0
    if isinstance(prompt[0], list):
        return sum(len(one) for one in prompt if isinstance(one, list)), 0
    if isinstance(prompt[0], str):
        return 0, sum(len(one) for one in prompt if isinstance(one, str))
    return 0, sum(_message_size(message) for message in prompt)


def _message_size(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, str) else len(msgspec.json.encode(content))


def routing_request(
    request_id: RequestId,
    body: RequestBody,
    adapter: RoutedAdapter | None,
    prompt_tokens: int,
    output_tokens: int,
    averages: RequestAverages,
    *,
    wants_keys: bool,
) -> RoutingRequest:
    """Return a body as routing sees it.

    Args:
        request_id: of the request.
        body: its body.
        adapter: that it asks for, None for the base model.
        prompt_tokens: of the prompt.
        output_tokens: those that have been generated elsewhere.
        averages: say how long answers are.
        wants_keys: compute keys of the prompt's blocks.
    """
    expected = averages.output_tokens
    if body.max_tokens is not None:
        is_exact = body.fields.get("ignore_eos") is True
        expected = body.max_tokens if is_exact else min(expected, body.max_tokens)
    return RoutingRequest(
        request_id=request_id,
        adapter=None if adapter is None else adapter.digest,
        rank=0 if adapter is None else adapter.rank,
        adapter_bytes=0 if adapter is None else adapter.size_bytes,
        known_tokens=prompt_tokens + output_tokens,
        expected_tokens=max(1, round(expected) - output_tokens),
        keys=_keys(body, adapter) if wants_keys else (),
        generated_tokens=output_tokens,
    )


def _keys(body: RequestBody, adapter: RoutedAdapter | None) -> tuple[bytes, ...]:
    """Return the keys of a prompt's blocks: two prompts share those of what they have in common at their start."""
    digest = None if adapter is None else adapter.digest
    prompt = body.fields.get("messages" if body.is_chat else "prompt")
    try:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return tuple(block_keys(digest, prompt[: _MOST_KEYS * _KEY_TOKENS], _KEY_TOKENS))
    except (TypeError, OverflowError):
        return ()  # no token ids: the backend will say so
    text = prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)
    return tuple(block_keys(digest, list(text[: _MOST_KEYS * _KEY_BYTES]), _KEY_BYTES))


MOST_LOSSES = 3
"""A request is given up when its backend has been lost so many times: it may be what ends them."""

_T = TypeVar("_T")


class BackendLost(Exception):
    """The backend of a request is gone, or does not take it; the request must be placed again."""


class ProxiedRequest:
    """One request, from its arrival to the end of its answer.

    Args:
        request_id: unique among all requests of the router.
        body: its body.
        adapter: that it asks for, None for the base model.
        prompt_tokens: of its prompt, counted or guessed.

    Attributes:
        placed: done as soon as a backend has been found and has the adapter.
        backend: where it is, or was last.
        failed_at: backends that have failed it, which are avoided while another is open.
        output_tokens: that earlier backends have given.
        is_known: the dispatcher counts it.
        is_started: its backend has given a token since it was placed.
    """

    placed: "asyncio.Future[Backend]"

    def __init__(
        self, request_id: RequestId, body: RequestBody, adapter: RoutedAdapter | None, prompt_tokens: int
    ) -> None:
        self.request_id = request_id
        self.body = body
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.backend: Backend | None = None
        self.failed_at: set[ReplicaId] = set()
        self.output_tokens = 0
        self.is_known = False
        self.is_started = False
        self._losses = 0
        self._is_lost = False
        self._scope: asyncio.Timeout | None = None

    def begin(self) -> None:
        """It is to be placed, perhaps once more."""
        self.placed = asyncio.get_running_loop().create_future()
        self._is_lost = self.is_started = False

    def count_loss(self) -> None:
        """Its backend was lost while it answered, or was asked to load the adapter.

        Raises:
            ApiError: that has happened too often.
        """
        self._losses += 1
        if self._losses == MOST_LOSSES:
            raise ApiError(502, f"The backend of this request was lost, {MOST_LOSSES} times: it is given up.")

    def lose(self) -> None:
        """Its backend is gone: whatever it waits for from there ends with ``BackendLost``."""
        if not self._is_lost:
            self._is_lost = True
            if self._scope is not None:
                self._scope.reschedule(0.0)

    async def unless_lost(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Wait for something from its backend.

        Raises:
            Lost: the backend is gone; the work was cancelled.
        """
        if self._is_lost:
            raise BackendLost
        try:
            async with asyncio.timeout(None) as self._scope:
                return await work()
        except TimeoutError:
            if not self._is_lost:
                raise
            raise BackendLost from None
        finally:
            self._scope = None
