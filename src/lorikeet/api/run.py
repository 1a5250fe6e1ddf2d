"""Starts the engines and the HTTP server for ``lorikeet serve``, and drains them at the end."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import uvicorn
import uvloop
from anyio import to_thread

from lorikeet.adapters.catalog import AdapterCatalog, StoredAdapters, registry_url
from lorikeet.adapters.checkpoint import AdapterChecks, ServedBase
from lorikeet.adapters.errors import AdapterError
from lorikeet.api.app import create_app, create_service
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.sampling import ModelLimits, SamplingDefaults
from lorikeet.chat.text_processor import TextProcessor, read_generation_config
from lorikeet.client.client import EngineClient, Engines
from lorikeet.client.local_host import LocalHost
from lorikeet.client.supervisor import EngineError
from lorikeet.config import ConfigError, ExecutorKind, LogprobsMode, ServerSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.chat_template import TemplateError
from lorikeet.core.logs import configure_logs
from lorikeet.core.machine import cpu_model, gpu_models
from lorikeet.core.messages import LOADING_WEIGHTS, EngineReady, Progress
from lorikeet.core.process_tuning import frozen_gc, return_large_blocks
from lorikeet.core.text import install_command
from lorikeet.http.connections import ConnectionLimits, limited_http, raise_file_limit
from lorikeet.http.listening import ListeningServer, is_loopback, listen, listen_unix
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread
from lorikeet.http.tls import Certificate, open_certificate
from lorikeet.memory.packing import pack
from lorikeet.memory.sizing import check_blocks, stored_geometry
from lorikeet.models.architectures import ARCHITECTURES
from lorikeet.models.base_digest import base_digest, files_digest
from lorikeet.models.config import ModelConfig, max_model_len, read_model_config, wants_own_decoder
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.model_folder import ModelFolder, prepare_model
from lorikeet.observe.ended_request import EndObserver
from lorikeet.observe.exporters import open_exporters
from lorikeet.observe.length_prediction import open_length_predictor
from lorikeet.observe.request_log import RequestLog
from lorikeet.policies import BATCHING
from lorikeet.presets import resolve_preset
from lorikeet.serving.adapter_life import follow_registry
from lorikeet.serving.images import PromptImages, may_take_images
from lorikeet.serving.preload import log_restored, names_to_show, preload_adapters, served_when_named
from lorikeet.serving.served_models import ServedModels
from lorikeet.serving.service import Service
from lorikeet.tenants.tenants import Tenants
from lorikeet.terminal import ProgressDisplay, exit_at_once, fail, show_ready, shown_url

if TYPE_CHECKING:
    from lorikeet.observe.tracing import RequestTraces

_KEEP_ALIVE_S = 75


def serve(settings: Settings, name_settings: Callable[[str], str], host: LocalHost) -> None:
    """Serve until SIGTERM or SIGINT; the first signal drains, or ends a start, and the second stops immediately.

    Args:
        settings: the whole server's settings.
        name_settings: replaces the names of settings in an error text by the user's names.
        host: starts the engine; the first one of several.

    Raises:
        SystemExit: with code 1 if the server cannot start, the reason printed or, with ``log_json``, logged.
    """
    as_json = settings.server.log_json
    try:
        configure_logs(settings.server.log_level, as_json=as_json)
    except ValueError as error:
        configure_logs("info", as_json=as_json)
        fail(name_settings(str(error)), as_json=as_json)
    if as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return_large_blocks()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, host))
    except (AdapterError, ConfigError, EngineError, ModelConfigError, OSError, TemplateError, ValueError) as error:
        fail(name_settings(str(error)), as_json=as_json)
    except (asyncio.CancelledError, KeyboardInterrupt):
        log.info("stopped before it was ready")
        host.close()
        exit_at_once()


async def _serve(settings: Settings, host: LocalHost) -> None:
    as_json = settings.server.log_json
    server_settings = settings.server
    uds = server_settings.uds
    certificate = open_certificate(server_settings.ssl_certfile, server_settings.ssl_keyfile)
    listener = listen_unix(uds) if uds else listen(server_settings.host, server_settings.port)
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        request_log = _open_request_log(settings)
        if request_log is not None:
            stack.callback(request_log.close)
        progress = _StartProgress(stack.enter_context(ProgressDisplay(bars=not as_json, lines=False)))
        model = await in_daemon_thread(partial(prepare_model, settings.model, progress.stage))
        log.info("model found", model=model.names[0], folder=str(model.path))
        _check_base(settings, model)
        files = asyncio.ensure_future(in_daemon_thread(partial(files_digest, model.path)))
        stack.callback(files.cancel)
        text_processor = TextProcessor.read(model.path, settings.model.chat_template)
        if text_processor.template is not None and text_processor.template.leaves_text_out:
            log.warning("the chat template drops user messages, so chats with the base model are refused")
        lengths, lengths_note = open_length_predictor(settings.server, model.path / "tokenizer.json")
        stack.push_async_callback(lengths.close)

        tenants = await to_thread.run_sync(_open_tenants, settings, model.identity)
        if tenants is not None:
            stack.callback(tenants.close)

        stored = asyncio.ensure_future(to_thread.run_sync(StoredAdapters, settings.adapters))
        stack.callback(stored.cancel)
        images = PromptImages(settings.server, model.path) if may_take_images(model.path) else None
        if images is not None:
            stack.push_async_callback(images.close)
        client = _open_engines(_with_folder(settings, model.path), host, stack)
        stack.push_async_callback(client.close)
        engine_info = await client.start(progress.on_engine_progress)
        for note in engine_info.notes:
            log.info(note)
        model_limits = _limits(model.path, engine_info, settings, text_processor.eos_token_id)
        if images is not None and engine_info.base is not None:
            refused = engine_info.base.images_refused
            model_limits = msgspec.structs.replace(model_limits, image_tokens=await images.start(refused))
        chats = AdapterChats(
            ChatSettings(
                text_processor,
                model_limits,
                tool_parser=settings.model.tool_call_parser,
                reasoning_parser=settings.model.reasoning_parser,
            )
        )
        catalog = await to_thread.run_sync(_open_catalog, settings, engine_info, model, chats, await stored)
        stack.callback(catalog.close)
        await preload_adapters(catalog, settings.adapters.preload, partial(progress.display.show, "adapters"))
        log_restored(catalog)
        client.register_adapters(await to_thread.run_sync(catalog.versions))
        if settings.kv_events.endpoint:
            client.name_adapters({record.name: record.digest for record in catalog.list()}, "")
        log.info("adapters registered", adapters=len(catalog.names()), **served_when_named(settings.adapters))

        names = ServedModels(
            model.names,
            model.aliases,
            model.identity,
            catalog,
            engine_info.max_model_len,
            _base_digest(await files, settings, engine_info),
            takes_images=model_limits.image_tokens is not None,
        )
        log.info("base model's digest", digest=names.base_digest)
        service = create_service(
            settings,
            client,
            catalog,
            chats,
            names,
            request_log,
            lengths,
            traces=_open_traces(server_settings.otlp_traces_endpoint, names.base, stack),
            exporters=_open_exporters(server_settings.exporters, names.base, stack),
            tenants=tenants,
            images=images,
        )
        stack.push_async_callback(service.prompt_processes.close)
        stack.push_async_callback(service.resolver.loader.close)
        stack.push_async_callback(service.grammars.close)
        stack.push_async_callback(service.batches.close)
        await service.batches.resume()
        if settings.adapters.enabled:
            stack.callback(asyncio.create_task(follow_registry(service)).cancel)
        for note in (*catalog.notes, lengths_note):
            log.info(note)
        needs_key = bool(settings.server.api_keys) or tenants is not None
        if not needs_key and not uds and not is_loopback(settings.server.host):
            log.warning("anyone who can reach this address may use the server: no --api-key is set")
        url = (
            f"unix:{uds}"
            if uds
            else shown_url(settings.server.host, listener.getsockname()[1], certificate is not None)
        )

        def on_ready() -> None:
            progress.display.stop()
            shown = list(
                dict.fromkeys([*names_to_show(catalog, settings.adapters.preload), *service.resolver.loader.names()])
            )
            own = any(record.name == shown[0] and record.chat.chat_template for record in catalog.list())
            chats_too = text_processor.template is not None or own
            show_ready(url, names.base, shown, needs_key=needs_key, as_json=as_json, chats=chats_too)

        limits = _connection_limits(settings.server)
        server = _Server(service, listener, certificate, limits, settings.server.drain_timeout_s, on_ready)
        if certificate is not None:
            await stack.enter_async_context(certificate.renewing())
        # Uvicorn's own handlers receive the signals from here on.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        with frozen_gc():
            await server.serve()


def _open_traces(endpoint: str, model_name: str, stack: AsyncExitStack) -> "RequestTraces | None":
    """Return the maker of spans, which ``stack`` closes; None without an address.

    Raises:
        ConfigError: the library for spans is not installed.
    """
    if not endpoint:
        return None
    try:
        from lorikeet.observe.tracing import RequestTraces, open_exporter
    except ImportError as error:
        raise ConfigError(f"server.otlp_traces_endpoint: run `{install_command('tracing')}` ({error})") from error
    traces = RequestTraces(model_name, open_exporter(endpoint))
    # Closing sends the last spans, which takes seconds if the collector cannot be reached.
    stack.push_async_callback(in_daemon_thread, traces.close)
    return traces


def _open_exporters(exporters: tuple[str, ...], model_name: str, stack: AsyncExitStack) -> tuple[EndObserver, ...]:
    """Create the exporters, which ``stack`` closes.

    Raises:
        ConfigError: an exporter does not exist or cannot be used.
    """
    opened = open_exporters(exporters, model_name)
    for each in opened:
        stack.push_async_callback(in_daemon_thread, each.close)
    return opened


class _StartProgress:
    """Shows the stages of a start as bars, and logs the begin of long stages and the loading of weights.

    Args:
        display: shows the bars.
    """

    def __init__(self, display: ProgressDisplay) -> None:
        self.display = display
        self._began_s: dict[str, float] = {}
        self._is_loaded = False

    def stage(self, name: str) -> None:
        """Begin a stage of unknown length."""
        log.info(name)
        self.display.stage(name)

    def on_engine_progress(self, progress: Progress) -> None:
        """Show the engine's progress; log only the first of several replicas."""
        now_s = time.monotonic()
        began_s = self._began_s.setdefault(progress.stage, now_s)
        self.display.show(progress.stage, progress.done, progress.total)
        if progress.stage == LOADING_WEIGHTS and progress.done == progress.total and not self._is_loaded:
            self._is_loaded = True
            log.info("weights loaded", seconds=round(now_s - began_s, 1))


