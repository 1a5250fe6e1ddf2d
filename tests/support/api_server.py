"""A server on a free port, in the test's own event loop, over a scripted engine."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.checkpoint import AdapterChecks
from lorikeet.api.app import create_app, create_service
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.config import AdapterDirMode, AdapterSettings, BatchSettings, ServerSettings, Settings
from lorikeet.core.chat_template import ChatTemplate
from lorikeet.http.connections import ConnectionLimits, limited_http
from lorikeet.observe.length_prediction import AnswerLengthPredictor
from lorikeet.observe.request_log import RequestLog
from lorikeet.serving.images import PromptImages
from lorikeet.serving.served_models import ServedModels
from lorikeet.serving.service import Service
from lorikeet.tenants.tenants import Tenants
from tests.support.fakes import GEOMETRY, HIDDEN, FakeEngine, byte_level_tokenizer, write_adapter
from tests.support.quick_server import serving

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_level_tokenizer()
BASE_DIGEST = "ba5e" * 16
END: int = TOKENIZER.encode("<|im_end|>").ids[0]


@dataclass
class Running:
    """A server that answers at ``http``."""

    http: httpx.AsyncClient
    engine: FakeEngine
    service: Service
    sources: Path


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with adapters to load."""
    for seed, name in enumerate(("formal", "pirate", "json")):
        write_adapter(tmp_path / "sources" / name, seed=seed)
    return tmp_path / "sources"


@pytest.fixture
def start(tmp_path: Path, sources: Path) -> Start:
    """Start servers. By default the engine answers every request with ``hello world`` and an end token."""

    @asynccontextmanager
    async def start_one(
        answer: str = "hello world",
        request_log: RequestLog | None = None,
        lora: bool = True,
        lengths: AnswerLengthPredictor | None = None,
        max_model_len: int = 256,
        adapters: dict[str, Any] | None = None,
        batches: dict[str, Any] | None = None,
        tenants: Tenants | None = None,
        image_model: Path | None = None,
        **server: object,
    ) -> AsyncIterator[Running]:
        folders = {"adapter_dir": str(sources), "store_dir": str(tmp_path / "store")}
        given: dict[str, Any] = {**folders, "adapter_dir_mode": AdapterDirMode.ALLOW, **(adapters or {})}
        settings = Settings(
            adapters=AdapterSettings(enabled=lora, **given),
            server=msgspec.structs.replace(ServerSettings(), **server),
            batches=BatchSettings(**{"dir": str(tmp_path / "batches"), **(batches or {})}),
        )
        engine = FakeEngine(lambda request: [*TOKENIZER.encode(answer).ids, END], max_model_len=max_model_len)
        limits = ModelLimits(engine.engine_info.max_model_len, TOKENIZER.get_vocab_size(), (END,), hidden=HIDDEN)
        texts = TextProcessor(TOKENIZER, ChatTemplate(TEMPLATE, {}))
        images = PromptImages(settings.server, image_model)
        if image_model is not None:
            texts = TextProcessor.read(image_model)
            vocabulary = texts.tokenizer.get_vocab_size()
            limits = msgspec.structs.replace(limits, vocabulary=vocabulary, image_tokens=await images.start())
        chats = AdapterChats(ChatSettings(texts, limits))
        catalog = AdapterCatalog(
            settings.adapters,
            "base",
            GEOMETRY,
            reserved_names=("base",),
            checks=AdapterChecks("bfloat16"),
            fit_chat=chats.fit,
        )
        models = ServedModels(
            ("base",),
            ("/models/base",),
            "/models/base",
            catalog,
            limits.max_model_len,
            BASE_DIGEST,
            takes_images=limits.image_tokens is not None,
        )
        service = create_service(
            settings, engine.as_client(), catalog, chats, models, request_log, lengths, tenants=tenants, images=images
        )
        config = uvicorn.Config(
            create_app(service),
            http=limited_http(ConnectionLimits(), service.connections),  # type: ignore[arg-type]
            lifespan="off",
            log_level="error",
            access_log=False,
        )
        try:
            async with (
                serving(config) as url,
                httpx.AsyncClient(base_url=url, timeout=30, verify=False) as http,
            ):
                yield Running(http, engine, service, sources)
        finally:
            await service.batches.close()
            await service.prompt_processes.close()
            await service.images.close()
            await service.resolver.loader.close()
            await service.grammars.close()
            catalog.close()

    return start_one


@pytest.fixture
async def server(start: Start) -> AsyncIterator[Running]:
    """One server with the default settings and the adapter ``formal``."""
    async with start() as running:
        running.service.catalog.register("formal", str(running.sources / "formal"))
        yield running


def count_calls_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Return a list that gets all work on texts that is done off the event loop from now on."""
    calls: list[Callable[[], object]] = []

    async def run_sync(work: Callable[[], object]) -> object:
        calls.append(work)
        return work()

    monkeypatch.setattr("lorikeet.http.threads.to_thread.run_sync", run_sync)
    return calls
