"""Every answer names the weights that made it, and a request may name those that it expects."""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from lorikeet.core.provenance import DIGEST_HEADER, Provenance
from lorikeet.observe.request_log import RequestLog
from tests.api.streams import events as message_events
from tests.support.api_server import BASE_DIGEST, Running, Start
from tests.support.chat_requests import CHAT, MESSAGES, events
from tests.support.fakes import write_adapter, write_classifier

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
OTHER = "0123456789abcdef" * 4
ONLY = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "formal", "prompt": "hello"},
    CHAT: {"model": "formal", "messages": MESSAGES},
    f"{CHAT}/batch": {"model": "formal", "messages": [MESSAGES, MESSAGES]},
    "/v1/messages": {"model": "formal", "messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"model": "formal", "input": "hello"},
    "/v1/embeddings": {"model": "formal", "input": ["hello", "the"]},
    "/score": {"model": "formal", "text_1": "hello", "text_2": "the"},
    "/invocations": {"model": "formal", "prompt": "hello"},
}


def digest_of(server: Running, name: str = "formal") -> str:
    record = server.service.catalog.get(name)
    assert record is not None
    return record.digest


def test_expected_digest_may_be_a_prefix() -> None:
    adapted = Provenance("ba5e" * 16, "ad" * 32)
    base = Provenance("ba5e" * 16)
    assert adapted.fingerprint == "ba5eba5eba5e-adadadadadad"
    assert base.fingerprint == "ba5eba5eba5e"
    assert adapted.digests == "ba5e" * 16 + "-" + "ad" * 32
    for expected in ("adadadad", "AD" * 32, "ba5eba5e-adadadad", adapted.fingerprint, adapted.digests):
        assert adapted.matches(expected)
        assert not base.matches(expected)
    for expected in ("ba5eba5e", "ba5e" * 16):
        assert base.matches(expected)
        assert not adapted.matches(expected), "the base's digest does not name an adapter"
    assert not adapted.matches("ba5eba5f-adadadad")


