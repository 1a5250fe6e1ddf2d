"""Labels and scores over HTTP: vLLM's, Jina's, Cohere's and OpenAI's spellings."""

from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.support.api_server import TOKENIZER, Running, Start
from tests.support.fakes import scripted_vector, write_classifier

LABELS = {"0": "negative", "1": "neutral", "2": "positive"}


def register(server: Running) -> None:
    """Adapters with one to three labels."""
    for seed, (name, labels, given) in enumerate(
        (
            ("sentiment", 3, {"names": LABELS}),
            ("plain", 2, {}),
            ("topics", 2, {"names": {"0": "hate", "1": "violence"}, "problem": "multi_label_classification"}),
            ("relevance", 1, {}),
        )
    ):
        write_classifier(server.sources / name, labels, seed=seed, **given)
        server.service.catalog.register(name, str(server.sources / name))


def softmax(logits: Any) -> np.ndarray:
    grown = np.exp(np.array(logits) - np.max(logits))
    return grown / grown.sum()


def sigmoid(logits: Any) -> np.ndarray:
    return 1 / (1 + np.exp(-np.array(logits)))


async def post(server: Running, path: str, **body: Any) -> Any:
    reply = await server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_texts_are_classified_by_the_labels_of_the_config(server: Running) -> None:
    register(server)
    texts = ["hello", "world", "parrot"]
    reply = await post(server, "/classify", model="sentiment", input=texts)
    requests = server.engine.submitted[-3:]
    for each, request in zip(reply["data"], requests, strict=True):
        logits = scripted_vector(request)
        np.testing.assert_allclose(each["probs"], softmax(logits), atol=1e-6)
        assert each["label"] == LABELS[str(int(np.argmax(logits)))]
        assert each["num_classes"] == 3
    assert reply["usage"]["total_tokens"] == sum(len(each.prompt_token_ids) for each in requests)
    raw = await post(server, "/classify", model="plain", input="hello", use_activation=False)
    np.testing.assert_allclose(raw["data"][0]["probs"], scripted_vector(server.engine.submitted[-1]), atol=1e-6)
    assert raw["data"][0]["label"].startswith("LABEL_")
    several = await post(server, "/classify", model="topics", input="hello")
    np.testing.assert_allclose(
        several["data"][0]["probs"], sigmoid(scripted_vector(server.engine.submitted[-1])), atol=1e-6
    )


async def test_a_pair_is_scored_by_one_label_or_by_the_embeddings_of_the_two(server: Running) -> None:
    register(server)
    reply = await post(server, "/v1/score", model="relevance", text_1="hello", text_2=["world", "parrot"])
    requests = server.engine.submitted[-2:]
    assert [each.prompt_token_ids for each in requests] == [
        TOKENIZER.encode("hello", text).ids for text in ("world", "parrot")
    ]
    assert [each["score"] for each in reply["data"]] == pytest.approx(
        [float(sigmoid(scripted_vector(each))[0]) for each in requests], abs=1e-6
    )
    before = len(server.engine.submitted)
    reply = await post(server, "/score", model="formal", queries=["hello", "hello"], documents=["world", "parrot"])
    vectors = [np.array(scripted_vector(each)) for each in server.engine.submitted[before:]]
    assert len(vectors) == 3  # the query once
    query, *documents = (each / np.linalg.norm(each) for each in vectors)
    assert [each["score"] for each in reply["data"]] == pytest.approx(
        [float(query @ each) for each in documents], abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(server: Running, path: str) -> None:
    register(server)
    documents = ["hello", {"text": "world"}, "parrot", "small"]
    reply = await post(server, path, model="relevance", query="lorikeet", documents=documents, top_n=3)
    scores = [float(sigmoid(scripted_vector(each))[0]) for each in server.engine.submitted[-4:]]
    best = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [each["index"] for each in reply["results"]] == best
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx(
        [scores[at] for at in best], abs=1e-6
    )
    texts = ["hello", "world", "parrot", "small"]
    shown = [None if path == "/v2/rerank" else {"text": texts[at]} for at in best]
    assert [each.get("document") for each in reply["results"]] == shown
    hidden = await post(server, path, model="relevance", query="q", documents=["a"], return_documents=False)
    assert "document" not in hidden["results"][0]


@pytest.mark.slow
async def test_openais_client_moderates_by_the_labels_of_an_adapter(server: Running) -> None:
    register(server)
    async with AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as client:
        server.engine.vector = lambda request: [3.0, -3.0]
        (found,) = (await client.moderations.create(model="topics", input="hello")).results
        assert found.flagged is True
        assert found.categories.model_dump(exclude_unset=True) == {"hate": True, "violence": False}
        server.engine.vector = lambda request: [-3.0, -3.0]
        parts = [{"type": "text", "text": "hello"}]
        (found,) = (await client.moderations.create(model="topics", input=parts)).results  # type: ignore[arg-type]
        assert found.flagged is False
        for logits, model, flagged in (
            ([5.0, 0.0, 0.0], "sentiment", False),  # negative, which is no fault
            ([0.0, 0.0, 5.0], "sentiment", True),
            ([5.0, 0.0], "plain", False),  # without names the first label means nothing
            ([0.0, 5.0], "plain", True),
        ):
            server.engine.vector = lambda request, logits=logits: logits  # type: ignore[misc]
            (found,) = (await client.moderations.create(model=model, input="hello")).results
            assert found.flagged is flagged, (model, logits)


@pytest.mark.slow
async def test_models_without_a_single_label_are_refused(server: Running) -> None:
    register(server)
    for path, body in (
        ("/classify", {"model": "formal", "input": "x"}),
        ("/v1/moderations", {"input": "x"}),
        ("/score", {"model": "sentiment", "text_1": "x", "text_2": "y"}),
        ("/rerank", {"model": "plain", "query": "x", "documents": ["y"]}),
        ("/score", {"model": "relevance", "text_1": ["x", "y"], "text_2": ["a", "b", "c"]}),
        ("/rerank", {"model": "relevance", "query": "x", "documents": []}),
        ("/classify", {"model": "sentiment", "input": []}),
    ):
        reply = await server.http.post(path, json=body)
        assert reply.status_code == 400, (path, reply.text)
    reply = await server.http.post(
        "/v1/moderations", json={"model": "plain", "input": [{"type": "image_url", "image_url": {"url": "x"}}]}
    )
    assert reply.status_code == 501
    assert not server.engine.submitted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "names", "said"),
    [
        (2, {"0": "a", "1": "b", "2": "c"}, "id2label has 3 labels, but the score head has 2"),
        (2, {"0": "a", "2": "b"}, "it must name '0' to '1'"),
        (1, {"0": ""}, "not a text"),
    ],
)
async def test_labels_that_do_not_fit_the_head_are_refused(
    start: Start, labels: int, names: dict[str, str], said: str
) -> None:
    async with start() as server:
        write_classifier(server.sources / "wrong", labels, names=names)
        reply = await server.http.post(
            "/v1/load_lora_adapter", json={"lora_name": "wrong", "lora_path": str(server.sources / "wrong")}
        )
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]
