"""Routes beside completions through a router: embeddings, messages, responses and the like."""

import json
from typing import Any

import httpx
import pytest

from lorikeet.router.proxied_request import CHAT, RESPONSES
from tests.router.conftest import Start
from tests.router.scripted import FORWARDED
from tests.support.waiting import until

MESSAGES = "/v1/messages"
OTHERS = [path for path in FORWARDED if not path.endswith("completions") and path != "/tokenize"]


async def lines(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    """Return the lines of a stream that are not empty."""
    async with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        return [line async for line in reply.aiter_lines() if line]


async def test_routes_that_name_a_model_are_forwarded_to_where_its_adapter_is(start: Start) -> None:
    async with start() as routing:
        for path in OTHERS:
            body = {"model": "formal", "input": ["one", "two"], "frobnicate": 1}
            reply = await routing.http.post(path, json=body)
            assert reply.status_code == 200, (path, reply.text)
            assert (reply.json()["path"], reply.json()["model"]) == (path, "formal")
            backend = next(each for each in routing.backends if each.name == reply.json()["from"])
            assert backend.bodies[-1] == body
            assert "formal" in backend.adapters
        tokens = {"model": "formal", "prompt": "abc", "add_special_tokens": False, "stream": True}
        assert (await routing.http.post("/tokenize", json=tokens)).json() == {"tokens": [97, 98, 99]}
        unknown = {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}
        assert (await routing.http.post("/rerank", json=unknown)).json()["error"]["code"] == 404
        refused = (await routing.http.post(MESSAGES, json=unknown)).json()
        assert (refused["type"], refused["error"]["type"]) == ("error", "not_found_error")
        none = await routing.http.post("/v1/batches", json={"input_file_id": "file-1"})
        assert (none.status_code, "No backend of this router keeps files" in none.text) == (501, True)
        assert (await routing.http.post("/v1/audio/speech", json={})).status_code == 404
        await routing.idle()


async def test_streams_of_named_events_are_passed_on_and_end_as_their_route_does(start: Start) -> None:
    async with start(count=1) as routing:
        body = {"model": "base", "input": "x"}
        for path, last in ((MESSAGES, "message_stop"), (RESPONSES, "response.completed")):
            found = await lines(routing.http, path, body)
            assert [line for line in found if line.startswith("event:")][-1] == f"event: {last}"
            assert len(found) == 6
        await routing.metric('lorikeet:route_requests_total{outcome="complete"} 2.0')
        (backend,) = routing.backends
        backend.dies_after = 2
        for path in (MESSAGES, RESPONSES):
            *_, name, data = await lines(routing.http, path, body)
            said = json.loads(data.removeprefix("data: "))
            assert (name, said["type"]) == ("event: error", "error")
            assert "cannot be resumed" in (said if path == RESPONSES else said["error"])["message"]


async def test_stored_response_is_requested_from_its_backend(start: Start) -> None:
    async with start(api_keys=("one", "two"), backend_key="its") as routing:
        http = routing.http
        http.headers["Authorization"] = "Bearer one"
        begun = {"model": "base", "input": "x"}
        first = [(await http.post(RESPONSES, json=begun)).json() for _ in range(2)]
        assert {each["from"] for each in first} == {"b0", "b1"}
        for answer in first:
            of_it = {**begun, "previous_response_id": answer["id"]}
            for _ in range(2):
                assert (await http.post(RESPONSES, json=of_it)).json()["from"] == answer["from"]
            path = f"{RESPONSES}/{answer['id']}"
            for method, asked in (
                ("GET", f"{path}?include=a"),
                ("POST", f"{path}/cancel"),
                ("GET", f"{path}/input_items"),
                ("DELETE", path),
            ):
                reply = await http.request(method, asked)
                assert reply.json() == {"from": answer["from"], "asked": f"{method} {asked}"}
                assert reply.headers["x-own"] == "1"
            http.headers["Authorization"] = "Bearer two"
            assert (await http.get(path)).status_code == 404
            foreign = await http.post(RESPONSES, json=of_it)
            assert (foreign.status_code, foreign.json()["error"]["param"]) == (404, "previous_response_id")
            http.headers["Authorization"] = "Bearer one"
        streamed = await lines(http, RESPONSES, begun)
        kept = json.loads(streamed[1].removeprefix("data: "))["response"]
        assert (await http.get(f"{RESPONSES}/{kept['id']}")).json()["from"] == kept["from"]
        dropped = (await http.post(RESPONSES, json={**begun, "store": False})).json()["id"]
        assert (await http.get(f"{RESPONSES}/{dropped}")).status_code == 404
        assert {key for backend in routing.backends for key in backend.keys} == {"Bearer its"}


async def test_error_of_a_stored_response_names_the_lost_backend(start: Start) -> None:
    async with start() as routing:
        begun = {"model": "base", "input": "x"}
        kept = (await routing.http.post(RESPONSES, json=begun)).json()
        keeper = next(each for each in routing.backends if each.name == kept["from"])
        known = next(each for each in routing.parts.backend_router.backends.values() if each.url == keeper.url)
        of_it = {**begun, "previous_response_id": kept["id"]}
        await keeper.kill()
        await routing.up(1)
        refused = await routing.http.post(RESPONSES, json=of_it)
        assert refused.status_code == 503
        assert f"{known.replica} keeps the previous response" in refused.json()["error"]["message"]
        assert (await routing.http.get(f"{RESPONSES}/{kept['id']}")).status_code == 502
        known.is_leaving = True  # as when it is not found any more
        await until(lambda: known.replica not in routing.parts.backend_router.backends, "the backend is forgotten")
        for gone in (
            await routing.http.post(RESPONSES, json=of_it),
            await routing.http.get(f"{RESPONSES}/{kept['id']}"),
        ):
            assert gone.status_code == 404
            assert "the backend that kept it is gone" in gone.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "status", "reason"),
    [
        ("pirate*0.7+formal*0.3", 400, "No backend of this router mixes adapters"),
        ("pirate*0.7+nobody", 404, "The model `pirate*0.7+nobody` does not exist."),
        ("base:nobody", 404, "The model `base:nobody` does not exist."),
        ("other:pirate", 404, "The model `other:pirate` does not exist."),
        ("pirate@05d07048", 404, "`pirate` is now the version"),
        ("nobody@05d07048", 404, "The model `nobody@05d07048` does not exist."),
        ("nobody", 404, "The model `nobody` does not exist."),
    ],
)
async def test_error_of_a_mixture_or_version_name_has_the_reason(
    start: Start, model: str, status: int, reason: str
) -> None:
    async with start() as routing:
        reply = await routing.http.post(CHAT, json={"model": model, "messages": []})
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, "model")
        assert reason in reply.json()["error"]["message"]
        assert not any(backend.bodies for backend in routing.backends)