@pytest.mark.parametrize("model", ["base", "formal"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_answers_and_streams_name_their_weights(server: Running, path: str, model: str) -> None:
    made_by = Provenance(BASE_DIGEST, digest_of(server) if model == "formal" else "")
    body = BODIES[path] | {"model": model, "n": 2, "stream_options": None}
    reply = await server.http.post(path, json=body)
    answer = reply.json()
    assert reply.headers[DIGEST_HEADER] == made_by.digests
    assert answer["system_fingerprint"] == made_by.fingerprint
    assert [choice["system_fingerprint"] for choice in answer["choices"]] == [made_by.fingerprint] * 2
    assert not any("weight_versions" in choice for choice in answer["choices"])
    chunks = await events(server.http, path, body | {"stream_options": {"include_usage": True}})
    assert {chunk["system_fingerprint"] for chunk in chunks} == {made_by.fingerprint}
    async with server.http.stream("POST", path, json=body | {"stream": True}) as stream:
        assert stream.headers[DIGEST_HEADER] == made_by.digests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_clients_of_vllm_get_the_weights_of_each_token(server: Running, path: str) -> None:
    version = Provenance(BASE_DIGEST, digest_of(server)).fingerprint
    body = BODIES[path] | {"return_weight_versions": True, "return_token_ids": True, "n": 2}
    answer = (await server.http.post(path, json=body)).json()
    for choice in answer["choices"]:
        spans = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
        assert choice["weight_versions"] == spans
    chunks = await events(server.http, path, body)
    told = [choice for chunk in chunks for choice in chunk["choices"] if "weight_versions" in choice]
    assert [choice["index"] for choice in told] == [0, 1]
    assert all(choice["finish_reason"] == "stop" for choice in told)
    assert [choice["weight_versions"] for choice in told] == [spans] * 2


async def test_an_answer_without_tokens_has_no_spans(server: Running) -> None:
    body = BODIES[COMPLETIONS] | {"return_weight_versions": True, "max_tokens": 0}
    (choice,) = (await server.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["weight_versions"] == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_answers_of_blocks_refuse_spans(server: Running, path: str) -> None:
    reply = await server.http.post(path, json=BODIES[path] | {"return_weight_versions": True})
    assert (reply.status_code, reply.json()["error"].get("param")) in {
        (501, "return_weight_versions"),
        (501, None),
    }


async def test_messages_and_responses_name_their_weights(server: Running) -> None:
    fingerprint = Provenance(BASE_DIGEST, digest_of(server)).fingerprint
    for path in ("/v1/messages", "/v1/responses", f"{CHAT}/batch"):
        answer = (await server.http.post(path, json=BODIES[path])).json()
        assert answer["system_fingerprint"] == fingerprint, path
    opening, *_ = await message_events(server.http, "/v1/messages", BODIES["/v1/messages"])
    assert opening["message"]["system_fingerprint"] == fingerprint
    stream = await message_events(server.http, "/v1/responses", BODIES["/v1/responses"])
    assert stream[0]["response"]["system_fingerprint"] == fingerprint
    assert stream[-1]["response"]["system_fingerprint"] == fingerprint


async def test_other_servers_routes_name_their_weights(server: Running) -> None:
    made_by = Provenance(BASE_DIGEST, digest_of(server))
    tgi = {"inputs": "hello", "parameters": {"adapter_id": "formal", "details": True}}
    reply = await server.http.post("/generate", json=tgi)
    assert reply.json()["details"]["system_fingerprint"] == made_by.fingerprint
    sglang = {"text": ["hello", "the"], "lora_path": ["formal", None]}
    reply = await server.http.post("/generate", json=sglang)
    versions = [each["meta_info"]["weight_version"] for each in reply.json()]
    assert versions == [made_by.fingerprint, Provenance(BASE_DIGEST).fingerprint]
    assert reply.headers[DIGEST_HEADER] == f"{made_by.digests}, {BASE_DIGEST}"
    info = (await server.http.get("/model_info")).json()
    assert info["weight_version"] == Provenance(BASE_DIGEST).fingerprint


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_expects_other_weights_is_refused(server: Running, path: str) -> None:
    digest = digest_of(server)
    body = BODIES[path]
    for expected in (digest, digest[:8], Provenance(BASE_DIGEST, digest).fingerprint):
        reply = await server.http.post(path, json=body | {"expect_digest": expected})
        assert reply.status_code == 200, reply.text
        assert digest in reply.headers[DIGEST_HEADER]
    for expected in (OTHER, BASE_DIGEST, f"{OTHER[:8]}-{digest[:8]}"):
        submitted = len(server.engine.submitted)
        reply = await server.http.post(path, json=body | {"expect_digest": expected})
        assert reply.status_code == 409
        assert reply.headers["x-should-retry"] == "false"
        for named in (expected, digest, BASE_DIGEST):
            assert named in reply.json()["error"]["message"]
        assert len(server.engine.submitted) == submitted, "nothing is computed"
    for expected in ("", "abc", "not hexadecimal", f"{digest}0", 5, f"{digest}-"):
        assert (await server.http.post(path, json=body | {"expect_digest": expected})).status_code == 400
    said = (await server.http.post(path, json=body | {"expect_digest": "latest"})).json()["error"]["message"]
    assert "expect_digest: must be the first 8 to 64 hexadecimal digits of a digest" in said
    assert server.service.gate.active == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_dialects_expect_digests_too(server: Running, stream: bool) -> None:
    digest = digest_of(server)
    for expected, status in ((digest[:12], 200), (OTHER, 409)):
        parameters = {"adapter_id": "formal", "expect_digest": expected}
        tgi = {"inputs": "hello", "parameters": parameters}
        reply = await server.http.post("/generate_stream" if stream else "/generate", json=tgi)
        assert reply.status_code == status
        sglang = {"text": "hello", "lora_path": "formal", "expect_digest": expected, "stream": stream}
        assert (await server.http.post("/generate", json=sglang)).status_code == status
    batch = {"text": ["hello", "the"], "lora_path": ["formal", None], "expect_digest": [digest, BASE_DIGEST]}
    assert (await server.http.post("/generate", json=batch)).status_code == 200
    batch["expect_digest"] = [None, digest]
    assert (await server.http.post("/generate", json=batch)).status_code == 409
    batch["expect_digest"] = [digest]
    assert (await server.http.post("/generate", json=batch)).json()["error"]["param"] == "expect_digest"


async def test_aliases_mixtures_and_the_base_have_digests(server: Running) -> None:
    async def post(model: str, expected: str | None) -> httpx.Response:
        return await server.http.post(COMPLETIONS, json={"model": model, "prompt": "hello", "expect_digest": expected})

    server.service.catalog.register("pirate", str(server.sources / "pirate"))
    digest = digest_of(server)
    alias = {"name": "polite", "alias_of": "formal"}
    assert (await server.http.post("/v1/adapters", json=alias)).status_code == 201
    for model in ("polite", "base:formal", f"formal@{digest[:8]}"):
        assert (await post(model, digest)).status_code == 200
        assert (await post(model, digest_of(server, "pirate"))).status_code == 409
    mixture = "formal*0.5+pirate*0.5"
    mixed = (await post(mixture, None)).json()["system_fingerprint"]
    assert mixed not in (Provenance(BASE_DIGEST, digest).fingerprint, Provenance(BASE_DIGEST).fingerprint)
    assert (await post(mixture, mixed)).json()["system_fingerprint"] == mixed
    assert (await post(mixture, digest)).status_code == 409
    assert (await post("base", BASE_DIGEST[:16])).status_code == 200
    refused = await post("base", digest)
    assert refused.status_code == 409
    assert "answered by the base alone" in refused.json()["error"]["message"]


async def test_activated_lora_without_its_invocation_answers_like_the_base(server: Running) -> None:
    folder = write_adapter(server.sources / "activated", seed=7)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"alora_invocation_tokens": [9, 8]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    server.service.catalog.register("activated", str(folder))
    digest = digest_of(server, "activated")
    body = {"model": "activated", "prompt": [[5, 9, 8, 5], [5, 6]]}
    reply = await server.http.post(COMPLETIONS, json=body)
    acted = Provenance(BASE_DIGEST, digest)
    assert [choice["system_fingerprint"] for choice in reply.json()["choices"]] == [
        acted.fingerprint,
        Provenance(BASE_DIGEST).fingerprint,
    ]
    assert reply.headers[DIGEST_HEADER] == f"{acted.digests}, {BASE_DIGEST}"
    assert (await server.http.post(COMPLETIONS, json=body | {"expect_digest": digest})).status_code == 409
    body["prompt"] = [[5, 9, 8, 5]]
    assert (await server.http.post(COMPLETIONS, json=body | {"expect_digest": digest})).status_code == 200


async def test_labels_name_their_weights(server: Running) -> None:
    server.service.catalog.register("labels", str(write_classifier(server.sources / "labels", 3)))
    body = {"model": "labels", "input": "hello", "expect_digest": digest_of(server, "labels")}
    reply = await server.http.post("/classify", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers[DIGEST_HEADER] == f"{BASE_DIGEST}-{body['expect_digest']}"
    assert (await server.http.post("/classify", json=body | {"expect_digest": OTHER})).status_code == 409


async def test_a_large_body_expects_a_digest_too(server: Running) -> None:
    body = {"model": "formal", "prompt": [[5] * 100] * 200, "max_tokens": 1, "user": "x" * 100_000}
    digest = digest_of(server)
    assert (await server.http.post(COMPLETIONS, json=body | {"expect_digest": digest})).status_code == 200
    assert (await server.http.post(COMPLETIONS, json=body | {"expect_digest": OTHER})).status_code == 409


async def test_the_request_log_and_batches_name_the_weights(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=10**6, keep=1)
    async with start(request_log=log) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        fingerprint = Provenance(BASE_DIGEST, digest_of(server)).fingerprint
        await server.http.post(CHAT, json=BODIES[CHAT])
        await server.http.post(CHAT, json=BODIES[CHAT] | {"model": "base"})
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": BODIES[CHAT] | more})
            for name, more in (("right", {"expect_digest": digest_of(server)}), ("wrong", {"expect_digest": OTHER}))
        ]
        sent = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        file = (await server.http.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await server.http.post("/v1/batches", json=body)).json()
        async with asyncio.timeout(30):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0)
                batch = (await server.http.get(f"/v1/batches/{batch['id']}")).json()
        answers = (await server.http.get(f"/v1/files/{batch['output_file_id']}/content")).text
        errors = (await server.http.get(f"/v1/files/{batch['error_file_id']}/content")).text
    log.close()
    (answer,) = map(json.loads, answers.splitlines())
    assert answer["response"]["body"]["system_fingerprint"] == fingerprint
    (error,) = map(json.loads, errors.splitlines())
    assert (error["custom_id"], error["response"]["status_code"]) == ("wrong", 409)
    logged = [json.loads(line)["system_fingerprint"] for line in path.read_text().splitlines()]
    assert logged == [fingerprint, Provenance(BASE_DIGEST).fingerprint, fingerprint]


async def test_pages_of_other_origins_may_read_the_digest(start: Start) -> None:
    async with start(allowed_origins=("https://page.example",)) as server:
        headers = {"Origin": "https://page.example"}
        reply = await server.http.post(COMPLETIONS, json={"prompt": "hello"}, headers=headers)
        exposed = reply.headers["access-control-expose-headers"]
    assert DIGEST_HEADER.lower() in exposed.lower()


class _Change(NamedTuple):
    """A version that may be current between two times."""

    digest: str
    from_s: float
    until_s: float


@pytest.mark.parametrize("requests", [600, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
async def test_answers_under_churn_are_of_a_current_version(start: Start, requests: int) -> None:
    """While versions change, each answer's digest was current during the request, or the answer is a 409."""
    names = ("formal", "pirate", "json")
    chance = random.Random(82)
    changes: list[_Change] = []
    counts = {200: 0, 409: 0}
    is_over = False

    def possible(from_s: float, until_s: float) -> set[str]:
        return {each.digest for each in changes if each.from_s <= until_s and from_s <= each.until_s}

    async with start(max_queued=1000) as server:
        digests = []
        for name in names:
            loaded = await server.http.post("/v1/adapters", json={"name": name, "source": name})
            digests.append(loaded.json()["digest"])
        first = await server.http.post("/v1/adapters", json={"name": "moving", "source": "formal"})
        assert first.status_code == 201
        changes.append(_Change(digests[0], 0.0, float("inf")))

        async def churn() -> None:
            at = 0
            while not is_over:
                at = (at + chance.choice((1, 2))) % len(names)
                began_s = time.monotonic()
                changes.append(_Change(digests[at], began_s, float("inf")))
                body = {"name": "moving", "source": names[at], "replace": True}
                reply = await server.http.post("/v1/adapters", json=body)
                assert (reply.status_code, reply.json()["digest"]) == (201, digests[at])
                # The version before could be current until now, and none before that.
                before = changes[-2]
                changes[-2] = before._replace(until_s=time.monotonic())
                del changes[:-50]

        async def ask(each: int) -> None:
            expected = chance.choice([None, *digests])
            body = {"model": "moving", "prompt": "hello", "max_tokens": 2, "expect_digest": expected}
            began_s = time.monotonic()
            if each % 4 == 0:
                async with server.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as stream:
                    reply = stream
                    text = await stream.aread()
                told = {json.loads(line[6:])["system_fingerprint"] for line in text.splitlines() if line[6:7] == b"{"}
            else:
                reply = await server.http.post(COMPLETIONS, json=body)
                told = {reply.json().get("system_fingerprint")}
            current = possible(began_s, time.monotonic())
            counts[reply.status_code] += 1
            digest = reply.headers[DIGEST_HEADER].removeprefix(f"{BASE_DIGEST}-")
            assert digest in current, "the version was current during the request"
            if reply.status_code == 200:
                assert expected in (None, digest)
                assert told == {Provenance(BASE_DIGEST, digest).fingerprint}
            else:
                assert expected is not None
                assert expected != digest

        changing = asyncio.create_task(churn())
        todo = iter(range(requests))

        async def work() -> None:
            for each in todo:
                await ask(each)

        await asyncio.gather(*(work() for _ in range(8)))
        is_over = True
        await changing
    assert sum(counts.values()) == requests
    assert min(counts.values()) > 0.1 * requests