def _check_base(settings: Settings, model: ModelFolder) -> None:
    """Check the base model, as far as possible without its library, and the profile that policies use.

    A paced executor runs on the profile's device by definition.

    Raises:
        ConfigError: no profile fits this base model, or its memory is too small.
        ModelConfigError: its config is broken, or Lorikeet's own decoder is requested and does not support it.
        ProfileError: the profile belongs to another model or device.
    """
    engine = settings.engine
    wanted = settings.model.model_impl
    if not wants_own_decoder(model.path, wanted):
        if engine.profile or engine.executor is not ExecutorKind.TORCH:
            raise ConfigError(f"profile: {model.names[0]!r} cannot have one; only {', '.join(ARCHITECTURES)} can")
        cluster = settings.cluster
        if cluster.replicas > 1 or cluster.max_replicas or cluster.ray_address:
            # The pool that carries adapters between machines knows only the modules of Lorikeet's own decoder.
            raise ConfigError(f"replicas: {model.names[0]!r} runs by transformers' modules, in one replica only")
        if engine.ranks > 1:
            setting = "tensor_parallel" if engine.tensor_parallel > 1 else "pipeline_parallel"
            raise ConfigError(
                f"{setting}: {model.names[0]!r} runs by transformers' modules, which are not split over ranks"
            )
        return
    config = read_model_config(model.path)
    if engine.profile:
        from lorikeet.costs.catalog import load_profile
        from lorikeet.costs.profile_checks import (  # These take time to import, and few servers need them.
            check_device,
            check_model,
        )

        profile = load_profile(engine.profile)
        check_model(profile, config.geometry(profile.geometry.dtype_bytes), model.names[0])
        if engine.executor is ExecutorKind.TORCH:
            check_device(profile, engine.device, cpu_model(), gpu_models())
    _check_memory(settings, config)


