"""The routes of TGI, LoRAX, SGLang, SageMaker and vLLM, over a scripted engine and over the default model."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from lorikeet.http import sessions
from lorikeet.http.errors import ApiError
from lorikeet.models.default import prepare_default_model
from tests.support.api_server import END, TOKENIZER, Running, Start
from tests.support.served import Server, serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow

HELLO = TOKENIZER.encode("hello").ids
ANSWER = [*TOKENIZER.encode("hello world").ids, END]


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream; ``[DONE]`` as it is."""
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    sent = [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in sent]


async def test_tgi_answers_with_the_text(server: Running) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 30}}
    assert (await server.http.post("/generate", json=body)).json() == {"generated_text": "hello world"}
    assert (await server.http.post("/", json=body)).json() == [{"generated_text": "hello world"}]
    (request, _) = server.engine.submitted
    assert request.prompt_token_ids == HELLO
    assert (request.sampling.temperature, request.sampling.max_tokens, request.adapter) == (0.0, 30, None)


async def test_tgi_tells_details_of_tokens_and_of_the_prompt(server: Running) -> None:
    given = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "seed": 2**64 - 1, "do_sample": True}
    body = {"inputs": "hello", "parameters": {**given, "return_full_text": True}}
    answer = (await server.http.post("/generate", json=body)).json()
    assert answer["generated_text"] == "hellohello world"
    details = answer["details"]
    assert (details["finish_reason"], details["prompt_tokens"]) == ("eos_token", len(HELLO))
    assert (details["generated_tokens"], details["seed"]) == (len(ANSWER), 2**64 - 1)
    assert [token["id"] for token in details["tokens"]] == ANSWER
    assert [token["special"] for token in details["tokens"]] == [False] * (len(ANSWER) - 1) + [True]
    assert [len(top) for top in details["top_tokens"]] == [2] * len(ANSWER)
    assert [token["id"] for token in details["prefill"]] == HELLO
    assert details["prefill"][0]["logprob"] is None


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
@pytest.mark.parametrize("per_output", [1, 3])
async def test_tgi_streams_an_event_for_each_token(server: Running, path: str, per_output: int) -> None:
    server.engine.per_output = per_output
    sent = await events(server.http, path, {"inputs": "hello", "stream": True})
    assert [event["token"]["id"] for event in sent] == ANSWER
    assert [event["index"] for event in sent] == list(range(1, len(ANSWER) + 1))
    assert [event["token"]["text"] for event in sent] == [*(TOKENIZER.decode([each]) for each in ANSWER[:-1]), ""]
    assert [event["generated_text"] for event in sent[:-1]] == [None] * (len(ANSWER) - 1)
    assert sent[-1]["generated_text"] == "hello world"
    assert sent[-1]["details"]["generated_tokens"] == len(ANSWER)


async def test_stop_strings_end_an_answer_as_in_tgi(server: Running) -> None:
    body = {"inputs": "hello", "parameters": {"stop": ["lo w"], "details": True}}
    answer = (await server.http.post("/generate", json=body)).json()
    assert answer["generated_text"] == "hello w"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    server.engine.per_output = 2
    sent = await events(server.http, "/generate_stream", body)
    assert "".join(event["token"]["text"] for event in sent) == sent[-1]["generated_text"] == "hello w"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hello", "parameters": {"adapter_id": "formal", "adapter_source": "local"}}),
        ("/", {"inputs": "hello", "parameters": {"adapter_id": "formal"}}),
        ("/generate", {"text": "hello", "lora_path": "formal"}),
        ("/invocations", {"prompt": "hello", "model": "formal"}),
    ],
)
async def test_every_dialect_can_name_an_adapter(server: Running, path: str, body: dict[str, Any]) -> None:
    assert (await server.http.post(path, json=body)).status_code == 200
    adapter = server.engine.submitted[0].adapter
    assert adapter is not None
    assert adapter.name == "formal"


