"""``/v1/embeddings``: its fields, and clients of OpenAI's."""

import base64
import json

import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.support.api_server import TOKENIZER, Running, Start
from tests.support.fakes import HIDDEN, scripted_vector, write_adapter

pytestmark = pytest.mark.slow

PATH = "/v1/embeddings"


def unit(vector: list[float]) -> np.ndarray:
    return np.array(vector) / np.linalg.norm(vector)


async def test_openais_client_gets_vectors_of_texts_and_of_tokens(server: Running) -> None:
    ids = TOKENIZER.encode("hello world").ids
    async with AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as client:
        for given, count in (("hello world", 1), (["hello world", "parrot"], 2), (ids, 1), ([ids, ids[:1]], 2)):
            # The client asks for base64 by itself, and decodes it.
            reply = await client.embeddings.create(model="formal", input=given)
            assert [each.index for each in reply.data] == list(range(count))
            assert reply.model == "formal"
            last = server.engine.submitted[-count:]
            assert last[0].prompt_token_ids == ids
            assert reply.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in last)
            for found, request in zip(reply.data, last, strict=True):
                np.testing.assert_allclose(found.embedding, unit(scripted_vector(request)), atol=1e-6)
        cut = await client.embeddings.create(model="base", input="hello world", dimensions=5, encoding_format="float")
    (request,) = server.engine.submitted[-1:]
    np.testing.assert_allclose(cut.data[0].embedding, unit(scripted_vector(request)[:5]), atol=1e-6)
    assert (request.pooling is not None, request.adapter, request.sampling.max_tokens) == (True, None, 1)


async def test_base64_vectors_equal_float_vectors(server: Running) -> None:
    body = {"model": "formal", "input": "parrot", "normalize": False}
    plain, packed = [
        (await server.http.post(PATH, json=body | {"encoding_format": form})).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    ]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(plain, "<f4"))
    np.testing.assert_allclose(plain, scripted_vector(server.engine.submitted[-1]), rtol=1e-6)


async def test_a_long_list_is_run_in_slices_and_a_large_body_is_read(start: Start) -> None:
    async with start(max_queued=130) as server:
        texts = [f"{number} {'x' * 220}" for number in range(300)]
        body = {"model": "base", "input": texts}
        assert len(json.dumps(body)) > 2**16
        reply = await server.http.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["data"]) == len(server.engine.submitted) == 300
        assert server.service.gate.active == 0


async def test_pooling_of_the_body_overrides_the_adapters_and_the_defaults(start: Start) -> None:
    async with start() as server:
        for name, config, modules in (
            ("mean", {"pooling_mode": "mean", "include_prompt": True}, ["Transformer", "Pooling"]),
            ("old", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ["Pooling", "Normalize"]),
        ):
            folder = write_adapter(server.sources / name, seed=7)
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
            listed = [{"idx": 0, "type": f"sentence_transformers.models.{each}"} for each in modules]
            (folder / "modules.json").write_text(json.dumps(listed))
            server.service.catalog.register(name, str(folder))
        for model, asked, kind, is_unit in (
            ("base", {}, "lasttoken", True),
            ("mean", {}, "mean", False),
            ("old", {}, "lasttoken", True),
            ("mean", {"pooling": "last", "normalize": True}, "lasttoken", True),
            ("base", {"pooling": "weightedmean"}, "weightedmean", True),
        ):
            reply = await server.http.post(PATH, json={"model": model, "input": "parrot", **asked})
            request = server.engine.submitted[-1]
            assert request.pooling is not None
            assert request.pooling.kind == kind
            norm = np.linalg.norm(reply.json()["data"][0]["embedding"])
            assert bool(abs(norm - 1) < 1e-6) is is_unit
        # ``old`` and ``mean`` have the same weights, so one version: the pooling belongs to the name.
        assert len(server.service.catalog.versions()) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[10**6]]}, "input"),
        ({"input": ["x"] * 2049}, None),
        ({"input": "x" * 2000}, "input"),
        ({"input": "x", "dimensions": HIDDEN + 1}, "dimensions"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "x", "pooling": "cls"}, "pooling"),
        ({}, "input"),
    ],
)
async def test_invalid_embedding_requests_are_refused(
    server: Running, fields: dict[str, object], param: str | None
) -> None:
    reply = await server.http.post(PATH, json={"model": "base", **fields})
    assert reply.status_code == 400, reply.text
    assert param is None or (reply.json()["error"]["param"] or "").startswith(param), reply.text
    assert server.service.gate.active == 0


async def test_error_names_the_invalid_text_among_several(server: Running) -> None:
    long = "x" * 2000
    for path, body, place, param in (
        (PATH, {"input": ["a", ""]}, "input.1", "input"),
        (PATH, {"input": ["a"] * 200 + [""]}, "input.200", "input"),
        (PATH, {"input": ["a", long]}, "input.1", "input"),
        (PATH, {"input": ""}, "The prompt is empty", "input"),
        ("/rerank", {"query": "a", "documents": ["b", "c", ""]}, "documents.2", "documents"),
        ("/score", {"text_1": "", "text_2": ["b", "c"]}, "text_1:", "text_2"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt.1", "prompt"),
        ("/v1/completions", {"prompt": ["a", long]}, "prompt.1", "prompt"),
        ("/v1/completions", {"prompt": ["a", "x" * 70_000]}, "prompt.1", "prompt"),  # read in another process
    ):
        refused = await server.http.post(path, json={"model": "formal", **body})
        error = refused.json()["error"]
        assert refused.status_code == 400
        assert error["message"].startswith(place), error
        assert error["param"] == param


async def test_an_unknown_model_is_404_and_numbers_that_are_not_finite_are_an_error(server: Running) -> None:
    assert (await server.http.post(PATH, json={"model": "nobody", "input": "x"})).status_code == 404
    server.engine.vector = lambda request: [float("nan")] * HIDDEN
    reply = await server.http.post(PATH, json={"model": "base", "input": "x"})
    assert reply.status_code == 500
    assert "finite" in reply.json()["error"]["message"]
