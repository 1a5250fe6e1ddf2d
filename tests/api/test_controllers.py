"""The calls of controllers in Kubernetes, twice in a row: each ends as its sender expects.

The bodies are those that lora-syncer, AIBrix and Dynamo send: ``docs/deployment.md`` names their sources.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lorikeet.http.errors import ApiError
from lorikeet.serving.served_models import ServedModels
from tests.support.api_server import BASE_DIGEST, Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.fakes import write_adapter
from tests.support.hub import hub

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture
async def server(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """A server that may read the repositories of one organisation, of which there is one."""
    with hub({"org/legal": write_adapter(tmp_path / "legal", seed=7), "other/x": write_adapter(tmp_path / "x")}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        async with start(adapters={"allowed_sources": ("hf://org/",)}) as running:
            yield running


async def models(server: Running) -> set[str]:
    return {card["id"] for card in (await server.http.get("/v1/models")).json()["data"]}


async def test_lora_syncer_reconciles(server: Running) -> None:
    """A round: health, the list of models, then what should exist and what should not."""
    wanted = {"lora_name": "legal", "lora_path": "org/legal", "base_model_name": "base"}
    for _ in range(2):
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.post("/v1/load_lora_adapter", json=wanted)).status_code == 200
        assert "legal" in await models(server)
    assert (await server.http.post(CHAT, json=body(model="legal"))).status_code == 200
    for status in (200, 404):
        gone = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})
        assert gone.status_code == status
        assert "legal" not in await models(server)


async def test_aibrix_loads_from_the_hub_and_from_its_runtime(server: Running) -> None:
    """The controller sends ``huggingface://org/repo`` as ``org/repo``; the runtime sends the folder it has fetched."""
    for path in ("org/legal", str(server.sources / "pirate")):
        for _ in range(2):
            assert (await server.http.get("/v1/models", headers={"Authorization": "Bearer x"})).status_code == 200
            loaded = await server.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
            assert loaded.status_code == 200, loaded.text
        assert (await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})).status_code == 200


async def test_dynamo_takes_a_second_load_as_success(server: Running) -> None:
    content = {"lora_name": "legal", "source": {"uri": "hf://org/legal"}}
    replies = [(await server.http.post("/v1/loras", json=content)).json() for _ in range(2)]
    assert replies[0] == replies[1]
    assert replies[0]["status"] == "success"
    assert (await server.http.get("/v1/loras")).json()["count"] == 1
    assert (await server.http.delete("/v1/loras/legal")).status_code == 200


@pytest.mark.parametrize(
    ("route", "more"),
    [
        ("/load_lora_adapter", {"lora_name": "legal", "lora_path": "pirate"}),
        ("/v1/loras", {"lora_name": "legal", "source": {"uri": "pirate"}}),
        ("/adapters", {"name": "legal", "src": "pirate"}),
    ],
)
async def test_route_without_a_field_to_replace_names_no_such_field(
    server: Running, route: str, more: dict[str, Any]
) -> None:
    await server.http.post("/v1/load_lora_adapter", json={"lora_name": "legal", "lora_path": "org/legal"})
    reply = await server.http.post(route, json=more)
    assert reply.status_code == 400
    assert "Unload it first, or replace it by POST /v1/adapters" in reply.text


async def test_folder_takes_precedence_over_a_repository_of_the_same_name(server: Running) -> None:
    write_adapter(server.sources / "org" / "legal", seed=8)
    content = {"lora_name": "legal", "lora_path": "org/legal"}
    assert (await server.http.post("/v1/load_lora_adapter", json=content)).status_code == 200
    card = (await server.http.get("/v1/adapters/legal")).json()
    assert card["source"] == "legal"
    content = {"name": "hub", "source": "hf://org/legal"}
    other = (await server.http.post("/v1/adapters", json=content)).json()
    assert (other["source"], other["digest"] == card["digest"]) == ("hf://org/legal", False)


@pytest.mark.parametrize("path", ["other/x", "org/missing", "org/legal@refs/pr/1", "org/../other/x"])
async def test_repository_without_read_access_is_refused(server: Running, path: str) -> None:
    reply = await server.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
    assert reply.status_code in (400, 404)
    assert "a" not in await models(server)
    if path == "other/x":
        assert "--allow-source hf://org/" in reply.text


async def test_kserve_names_an_adapter_by_the_prefix_of_its_namespace(server: Running) -> None:
    """A base that is served under ``publishers/NAMESPACE/models/NAME`` gives its adapters the same prefix."""
    models = ServedModels(
        ("llama", "publishers/team/models/llama"), (), "llama", server.service.catalog, 256, BASE_DIGEST
    )
    await server.http.post("/v1/load_lora_adapter", json={"lora_name": "legal", "lora_path": "org/legal"})
    assert models.resolve("publishers/team/models/legal").name == "legal"
    assert models.resolve("publishers/team/models/llama").adapter is None
    assert models.missing("publishers/team/models/unknown") == ["unknown"]
    with pytest.raises(ApiError):
        models.resolve("publishers/others/models/legal")
