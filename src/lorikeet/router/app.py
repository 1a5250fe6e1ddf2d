"""Builds the router's ASGI application, with forwarded routes and routes that the router answers."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorikeet.http.anthropic_errors import AnthropicErrors
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.http.errors import ApiError, install_handlers, model_not_found
from lorikeet.http.middleware import add_middleware
from lorikeet.http.model_routes import MODEL_ROUTES
from lorikeet.http.routes import BodySize, Callers, Forwarding, Route, RouteTable
from lorikeet.http.web import page_file
from lorikeet.http.weight_pushes import WEIGHT_PUSHES
from lorikeet.observe.stats_stream import read_stats_query, stats_response
from lorikeet.router.adapter_routes import AdapterRoutes, json_response
from lorikeet.router.batch_routes import MAX_FILE_BYTES, BatchRoutes
from lorikeet.router.metrics import router_state
from lorikeet.router.proxy import MAX_BODY_BYTES, RouterParts, forward, forward_stored
from lorikeet.router.request_routes import RequestRoutes
from lorikeet.router.tenant_routes import TenantRoutes
from lorikeet.router.training_routes import TrainingRoutes

_READY = "/health/ready"


def create_app(
    parts: RouterParts,
    preset: str,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    host: str = "",
    *,
    passes_keys: bool = False,
    why_shared: str = "",
) -> Starlette:
    """Return the ASGI application.

    Args:
        parts: parts of the router.
        preset: name of the preset that routes and places, for ``/v1/cluster``.
        api_keys: keys for all routes except health and metrics; empty for open access.
        admin_keys: keys for the routes that change adapters; empty if the API keys open these routes, too.
        allowed_origins: origins of web pages that may use the router. The backends' own lists are ignored.
        host: the address to listen on.
        passes_keys: whether backends check the clients' keys, and so decide whom a pause is about.
        why_shared: see ``BatchRoutes``.
    """
    app = Starlette()
    routes = _Routes(parts, preset)
    adapters = AdapterRoutes(parts.catalog, parts.backend_router)
    training = TrainingRoutes(parts)
    batches = BatchRoutes(parts, why_shared)
    requests = RequestRoutes(parts)
    tenants = TenantRoutes(parts.tenants, parts.catalog)
    pausers = Callers.KEYS if passes_keys else Callers.ADMINS

    rows: list[Route] = []

    def serve(row: Route, *answers: Callable[[Request], Awaitable[Response]]) -> None:
        rows.append(row)
        for path, answer in zip(row.paths, answers, strict=True):
            app.add_route(path, answer, methods=list(row.methods))

    for row in MODEL_ROUTES:
        if row.forwarding is Forwarding.BY_RESPONSE:
            serve(row, partial(_stored, parts))
        else:
            serve(row, *(partial(_proxied, path, parts) for path in row.paths))
    serve(Route("GET /v1/models", Callers.KEYS), routes.models)
    serve(Route("GET /v1/models/{name:path}", Callers.KEYS), routes.model)
    serve(Route("GET /v1/adapters", Callers.KEYS), adapters.list)
    serve(Route("POST /v1/adapters", Callers.ADMINS), adapters.add)
    serve(Route("GET /v1/adapters/{name:path}", Callers.KEYS), adapters.one)
    serve(Route("PATCH /v1/adapters/{name:path}", Callers.ADMINS), adapters.change)
    serve(Route("DELETE /v1/adapters/{name:path}", Callers.ADMINS), adapters.delete)
    serve(Route("POST /v1/load_lora_adapter", Callers.ADMINS), adapters.load)
    serve(Route("POST /v1/unload_lora_adapter", Callers.ADMINS), adapters.unload)
    serve(Route("POST /pause", pausers), training.pause)
    serve(Route("POST /resume", pausers), training.resume)
    serve(Route("GET /is_paused", Callers.OPERATOR), training.is_paused)
    serve(Route("POST /sleep", Callers.ADMINS), training.sleep)
    serve(Route("POST /wake_up", Callers.ADMINS), training.wake_up)
    serve(Route("GET /is_sleeping", Callers.ADMINS), training.is_sleeping)
    serve(Route("POST /reset_prefix_cache", Callers.ADMINS), training.reset_prefix_cache)
    serve(Route("POST /abort_requests", Callers.KEYS), training.abort_requests)
    serve(Route("POST /finish_session", Callers.KEYS), training.finish_session)
    serve(Route("GET /get_world_size", Callers.OPERATOR), training.world_size)
    serve(Route("GET /server_info /get_server_info", Callers.OPERATOR), training.server_info, training.server_info)
    serve(Route("POST /v1/files", Callers.KEYS, BodySize.FILE), batches.upload)
    serve(Route("GET /v1/files", Callers.KEYS), batches.list_files)
    serve(Route("GET/DELETE /v1/files/{file_id}", Callers.KEYS), batches.of_file)
    serve(Route("GET /v1/files/{file_id}/content", Callers.KEYS), batches.content)
    serve(Route("POST /v1/batches", Callers.KEYS), batches.create_batch)
    serve(Route("GET /v1/batches", Callers.KEYS), batches.list_batches)
    serve(Route("GET /v1/batches/{batch_id}", Callers.KEYS), batches.of_batch)
    serve(Route("POST /v1/batches/{batch_id}/cancel", Callers.KEYS), batches.of_batch)
    serve(Route("GET /v1/requests", Callers.KEYS), requests.latest)
    serve(Route("GET /v1/requests/{request_id}", Callers.KEYS), requests.one)
    serve(Route("POST /v1/keys", Callers.ADMINS), tenants.create_key)
    serve(Route("GET /v1/keys", Callers.ADMINS), tenants.list_keys)
    serve(Route("GET /v1/keys/{key_id}", Callers.ADMINS), tenants.get_key)
    serve(Route("PATCH /v1/keys/{key_id}", Callers.ADMINS), tenants.change_key)
    serve(Route("DELETE /v1/keys/{key_id}", Callers.ADMINS), tenants.revoke_key)
    serve(Route("POST /v1/keys/{key_id}/rotate", Callers.ADMINS), tenants.rotate_key)
    serve(Route("GET /v1/usage", Callers.KEYS), tenants.usage)
    serve(Route("GET /v1/audit", Callers.ADMINS), tenants.audit)
    for path in WEIGHT_PUSHES:
        serve(Route(f"POST {path}", Callers.ADMINS, is_supported=False), training.refuse_push)
    serve(Route("GET /v1/cluster", Callers.ADMINS), routes.cluster)
    serve(Route("GET /v1/stats", Callers.ADMINS), routes.stats)
    serve(Route("GET /v1/stats/stream", Callers.ADMINS), routes.stats_stream)
    serve(Route("GET /ui /ui/{name}", Callers.ANYONE), routes.page, routes.page)
    serve(Route("GET /health/live", Callers.ANYONE), routes.live)
    serve(Route(f"GET {_READY} /health", Callers.ANYONE), routes.health, routes.health)
    serve(Route("GET /metrics", Callers.ANYONE_WITHOUT_TENANTS), routes.metrics)
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        app.add_route("/{path:path}", routes.not_served, methods=[method])
    install_handlers(app)
    add_middleware(
        app,
        RouteTable(rows),
        dict.fromkeys(BodySize, MAX_BODY_BYTES) | {BodySize.SMALL: SMALL_BODY_BYTES, BodySize.FILE: MAX_FILE_BYTES},
        api_keys=api_keys,
        admin_keys=admin_keys,
        allowed_origins=allowed_origins,
        host=host,
        tenants=parts.tenants,
    )
    app.add_middleware(AnthropicErrors)
    return app


async def _proxied(path: str, parts: RouterParts, http: Request) -> Response:
    return await forward(http, path, parts)


async def _stored(parts: RouterParts, http: Request) -> Response:
    return await forward_stored(http, parts)


class _Routes:
    """Answers the routes that the router does not forward."""

    def __init__(self, parts: RouterParts, preset: str) -> None:
        self._parts = parts
        self._preset = preset

    async def models(self, http: Request) -> Response:
        """Return all models, the base first."""
        return json_response({"object": "list", "data": self._parts.catalog.cards(http.state.access)})

    async def model(self, http: Request) -> Response:
        """Return one model."""
        name = http.path_params["name"]
        card = next((card for card in self._parts.catalog.cards(http.state.access) if card["id"] == name), None)
        if card is None:
            raise model_not_found(name)
        return json_response(card)

    async def cluster(self, http: Request) -> Response:
        """Return the backends as replicas, in the form of a server's own ``/v1/cluster``."""
        backend_router = self._parts.backend_router
        names = {digest: adapter.name for digest, adapter in backend_router.versions.items()}
        return json_response({**router_state(backend_router).shown(names), "preset": self._preset})

    async def stats(self, http: Request) -> Response:
        """Return the router's current statistics, in the form of a server's own ``/v1/stats``."""
        return await stats_response(self._parts.stats.snapshot, read_stats_query(http.query_params))

    async def stats_stream(self, http: Request) -> Response:
        """Stream the router's statistics as server-sent events."""
        query = read_stats_query(http.query_params)
        return self._parts.stats.streams.response(self._parts.stats.snapshot, query)

    async def page(self, http: Request) -> Response:
        """Return the console, or one of its files."""
        return page_file(http, http.path_params.get("name", "ui.html"))

    async def live(self, http: Request) -> Response:
        """Answer 200 while the process runs."""
        return Response()

    async def health(self, http: Request) -> Response:
        """Answer 200 if a backend takes requests, otherwise 503.

        A router whose backends sleep is healthy, but not ready, as a server of its own is.
        """
        is_open = [backend for backend in self._parts.backend_router.backends.values() if backend.is_open]
        is_awake = not self._parts.held.sleeps and not all(backend.is_asleep for backend in is_open)
        status = "no backend" if not is_open else "ready" if is_awake else "asleep"
        is_well = status == "ready" or (status == "asleep" and http.url.path != _READY)
        return JSONResponse({"status": status, "backends": len(is_open)}, 200 if is_well else 503)

    async def metrics(self, http: Request) -> Response:
        """Return the metrics in the format of Prometheus or OpenMetrics."""
        return self._parts.metrics.page(http.headers.get("accept", ""))

    async def not_served(self, http: Request) -> Response:
        """Answer 404 with the list of routes."""
        raise ApiError(
            404,
            f"{http.method} {http.url.path} is not forwarded. lorikeet router forwards requests that name a model "
            "(completions, chats, messages, responses, embeddings, scores, tokens), files and batches, and has "
            "/v1/models, /v1/adapters, "
            "/v1/load_lora_adapter, /v1/unload_lora_adapter, /pause and others of training loops, /v1/cluster, "
            "/v1/stats, /ui, /health and /metrics of its own; docs/router.md lists all. Ask a backend at its own "
            "address for others; /v1/cluster lists backends.",
        )