def _check_memory(settings: Settings, config: ModelConfig) -> None:
    """Check, before weights are loaded, that a pool of a set size holds the longest sequence and an adapter.

    Raises:
        ConfigError: the pool is too small, or the longest sequence exceeds the model's.
    """
    engine = settings.engine
    if engine.executor is not ExecutorKind.TORCH:
        return
    longest_tokens = max_model_len(settings, config)
    if engine.memory_bytes:
        dtype = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
        stage = config.stage(0, engine.pipeline_parallel)
        geometry = stored_geometry(engine, stage.geometry(4 if dtype == "float32" else 2, engine.tensor_parallel))
        check_blocks(settings, geometry, longest_tokens, engine.memory_bytes // geometry.block_bytes(engine.block_size))


def _open_engines(settings: Settings, host: LocalHost, stack: AsyncExitStack) -> Engines:
    if settings.cluster.is_one_engine:
        return EngineClient(settings, host)
    try:
        from lorikeet.cluster.open import open_cluster  # This extra is needed only for several engines.
    except ImportError as error:
        raise ConfigError(
            f"replicas: several replicas need an extra: {install_command('cluster')} ({error})"
        ) from error
    return open_cluster(settings, stack, host)


def _open_tenants(settings: Settings, base: str) -> Tenants | None:
    return Tenants(registry_url(settings.adapters), base) if settings.server.tenants else None


class _Server(ListeningServer):
    """Runs uvicorn, and drains after the first signal: the server runs until accepted requests have ended."""

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        certificate: Certificate | None,
        limits: ConnectionLimits,
        drain_timeout_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        config = uvicorn.Config(
            create_app(service),
            http=limited_http(limits, service.connections),  # type: ignore[arg-type]
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config, listener, certificate)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._drain_until_s: float | None = None
        self._drain_began_s: float | None = None
        """Time at which the drain was last logged."""
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call ``on_ready``."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first drains, the next stops. The process exits with code 0, since none is passed on.

        Nothing is logged here: the signal may have interrupted a write to the log.
        """
        if self._drain_until_s is None:
            self._service.gate.draining = True
            self._drain_until_s = time.monotonic() + self._drain_timeout_s
        else:
            self._drain_until_s = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to stop, together with uvicorn; uvicorn calls this ten times a second."""
        if self._drain_until_s is not None and not self.should_exit:
            active = self._service.gate.active
            now_s = time.monotonic()
            if self._drain_began_s is None:
                self._drain_began_s = now_s
                log.info(f"draining, {active} requests running", drain_timeout_s=self._drain_timeout_s)
            if active and now_s > self._drain_until_s:
                log.warning("stopped before all requests had finished", requests=active)
                self._service.stop_all()
                active = 0
            self.should_exit = not active
            if self.should_exit:
                log.info("drained", seconds=round(now_s - self._drain_began_s, 1))
        return await super().on_tick(counter)


def _connection_limits(server: ServerSettings) -> ConnectionLimits:
    return ConnectionLimits(
        min(server.max_connections, raise_file_limit()),
        server.max_head_bytes,
        server.head_timeout_s,
        server.body_timeout_s,
        server.write_timeout_s,
    )


def _with_folder(settings: Settings, folder: Path) -> Settings:
    """Return the engine's settings, which name the model's local folder."""
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, model=str(folder)))


