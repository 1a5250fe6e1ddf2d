"""Weighted mixtures of adapters: their spellings, what they are made of, and how many are kept."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorikeet.chat.mixtures import MAX_MIXTURES, PREFIX, spelled
from lorikeet.config import AdapterDirMode
from tests.support.api_server import Running, Start
from tests.support.fakes import write_adapter, write_classifier, write_dora

pytestmark = pytest.mark.slow

PATH = "/v1/completions"


async def ask(server: Running, path: str = PATH, **body: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    reply = await server.http.post(path, json={**prompt, "max_tokens": 2, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def register(server: Running, *names: str) -> None:
    for name in names:
        server.service.catalog.register(name, str(server.sources / name))


def test_texts_are_mixtures_or_plain_names() -> None:
    assert spelled("a*0.7+b*0.3") == [("a", 0.7), ("b", 0.3)]
    assert spelled(" org/a@12ab * -1 + b ") == [("org/a@12ab", -1.0), ("b", 1.0)]
    assert spelled("a*.5+b*1e-3") == [("a", 0.5), ("b", 0.001)]
    for text in ("a", "", "a-b", "a*b", "*2", "a**2", "a+", "a*nan", "a*2*3"):
        assert spelled(text) is None, text


async def test_every_spelling_names_the_same_version(server: Running) -> None:
    register(server, "pirate")
    mixture = "formal*0.75+pirate*0.5"
    lora = [{"id": "formal", "scale": 0.75}, {"id": 1, "scale": 0.5}]
    merged = {"ids": ["formal", "pirate"], "weights": [0.75, 0.5], "merge_strategy": "linear"}
    assert (await ask(server, model=mixture))["model"] == mixture
    assert (await ask(server, "/v1/chat/completions", model=f"base:{mixture}"))["model"] == f"base:{mixture}"
    await ask(server, model="base", lora=lora)
    await ask(server, lora=[*lora, {"id": "formal", "scale": 0}])
    await ask(server, merged_adapters=merged)
    await ask(server, adapter_parameters=merged)
    await ask(server, model=mixture, prompt="x" * 70_000, truncate_prompt_tokens=5)  # read in another process
    reply = await server.http.post("/generate", json={"inputs": "hi", "parameters": {"merged_adapters": merged}})
    assert reply.status_code == 200, reply.text
    assert (await server.http.post("/v1/embeddings", json={"model": mixture, "input": "hi"})).status_code == 200
    adapters = [request.adapter for request in server.engine.submitted]
    assert len(adapters) == 9
    assert len({each and each.digest for each in adapters}) == 1
    assert adapters[0] is not None
    assert adapters[0].ranks == {"q": (8, 8)}
    await ask(server, lora=[{"id": "formal", "scale": 0}])
    assert server.engine.submitted[-1].adapter is None
    listed = (await server.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["base", "formal", "pirate"]


async def test_mixture_loads_its_adapters_on_first_use(start: Start) -> None:
    async with start(adapters={"adapter_dir_mode": AdapterDirMode.SERVE}) as server:
        mixture = "formal*0.5+json*0.5"
        assert server.service.models.missing(mixture) == ["formal", "json"]
        await ask(server, model=mixture)
        assert {"formal", "json"} <= set(server.service.catalog.names())
        assert server.service.models.missing(mixture) == []


async def test_error_of_a_mixture_uses_the_clients_spelling(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(adapters={"max_rank": 6}) as server:
        register(server, "formal", "pirate")
        for mixture in ("formal*1+pirate*2", "base:formal+pirate*2"):
            refused = await server.http.post(PATH, json={"model": mixture, "prompt": "hi", "max_tokens": 2})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "model")
            assert f"mixture {mixture!r}" in error["message"]
            assert PREFIX not in error["message"]


async def test_an_index_is_the_place_in_the_list_of_adapters(start: Start) -> None:
    async with start(adapters={"adapter_dir_mode": AdapterDirMode.SERVE}) as server:
        listed = [each["name"] for each in (await server.http.get("/v1/adapters")).json()["data"]]
        assert listed == sorted(listed)
        assert len(listed) > 1
        for index in (*reversed(range(len(listed))), 0):  # whatever was loaded first, and beside mixtures
            reply = await ask(server, model="base", lora=[{"id": index, "scale": 0.5}])
            assert reply["model"] == f"base:{listed[index]}*0.5"
            reply = await ask(server, "/v1/chat/completions", lora=[{"id": index, "scale": 0.5}])
            assert reply["model"] == f"{listed[index]}*0.5"
            adapter = server.engine.submitted[-1].adapter
            assert adapter is not None
            assert adapter.name == f"{listed[index]}*0.5"
        for index in (len(listed), 2**31 - 1):
            refused = await server.http.post(PATH, json={"prompt": "hi", "lora": [{"id": index}]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "lora")
            assert f"lists {len(listed)}" in refused.json()["error"]["message"]


async def test_the_delta_of_a_mixture_is_the_weighted_sum(server: Running) -> None:
    folder = write_adapter(server.sources / "wide", rank=3, seed=5)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"lora_alpha": 12, "use_rslora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    register(server, "wide")
    await ask(server, model="formal*0.5+wide*-2")
    ref = server.engine.submitted[-1].adapter
    assert ref is not None

    def delta(path: str, scaling: float) -> np.ndarray:
        tensors = load_file(f"{path}/adapter_model.safetensors")
        key = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
        return scaling * tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]

    parts = delta(str(server.sources / "formal"), 0.5) + delta(str(folder), -2 * 12 / 3**0.5)
    np.testing.assert_allclose(delta(ref.folder, 1.0), parts, rtol=1e-5, atol=1e-5)
    assert ref.max_rank == 4 + 3


async def test_the_mixtures_used_last_are_kept_and_a_new_version_of_a_part_makes_a_new_one(server: Running) -> None:
    weights = [2 + number / 64 for number in range(MAX_MIXTURES + 3)]  # formal*1.0 is formal
    for weight in weights:
        await ask(server, model=f"formal*{weight}")
    made = {request.adapter.digest for request in server.engine.submitted if request.adapter is not None}
    assert len(made) == len(weights)
    for _ in range(200):
        kept = [name for name in server.service.catalog.names() if name.startswith(PREFIX)]
        if len(kept) == MAX_MIXTURES and len(server.engine.dropped) == 3:
            break
        await server.http.get("/health")
    assert len(kept) == MAX_MIXTURES
    first = [request.adapter.digest for request in server.engine.submitted[:3] if request.adapter is not None]
    assert sorted(server.engine.dropped) == sorted(first)
    before = server.engine.submitted[-1].adapter
    reply = await server.http.delete(f"/v1/adapters/{kept[-1]}")  # a mixture that was removed is made again
    assert reply.status_code == 200, reply.text
    await ask(server, model=f"formal*{weights[-1]}")
    assert server.engine.submitted[-1].adapter == before
    write_adapter(server.sources / "formal", seed=77)
    server.service.catalog.register("formal", str(server.sources / "formal"), replace=True)
    await ask(server, model=f"formal*{weights[-1]}")
    after = server.engine.submitted[-1].adapter
    assert before is not None
    assert after is not None
    assert after.digest not in made


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "formal*0.5+nobody*0.5"}, 404, "nobody"),
        ({"model": "formal*0.5+base"}, 400, "must be an adapter that can be mixed"),
        ({"model": "formal*1e9"}, 400, "beyond"),
        ({"model": "+".join(["formal"] * 17)}, 400, "at most 16"),
        ({"model": "formal*0.5", "lora_path": "formal"}, 400, "lora_path"),
        ({"model": "classes*0.5+formal"}, 400, "score head"),
        ({"model": "dora*0.5+formal"}, 400, "magnitude beside A and B"),
        ({"merged_adapters": {"ids": ["formal"], "weights": [1, 2]}}, 400, "2 weights"),
        ({"merged_adapters": {"ids": ["formal"], "merge_strategy": "ties"}}, 400, "merge_strategy"),
        ({"lora": [{"id": "formal"}], "merged_adapters": {"ids": ["formal"]}}, 400, "exclude each other"),
        ({"model": "formal", "lora": [{"id": "formal", "scale": 0.5}]}, 400, "must be the base or missing"),
    ],
)
async def test_invalid_mixture_is_refused(server: Running, body: Any, status: int, said: str) -> None:
    write_classifier(server.sources / "classes", 2)
    write_dora(server.sources / "dora")
    register(server, "classes", "dora")
    reply = await server.http.post(PATH, json={"prompt": "hi", **body})
    assert reply.status_code == status, reply.text
    assert said in reply.json()["error"]["message"]
    assert not server.engine.submitted