async def test_backends_get_the_plain_name_of_an_adapter(start: Start) -> None:
    async with start() as routing:
        digest = (await routing.http.get("/v1/adapters/pirate")).json()["digest"]
        for model in ("base:pirate", f"pirate@{digest[:8]}", f"base:pirate@{digest}"):
            chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
            assert (await routing.http.post(CHAT, json=chat)).status_code == 200
        assert {asked["model"] for backend in routing.backends for asked in backend.bodies} == {"pirate"}


async def test_a_mixture_goes_to_a_lorikeet_that_has_loaded_all_of_its_adapters(start: Start) -> None:
    async with start(count=3) as routing:
        mixing = routing.backends[1]
        mixing.owner = "lorikeet"
        known = routing.parts.backend_router.backends.values()
        await until(lambda: any(each.is_lorikeet for each in known), "the router has read the models again")
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        for model in ("pirate*0.7+formal*0.3", "base:formal + pirate*-1"):
            reply = await routing.http.post(CHAT, json={"model": model, **chat})
            assert reply.status_code == 200, reply.text
        assert [body["model"] for body in mixing.bodies] == ["pirate*0.7+formal*0.3", "formal+pirate*-1"]
        assert {*mixing.adapters} == {"pirate", "formal"}
        mixing.adapters.clear()  # as after a restart
        reply = await routing.http.post(CHAT, json={"model": "pirate+formal", **chat})
        assert reply.status_code == 200
        mixing.bad_paths.add("/elsewhere/formal")
        mixing.adapters.clear()
        refused = await routing.http.post(CHAT, json={"model": "pirate+formal", **chat})
        assert refused.status_code == 400
        assert "no tensors in" in refused.json()["error"]["message"]
        assert not routing.backends[0].bodies + routing.backends[2].bodies


async def test_auto_goes_to_a_lorikeet_that_offers_it(start: Start) -> None:
    async with start(count=3) as routing:
        chat = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        refused = await routing.http.post(CHAT, json=chat)
        assert refused.status_code == 404
        assert "Lorikeets with --auto-model" in refused.json()["error"]["message"]
        choosing = routing.backends[1]
        choosing.owner = "lorikeet"
        choosing.adapters["auto"] = "auto"  # listed beside its adapters

        async def is_listed() -> bool:
            return "auto" in [card["id"] for card in (await routing.http.get("/v1/models")).json()["data"]]

        await until(is_listed, "the router has read the models again")
        for _ in range(3):
            assert (await routing.http.post(CHAT, json=chat)).status_code == 200
        assert [body["model"] for body in choosing.bodies] == ["auto"] * 3
        assert not routing.backends[0].bodies + routing.backends[2].bodies
        await choosing.kill()
        await routing.up(2)
        assert (await routing.http.post(CHAT, json=chat)).status_code == 503


async def test_backends_get_the_clients_keys_beside_the_routers_own(start: Start) -> None:
    async with start(count=1, backend_key="own", admin_keys=("admin",), passes_keys=True) as routing:
        (backend,) = routing.backends
        backend.key = "own"  # which the router needs to read its models
        chat = {"model": "pirate", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        headers = {"Authorization": "Bearer a-tenants"}
        assert (await routing.http.post(CHAT, json=chat, headers=headers)).status_code == 200
        assert backend.keys == ["Bearer a-tenants"]
        assert (await routing.http.post("/v1/adapters", json={}, headers=headers)).status_code == 401


@pytest.mark.parametrize("field", ["lora_path", "lora", "merged_adapters"])
async def test_an_adapter_is_named_by_the_model_alone(start: Start, field: str) -> None:
    async with start() as routing:
        body = {"model": "base", "messages": [{"role": "user", "content": "hello"}], field: ["json"]}
        reply = await routing.http.post(CHAT, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert not any(backend.bodies for backend in routing.backends)
