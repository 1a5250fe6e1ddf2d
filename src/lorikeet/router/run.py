"""Runs ``lorikeet router``: builds a router from its options, serves, and drains at the end."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from types import FrameType

import msgspec
import uvicorn
import uvloop

from lorikeet.adapters.catalog import registry_url
from lorikeet.cluster.build import build_cluster_policies
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.service import LocalPlacementService
from lorikeet.cluster.setup import ClusterOptions
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.config import AdapterSettings, ConfigError
from lorikeet.core.ids import ReplicaId
from lorikeet.core.logs import configure_logs
from lorikeet.core.process_tuning import frozen_gc, return_large_blocks
from lorikeet.core.request import Slo
from lorikeet.core.splits import Split
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import ProfileError
from lorikeet.http.body_gate import BodyGate
from lorikeet.http.connections import ConnectionLimits, limited_http, raise_file_limit
from lorikeet.http.listening import ListeningServer, listen
from lorikeet.http.logs import log
from lorikeet.http.tls import Certificate, open_certificate
from lorikeet.http.urls import server_root
from lorikeet.presets import describe_preset, resolve_preset
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.app import create_app
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.discovery import Discovery
from lorikeet.router.health import HEALTH_S, TIMEOUT_S, HealthMonitor
from lorikeet.router.held_calls import HeldCalls
from lorikeet.router.metrics import RouterMetrics
from lorikeet.router.proxied_request import PromptLengths
from lorikeet.router.proxy import MAX_BODY_BYTES, RouterParts
from lorikeet.router.records import RouteRecords
from lorikeet.router.stats import RouterStats
from lorikeet.router.stored_answers import StoredAnswers
from lorikeet.tenants.tenants import Tenants
from lorikeet.terminal import fail, show_ready, shown_url

_KEEP_ALIVE_S = 75


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a router.

    Attributes:
        backends: at least one backend in the form of ``discovery.open_source``, all different.
        adapters: adapters that clients may name from the start.
        splits: names whose requests are split between those adapters, with their shares.
        preset: the system whose routing and placement are used.
        profile: name or file of a cost profile of one backend, for presets that decide by costs; empty for none.
        slo: SLO targets for such presets.
        seed: seed of the random choices.
        host, port: address to listen on; port 0 picks a free one.
        ssl_certfile, ssl_keyfile: PEM files of certificate and key for HTTPS; empty for HTTP.
        api_keys, admin_keys, allowed_origins: see ``lorikeet serve``.
        shared_prefix_cache: whether requests of different API keys reuse each other's KV at the backends.
        backend_key: key for the backends, which replaces the client's key; empty to pass on the client's key.
        passes_keys: whether requests keep the client's key although there is a ``backend_key``.
        tenants: whether clients may have keys of the registry's database, with scopes and limits.
        registry_url: SQLAlchemy URL of that database; empty for the file in the user's data folder.
        tenant_header: header in which backends get the client's tenant; empty for none.
        connections: limits on clients' connections.
        health_s: time between two health checks of a backend, in seconds.
        backend_timeout_s: seconds without any answer after which a backend gets no requests for a minute; 0 for never.
        drain_timeout_s: seconds for which running requests may continue after SIGTERM.
        log_level, log_json: level and form of the router's log.
    """

    backends: tuple[str, ...]
    adapters: tuple[RoutedAdapter, ...] = ()
    splits: dict[str, Split] = {}
    preset: str = "auto"
    profile: str = ""
    slo: Slo = Slo()
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    backend_key: str = ""
    passes_keys: bool = False
    tenants: bool = False
    registry_url: str = ""
    tenant_header: str = ""
    shared_prefix_cache: bool = False
    connections: ConnectionLimits = ConnectionLimits()
    health_s: float = HEALTH_S
    backend_timeout_s: float = TIMEOUT_S
    drain_timeout_s: float = 120.0
    log_level: str = "info"
    log_json: bool = False

    @property
    def why_files_are_shared(self) -> str:
        """Why backends could not tell the files of different clients apart; empty if they can."""
        is_told = self.passes_keys or not self.backend_key or bool(self.tenant_header)
        if is_told or len({*self.api_keys, *self.admin_keys}) < 2:
            return ""
        return (
            "The backends of this router could not tell its clients' files and batches apart: start it with "
            "--tenant-header, and the backends with the same, or with --pass-client-keys."
        )


def run_router(options: RouterOptions) -> None:
    """Route requests until SIGTERM or SIGINT. The first signal drains, and a second signal stops immediately.

    Raises:
        SystemExit: with code 1 if the router cannot start. The reason is printed or, with ``log_json``, logged.
    """
    try:
        configure_logs(options.log_level, as_json=options.log_json)
    except ValueError as error:
        configure_logs("info", as_json=options.log_json)
        fail(str(error), as_json=options.log_json)
    return_large_blocks()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(options))
    except (ConfigError, OSError, ProfileError, ValueError) as error:
        fail(str(error), as_json=options.log_json)
    except (asyncio.CancelledError, KeyboardInterrupt):
        log.info("stopped before it was ready")


async def _run(options: RouterOptions) -> None:
    certificate = open_certificate(options.ssl_certfile, options.ssl_keyfile)
    with listen(options.host, options.port) as listener:
        async with open_router(options) as parts, AsyncExitStack() as stack:
            if certificate is not None:
                await stack.enter_async_context(certificate.renewing())
            await _serve(options, listener, certificate, parts)


