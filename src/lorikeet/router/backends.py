"""Calls one server behind a router: its requests, its health, and its adapters."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.http.answer_stream import error_text
from lorikeet.http.logs import log
from lorikeet.http.model_routes import AUTO_MODEL
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.apis import APIS, PROGRESS, RUNNING, BackendSpec, Reply, ServerApi, api_of
from lorikeet.router.connections import (
    STUCK_S,
    AnswerWatch,
    BackendConnectionError,
    BackendResponse,
    Connections,
    FileBody,
    Headers,
)

ANSWER_S = 10.0
"""Seconds after which a health check without an answer counts the backend as down."""
LOAD_S = 120.0
"""Seconds after which a load of an adapter counts as refused."""
_TOKENIZE_S = 0.5
"""Most seconds for the tokens of a prompt, without which the request is routed by its text."""
REST_S = 60.0
"""Seconds for which a backend that hung gets no requests, even if its health check answers."""
_LOG_EVERY_S = 10.0
"""Seconds between two log lines about failures of one kind at one backend."""


class BackendRefused(RuntimeError):
    """A backend answered a call of the router with an error of the HTTP status ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelCard(msgspec.Struct):
    """A model in a backend's ``/v1/models``; ``parent`` is None for base models.

    vLLM gives an adapter's source as ``root``. Lorikeet hides folders, and gives the hash of the source and the digest
    of the version.
    """

    id: str
    root: str | None = None
    parent: str | None = None
    source_sha256: str | None = None
    digest: str | None = None

    @property
    def source_hash(self) -> str:
        """Hash of the adapter's source."""
        return self.source_sha256 or _hash(self.root or "")


class Feature(StrEnum):
    """An ability that some requests need and only some servers have."""

    MIXTURES = "mixes adapters"
    AUTO = "chooses adapters by prompts"
    FILES = "keeps files and batches"


class BackendHealth(NamedTuple):
    """The result of a health check.

    Attributes:
        is_open: whether the backend takes new requests. Otherwise it only finishes its running requests.
        requests: number of running and waiting requests; None if the backend's metrics lack it.
    """

    is_open: bool
    requests: int | None


