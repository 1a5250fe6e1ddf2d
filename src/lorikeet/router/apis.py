"""Calls the APIs of the servers behind a router: each loads adapters, and names them in requests, in its own way.

All speak OpenAI's completions. vLLM and llama.cpp's server have been run behind a router. The calls of SGLang (LoRA
serving) and Ollama (docs/api) were compared with their documentation in November 2026, the calls of TGI and LoRAX were
written from memory. None of these four servers has been run behind a router yet.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.http.urls import server_root
from lorikeet.router.adapters import RoutedAdapter

Fields = dict[str, Any]

RUNNING = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs|"
    r"llamacpp:requests_(?:processing|deferred)|(?:tgi|lorax)_(?:queue_size|batch_current_size))"
    r"(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
"""Gauges of running and waiting requests, under the names of all these servers."""
PROGRESS = re.compile(
    r"^(?:vllm:(?:prompt_tokens|generation_tokens|iteration_tokens)_total(?:_sum)?|"
    r"sglang:(?:prompt|generation)_tokens_total|llamacpp:(?:prompt_tokens|tokens_predicted)_total|"
    r"(?:tgi|lorax)_request_generated_tokens_sum)(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
"""Counters that rise while these servers compute, for any client."""

_CHUNK_BYTES = 2**20


class Reply(NamedTuple):
    """A server's answer to a call of the router."""

    status: int
    text: bytes


class Ask(Protocol):
    """Sends a request of the router to a server."""

    def __call__(self, method: str, path: str, body: Fields | bytes | None = None) -> Awaitable[Reply]:
        """Send a JSON body, or plain bytes, and return the answer."""
        ...


