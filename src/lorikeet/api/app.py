"""Builds the service from its parts, and the ASGI application with its middleware, routes and error handlers."""

from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from lorikeet import __version__
from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.task import AdapterTask
from lorikeet.adapters.task_files import read_task
from lorikeet.api.pooled import MAX_POOLED_BYTES
from lorikeet.api.route_table import add_routes, all_routes
from lorikeet.api.routes.batches import FORM_BYTES
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.mixtures import Mixtures
from lorikeet.chat.structured_output import GrammarChecks
from lorikeet.client.client import Engines
from lorikeet.config import Settings
from lorikeet.core.events import AdapterEvent, AdapterLoaded
from lorikeet.http.admission import AdmissionGate
from lorikeet.http.anthropic_errors import AnthropicErrors
from lorikeet.http.body_gate import SMALL_BODY_BYTES, BodyGate
from lorikeet.http.errors import install_handlers
from lorikeet.http.logs import log
from lorikeet.http.middleware import RootPath, add_middleware
from lorikeet.http.routes import BodySize
from lorikeet.http.web import SecurityHeaders
from lorikeet.observe.collectors import (
    AdapterNames,
    ClusterCollector,
    ConnectionCollector,
    ReplicasCollector,
    TenantCollector,
    UsageCollector,
    load_of,
)
from lorikeet.observe.ended_request import EndObserver
from lorikeet.observe.image_counts import ImageCollector
from lorikeet.observe.length_prediction import AnswerLengthPredictor, LengthCollector
from lorikeet.observe.live_stats import LiveStats
from lorikeet.observe.load_reports import LoadReports
from lorikeet.observe.metrics import RequestMetrics
from lorikeet.observe.observer import RequestObserver
from lorikeet.observe.request_log import RequestLog
from lorikeet.observe.shedding import TtftForecast
from lorikeet.observe.slo_targets import read_targets
from lorikeet.observe.traffic import MOST_TENANTS, AdapterUsage
from lorikeet.presets import resolve_preset
from lorikeet.serving import adapter_life
from lorikeet.serving.adapter_loader import AdapterLoader
from lorikeet.serving.auto_model import AutoModel
from lorikeet.serving.batches.batches import Batches
from lorikeet.serving.batches.dispatch import BatchDispatcher
from lorikeet.serving.batches.storage import BatchStorage
from lorikeet.serving.images import PromptImages
from lorikeet.serving.large_bodies import PromptProcesses
from lorikeet.serving.model_resolver import ModelResolver
from lorikeet.serving.served_models import ServedModels
from lorikeet.serving.service import Service
from lorikeet.serving.stored_responses import StoredResponses
from lorikeet.tenants.tenants import Tenants

if TYPE_CHECKING:
    from lorikeet.observe.tracing import RequestTraces


def create_service(
    settings: Settings,
    client: Engines,
    catalog: AdapterCatalog,
    chats: AdapterChats,
    models: ServedModels,
    request_log: RequestLog | None = None,
    lengths: AnswerLengthPredictor | None = None,
    traces: "RequestTraces | None" = None,
    tenants: Tenants | None = None,
    exporters: tuple[EndObserver, ...] = (),
    images: PromptImages | None = None,
) -> Service:
    """Build the service from the parts of a server.

    Args:
        settings: the whole server's settings.
        client: the started client of the engines.
        catalog: the adapters.
        chats: chat settings of the base model and of the adapters.
        models: names of the base model and the adapters.
        request_log: log of requests; None for no log.
        lengths: predicts the lengths of answers; None for no predictions.
        traces: makes spans of requests; None for no spans.
        exporters: plug-ins that get every request that has ended.
        images: reads the images of prompts; None for a model that takes none.
        tenants: keys of the registry's database; None for a server without tenants.

    Raises:
        ConfigError: the SLO targets in the settings cannot be read.
    """
    metrics = RequestMetrics(models.base, chats.base.limits.max_model_len)
    usage = AdapterUsage(settings.server.metrics_adapters)
    by_tenant = AdapterUsage(settings.server.metrics_adapters, most=MOST_TENANTS)
    lengths = lengths or AnswerLengthPredictor()
    forecast = TtftForecast(resolve_preset(settings.engine.preset)[1].admission) if settings.server.shed else None
    live = LiveStats(lambda: client.views)
    service = Service(
        settings=settings.server,
        adapter_settings=settings.adapters,
        client=client,
        catalog=catalog,
        chats=chats,
        base_task=_base_task(chats),
        ranks=settings.engine.ranks,
        models=models,
        targets=read_targets(settings.server, settings.cluster),
        gate=AdmissionGate(settings.server.max_queued),
        batch_gate=AdmissionGate(settings.server.max_queued),
        lengths=lengths,
        body_gate=BodyGate(settings.server.max_body_bytes),
        prompt_processes=PromptProcesses(chats.base, settings.server.max_queued),
        images=images or PromptImages(settings.server, None),
        grammars=GrammarChecks(chats.base.text_processor, chats.base.limits),
        observer=RequestObserver(
            metrics,
            usage,
            by_tenant,
            request_log,
            lengths,
            forecast,
            live,
            traces,
            None if tenants is None else tenants.ledger,
            exporters,
            models.base_digest,
        ),
        sends_names=bool(settings.kv_events.endpoint),
        tenants=tenants,
        responses=StoredResponses(
            settings.server.stored_responses,
            settings.server.stored_responses_bytes,
            settings.server.stored_responses_s,
        ),
    )
    remove = partial(adapter_life.remove_unused, service)
    service.resolver = ModelResolver(
        models,
        catalog,
        AdapterLoader(settings.adapters, partial(adapter_life.load_on_demand, service), remove),
        Mixtures(partial(adapter_life.make_mixture, service), remove),
        AutoModel(catalog, is_enabled=settings.server.auto_model),
    )
    service.batches = Batches(
        BatchStorage(settings.batches, models.base, settings.server.max_body_bytes),
        lambda: settings.batches.concurrency or settings.engine.max_num_seqs * max(1, len(client.views)),
        lambda: BatchDispatcher(create_batch_app(service), tenants),
    )
    _add_collectors(service, usage, by_tenant)
    client.on_adapter_event(partial(_on_adapter_event, service))
    return service