async def _serve(
    options: RouterOptions, listener: socket.socket, certificate: Certificate | None, parts: RouterParts
) -> None:
    preset, _ = resolve_preset(options.preset)
    app = create_app(
        parts,
        preset,
        options.api_keys,
        options.admin_keys,
        options.allowed_origins,
        options.host,
        passes_keys=options.passes_keys,
        why_shared=options.why_files_are_shared,
    )
    files = raise_file_limit() // 2  # A request needs two sockets.
    limits = options.connections._replace(max_connections=min(options.connections.max_connections, files))
    config = uvicorn.Config(
        app,
        http=limited_http(limits, parts.metrics.connections),  # type: ignore[arg-type]
        loop="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(options.drain_timeout_s),
    )

    tasks = BackgroundTasks()
    has_come = parts.backend_router.has_come

    def on_listening(url: str) -> None:
        if not has_come.is_set():
            log.warning(f"no backend yet; requests to {url} wait{parts.backend_router.backend_errors()}")
        tasks.run(show_once_ready(url))

    async def show_once_ready(url: str) -> None:
        await has_come.wait()
        names = [card["id"] for card in parts.catalog.base_cards()] or ["not known yet"]
        show_ready(
            url,
            names[0],
            list(parts.catalog.adapters),
            needs_key=bool(options.api_keys) or options.tenants,
            as_json=options.log_json,
        )

    with frozen_gc():
        try:
            await _Server(config, listener, certificate, on_listening, parts.stats).serve()
        finally:
            await tasks.close()


@asynccontextmanager
async def open_router(options: RouterOptions) -> AsyncIterator[RouterParts]:
    """Build the parts of a router, start health checks and placement, and end them afterwards.

    Raises:
        ConfigError: the preset needs a profile that was not given, or does not exist.
        ProfileError: the profile cannot be read.
        ValueError: the options lack a backend or name one twice, or an address is not valid.
    """
    if len({server_root(text.partition(",")[0]) for text in options.backends}) < len(options.backends):
        raise ValueError("a backend is given twice")
    discovery = Discovery(options.backends)
    specs = await discovery.first()
    replicas = [ReplicaId(f"backend-{number}") for number in range(len(specs))]
    _, preset = resolve_preset(options.preset)
    profile = load_profile(options.profile) if options.profile else None
    if preset.routing == "seconds" and profile is None:  # Backends do not report the times of their steps.
        preset = msgspec.structs.replace(preset, routing="kv-affinity")
    slo = options.slo
    cluster = ClusterOptions(
        seed=options.seed, ttft_s=slo.ttft_s or 0.0, tpot_s=slo.tpot_s or 0.0, e2e_s=slo.e2e_s or 0.0
    )
    routing, placement = build_cluster_policies(preset, profile, cluster)
    log.info(describe_preset(options.preset), routing=preset.routing, placement=preset.placement)
    if preset.comigration:
        log.info("running requests are not migrated: a router cannot move them between servers")
    make = partial(
        Backend,
        api_key=options.backend_key,
        passes_keys=options.passes_keys,
        withholds_keys=options.tenants,
        tenant_header=options.tenant_header.lower().encode(),
    )
    backends = [make(replica, spec) for replica, spec in zip(replicas, specs, strict=True)]
    backend_router = BackendRouter(backends, routing, prefetch=preset.pool_prefetch)
    placements = LocalPlacementService(Orchestrator(placement, replicas, time.monotonic()))
    catalog = ModelCatalog(backend_router, options.adapters, placements, preset.placement_period_s, options.splits)
    tenants = await asyncio.to_thread(_open_tenants, options)
    copies = BackgroundTasks()
    later = BackgroundTasks()
    held = HeldCalls()
    monitor = HealthMonitor(backend_router, catalog.adapters, held, options.health_s, options.backend_timeout_s)
    try:
        await monitor.start()
        await catalog.start()
        if not discovery.is_fixed:
            monitor.follow(discovery, make)
        yield RouterParts(
            backend_router,
            catalog,
            monitor,
            RouterMetrics(backend_router),
            RouterStats(backend_router, catalog),
            PromptLengths(),
            count(),
            BodyGate(MAX_BODY_BYTES),
            StoredAnswers(),
            copies,
            later,
            set(),
            held,
            RouteRecords(),
            tenants,
            isolates_keys=not options.shared_prefix_cache,
        )
    finally:
        await copies.close()
        await later.close()
        await monitor.close()
        await catalog.close()
        await backend_router.close()
        if tenants is not None:
            await asyncio.to_thread(tenants.close)


def _open_tenants(options: RouterOptions) -> Tenants | None:
    """Open the registry's database, if clients may have keys of it. Raises ConfigError."""
    return Tenants(registry_url(AdapterSettings(registry_url=options.registry_url)), "") if options.tenants else None


class _Server(ListeningServer):
    """Runs uvicorn, and reports when it listens and drains. After a signal the process ends with code 0."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        certificate: Certificate | None,
        on_listening: Callable[[str], None],
        stats: RouterStats,
    ) -> None:
        super().__init__(config, listener, certificate)
        self._on_listening = on_listening
        self._stats = stats

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, then call ``on_listening`` with the URL."""
        await super().startup(sockets)
        if self.started:
            host, port = self._listener.getsockname()[:2]
            self._on_listening(shown_url(host, port, self._certificate is not None))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests until the drain timeout."""
        began_s = time.monotonic()
        log.info(f"draining, {len(self.server_state.tasks)} requests running")
        await super().shutdown(sockets)
        log.info("drained", seconds=round(time.monotonic() - began_s, 1))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal and stop immediately after the next. Signals are not passed on."""
        self.force_exit = self.should_exit
        self.should_exit = self._stats.is_ending = True
