"""``serve``: from settings to a server that answers, and to its orderly end."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
import uvloop
from anyio import to_thread

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import AdapterError
from lorikeet.api.announce import Announcer, fail, give_up, shown_url
from lorikeet.api.app import create_app, create_service
from lorikeet.api.length_prediction import open_length_predictor
from lorikeet.api.logs import configure_logs, log
from lorikeet.api.model_folder import ModelFolder, prepare_model
from lorikeet.api.request_log import RequestLog
from lorikeet.api.sampling import ModelLimits, SamplingDefaults
from lorikeet.api.served_models import ServedModels
from lorikeet.api.service import Service
from lorikeet.api.text_processor import TemplateError, TextProcessor, read_generation_config
from lorikeet.api.threads import in_daemon_thread
from lorikeet.client.client import EngineClient, Engines
from lorikeet.client.supervisor import EngineError
from lorikeet.config import ConfigError, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.extras import install_command
from lorikeet.core.messages import EngineReady
from lorikeet.core.process_tuning import frozen_gc
from lorikeet.memory.packing import pack
from lorikeet.models.config import ModelConfig, ModelConfigError, read_model_config

_KEEP_ALIVE_S = 75


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; the first one drains, a second one stops at once.

    Raises:
        SystemExit: with code 1 if the server cannot start, the reason printed.
    """
    try:
        configure_logs(settings.server.log_level, as_json=settings.server.log_json)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings))
    except (AdapterError, ConfigError, EngineError, ModelConfigError, OSError, TemplateError, ValueError) as error:
        fail(str(error))
    except (asyncio.CancelledError, KeyboardInterrupt):
        give_up("stopped before it was ready")


async def _serve(settings: Settings) -> None:
    listener = _bind(settings.server.host, settings.server.port)
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        announcer = stack.enter_context(Announcer())
        model = await in_daemon_thread(partial(prepare_model, settings.model, announcer.stage))
        config = read_model_config(model.path)
        texts = TextProcessor.read(model.path, settings.model.chat_template)
        request_log = _open_request_log(settings)
        if request_log is not None:
            stack.callback(request_log.close)
        lengths, lengths_note = open_length_predictor(settings.server, model.path / "tokenizer.json")
        stack.push_async_callback(lengths.close)

        client = _open_engines(_with_folder(settings, model.path), stack)
        stack.push_async_callback(client.close)
        engine_info = await client.start(lambda progress: announcer.show(progress.stage, progress.done, progress.total))
        catalog = await to_thread.run_sync(_open_catalog, settings, config, engine_info, model)
        stack.callback(catalog.close)
        await _preload(catalog, settings.adapters.preload, announcer)
        client.register_adapters(await to_thread.run_sync(catalog.versions))

        names = ServedModels(model.names, model.aliases, str(model.path), catalog, engine_info.max_model_len)
        service = create_service(
            settings, client, catalog, texts, names, _limits(model.path, config, engine_info), request_log, lengths
        )
        for note in (*engine_info.notes, *catalog.notes, lengths_note):
            log.info(note)
        asks_for_key = bool(settings.server.api_keys)
        if not asks_for_key and not _is_loopback(settings.server.host):
            log.warning("whoever reaches this machine may use the server: there is no --api-key")
        url = shown_url(settings.server.host, listener.getsockname()[1])
        server = _Server(
            service,
            settings.server.drain_timeout_s,
            on_ready=lambda: announcer.ready(url, names.base, catalog.names(), asks_for_key=asks_for_key),
        )
        # From here on uvicorn's own handlers receive the signals.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        with frozen_gc():
            await server.serve(sockets=[listener])


def _open_engines(settings: Settings, stack: AsyncExitStack) -> Engines:
    cluster = settings.cluster
    if cluster.replicas == 1 and not cluster.max_replicas and not cluster.ray_address:
        return EngineClient(settings)
    try:
        from lorikeet.cluster.open import open_cluster  # an extra, which a server with one engine does without
    except ImportError as error:
        raise ConfigError(f"several replicas need more: {install_command('cluster')} ({error})") from error
    return open_cluster(settings, stack)


class _Server(uvicorn.Server):
    """Uvicorn that drains: on the first signal it goes on answering until accepted requests have ended."""

    def __init__(self, service: Service, drain_timeout_s: float, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            create_app(service),
            loop="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._drain_until_s: float | None = None
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: drain, then stop at once. Not passing it on lets the process exit with code 0."""
        if self._drain_until_s is None:
            self._service.gate.draining = True
            self._drain_until_s = time.monotonic() + self._drain_timeout_s
        else:
            self._drain_until_s = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Tell uvicorn, ten times a second, whether to stop."""
        if self._drain_until_s is not None and not self.should_exit:
            active = self._service.gate.active
            if active and time.monotonic() > self._drain_until_s:
                log.warning("stopped before all requests had finished", requests=active)
                self._service.stop_all()
                active = 0
            self.should_exit = not active
        return await super().on_tick(counter)


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before anything heavy starts.

    Raises:
        ConfigError: it cannot be had.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_folder(settings: Settings, folder: Path) -> Settings:
    """Let the engine read the folder that was found, whatever the model was called."""
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, model=str(folder)))


def _limits(folder: Path, config: ModelConfig, engine_info: EngineReady) -> ModelLimits:
    try:
        defaults = SamplingDefaults.from_generation_config(read_generation_config(folder))
    except msgspec.ValidationError as error:
        raise ModelConfigError(f"{folder / 'generation_config.json'}: {error}") from error
    return ModelLimits(engine_info.max_model_len, config.vocab_size, config.eos_token_ids, defaults)


def _open_catalog(
    settings: Settings, config: ModelConfig, engine_info: EngineReady, model: ModelFolder
) -> AdapterCatalog:
    dtype_bytes = engine_info.geometry.dtype_bytes
    share = config.geometry(dtype_bytes, settings.engine.tensor_parallel)

    def accept(adapter: AdapterRef) -> None:
        blocks = pack(adapter.ranks, share, engine_info.block_bytes // dtype_bytes).blocks
        if blocks > engine_info.max_adapter_blocks:
            raise AdapterError(
                f"adapter {adapter.name!r} takes {blocks} blocks of device memory, at most "
                f"{engine_info.max_adapter_blocks} are there for one; give the server more memory"
            )

    reserved = (*model.names, *model.aliases)
    return AdapterCatalog(
        settings.adapters, model.identity, engine_info.geometry, reserved_names=reserved, accept=accept
    )


async def _preload(catalog: AdapterCatalog, pairs: tuple[str, ...], announcer: Announcer) -> None:
    """Register the adapters named on the command line; the server does not start without one of them."""
    for done, pair in enumerate(pairs):
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise ConfigError(f"adapter {pair!r}: not of the form name=source")
        announcer.show("adapters", done, len(pairs))
        try:
            await in_daemon_thread(partial(catalog.register, name, source, replace=True, trusted=True))
        except AdapterError as error:
            raise ConfigError(f"adapter {name!r} from {source}: {error}") from error
        announcer.show("adapters", done + 1, len(pairs))


def _open_request_log(settings: Settings) -> RequestLog | None:
    server = settings.server
    if not server.request_log:
        return None
    return RequestLog(
        Path(server.request_log),
        max_bytes=server.request_log_max_bytes,
        keep=server.request_log_keep,
        text=server.request_log_text,
    )