def _add_collectors(service: Service, usage: AdapterUsage, by_tenant: AdapterUsage) -> None:
    """Add the metrics that are read at every scrape."""
    metrics = service.observer.metrics
    names = AdapterNames(
        service.adapters_by_digest,
        usage.recent_requests,
        partial(adapter_life.median_blocks, service),
        service.resolver.loader.pinned,
        service.settings.metrics_max_adapters,
    )
    base = service.models.base
    metrics.add_collector(ReplicasCollector(service.client, metrics.labels, names))
    metrics.add_collector(ClusterCollector(service.client, base))
    metrics.add_collector(UsageCollector(usage, metrics.labels))
    metrics.add_collector(TenantCollector(by_tenant, metrics.labels))
    metrics.add_collector(ConnectionCollector(service.connections.closed, {"model_name": base}))
    metrics.add_collector(LengthCollector(service.lengths, metrics.labels))
    metrics.add_collector(ImageCollector(service.images.counts, metrics.labels))


def _on_adapter_event(service: Service, event: AdapterEvent) -> None:
    """Record a load or eviction of an adapter in the statistics, metrics and log."""
    service.observer.live.on_adapter_event(event, service.names_of)
    if isinstance(event, AdapterLoaded):
        if event.error is not None:
            log.warning("adapter could not be loaded", digest=event.digest, error=event.error)
        else:
            service.observer.metrics.adapter_load.observe(event.seconds)


def _base_task(chats: AdapterChats) -> AdapterTask:
    """Return how the base model makes vectors, by the files of its folder."""
    origin = chats.base.text_processor.origin
    try:
        return AdapterTask() if origin is None else read_task(origin[0])
    except AdapterError as error:
        log.warning("the pooling settings of the base model are ignored", reason=str(error))
        return AdapterTask()


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application that serves ``service``."""
    app = FastAPI(title="Lorikeet", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    table = add_routes(app, all_routes())
    install_handlers(app)
    settings = service.settings
    add_middleware(
        app,
        table,
        _max_body_bytes(service),
        api_keys=settings.api_keys,
        admin_keys=settings.admin_keys,
        tenant_header=settings.tenant_header,
        tenants=service.tenants,
        allowed_origins=settings.allowed_origins,
        host="" if settings.uds else settings.host,
    )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(LoadReports, load=partial(load_of, service.client))
    app.add_middleware(SecurityHeaders)
    if root_path := settings.root_path.rstrip("/"):
        app.add_middleware(RootPath, prefix=root_path)
    return app


def create_batch_app(service: Service) -> FastAPI:
    """Return the application that answers the lines of batches: the batchable routes without middleware."""
    app = FastAPI(openapi_url=None)
    app.state.service = service
    add_routes(app, (route for route in all_routes() if route.row.is_batchable))
    install_handlers(app)
    return app


def _max_body_bytes(service: Service) -> dict[BodySize, int]:
    """Return the limit of each body size, in bytes."""
    most = service.settings.max_body_bytes
    return {
        BodySize.SMALL: min(SMALL_BODY_BYTES, most),
        BodySize.PROMPT: most,
        BodySize.POOLED: min(MAX_POOLED_BYTES, most),
        BodySize.WEIGHTS: service.adapter_settings.max_bytes,
        BodySize.FILE: service.batches.storage.settings.max_file_bytes + FORM_BYTES,
    }