@pytest.mark.parametrize("name", [None, "", "__base__"])
async def test_lorax_names_the_base_in_three_ways(server: Running, name: str | None) -> None:
    body = {"inputs": "hello", "parameters": {"adapter_id": name}}
    assert (await server.http.post("/generate", json=body)).status_code == 200
    assert server.engine.submitted[0].adapter is None


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "inputs"),
        ({"inputs": 5}, 400, "inputs"),
        ({"inputs": ""}, 400, "inputs"),
        ({"inputs": "hello", "parameters": {"max_new_tokens": 1000}}, 400, "max_new_tokens"),
        ({"inputs": "hello", "parameters": {"temperature": 0}}, 400, "parameters"),
        ({"inputs": "hello", "parameters": {"adapter_id": "nobody"}}, 404, "adapter_id"),
        ({"inputs": "hello", "parameters": {"top_n_tokens": 100, "details": True}}, 400, "top_n_tokens"),
        ({"inputs": "hello", "parameters": {"typical_p": 0.5}}, 501, "typical_p"),
        (
            {"inputs": "hello", "parameters": {"merged_adapters": {"ids": ["formal"], "weights": [1, 2]}}},
            400,
            "merged_adapters",
        ),
        ({"inputs": "hello", "parameters": {"grammar": {"type": "json", "value": "{"}}}, 400, "grammar"),
        ({"text": "hello", "input_ids": [5]}, 400, "text"),
        ({"text": ""}, 400, "text"),
        ({"text": "hello", "sampling_params": {"max_new_tokens": 1000}}, 400, "max_new_tokens"),
        ({"text": "hello", "sampling_params": {"min_new_tokens": 200}}, 400, "min_new_tokens"),
        ({"text": "hello", "sampling_params": {"stop_regex": "a+"}}, 501, "stop_regex"),
        ({"text": "hello", "image_data": "x"}, 501, "image_data"),
        ({"text": "hello", "lora_path": "nobody"}, 404, "lora_path"),
        ({"text": "hello", "lora_path": ["formal"]}, 400, "text"),
        ({"text": ["hello", "the"], "lora_path": ["formal"]}, 400, "lora_path"),
        ({"text": ["hello", "the"], "lora_path": ["formal", None], "stream": True}, 501, "stream"),
        ({"text": ["hello", ""], "lora_path": ["formal", None]}, 400, "text"),
    ],
)
async def test_errors_use_the_dialects_field_names(
    server: Running, body: dict[str, Any], status: int, param: str
) -> None:
    reply = await server.http.post("/generate", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert "max_tokens" not in error["message"]
    assert server.service.gate.active == 0


async def test_sglang_answer_has_ids_and_finish_reason(server: Running) -> None:
    body = {"text": "hello", "rid": "mine", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    answer = (await server.http.post("/generate", json=body)).json()
    assert answer["output_ids"] == ANSWER[:2]
    assert answer["meta_info"] == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": len(HELLO),
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "ba5eba5eba5e",
    }
    assert (await server.http.post("/generate", json={"input_ids": HELLO})).json()["text"] == "hello world"
    stopped = (await server.http.post("/generate", json={"text": "hello", "sampling_params": {"stop": "w"}})).json()
    assert stopped["text"] == "hello "
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "w"}


