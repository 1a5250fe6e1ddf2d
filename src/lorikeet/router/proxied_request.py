"""Holds a request that passes through the router.

``RequestBody`` reads the fields that routing needs: the model, and the lengths of prompt and answer. ``ProxiedRequest``
is the state that the proxy task and the backend router share.
"""

import asyncio
import copy
import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec

from lorikeet.cluster.routing.fleet import RequestAverages
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.http import model_routes
from lorikeet.http.anthropic_errors import MESSAGES_PATH
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.http.body_structure import BodyStructure, check_structure
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.routes import Forwarding
from lorikeet.memory.tree import block_keys
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backends import Backend, Feature
from lorikeet.router.records import RouteDecision, RouteRecord

COMPLETIONS = model_routes.COMPLETIONS.path
CHAT = model_routes.CHAT.path
RESPONSES = model_routes.RESPONSES.path
TOKENS = model_routes.TOKENS.path
_FORWARDING = {path: row.forwarding for row in model_routes.MODEL_ROUTES for path in row.paths}
_PROMPTS = {COMPLETIONS: ("prompt",), CHAT: ("messages",), TOKENS: ("token_ids",), MESSAGES_PATH: ("messages",)}
_OTHER_PROMPTS = ("input", "documents", "text_2", "text_1", "messages", "prompt", "tokens")
"""Fields that may hold the prompt; the first one in the body counts."""
_LIMITS = {CHAT: ("max_completion_tokens", "max_tokens"), RESPONSES: ("max_output_tokens",)}
DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens`` in completions, for OpenAI, vLLM and Lorikeet."""

_KEY_BYTES = 64
"""Bytes of a block of a text prompt. Routing compares prompts by hashes of their blocks."""
_KEY_TOKENS = 16
"""Tokens of a block of a prompt of token ids."""
MIN_TOKENIZED = 1024
"""Fewest characters of a prompt that is tokenized to be compared with the blocks that backends report."""
_TEMPLATED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields of a chat that determine its prompt."""
_MAX_KEYS = 1024
"""Most blocks that are hashed. Only the start of longer prompts is compared."""


_MAX = BodyStructure(depth=100, containers=2**16, keys=2**18, values=2**21)
"""Limits of a large body, which would delay every stream while it is decoded."""


_OTHER_WAYS = ("lora_path", "lora", "merged_adapters", "adapter_parameters", "adapter_id", "adapter_source")
"""Fields beside ``model`` that name adapters at some servers. The router would not know which backend has these."""


class ReceivedAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a streamed answer that the client has from an earlier request.

    Attributes:
        text: the text.
        tokens: number of its tokens, from the last event's usage, or else the number of events with text.
    """

    text: str
    tokens: Annotated[int, msgspec.Meta(ge=0)]


class RequestBody:
    """The body of a request that names a model.

    Args:
        path: path of a route whose bodies name a model.
        content: the body.
        tenant: tenant of the request. Other tenants' requests do not reuse its KV; empty if all share it.

    Attributes:
        fields: the parsed body, unknown fields included.
        content: the bytes as received; with a tenant, encoded again with a ``cache_salt`` of that tenant.
        received: the part of the answer that the client has already; None for a new answer. The field is for the router
            only.

    Raises:
        ApiError: 400, the body is not a JSON object, ``model`` or ``cache_salt`` is not a string, ``received`` is not
            valid, or other fields name adapters.
    """

    def __init__(self, path: str, content: bytes, tenant: str = "") -> None:
        if len(content) > SMALL_BODY_BYTES:
            check_structure(content, _MAX)
        try:
            fields = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise bad_request(f"The body is not valid JSON: {error}.") from error
        if not isinstance(fields, dict):
            raise bad_request("The body must be a JSON object.")
        if not isinstance(fields.get("model"), str | None):
            raise bad_request("model: must be a string.", "model")
        for name in _OTHER_WAYS:
            if fields.get(name):
                raise bad_request(f"{name}: a router finds the adapter by `model` alone; name it there.", name)
        if tenant and _FORWARDING[path] is not Forwarding.COUNTED:
            own = fields.get("cache_salt") or ""
            if not isinstance(own, str):
                raise bad_request("cache_salt: must be a string.", "cache_salt")
            # A field of vLLM: backends reuse KV only between requests with the same salt.
            fields["cache_salt"] = hashlib.sha256(f"{tenant}\0{own}".encode()).hexdigest()[:32]
            content = msgspec.json.encode(fields)
        self.received: ReceivedAnswer | None = None
        if "received" in fields:
            try:
                self.received = msgspec.convert(fields.pop("received"), ReceivedAnswer | None)
            except msgspec.ValidationError as error:
                raise bad_request(f"received: {error}.", "received") from error
            content = msgspec.json.encode(fields)
        self.path = path
        self.fields: dict[str, Any] = fields
        self.content = content

    def with_fields(self, **changed: Any) -> "RequestBody":
        """Return the body with some fields changed; None removes a field."""
        changed_body = copy.copy(self)
        fields = {**self.fields, **changed}
        changed_body.fields = {
            name: value for name, value in fields.items() if value is not None or name not in changed
        }
        changed_body.content = msgspec.json.encode(changed_body.fields)
        return changed_body

    @property
    def forwarding(self) -> Forwarding:
        """The treatment of the body's route."""
        return _FORWARDING[self.path]

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        fields = self.fields.get("sampling_params") if self.path == TOKENS else self.fields
        found = [fields.get(name) for name in ("n", "best_of")] if isinstance(fields, dict) else []
        return max([1, *(each for each in found if isinstance(each, int) and not isinstance(each, bool))])

    @property
    def sequences(self) -> int:
        """Number of sequences: of each prompt, all choices."""
        prompt = self.prompt
        is_one = self.path in (CHAT, RESPONSES, TOKENS, MESSAGES_PATH) or not isinstance(prompt, list) or not prompt
        return self.choices * (1 if is_one or type(prompt[0]) is int else len(prompt))

    @property
    def generates(self) -> bool:
        """Whether the answer is generated token by token."""
        return _FORWARDING[self.path] is Forwarding.GENERATED

    @property
    def user(self) -> str:
        """The user in the body; empty for none."""
        user = self.fields.get("user")
        return user if isinstance(user, str) else ""

    @property
    def is_chat(self) -> bool:
        """Whether the request is a chat completion."""
        return self.path == CHAT

    @property
    def model(self) -> str:
        """The model of the request; empty for the backend's default."""
        return self.fields.get("model") or ""

    @property
    def cache_salt(self) -> str:
        """The salt of the request's KV, which only requests with the same salt reuse; empty without a salt."""
        salt = self.fields.get("cache_salt")
        return salt if isinstance(salt, str) else ""

    @property
    def prompt(self) -> Any:
        """The prompt: a text, texts, token ids or messages; None if the body has none."""
        names = _PROMPTS.get(self.path, _OTHER_PROMPTS)
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt's token ids, if it is given as such; else None."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        return None

    @property
    def to_tokenize(self) -> dict[str, Any]:
        """The fields of a request for the prompt's token ids; empty for a short prompt, or one of another form."""
        prompt = self.prompt
        if self.path == CHAT and isinstance(prompt, list) and _size(self)[1] >= MIN_TOKENIZED:
            return {name: self.fields[name] for name in _TEMPLATED if self.fields.get(name) is not None}
        is_long = self.path == COMPLETIONS and isinstance(prompt, str) and len(prompt) >= MIN_TOKENIZED
        return {"prompt": prompt} if is_long else {}

    @property
    def previous_response(self) -> str:
        """The id of the stored answer that the request continues; empty if it continues no answer."""
        previous = self.fields.get("previous_response_id") if self.path == RESPONSES else None
        return previous if isinstance(previous, str) else ""

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return self.fields.get("stream") is True and self.generates

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of the answer; None if the body sets no limit."""
        if _FORWARDING[self.path] in (Forwarding.POOLED, Forwarding.COUNTED):
            return 1
        fields = self.fields.get("sampling_params") if self.path == TOKENS else self.fields
        if not isinstance(fields, dict):
            return DEFAULT_MAX_TOKENS
        limits = [fields.get(name) for name in _LIMITS.get(self.path, ("max_tokens",))]
        said = next((limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool)), None)
        return DEFAULT_MAX_TOKENS if said is None and self.path in (COMPLETIONS, TOKENS) else said


class PromptLengths:
    """Estimates the tokens of prompts from their characters, by the ratio that backends have reported."""

    def __init__(self) -> None:
        self._characters = 400.0
        self._tokens = 100.0  # The first values stand for one prompt of 4 characters per token.

    def tokens(self, body: RequestBody) -> int:
        """Return the number of tokens of a prompt: exact for token ids, estimated for text."""
        ids, characters = _size(body)
        return max(1, ids + round(characters * self._tokens / self._characters))

    def learn(self, body: RequestBody, tokens: int) -> None:
        """Update the ratio with the number of tokens that a backend has counted."""
        ids, characters = _size(body)
        if characters and not ids and body.path in _PROMPTS:  # Other routes may count a text several times.
            self._characters = 0.99 * self._characters + characters
            self._tokens = 0.99 * self._tokens + tokens


def _size(body: RequestBody) -> tuple[int, int]:
    """Return the number of token ids and of characters of a prompt."""
    prompt = body.prompt
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
    session: str = "",
    cached_tokens: dict[ReplicaId, int] | None = None,
) -> RoutingRequest:
    """Return the part of a request that routing needs.

    Args:
        request_id: unique id.
        body: body of the request.
        adapter: adapter of the request; None for the base model.
        prompt_tokens: tokens of the prompt.
        output_tokens: number of tokens that other backends have generated.
        averages: average lengths of answers, for the expected length of this one.
        wants_keys: whether to compute the hashes of the prompt's blocks.
        session: name of a conversation whose requests go to the same backend.
        cached_tokens: number of the prompt's leading tokens that backends have cached, by their reports.
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
        session=session,
        cached_tokens=cached_tokens or {},
    )