class Backend:
    """A server with OpenAI's API and adapters. The way to load adapters depends on the kind of server.

    Every method that sends a request raises ``BackendConnectionError`` if the connection fails.

    Args:
        replica: the backend's id in the router.
        spec: the backend's address and options.
        api_key: key of the router; empty for none.
        passes_keys: whether clients' requests keep the client's key although the router has its own.
        withholds_keys: whether clients' requests lose the client's key although the router has none of its own.
        tenant_header: header in which the backend gets the client's tenant, in lower case; empty for none.

    Raises:
        ValueError: the address is not valid.

    Attributes:
        url: the address, without ``/v1``.
        has_key: whether the router has a key of its own.
        replaces_keys: whether the router sends its own key, or none, instead of the client's.
        tenant_header: see the argument.
        api: the backend's API; vLLM's until the API is known.
        epoch: number that grows each time the backend comes up.
        is_up: whether the backend answers.
        is_open: whether the backend takes new requests.
        is_asleep: whether the backend's engine sleeps, by the last health check.
        is_leaving: whether the backend is no longer found, so that it gets no new requests.
        last_error: error of the last health check; empty while the backend is up.
        adapters: known versions that the backend has loaded for this router, by name; the least recently used first.
        uses: returns whether a request at the backend needs the adapter of a name.
        on_evicted: function that is called with a version that was unloaded to make room.
        base_cards: cards of the backend's base models.
        listed_versions: digests of the adapters that it lists by name, if it is a Lorikeet.
        loads, unloads, refusals: number of calls so far.
        failures: number of failures by reason.
        watch: measures the waits for the backend's answers.
    """

    def __init__(
        self,
        replica: ReplicaId,
        spec: BackendSpec,
        api_key: str = "",
        *,
        passes_keys: bool = False,
        withholds_keys: bool = False,
        tenant_header: bytes = b"",
    ) -> None:
        self.replica = replica
        self.url = spec.url.rstrip("/")
        self.api: ServerApi = APIS[spec.api or ServerApi.name](spec.base)
        self._spec = spec
        self._knows_api = bool(spec.api)
        self.epoch = -1
        self.is_up = False
        self.is_open = False
        self.is_asleep = False
        self.is_leaving = False
        self.last_error = ""
        self.adapters: dict[str, AdapterDigest] = {}
        self.uses: Callable[[str], bool] = lambda name: False
        self.on_evicted: Callable[[AdapterDigest], object] = lambda digest: None
        self.base_cards: list[dict[str, Any]] = []
        self.loads = self.unloads = self.refusals = 0
        self._listed: dict[str, str] = {}
        """Hash of the source by name of all adapters that it lists, those of other clients included."""
        self.listed_versions: dict[str, str] = {}
        self._last_versions: dict[str, AdapterDigest] = {}
        """Version by name that it was last known to have. Kept while it is down: its process may live on."""
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """By name, as long as somebody loads or unloads under it."""
        self.failures = Counter[str]()
        self.watch = AnswerWatch()
        self._logged_s: dict[str, float] = {}
        self._rests_until_s = 0.0
        self._progress: tuple[str, ...] = ()
        self._has_metrics = True
        self._key: Headers = [(b"authorization", f"Bearer {api_key}".encode())] if api_key else []
        self._client_key: Headers = [] if passes_keys else self._key
        self.has_key = bool(api_key)
        self.replaces_keys = bool(self._client_key) or withholds_keys
        self.tenant_header = tenant_header
        self._connections = Connections(self.url)

    @property
    def kv_addresses(self) -> tuple[str, str]:
        """Addresses of events of KV and of missed ones; empty without them."""
        return self._spec.kv_addresses()

    @property
    def is_lorikeet(self) -> bool:
        """Whether the server is a Lorikeet."""
        return any(card.get("owned_by") == "lorikeet" for card in self.base_cards)

    def has(self, feature: Feature) -> bool:
        """Return whether the server has a feature. Only a Lorikeet has any; ``auto`` is listed where it is allowed."""
        return self.is_lorikeet and (feature is not Feature.AUTO or AUTO_MODEL in self._listed)

    async def open(
        self, method: str, path: str, headers: Headers, content: bytes | None = None, *, is_stream: bool = False
    ) -> BackendResponse:
        """Send a client's request. Return the answer once its head has arrived."""
        headers = headers + self._client_key
        return await self._connections.send(method, path, headers, content, self.watch, is_stream=is_stream)

    async def call(self, method: str, path: str, headers: Headers, content: bytes | FileBody | None = None) -> Reply:
        """Send a client's request that computes nothing, and return the answer, however long it takes."""
        reply = await self._connections.send(method, path, headers + self._client_key, content)
        try:
            return Reply(reply.status, await reply.read())
        finally:
            reply.close()

    async def ask(self, path: str) -> Reply:
        """Send GET with the router's own key, and return the answer."""
        return await self._request("GET", path)

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    # --- health --------------------------------------------------------------------------------------

    def failed(self, reason: str, detail: str) -> None:
        """Count a failure. Log it unless a failure for the same reason was logged recently."""
        self.failures[reason] += 1
        now = time.monotonic()
        if now >= self._logged_s.get(reason, now):
            self._logged_s[reason] = now + _LOG_EVERY_S
            log.warning("backend failed", backend=self.url, reason=reason, detail=detail, times=self.failures[reason])

    def hangs(self, timeout_s: float) -> bool:
        """Return whether no piece of any answer has arrived for ``timeout_s`` seconds; False for 0.

        While the backend's metrics count tokens, it does not hang. Without such metrics, a backend may take longer for
        a whole answer, which arrives only at its end.
        """
        limit_s = timeout_s if self._progress or self.watch.streams else max(timeout_s, STUCK_S)
        return timeout_s > 0 and self.watch.silent_s >= limit_s

    def is_occupied(self, timeout_s: float) -> bool:
        """Return whether the backend is up and answering, so that a health check may wait behind its answers.

        If the backend answers health checks behind other requests, its answers may pause for ``timeout_s`` seconds.
        """
        within_s = max(ANSWER_S, timeout_s) if self.api.health_waits else ANSWER_S
        return self.is_up and self.watch.has_heard(within_s)

    def rest(self) -> None:
        """Stop sending requests to the backend for a while."""
        self._rests_until_s = time.monotonic() + REST_S

    @property
    def is_resting(self) -> bool:
        """Whether the backend gets no requests, because it hung."""
        return time.monotonic() < self._rests_until_s

    async def check(self) -> BackendHealth:
        """Check the backend's health and count its requests.

        Raises:
            BackendConnectionError: the backend cannot be reached.
            TimeoutError: the backend does not answer in time.
            BackendRefused: ``/health`` answers neither 200 nor 503.
        """
        async with asyncio.timeout(ANSWER_S):
            if not self._knows_api:
                await self._find_api()
            path = self.api.health_path
            status, text = await self._request("GET", path)
            if status not in (200, 503):
                raise self._refusal(path, status)
            requests = await self._count_requests() if self._has_metrics else None
        self.is_asleep = _is_asleep(text)
        return BackendHealth(status == 200, requests)

    async def is_paused(self) -> bool:
        """Return whether somebody has paused the backend, or some of its adapters or tenants; False if unknown."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status, text = await self._request("GET", "/is_paused")
            answer = msgspec.json.decode(text) if status == 200 else None
        except (msgspec.DecodeError, TimeoutError, BackendConnectionError):
            return False
        return isinstance(answer, dict) and any(answer.get(name) for name in ("is_paused", "adapters", "tenants"))

    async def _find_api(self) -> None:
        """Detect the kind of server by its list of models."""
        status, text = await self._request("GET", "/v1/models")
        if status != 200:
            return
        try:
            cards = msgspec.json.decode(text)["data"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return
        if isinstance(cards, list) and cards:
            self.api = APIS[api_of(cards)](self._spec.base)
            self._knows_api = True

    async def _count_requests(self) -> int | None:
        status, text = await self._request("GET", "/metrics")
        page = text.decode(errors="replace") if status == 200 else ""
        found = RUNNING.findall(page)
        progress = tuple(PROGRESS.findall(page))
        if progress != self._progress:
            self._progress = progress
            self.watch.heard()
        self._has_metrics = bool(found)
        try:
            return round(sum(map(float, found))) if found else None
        except (ValueError, OverflowError):
            return None  # A metric is infinite or not a number.

    async def list_models(self) -> None:
        """Read the backend's ``/v1/models``.

        Adapters that are no longer listed are forgotten, since the backend was restarted.

        Raises:
            BackendConnectionError: the backend cannot be reached.
            TimeoutError: the backend does not answer in time.
            BackendRefused: the answer is not a list of models.
        """
        before = set(self.adapters)
        last = set(self._last_versions)
        async with asyncio.timeout(ANSWER_S):
            status, text = await self._request("GET", "/v1/models")
            await self.api.list_more(self._request)
        if status == 404 and self.api.base:  # The backend has no /v1/models.
            text = msgspec.json.encode({"data": [{"id": self.api.base, "object": "model"}]})
        elif status != 200:
            raise self._refusal("/v1/models", status)
        try:
            cards: Any = msgspec.json.decode(text)["data"]
            known = msgspec.convert(cards, list[ModelCard])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
            raise BackendRefused(status, f"the answer of /v1/models is not a list of models: {error}") from error
        self.base_cards = [card for card in cards if self.api.is_base(card)]
        bases = {card["id"] for card in self.base_cards}
        self._listed = {card.id: card.source_hash for card in known if card.id not in bases}
        self.listed_versions = {card.id: card.digest for card in known if card.digest and card.id not in bases}
        if not self.api.lists_adapters:
            return
        for name in before - self._listed.keys():
            self.adapters.pop(name, None)
        for name in last - self._listed.keys() - self.adapters.keys():
            self._last_versions.pop(name, None)

    def _refusal(self, path: str, status: int) -> BackendRefused:
        """Return the error for an answer with a status, with a hint about keys where it helps."""
        if status not in (401, 403):
            return BackendRefused(status, f"{path} answers {status}")
        why = "it does not take the key of --backend-key" if self._key else "it wants a key; --backend-key gives it"
        return BackendRefused(status, f"{path} answers {status}: {why}")

    def on_up(self) -> None:
        """Mark the backend as up. Only its listed adapters are known."""
        self.epoch += 1
        self.is_up = self.is_open = True
        self.last_error = ""
        self.adapters.clear()
        self._has_metrics = True

    def on_reopened(self) -> None:
        """Mark the backend as open for requests."""
        self.is_open = self._has_metrics = True

    def on_down(self) -> None:
        """Mark the backend as down."""
        self.is_up = self.is_open = False
        self.adapters.clear()
        self._listed.clear()
        self.listed_versions.clear()
        self._knows_api = bool(self._spec.api)  # Another server may start at this address.

    # --- adapters ------------------------------------------------------------------------------------

    def holds(self, adapter: RoutedAdapter) -> bool:
        """Return whether the backend has loaded this version."""
        return self.adapters.get(adapter.name) == adapter.digest

    def adopt_listed(self, adapter: RoutedAdapter) -> bool:
        """Count a listed adapter as loaded, and return True, if its source fits and it may be this version."""
        is_new = adapter.name not in self.adapters
        if is_new and self._listed.get(adapter.name) == _hash(adapter.source) and self._may_hold(adapter):
            self._set_loaded(adapter)
        return self.holds(adapter)

    def _may_hold(self, adapter: RoutedAdapter) -> bool:
        """Return whether the backend's adapter of this name may be this version."""
        last = self._last_versions.get(adapter.name)
        return not adapter.replaces if last is None else last == adapter.digest

    def _set_loaded(self, adapter: RoutedAdapter) -> None:
        self.adapters[adapter.name] = self._last_versions[adapter.name] = adapter.digest

    def note_use(self, adapter: RoutedAdapter) -> None:
        """Record that a request for an adapter is sent to the backend."""
        if self.holds(adapter):
            self.adapters[adapter.name] = self.adapters.pop(adapter.name)

    async def _make_room(self) -> None:
        """Unload the least recently used adapters if the backend is at its limit of adapters."""
        while 0 < self._spec.max_loras <= len(self.adapters):
            name = next((name for name in self.adapters if not self.uses(name)), None)
            if name is None:
                return
            digest = self.adapters[name]
            await self._unload(name)
            self.on_evicted(digest)

    def forget(self, adapter: RoutedAdapter) -> None:
        """Forget an adapter that the backend no longer has."""
        self.adapters.pop(adapter.name, None)
        self._listed.pop(adapter.name, None)
        self.listed_versions.pop(adapter.name, None)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def load(self, adapter: RoutedAdapter) -> None:
        """Load an adapter unless the backend has it. Another version of the same name is unloaded first.

        Calls for one name run one after the other. If the backend refuses because it has an unlisted adapter of that
        name, the load counts as done unless that adapter may be another version.

        Raises:
            BackendRefused: the backend cannot load it.
        """
        async with self._lock(adapter.name):
            if self.holds(adapter) or self.adopt_listed(adapter):
                return
            if 0 < self._spec.max_rank < adapter.rank:
                raise self._not_loaded(
                    400, adapter, f"its rank {adapter.rank} is larger than max_rank={self._spec.max_rank}"
                )
            if adapter.name in self.adapters or adapter.name in self._listed:
                await self._unload(adapter.name)
            await self._make_room()
            try:
                async with asyncio.timeout(LOAD_S):
                    status, text = await self._load(adapter)
                    if _is_already_loaded(status, text) and not self._may_hold(adapter):
                        await self._unload(adapter.name)
                        status, text = await self._load(adapter)
            except TimeoutError:
                raise self._not_loaded(504, adapter, f"it was not loaded within {LOAD_S:g} s") from None
            if status != 200 and not _is_already_loaded(status, text):
                raise self._not_loaded(status, adapter, error_text(text))
            self._set_loaded(adapter)
        log.info("adapter loaded", backend=self.url, adapter=adapter.name)

    def _not_loaded(self, status: int, adapter: RoutedAdapter, why: str) -> BackendRefused:
        self.refusals += 1
        self.failed("load", f"adapter {adapter.name!r}: {why}")
        # The reason from a Lorikeet backend already begins with the adapter's name.
        named = f"adapter {adapter.name!r}: "
        return BackendRefused(status, f"{self.replica} cannot load {named}{why.removeprefix(named)}")

    async def _load(self, adapter: RoutedAdapter) -> Reply:
        self.loads += 1
        return await self.api.load(self._request, adapter)

    async def unload(self, adapter: RoutedAdapter) -> None:
        """Unload an adapter, unless another version has replaced it.

        Raises:
            BackendRefused: the backend does not unload it.
        """
        async with self._lock(adapter.name):
            if self.holds(adapter):
                await self._unload(adapter.name)

    async def _unload(self, name: str) -> None:
        status, text = await self.api.unload(self._request, name)
        if is_there := status != 404:
            self.unloads += 1
        if is_there and status != 200:
            self.refusals += 1
            raise BackendRefused(status, f"{self.replica} does not unload adapter {name!r}: {error_text(text)}")
        self.adapters.pop(name, None)
        self._listed.pop(name, None)
        self.listed_versions.pop(name, None)
        self._last_versions.pop(name, None)
        if is_there:
            log.info("adapter unloaded", backend=self.url, adapter=name)

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of a text that continues a prompt.

        Raises:
            BackendRefused: the backend has no ``/tokenize``.
        """
        status, answer = await self.api.tokenize(self._request, model, text)
        try:
            return msgspec.convert(msgspec.json.decode(answer)["tokens"], list[int])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
            raise BackendRefused(status, f"{self.replica} does not tokenize: {error_text(answer)}") from error

    async def prompt_tokens(self, fields: dict[str, Any]) -> list[int]:
        """Return the token ids of a prompt or of messages; empty if the backend does not tokenize them."""
        try:
            async with asyncio.timeout(_TOKENIZE_S):
                status, answer = await self._request("POST", "/tokenize", fields)
            return msgspec.convert(msgspec.json.decode(answer)["tokens"], list[int]) if status == 200 else []
        except (msgspec.MsgspecError, KeyError, TypeError, TimeoutError, BackendConnectionError):
            return []

    @property
    def base(self) -> str:
        """The name of the base model; empty until the backend has listed its models."""
        return self.base_cards[0]["id"] if self.base_cards else ""

    def body_for(self, content: bytes, model: str, adapter: RoutedAdapter | None) -> bytes:
        """Return the body of a request for ``model`` in the form of the backend's API."""
        if model == AUTO_MODEL and self.has(Feature.AUTO):
            return content
        base = model if any(card["id"] == model for card in self.base_cards) else self.base
        if self.api.takes(model, adapter, base):
            return content
        return msgspec.json.encode(self.api.named(msgspec.json.decode(content), adapter, base))

    async def _request(self, method: str, path: str, body: dict[str, Any] | bytes | None = None) -> Reply:
        headers: Headers = []
        if isinstance(body, dict):
            headers = [(b"content-type", b"application/json")]
            body = msgspec.json.encode(body)
        reply = await self._connections.send(method, path, headers + self._key, body)
        try:
            return Reply(reply.status, await reply.read())
        finally:
            reply.close()


def _is_asleep(health: bytes) -> bool:
    """Return whether the body of a Lorikeet's ``/health`` says that its engine sleeps; other servers have no body."""
    try:
        return b"asleep" in health and msgspec.json.decode(health)["status"] == "asleep"
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _is_already_loaded(status: int, text: bytes) -> bool:
    """Return whether a load failed because the backend has an adapter of that name."""
    return status != 200 and b"already been loaded" in text