def _limits(folder: Path, engine_info: EngineReady, settings: Settings, eos_token_id: int | None) -> ModelLimits:
    """Return the limits and defaults of the base model; the tokenizer's end token ends answers, too."""
    base = engine_info.base
    assert base is not None, "an engine that serves has a model"
    defaults = _sampling_defaults(folder, settings.model.generation_config)
    of_tokenizer = () if eos_token_id is None or eos_token_id >= base.vocab_size else (eos_token_id,)
    ends = tuple(dict.fromkeys((*base.eos_token_ids, *of_tokenizer)))
    return ModelLimits(
        engine_info.max_model_len,
        base.vocab_size,
        ends,
        defaults,
        settings.server.max_logprobs,
        base.embed_size,
        settings.server.logprobs_mode is LogprobsMode.PROCESSED,
    )


def _sampling_defaults(folder: Path, source: str) -> SamplingDefaults:
    """Return the sampling defaults.

    Args:
        folder: the model's folder.
        source: ``generation_config`` of the model's settings.

    Raises:
        ModelConfigError: the file holds a wrong value.
    """
    if source == "vllm":
        return SamplingDefaults()
    if source != "auto":
        folder = Path(source).expanduser()
    try:
        return SamplingDefaults.from_generation_config(read_generation_config(folder))
    except msgspec.ValidationError as error:
        raise ModelConfigError(f"{folder / 'generation_config.json'}: {error}") from error


