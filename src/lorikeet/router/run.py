"""``lorikeet router``: from options to a router that answers, and to its orderly end."""

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from types import FrameType

import msgspec
import uvicorn
import uvloop

from lorikeet.api.announce import Announcer, fail, shown_url
from lorikeet.api.logs import configure_logs, log
from lorikeet.cluster.build import ClusterOptions, build_cluster_policies
from lorikeet.cluster.controller.dispatcher import Dispatcher
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.service import LocalPlacementService
from lorikeet.config import ConfigError
from lorikeet.core.ids import ReplicaId
from lorikeet.core.process_tuning import frozen_gc
from lorikeet.core.request import Slo
from lorikeet.core.urls import server_root
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import ProfileError
from lorikeet.presets import resolve_preset
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.app import create_app
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.health import HEALTH_S, HealthMonitor
from lorikeet.router.metrics import RouterMetrics
from lorikeet.router.proxied_request import PromptLengths
from lorikeet.router.proxy import RouterParts

_KEEP_ALIVE_S = 75


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway is started with.

    Attributes:
        backends: addresses, at least one, all different.
        adapters: that clients may ask for from the start.
        preset: the system whose routing and placement count.
        profile: name or file of a profile of one backend, for presets that decide by costs; empty for none.
        slo: what such presets keep to.
        seed: of whatever is drawn.
        host, port: where to listen; port 0 picks a free one.
        api_keys, admin_keys, allowed_origins: as of ``lorikeet serve``.
        backend_key: sent to the backends instead of what clients send; empty for none.
        health_s: time between two calls to a backend.
        drain_timeout_s: how long requests may go on after SIGTERM.
        log_level, log_json: of the gateway's own log.
    """

    backends: tuple[str, ...]
    adapters: tuple[RoutedAdapter, ...] = ()
    preset: str = "auto"
    profile: str = ""
    slo: Slo = Slo()
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    backend_key: str = ""
    health_s: float = HEALTH_S
    drain_timeout_s: float = 120.0
    log_level: str = "info"
    log_json: bool = False


def route(options: RouterOptions) -> None:
    """Route until SIGTERM or SIGINT; the first one drains, a second one stops at once.

    Raises:
        SystemExit: with code 1 if it cannot start, the reason printed.
    """
    try:
        configure_logs(options.log_level, as_json=options.log_json)
        raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_route(options))
    except (ConfigError, OSError, ProfileError, ValueError) as error:
        fail(str(error))
    except (asyncio.CancelledError, KeyboardInterrupt):
        fail("stopped before it was ready")


def raise_file_limit() -> None:
    """Have as many open files as this process may: a request takes two sockets, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # more than the system really allows: then the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _route(options: RouterOptions) -> None:
    async with gateway(options) as parts:
        preset, _ = resolve_preset(options.preset)
        app = create_app(parts, preset, options.api_keys, options.admin_keys, options.allowed_origins)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            loop="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(options.drain_timeout_s),
        )

        def announce(url: str) -> None:
            names = [card["id"] for card in parts.catalog.base_cards()] or ["not known yet"]
            Announcer().ready(url, names[0], list(parts.catalog.adapters), asks_for_key=bool(options.api_keys))

        with frozen_gc():
            await _Server(config, announce).serve()


@asynccontextmanager
async def gateway(options: RouterOptions) -> AsyncIterator[RouterParts]:
    """Put the parts of a gateway together, and start what goes on beside requests.

    Raises:
        ConfigError: the preset needs a profile that was not given, or does not exist.
        ProfileError: the profile cannot be read.
        ValueError: no backend, one twice, or what is no address.
    """
    urls = [server_root(url) for url in options.backends]
    if len(set(urls)) < len(urls):
        raise ValueError("a backend is given twice")
    replicas = [ReplicaId(f"backend-{number}") for number in range(len(urls))]
    name, preset = resolve_preset(options.preset)
    profile = load_profile(options.profile) if options.profile else None
    slo = options.slo
    cluster = ClusterOptions(
        seed=options.seed, ttft_s=slo.ttft_s or 0.0, tpot_s=slo.tpot_s or 0.0, e2e_s=slo.e2e_s or 0.0
    )
    router, placement = build_cluster_policies(preset, replicas, profile, cluster)
    log.info("routing and placement", preset=name, routing=preset.routing, placement=preset.placement)
    if preset.comigration:
        log.info("requests stay where they are while their backend lives: only engines of one's own can hand them over")
    backends = [Backend(replica, url, options.backend_key) for replica, url in zip(replicas, urls, strict=True)]
    head = BackendRouter(backends, Dispatcher(router, prefetch=preset.pool_prefetch))
    placements = LocalPlacementService(Orchestrator(placement, time.monotonic()))
    catalog = ModelCatalog(head, options.adapters, placements, preset.placement_period_s)
    watch = HealthMonitor(head, catalog.adapters, options.health_s)
    try:
        await watch.start()
        await catalog.start()
        yield RouterParts(head, catalog, watch, RouterMetrics(head), PromptLengths(), count())
    finally:
        await watch.close()
        await catalog.close()
        await head.close()


class _Server(uvicorn.Server):
    """Uvicorn that says when it is ready, and whose process ends with code 0 after a signal."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(shown_url(host, port))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: finish what has been accepted, then stop at once. It is not passed on."""
        self.force_exit = self.should_exit
        self.should_exit = True