async def test_sglang_tells_log_probabilities(server: Running) -> None:
    body = {"input_ids": HELLO, "return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = (await server.http.post("/generate", json={**body, "logprob_start_len": 0})).json()["meta_info"]
    assert [each[1] for each in meta["input_token_logprobs"]] == HELLO
    assert meta["input_token_logprobs"][0][0] is None
    assert [each[1] for each in meta["output_token_logprobs"]] == ANSWER
    assert meta["output_token_logprobs"][0] == [-0.5, ANSWER[0], "hello"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [1] * len(ANSWER)
    meta = (await server.http.post("/generate", json=body)).json()["meta_info"]
    assert meta["input_token_logprobs"] == []


async def test_prompts_of_an_sglang_batch_may_have_different_adapters(server: Running) -> None:
    body = {"text": ["hello", "the"], "lora_path": ["formal", None]}
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    answers = (await server.http.post("/generate", json={**body, "sampling_params": params})).json()
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2]
    assert [request.adapter and request.adapter.name for request in server.engine.submitted] == ["formal", None]


async def test_sglang_streams_the_text_so_far(server: Running) -> None:
    *sent, done = await events(server.http, "/generate", {"text": "hello", "stream": True})
    assert done == "[DONE]"
    texts = [event["text"] for event in sent]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == "hello world"
    *sent, _ = await events(server.http, "/generate", {"text": ["hello", "the"], "stream": True})
    assert {event["index"] for event in sent} == {0, 1}


async def test_a_request_is_aborted_by_its_id_and_only_by_its_tenant(start: Start) -> None:
    async with start(api_keys=("one", "two")) as server:
        server.engine.open.clear()
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        body = {"text": "hello", "rid": "mine"}
        running = asyncio.create_task(server.http.post("/generate", json=body, headers=keys[0]))
        await until(lambda: bool(server.service.generations), "the request runs")
        for key, content in ((keys[1], {"abort_all": True}), (keys[0], {"rid": "another"})):
            assert (await server.http.post("/abort_request", json=content, headers=key)).status_code == 200
        assert server.engine.aborted == []
        await server.http.post("/abort_request", json={"rid": "cmpl-mine"}, headers=keys[0])
        assert [request_id.startswith("mine-") for request_id in server.engine.aborted] == [True]
        assert (await server.http.post("/abort_request", json={}, headers=keys[0])).status_code == 400
        server.engine.open.set()
        await running


async def test_requests_after_a_reset_do_not_reuse_earlier_kv(start: Start) -> None:
    async with start(api_keys=("user",), admin_keys=("admin",)) as server:
        salts = []
        for path in ("/reset_prefix_cache", "/flush_cache", ""):
            await server.http.post("/generate", json={"text": "hello"}, headers={"Authorization": "Bearer user"})
            salts.append(server.engine.submitted[-1].cache_salt)
            if path:
                refused = await server.http.post(path, headers={"Authorization": "Bearer user"})
                reset = await server.http.post(path, headers={"Authorization": "Bearer admin"})
                assert (refused.status_code, reset.status_code) == (403, 200)
                assert path != "/reset_prefix_cache" or reset.json() == {"success": True}
        assert len(set(salts)) == 3


async def test_sagemaker_takes_everything_at_one_route(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "formal"}
    kinds = [(chat, "chat.completion"), ({"prompt": "hello"}, "text_completion")]
    for body, kind in kinds:
        answer = (await server.http.post("/invocations", json=body, headers=header)).json()
        assert (answer["object"], answer["model"]) == (kind, "formal")
    answer = await server.http.post("/invocations", json={"inputs": "hello"}, headers=header)
    assert answer.json() == [{"generated_text": "hello world"}]
    assert [request.adapter and request.adapter.name for request in server.engine.submitted] == ["formal"] * 3
    assert (await server.http.post("/invocations", json={})).status_code == 400
    assert (await server.http.post("/invocations", json={"messages": "x"})).json()["error"]["param"] == "messages"


async def test_sagemaker_loads_and_removes_adapters(server: Running) -> None:
    body = {"name": "new", "src": str(server.sources / "pirate"), "preload": True, "pin": False}
    assert (await server.http.post("/adapters", json=body)).status_code == 200
    assert server.engine.submitted[0].adapter is not None
    assert (await server.http.post("/adapters", json=body)).status_code == 200, "the same content changes nothing"
    other = {**body, "src": str(server.sources / "formal")}
    assert (await server.http.post("/adapters", json=other)).status_code == 400
    assert (await server.http.delete("/adapters/new")).status_code == 200
    assert (await server.http.delete("/adapters/new")).status_code == 404


async def test_sagemaker_has_sessions(server: Running) -> None:
    async def call(body: dict[str, Any], session: str | None = None) -> httpx.Response:
        headers = {} if session is None else {"X-Amzn-SageMaker-Session-Id": session}
        return await server.http.post("/invocations", json=body, headers=headers)

    begun = await call({"requestType": "NEW_SESSION"})
    session, _, expires = begun.headers["X-Amzn-SageMaker-New-Session-Id"].partition("; Expires=")
    assert datetime.fromisoformat(expires) > datetime.now(UTC)
    assert (await call({"prompt": "hello"}, session)).json()["choices"][0]["text"] == "hello world"
    close = {"requestType": "CLOSE"}
    for body, named, status, said in (
        ({"requestType": "NEW_SESSION", "more": 1}, None, 400, "more"),
        ({**close, "more": 1}, session, 400, "more"),
        ({"requestType": "OTHER"}, session, 400, "requestType"),
        (close, None, 424, "invalid session_id"),
        (close, "nobody", 400, "session not found"),
        ({"prompt": "hello"}, "nobody", 400, "session not found"),
    ):
        refused = await call(body, named)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (status, True), refused.text
    assert (await call(close, session)).headers["X-Amzn-SageMaker-Closed-Session-Id"] == session
    assert (await call(close, session)).status_code == 400


def test_sessions_end_by_themselves_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1.0
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(sessions, "_MOST", 2)
    begun = sessions.Sessions()
    first, second = (begun.begin("t")[0] for _ in range(2))
    begun.use("t", first)
    third, _ = begun.begin("t")
    for each, tenant in ((second, "t"), (first, "other")):
        with pytest.raises(ApiError, match="session not found"):
            begun.use(tenant, each)
    now_s = 1.0 + sessions.LASTS_S
    with pytest.raises(ApiError, match="session not found"):
        begun.use("t", third)


async def test_servers_tell_of_themselves(server: Running) -> None:
    answers = {
        path: (await server.http.get(path)).json()
        for path in ("/info", "/get_model_info", "/model_info", "/server_info", "/get_server_info")
    }
    assert answers["/info"]["max_total_tokens"] == answers["/server_info"]["max_model_len"] == 256
    assert answers["/get_model_info"]["model_path"] == answers["/get_server_info"]["model_path"] == "/models/base"
    assert answers["/model_info"]["is_generation"] is True
    asked = (await server.http.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
    assert asked["model_config"] == {
        "model": "/models/base",
        "dtype": "torch.bfloat16",
        "max_model_len": 256,
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
    }
    assert asked["weight_transfer_config"] is None
    assert (await server.http.get("/tokenizer_info")).status_code == 404, "it was not read from a folder"


async def test_health_check_can_generate_a_token(server: Running) -> None:
    assert (await server.http.get("/health_generate")).status_code == 200
    assert len(server.engine.submitted) == 1
    server.engine.alive = False
    assert (await server.http.get("/health_generate")).status_code == 503
    server.engine.alive = True
    server.service.gate.max_queued = 1
    ticket = server.service.gate.enter(1)
    assert (await server.http.get("/health_generate")).status_code == 200, "it is only busy"
    ticket.release()


ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
PROMPT = "The capital of France is"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(default_model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A server of the default model with one adapter."""
    model = prepare_default_model(default_model_cache)
    flags = ["--lora-modules", f"pirate={ADAPTERS / 'pirate'}", "--dtype", "float32", "--max-model-len", "1024"]
    async with serving(model, tmp_path_factory.mktemp("home"), *flags, "--memory", "256MiB") as started:
        yield started


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_all_dialects_give_the_answer_of_the_completion(real: Server) -> None:
    async def post(path: str, body: dict[str, Any]) -> Any:
        reply = await real.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    sglang: dict[str, Any] = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    for adapter in (None, "pirate"):
        plain = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "model": adapter}
        expected = (await post("/v1/completions", plain))["choices"][0]["text"]
        tgi = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "adapter_id": adapter}}
        assert (await post("/generate", tgi))["generated_text"] == expected
        assert (await post("/invocations", plain))["choices"][0]["text"] == expected
        again = await post("/generate", {**sglang, "lora_path": adapter})
        assert again["text"] == expected
        assert (await events(real.http, "/generate_stream", tgi))[-1]["generated_text"] == expected
    prompt = {"input_ids": again["output_ids"] * 8, "sampling_params": {"max_new_tokens": 1}}
    cached = []
    for _ in range(2):
        cached.append((await post("/generate", prompt))["meta_info"]["cached_tokens"])
    assert (await real.http.post("/flush_cache")).status_code == 200
    cached.append((await post("/generate", prompt))["meta_info"]["cached_tokens"])
    assert cached[1] > cached[0] == cached[2] == 0
    info = (await real.http.get("/tokenizer_info")).json()
    assert info["chat_template"]
    assert isinstance(info["tokenizer_class"], str)
    assert (await real.http.get("/health_generate")).status_code == 200
