"""The list of routes agrees with the application, and each of them answers."""

import re

import pytest

from lorikeet.api.info import UNSUPPORTED
from lorikeet.api.route_list import ROUTES
from tests.support.api_server import Running

CALLS = [(each.state, *call) for each in ROUTES for call in each.calls()]
NOT_DESCRIBED = {"/docs", "/ui", "/openapi.json"}
ENDLESS = {"/v1/stats/stream"}


def shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


@pytest.mark.slow
async def test_every_route_of_the_application_is_listed_and_no_other(server: Running) -> None:
    described = (await server.http.get("/openapi.json")).json()["paths"]
    known = {(method.upper(), shape(path)) for path, methods in described.items() for method in methods}
    listed = {(method, shape(path)) for state, method, path in CALLS if state == "now" and path not in NOT_DESCRIBED}
    assert listed == known
    assert {path for state, _, path in CALLS if state == "501"} == set(UNSUPPORTED)


@pytest.mark.slow
async def test_every_listed_route_answers(server: Running) -> None:
    for state, method, path in sorted(set(CALLS)):
        named = shape(path).replace("{}", "nobody")
        body = {} if method == "POST" else None
        async with server.http.stream(method, named, json=body) as reply:
            if path not in ENDLESS:
                await reply.aread()
        if path == "/pause":
            await server.http.post("/resume")
        if state == "501":
            assert reply.status_code == 501, path
            assert reply.headers["x-should-retry"] == "false"
            continue
        assert reply.status_code in (200, 201, 204, 400, 404, 409, 415), (method, path, reply.text)
        if reply.status_code == 404:  # the thing that it names is not there, but the route is
            assert "Not Found" not in reply.json()["error"]["message"], (method, path)


async def test_a_route_that_is_not_there_says_so(server: Running) -> None:
    reply = await server.http.get("/v1/nothing")
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "GET /v1/nothing: Not Found")