def _keys(body: RequestBody, adapter: RoutedAdapter | None) -> tuple[bytes, ...]:
    """Return the hashes of a prompt's blocks. Prompts with a common prefix share the hashes of the prefix."""
    digest = None if adapter is None else adapter.digest
    salt = body.cache_salt
    prompt = body.prompt
    try:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return tuple(block_keys(digest, prompt[: _MAX_KEYS * _KEY_TOKENS], _KEY_TOKENS, salt=salt))
    except (TypeError, OverflowError):
        return ()  # The token ids are invalid, and the backend will refuse them.
    text = prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)
    return tuple(block_keys(digest, list(text[: _MAX_KEYS * _KEY_BYTES]), _KEY_BYTES, salt=salt))


MAX_LOSSES = 3
"""A request fails after losing its backend this many times, because it may be the cause of the crashes."""

_T = TypeVar("_T")


def _nothing() -> None:
    pass


class BackendLost(Exception):
    """The backend of a request was lost or did not accept it, so the request must be placed again."""


class ProxiedRequest:
    """One request, from its arrival to the end of its answer.

    Args:
        request_id: unique among all requests of the router.
        body: body of the request.
        adapter: adapter of the request; None for the base model.
        prompt_tokens: tokens of the prompt, counted or estimated.
        session: name of a conversation whose requests go to the same backend; empty for none.
        mixed: further adapters that the backend needs for a mixture.
        feature: a feature that the backend needs; None for none.

    Attributes:
        placed: future of the chosen backend, which is set once the backend has the adapter.
        backend: the current or last backend.
        failed_at: backends that have failed the request, had no room for it, or lack the answer that it continues. They
            are avoided while another backend is open.
        output_tokens: number of tokens generated by earlier backends.
        is_dispatched: whether the dispatcher counts the request.
        is_started: whether the current backend has sent a token.
        is_lost: whether the current backend was lost.
        record: the request's record; None for a request without one.
        decision: why the next backend was chosen; None if its session was there before.
        token_ids: token ids of the prompt, empty if they are not known; None until they are needed.
    """

    placed: "asyncio.Future[Backend]"

    def __init__(
        self,
        request_id: RequestId,
        body: RequestBody,
        adapter: RoutedAdapter | None,
        prompt_tokens: int,
        session: str = "",
        mixed: tuple[RoutedAdapter, ...] = (),
        feature: Feature | None = None,
    ) -> None:
        self.feature = feature
        self.session = session
        self.mixed = mixed
        self.request_id = request_id
        self.body = body
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.backend: Backend | None = None
        self.failed_at: set[ReplicaId] = set()
        self.output_tokens = 0
        self.is_dispatched = False
        self.is_started = False
        self.record: RouteRecord | None = None
        self.decision: RouteDecision | None = None
        self.token_ids: list[int] | None = None
        self._losses = 0
        self.is_lost = False
        self._scope: asyncio.Timeout | None = None
        self._close: Callable[[], None] = _nothing

    @property
    def adapters(self) -> tuple[RoutedAdapter, ...]:
        """All adapters that the backend needs."""
        return self.mixed if self.adapter is None else (self.adapter, *self.mixed)

    def begin(self) -> None:
        """Prepare the request for its first or next placement."""
        self.placed = asyncio.get_running_loop().create_future()
        self.is_lost = self.is_started = False
        self._close = _nothing

    def count_loss(self) -> None:
        """Count a loss of the request's backend during the answer or the load of the adapter.

        Raises:
            ApiError: 502, the request has lost too many backends.
        """
        self._losses += 1
        if self._losses == MAX_LOSSES:
            raise ApiError(
                502, f"The backend of this request was lost {MAX_LOSSES} times; the router does not try it again."
            )

    def mark_lost(self) -> None:
        """Raise ``BackendLost`` in everything that awaits the request's backend, because the backend was lost."""
        if not self.is_lost:
            self.is_lost = True
            self._close()
            if self._scope is not None:
                self._scope.reschedule(0.0)

    def close_if_lost(self, close: Callable[[], None]) -> None:
        """Call ``close``, which ends the response, if the backend is lost within the context.

        One callback is cheaper than a time limit around each piece.
        """
        self._close = close
        if self.is_lost:  # The backend was lost after the response began.
            close()

    async def run_unless_lost(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run ``work``, which waits for the backend, and return its result.

        Raises:
            BackendLost: the backend was lost, and the work was cancelled.
        """
        if self.is_lost:
            raise BackendLost
        try:
            async with asyncio.timeout(None) as self._scope:
                return await work()
        except TimeoutError:
            if not self.is_lost:
                raise
            raise BackendLost from None
        finally:
            self._scope = None