class ServerApi:
    """The API of vLLM and Lorikeet: a call loads an adapter, which is then a separate model.

    Args:
        base: the base model's name at the server; empty for the listed name.

    Attributes:
        name: name of the API in a backend's option ``api=``.
        health_path: path that answers 200 while the server takes requests, and 503 while it does not.
        health_waits: whether health checks wait while the server answers many requests.
        continues_chats: whether an answer can continue the last message of a chat.
        lists_adapters: whether ``/v1/models`` lists the loaded adapters.
    """

    name = "vllm"
    health_path = "/health"
    health_waits = False
    continues_chats = True
    lists_adapters = True

    def __init__(self, base: str = "") -> None:
        self.base = base

    def is_base(self, card: Mapping[str, Any]) -> bool:
        """Return whether a card in ``/v1/models`` is a base model and not an adapter."""
        return card.get("parent") is None if not self.base else card.get("id") == self.base

    async def list_more(self, ask: Ask) -> None:
        """Read more about the server's adapters than ``/v1/models`` lists."""

    async def load(self, ask: Ask, adapter: RoutedAdapter) -> Reply:
        """Load an adapter. A status other than 200 is a refusal."""
        return await ask("POST", "/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.source})

    async def unload(self, ask: Ask, name: str) -> Reply:
        """Unload an adapter by its name."""
        return await ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def takes(self, model: str, adapter: RoutedAdapter | None, base: str) -> bool:
        """Return whether the server accepts the client's request for a model unchanged."""
        return adapter is not None or model in ("", base) or not base

    def named(self, fields: Fields, adapter: RoutedAdapter | None, base: str) -> Fields:
        """Return the body of a request that the server does not accept unchanged.

        Args:
            fields: fields of the body.
            adapter: adapter of the request; None for the base model.
            base: name of the base model at the server.
        """
        return {**fields, "model": base}

    async def tokenize(self, ask: Ask, model: str, text: str) -> Reply:
        """Request the token ids of a text that continues a prompt."""
        return await ask("POST", "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})


class SglangApi(ServerApi):
    """The API of SGLang: a request names the base model, and its adapter in a separate field."""

    name = "sglang"
    lists_adapters = False

    def takes(self, model: str, adapter: RoutedAdapter | None, base: str) -> bool:
        """Return False: the server accepts no request unchanged."""
        return False

    async def load(self, ask: Ask, adapter: RoutedAdapter) -> Reply:
        """Load an adapter. Its refusals are 400, or ``success: false``."""
        reply = await ask("POST", "/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.source})
        try:
            answer = msgspec.json.decode(reply.text)
        except msgspec.DecodeError:
            return reply
        failed = isinstance(answer, dict) and answer.get("success") is False
        if not failed:
            return reply
        why = str(answer.get("error_message") or "no reason is given")
        return Reply(200, b"") if "already" in why else _refused(why)

    async def unload(self, ask: Ask, name: str) -> Reply:
        """Unload an adapter."""
        return await ask("POST", "/unload_lora_adapter", {"lora_name": name})

    def named(self, fields: Fields, adapter: RoutedAdapter | None, base: str) -> Fields:
        """Put the adapter's name into ``lora_path``."""
        fields = {**fields, "model": base or fields.get("model")}
        return fields if adapter is None else {**fields, "lora_path": adapter.name}


class _StartedWithAdapters(ServerApi):
    """The API of a server that loads adapters only at its start."""

    lists_adapters = False

    async def unload(self, ask: Ask, name: str) -> Reply:
        """Do nothing: the server keeps the adapters of its start."""
        return Reply(200, b"")


class LlamaCppApi(_StartedWithAdapters):
    """The API of llama.cpp's server: it loads adapters at its start, and a request selects one by number."""

    name = "llamacpp"
    health_waits = True  # The server has a thread for each connection, and four threads more than slots.

    def __init__(self, base: str = "") -> None:
        super().__init__(base)
        self._numbers: dict[str, int] = {}
        """Numbers of adapters by path, and by file name without its suffix."""

    async def list_more(self, ask: Ask) -> None:
        """Read the server's list of adapters."""
        reply = await ask("GET", "/lora-adapters")
        self._numbers = {}
        if reply.status != 200:
            return
        try:
            found = msgspec.json.decode(reply.text, type=list[dict[str, Any]])
            for each in found:
                path = str(each["path"])
                number = int(each["id"])
                self._numbers |= {path: number, Path(path).stem: number}
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, ValueError):
            return

    def takes(self, model: str, adapter: RoutedAdapter | None, base: str) -> bool:
        """Return whether the server has no adapters, and so accepts requests unchanged."""
        return not self._numbers and adapter is None and super().takes(model, adapter, base)

    def _number(self, adapter: RoutedAdapter) -> int | None:
        names = (adapter.source, adapter.name, Path(adapter.source).stem)
        return next((self._numbers[name] for name in names if name in self._numbers), None)

    async def load(self, ask: Ask, adapter: RoutedAdapter) -> Reply:
        """Find an adapter among the adapters of the server's start."""
        if self._number(adapter) is None:
            await self.list_more(ask)
        if self._number(adapter) is not None:
            return Reply(200, b"")
        return _refused(
            f"llama.cpp loads adapters at its start, and has none called {adapter.name}: start it with "
            f"--lora {adapter.name}.gguf --lora-init-without-apply"
        )

    def named(self, fields: Fields, adapter: RoutedAdapter | None, base: str) -> Fields:
        """Return the body with the number of the adapter.

        Adapters outside the body's list are off, but an empty list leaves all on. So a request for the base model lists
        one adapter as off.
        """
        number = None if adapter is None else self._number(adapter)
        chosen = {"id": 0, "scale": 0.0} if number is None else {"id": number, "scale": 1.0}
        return {**fields, "model": base, "lora": [chosen]}

    async def tokenize(self, ask: Ask, model: str, text: str) -> Reply:
        """Request the token ids of a text."""
        return await ask("POST", "/tokenize", {"content": text, "add_special": False})


class OllamaApi(ServerApi):
    """The API of Ollama: an adapter is a separate model, created from the base and uploaded files."""

    name = "ollama"
    lists_adapters = False
    health_path = "/api/version"

    def is_base(self, card: Mapping[str, Any]) -> bool:
        """Return whether a card is the model named by ``base=``; always True without ``base=``."""
        return not self.base or card.get("id") in (self.base, f"{self.base}:latest")

    async def load(self, ask: Ask, adapter: RoutedAdapter) -> Reply:
        """Upload the files that the server lacks, and create the model."""
        if not self.base:
            return _refused("name the model that adapters are for: --backend URL,api=ollama,base=MODEL")
        source = Path(adapter.source)
        files = dict[str, str]()
        paths = [source / CONFIG_FILE, source / WEIGHTS_FILE] if source.is_dir() else [source]
        for path in paths:
            try:
                content, digest = await asyncio.to_thread(_read, path)
            except OSError as error:
                return _refused(f"its files must be readable where the router runs: {error.strerror}")
            files[path.name] = digest
            there = await ask("HEAD", f"/api/blobs/{digest}")
            if there.status != 200:
                sent = await ask("POST", f"/api/blobs/{digest}", content)
                if sent.status not in (200, 201):
                    return sent
        body = {"model": adapter.name, "from": self.base, "adapters": files, "stream": False}
        return await ask("POST", "/api/create", body)

    async def unload(self, ask: Ask, name: str) -> Reply:
        """Delete the adapter's model."""
        return await ask("DELETE", "/api/delete", {"model": name})


def _read(path: Path) -> tuple[bytes, str]:
    """Return a file's content and its digest in Ollama's form. Large files take long."""
    content = path.read_bytes()
    return content, "sha256:" + hashlib.sha256(content).hexdigest()


class TgiApi(_StartedWithAdapters):
    """The API of Text Generation Inference: it loads ``LORA_ADAPTERS`` at its start, and calls the base ``tgi``."""

    name = "tgi"
    continues_chats = False

    def takes(self, model: str, adapter: RoutedAdapter | None, base: str) -> bool:
        """Return False: the server accepts no request unchanged."""
        return False

    async def load(self, ask: Ask, adapter: RoutedAdapter) -> Reply:
        """Do nothing: the server does not list its adapters, and refuses requests for unknown ones."""
        return Reply(200, b"")

    def named(self, fields: Fields, adapter: RoutedAdapter | None, base: str) -> Fields:
        """Return the body with the name that the adapter got at the server's start."""
        return {**fields, "model": "tgi" if adapter is None else adapter.name}


class LoraxApi(TgiApi):
    """The API of LoRAX: an adapter's source is its name, and the first request loads the adapter."""

    name = "lorax"

    def named(self, fields: Fields, adapter: RoutedAdapter | None, base: str) -> Fields:
        """Return the body with the adapter's source as its name."""
        if adapter is None:
            return {**fields, "model": base}
        return {**fields, "model": adapter.source.removeprefix("hf://")}


class OpenAiApi(_StartedWithAdapters):
    """The API of any server that lists adapters as models under their names."""

    name = "openai"
    health_path = "/v1/models"
    continues_chats = False

    def is_base(self, card: Mapping[str, Any]) -> bool:
        """Return whether a card is the model named by ``base=``; always True without ``base=``."""
        return not self.base or card.get("id") == self.base

    async def load(self, ask: Ask, adapter: RoutedAdapter) -> Reply:
        """Find the adapter in the server's list of models."""
        reply = await ask("GET", "/v1/models")
        try:
            names = {card["id"] for card in msgspec.json.decode(reply.text)["data"]}
        except (msgspec.DecodeError, KeyError, TypeError):
            return reply if reply.status != 200 else _refused("its answer is not a list of models")
        return Reply(200, b"") if adapter.name in names else _refused(f"it lists no model {adapter.name}")


APIS: dict[str, type[ServerApi]] = {
    api.name: api for api in (ServerApi, SglangApi, LlamaCppApi, OllamaApi, TgiApi, LoraxApi, OpenAiApi)
}
_BY_OWNER = {"sglang": "sglang", "llamacpp": "llamacpp", "library": "ollama"}
"""APIs by the ``owned_by`` of the servers' models."""


def api_of(cards: list[Any]) -> str:
    """Detect the API of a server by its list of models; vLLM's if the list has no hint."""
    owners = [card.get("owned_by") for card in cards if isinstance(card, dict)]
    return next((_BY_OWNER[owner] for owner in owners if owner in _BY_OWNER), ServerApi.name)


class BackendSpec(NamedTuple):
    """The address and API of a backend, see :func:`parse_backend`.

    Attributes:
        url: the address, without ``/v1``.
        api: name of the API in ``APIS``; empty to detect the API.
        base: name of the base model; empty for the listed name.
        max_loras: most adapters that may be loaded; 0 for no limit.
        max_rank: largest rank of an adapter; 0 for no limit.
        kv_events: port on which the server publishes events of its KV; 0 for none.
        kv_replay: port of missed events; 0 for none.
    """

    url: str
    api: str = ""
    base: str = ""
    max_loras: int = 0
    max_rank: int = 0
    kv_events: int = 0
    kv_replay: int = 0

    def kv_addresses(self) -> tuple[str, str]:
        """Return the addresses of events of KV and of missed ones; empty without them."""
        host = urlsplit(self.url).hostname or ""
        shown = f"[{host}]" if ":" in host else host
        events, replay = (f"tcp://{shown}:{port}" if port else "" for port in (self.kv_events, self.kv_replay))
        return events, replay


_PORTS = ("kv_events", "kv_replay")
_NUMBERS = ("max_loras", "max_rank", *_PORTS)


def parse_backend(text: str) -> BackendSpec:
    """Parse ``URL[,api=NAME][,base=MODEL][,max_loras=N][,max_rank=N][,kv_events=PORT][,kv_replay=PORT]``.

    Raises:
        ValueError: an option or the API is unknown.
    """
    url, *options = text.split(",")
    given: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in BackendSpec._fields[1:]:
            raise ValueError(
                f"{text}: unknown option {option!r}; options are api=NAME, base=MODEL, max_loras=N, max_rank=N, "
                "kv_events=PORT, kv_replay=PORT"
            )
        if not value:
            raise ValueError(f"{text}: {name} has no value")
        if name in _NUMBERS and not (value.isdecimal() and len(value) < 10):
            raise ValueError(f"{text}: {name} is {value[:50]!r}, and must be a whole number")
        if name in _PORTS and not 0 < int(value) < 2**16:
            raise ValueError(f"{text}: {name} is {value}, and must be a port, 1 to 65535, at the backend's host")
        given[name] = value
    if "kv_replay" in given and "kv_events" not in given:
        raise ValueError(f"{text}: kv_replay has missed events only, and needs kv_events=PORT")
    api = given.get("api", "")
    if api and api not in APIS:
        raise ValueError(f"{text}: unknown api {api!r}; choose one of: {', '.join(APIS)}")
    return BackendSpec(server_root(url), api, given.get("base", ""), *(int(given.get(name, 0)) for name in _NUMBERS))


def _refused(why: str) -> Reply:
    return Reply(400, msgspec.json.encode({"error": {"message": why}}))