def _base_digest(files: str, settings: Settings, engine_info: EngineReady) -> str:
    """Return the digest of the base with its dtype and quantisation, and those of adapters and KV."""
    base = engine_info.base
    assert base is not None, "an engine that serves has a model"
    engine = settings.engine
    kept = (engine.lora_dtype, engine.kv_cache_dtype)
    return base_digest(files, base.dtype, settings.model.load_format, engine_info.weights, *kept)


def _open_catalog(
    settings: Settings, engine_info: EngineReady, model: ModelFolder, chats: AdapterChats, stored: StoredAdapters
) -> AdapterCatalog:
    dtype_bytes = engine_info.geometry.dtype_bytes
    share = engine_info.local_geometry or engine_info.geometry
    base = engine_info.base
    assert base is not None, "an engine that serves has a model"

    def accept(adapter: AdapterRef) -> None:
        blocks = pack(adapter.ranks, share, engine_info.block_bytes // dtype_bytes, adapter.extras).blocks
        if blocks > engine_info.max_adapter_blocks:
            raise AdapterError(
                f"adapter {adapter.name!r} takes {blocks} blocks of device memory; one adapter gets at most "
                f"{engine_info.max_adapter_blocks}: start the server with more --memory"
            )

    reserved = (*model.names, *model.aliases)
    sources = settings.adapters
    return AdapterCatalog(
        msgspec.structs.replace(sources, allowed_sources=(*sources.allowed_sources, *sources.resolvers)),
        model.identity,
        engine_info.geometry,
        reserved_names=reserved,
        checks=AdapterChecks(
            base.dtype,
            ServedBase(
                (model.identity, *model.names, *model.aliases, *sources.base_aliases),
                model.revision,
                sources.strict_base,
            ),
            _why_only_low_rank(settings),
            _why_only_vectors(settings),
            "--deterministic: torch multiplies by these, in an order that depends on the batch"
            if settings.engine.deterministic
            else "",
        ),
        accept=accept,
        fit_chat=chats.fit,
        stored=stored,
    )


def _why_only_low_rank(settings: Settings) -> str:
    """Return why only low-rank matrices on linear modules can be served; "" if other adapters can be, too."""
    if settings.engine.pipeline_parallel > 1:
        return "pipeline stages serve low-rank matrices on linear modules only"
    name, preset = resolve_preset(settings.engine.preset)
    if BATCHING.load(preset.batching).merges:
        return f"preset {name} merges adapters, and can merge low-rank matrices on linear modules only"
    return ""


def _why_only_vectors(settings: Settings) -> str:
    """Return why whole linear layers and factors of inputs cannot be served; "" if they can be."""
    ranks = settings.engine.tensor_parallel
    return f"--tensor-parallel-size {ranks} does not split these over its ranks" if ranks > 1 else ""


def _open_request_log(settings: Settings) -> RequestLog | None:
    server = settings.server
    if not server.request_log:
        return None
    try:
        return RequestLog(
            Path(server.request_log),
            max_bytes=server.request_log_max_bytes,
            keep=server.request_log_keep,
            text=server.request_log_text,
        )
    except OSError as error:
        raise ConfigError(f"request_log: {server.request_log!r}: {error.strerror or error}") from error
