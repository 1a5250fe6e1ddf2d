"""Every route has a row, rows are what they claim to be, and every route answers."""

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, routing

from lorikeet.api import route_table
from lorikeet.api.route_table import RouteError, add_routes, all_routes
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.http.model_routes import BATCHABLE_PATHS, MODEL_ROUTES
from lorikeet.http.routes import BodySize, Callers, Route, Routes
from tests.support.api_server import Running

ROWS = [route.row for route in all_routes()]
CALLS = [(row.is_supported, method, path) for row in ROWS for path in row.paths for method in row.methods]
ENDLESS = {"/v1/stats/stream"}
ENDS = {"/pause": "/resume", "/sleep": "/wake_up"}
"""Routes after which requests wait, with those that end the wait."""


def shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


async def test_description_lists_every_supported_route_of_the_table(server: Running) -> None:
    described = (await server.http.get("/openapi.json")).json()["paths"]
    known = {(method.upper(), path) for path, methods in described.items() for method in methods}
    pages = {path for _, _, path in CALLS if path.startswith(("/docs", "/ui", "/openapi"))}
    listed = {(method, path.replace(":path}", "}")) for ok, method, path in CALLS if ok and path not in pages}
    assert listed == known


@pytest.mark.slow
async def test_every_route_answers(server: Running) -> None:
    for is_supported, method, path in sorted(set(CALLS)):
        named = shape(path).replace("{}", "nobody")
        body = {} if method == "POST" else None
        async with server.http.stream(method, named, json=body) as reply:
            if path not in ENDLESS:
                await reply.aread()
        if path in ENDS:
            await server.http.post(ENDS[path])
        if not is_supported:
            assert reply.status_code == 501, path
            assert reply.headers["x-should-retry"] == "false"
            continue
        assert reply.status_code in (200, 201, 204, 400, 404, 409, 415), (method, path, reply.text)
        if reply.status_code == 404:  # the thing that it names is not there, but the route is
            assert "Not Found" not in reply.json()["error"]["message"], (method, path)


async def test_unknown_route_is_a_404(server: Running) -> None:
    reply = await server.http.get("/v1/nothing")
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "GET /v1/nothing: Not Found")


def test_every_row_that_the_router_reads_has_a_handler() -> None:
    assert set(MODEL_ROUTES) <= set(ROWS)


def test_lines_of_batches_may_name_the_routes_of_openai() -> None:
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"}
    assert set(BATCHABLE_PATHS) == paths


def test_routes_with_prompts_come_first() -> None:
    sizes = [row.body for row in ROWS]
    assert BodySize.PROMPT not in sizes[sizes.count(BodySize.PROMPT) :]


def test_routes_without_a_key() -> None:
    pages = {"/docs", "/docs/{name}", "/ui", "/ui/{name}"}
    state = {"/health", "/health/live", "/health/ready", "/ping", "/version"}
    assert {path for row in ROWS if row.callers is Callers.ANYONE for path in row.paths} == pages | state
    closed = {path for row in ROWS if row.callers is Callers.ANYONE_WITHOUT_TENANTS for path in row.paths}
    assert closed == {"/load", "/metrics"}


@pytest.mark.parametrize("path", sorted({path for row in ROWS if "POST" in row.methods for path in row.paths}))
async def test_body_above_the_size_of_its_route_is_refused(server: Running, path: str) -> None:
    """The row of the path decides, also if the path has parts that vary."""
    (row,) = {row for row in ROWS if path in row.paths and "POST" in row.methods}
    body = b" " * (SMALL_BODY_BYTES + 1)
    reply = await server.http.post(shape(path).replace("{}", "x"), content=body)
    assert (reply.status_code == 413) == (row.body is BodySize.SMALL), reply.text


def test_route_without_a_row_is_an_error_that_names_its_handler() -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/v1/forgotten")
    async def forgotten() -> None: ...

    with pytest.raises(RouteError, match=r"test_route_table\..*forgotten lacks a row"):
        add_routes(app, all_routes())


def test_row_that_claims_to_be_batchable_beside_the_shared_ones_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = Routes()

    @routes.add(Route("POST /v1/claims", Callers.KEYS, is_batchable=True))
    async def claims() -> None: ...

    monkeypatch.setattr("lorikeet.api.routes.cluster.ROUTES", routes)
    with pytest.raises(RouteError, match=r"claims: a batchable or forwarded row belongs into http/model_routes\.py"):
        all_routes()


def test_module_of_routes_without_routes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.api.routes.cluster.ROUTES", None)
    with pytest.raises(RouteError, match=r"lorikeet\.api\.routes\.cluster lacks ROUTES"):
        all_routes()


def test_every_module_of_routes_is_served() -> None:
    folder = Path(route_table.__file__).with_name("routes")
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {route.handler.__module__.rpartition(".")[2] for route in all_routes()} == files


async def test_chat_calls_its_handler_without_a_search_for_arguments(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    solve = routing.solve_dependencies

    async def counted(**given: Any) -> Any:
        searches.append(given["dependant"].path)
        return await solve(**given)

    monkeypatch.setattr(routing, "solve_dependencies", counted)
    body = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    reply = await server.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, searches) == (200, [])
    wrong = await server.http.post("/v1/chat/completions", json=body | {"max_tokens": "two"})
    assert wrong.status_code == 400
    assert "max_tokens" in wrong.text
    broken = await server.http.post("/v1/chat/completions", content="{", headers={"content-type": "application/json"})
    assert (broken.status_code, "JSON" in broken.text) == (400, True)
    other = await server.http.post("/v1/chat/completions", content="{}", headers={"content-type": "text/plain"})
    assert other.status_code == 415
