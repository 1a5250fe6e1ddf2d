"""Checks of ten Python clients, which ``python -m benchmarks.clients`` runs in the environment of one client.

``python python_checks.py CLIENT URL MODEL`` prints a JSON line for each check. Checks import only their client.
The model is small, so tools are required rather than offered, and types that only JSON mode fills accept any object.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = MODEL = ""
KEY = "none"
ASK = "What is the capital of France?"
WEATHER = "What is the weather in Oslo?"
CHECKS: dict[str, list[Callable[[], Any]]] = {}


def check(client: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the checks of a client. It raises if something is wrong."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS.setdefault(client, []).append(function)
        return function

    return add


def main() -> None:
    """Run all checks of a client and print each result."""
    global URL, MODEL
    client, URL, MODEL = sys.argv[1:4]
    for function in CHECKS[client]:
        error = ""
        try:
            result = function()
            if asyncio.iscoroutine(result):
                asyncio.run(result)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}" if "-v" not in sys.argv else traceback.format_exc()
        name = function.__name__.partition("_")[2].replace("_", " ")
        print(json.dumps({"check": name, "error": error}), flush=True)


def weather(city: str) -> str:
    """Say what the weather in a city is."""
    return f"It is sunny in {city}."


# --- openai -------------------------------------------------------------------------------------------

TOOL = {
    "name": "weather",
    "description": "Say what the weather in a city is.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
MESSAGES: list[Any] = [{"role": "user", "content": ASK}]
IN_JSON = f"{ASK} Answer in JSON with the key `name`."


def _openai() -> Any:
    import openai

    return openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


@check("openai")
def openai_models() -> None:
    assert MODEL in [model.id for model in _openai().models.list()]


@check("openai")
def openai_chat() -> None:
    answer = _openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, max_tokens=20, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].message.content and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@check("openai")
def openai_stream() -> None:
    with _openai().chat.completions.stream(
        model=MODEL, messages=MESSAGES, max_tokens=200, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text and text == final.choices[0].message.content and final.usage.completion_tokens > 0


@check("openai")
def openai_completions() -> None:
    answer = _openai().completions.create(model=MODEL, prompt=["The sky is", "Grass is"], max_tokens=5, logprobs=1)
    assert len(answer.choices) == 2 and answer.choices[1].logprobs.tokens


@check("openai")
def openai_parse() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        is_capital: bool

    answer = _openai().chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, City)


@check("openai")
def openai_json_object() -> None:
    asked: list[Any] = [{"role": "user", "content": IN_JSON}]
    answer = _openai().chat.completions.create(
        model=MODEL, messages=asked, response_format={"type": "json_object"}, temperature=0, max_tokens=200
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check("openai")
def openai_tools() -> None:
    asked: list[Any] = [{"role": "user", "content": WEATHER}]
    client = _openai()
    common = {"model": MODEL, "tools": TOOLS, "temperature": 0}
    answer = client.chat.completions.create(messages=asked, tool_choice="required", parallel_tool_calls=False, **common)
    (call,) = answer.choices[0].message.tool_calls
    said = weather(**json.loads(call.function.arguments))
    asked += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": said}]
    assert client.chat.completions.create(messages=asked, tool_choice="none", **common).choices[0].message.content
    named = {"type": "function", "function": {"name": "weather"}}
    stream = client.chat.completions.create(messages=asked[:1], tool_choice=named, stream=True, **common)
    parts = [chunk.choices[0].delta.tool_calls for chunk in stream if chunk.choices]
    assert json.loads("".join(part[0].function.arguments or "" for part in parts if part)).keys() == {"city"}


@check("openai")
def openai_responses() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    client = _openai()
    first = client.responses.create(model=MODEL, input=ASK, temperature=0)
    assert first.output_text and client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.stream(model=MODEL, input="And of Spain?", previous_response_id=first.id) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
    assert client.responses.parse(model=MODEL, input=ASK, text_format=City).output_parsed is not None
    tool = {"type": "function", "strict": True, **TOOL}
    called = client.responses.create(model=MODEL, input=WEATHER, tools=[tool], tool_choice="required")
    assert called.output[-1].type == "function_call"


@check("openai")
def openai_embeddings() -> None:
    answer = _openai().embeddings.create(model=MODEL, input=[ASK, WEATHER])
    one, two = (each.embedding for each in answer.data)
    assert len(one) == len(two) and one != two and answer.usage.prompt_tokens
    assert abs(sum(number * number for number in one) - 1) < 1e-4
    (cut,) = _openai().embeddings.create(model=MODEL, input=ASK, dimensions=64, encoding_format="float").data
    assert len(cut.embedding) == 64


@check("openai")
def openai_refusals() -> None:
    """A route that is not supported raises an error without retries."""
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    try:
        client.images.generate(prompt="x")
    except openai.APIStatusError as error:
        assert error.response.headers["x-should-retry"] == "false"
    else:
        raise AssertionError("images are supported")


@check("openai")
async def openai_async() -> None:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    asked = [client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8) for _ in range(4)]
    assert all(answer.choices[0].message.content for answer in await asyncio.gather(*asked))


# --- litellm ------------------------------------------------------------------------------------------


def _litellm() -> dict[str, Any]:
    return {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0}


@check("litellm")
def litellm_chat() -> None:
    import litellm

    assert litellm.completion(messages=MESSAGES, **_litellm()).choices[0].message.content


@check("litellm")
def litellm_stream() -> None:
    import litellm

    stream = litellm.completion(messages=MESSAGES, stream=True, **_litellm())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@check("litellm")
def litellm_openai_and_text() -> None:
    import litellm

    common = {**_litellm(), "model": f"openai/{MODEL}"}
    assert litellm.completion(messages=MESSAGES, **common).choices[0].message.content
    common["model"] = f"text-completion-openai/{MODEL}"
    assert litellm.text_completion(prompt="The sky is", max_tokens=8, **common).choices[0].text


@check("litellm")
def litellm_response_format() -> None:
    import litellm
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    answer = litellm.completion(messages=MESSAGES, response_format=City, **_litellm())
    City.model_validate_json(answer.choices[0].message.content)


@check("litellm")
def litellm_tools() -> None:
    import litellm

    answer = litellm.completion(
        messages=[{"role": "user", "content": WEATHER}], tools=TOOLS, tool_choice="required", **_litellm()
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"]


@check("litellm")
def litellm_responses() -> None:
    import litellm

    answer = litellm.responses(input=ASK, **{**_litellm(), "model": f"openai/{MODEL}"})
    assert answer.output[0].content[0].text


@check("litellm")
async def litellm_messages() -> None:
    import litellm

    answer = await litellm.anthropic.messages.acreate(messages=MESSAGES, max_tokens=30, **_litellm())
    assert answer["content"][0]["text"]


# --- LangChain ----------------------------------------------------------------------------------------


def _langchain(**more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_retries=0, **more)


@check("langchain-openai")
def langchain_invoke() -> None:
    model = _langchain()
    assert model.invoke(ASK).content and model.batch([ASK, ASK])[1].usage_metadata["output_tokens"]
    assert "".join(chunk.content for chunk in model.stream(ASK))


@check("langchain-openai")
def langchain_structured_output() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        """A city."""

        name: Any = None

    for method in ("function_calling", "json_mode", "json_schema"):
        result = _langchain().with_structured_output(City, method=method).invoke(IN_JSON)
        assert isinstance(result, City), method


@check("langchain-openai")
def langchain_bind_tools() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    model = _langchain().bind_tools([tool(weather)], tool_choice="any")
    asked = [HumanMessage(WEATHER)]
    answer = model.invoke(asked)
    call = answer.tool_calls[0]
    history = [*asked, answer, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    assert _langchain().invoke(history).content
    assert [chunk for chunk in model.stream(asked) if chunk.tool_call_chunks]


@check("langchain-openai")
def langchain_responses() -> None:
    assert _langchain(use_responses_api=True).invoke(ASK).text


@check("langchain-openai")
def langchain_embeddings() -> None:
    from langchain_openai import OpenAIEmbeddings

    # Otherwise it sends token ids of OpenAI's tokenizer.
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, check_embedding_ctx_length=False
    )
    one, two = embeddings.embed_documents([ASK, WEATHER])
    again = embeddings.embed_query(ASK)
    assert len(one) == len(two) and one != two
    assert max(abs(a - b) for a, b in zip(one, again, strict=True)) < 1e-4


# --- LlamaIndex ---------------------------------------------------------------------------------------


def _llama_index() -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
        max_tokens=100,
    )


@check("llama-index")
def llamaindex_chat() -> None:
    from llama_index.core.llms import ChatMessage

    model = _llama_index()
    asked = [ChatMessage(role="user", content=ASK)]
    assert model.chat(asked).message.content and model.complete(ASK).text
    assert [*model.stream_chat(asked)][-1].message.content and [*model.stream_complete(ASK)][-1].text


@check("llama-index")
def llamaindex_structured() -> None:
    from llama_index.core.llms import ChatMessage
    from pydantic import BaseModel

    class City(BaseModel):
        """A city."""

        name: str

    model = _llama_index().as_structured_llm(City)
    assert isinstance(model.chat([ChatMessage(role="user", content=ASK)]).raw, City)


@check("llama-index")
def llamaindex_tools() -> None:
    from llama_index.core.tools import FunctionTool

    model = _llama_index()
    answer = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=WEATHER, tool_required=True)
    assert model.get_tool_calls_from_response(answer)[0].tool_kwargs.keys() == {"city"}


# --- instructor ---------------------------------------------------------------------------------------


@check("instructor")
def instructor_modes() -> None:
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    class Anything(BaseModel):
        name: Any = None

    kinds = instructor.Mode
    for mode, kind in ((kinds.TOOLS, City), (kinds.JSON_SCHEMA, City), (kinds.JSON, Anything)):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
        city = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": IN_JSON}],
            response_model=kind,
            temperature=0,
            max_retries=0,
            max_tokens=200,
        )
        assert isinstance(city, kind), mode


# --- pydantic-ai --------------------------------------------------------------------------------------


def _pydantic(output: Any, **more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
    return Agent(model, output_type=output, model_settings={"temperature": 0.0, "max_tokens": 300}, **more)


@check("pydantic-ai")
async def pydanticai_text_and_stream() -> None:
    agent = _pydantic(str, instructions="Be brief.")
    assert (await agent.run(ASK)).output
    async with agent.run_stream(ASK) as stream:
        assert [text async for text in stream.stream_text()][-1]


@check("pydantic-ai")
def pydanticai_output_types() -> None:
    from typing import Literal

    from pydantic import BaseModel
    from pydantic_ai import NativeOutput, PromptedOutput, ToolOutput

    class City(BaseModel):
        name: str

    class Anything(BaseModel):
        name: Any = None

    def shout(city: str) -> str:
        return city.upper()

    for kind, made in (
        (City, City),
        (list[str], list),
        (Literal["Paris", "Oslo"], str),
        ([City, Anything], (City, Anything)),
        (ToolOutput(City), City),
        (NativeOutput(City), City),
        (PromptedOutput(Anything), Anything),
        (shout, str),
    ):
        assert isinstance(_pydantic(kind).run_sync(IN_JSON).output, made), kind


@check("pydantic-ai")
def pydanticai_tools() -> None:
    agent = _pydantic(str, tools=[weather])
    assert agent.run_sync(WEATHER).output


# --- llm ----------------------------------------------------------------------------------------------


def _llm(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            {
                "model_id": "here",
                "model_name": MODEL,
                "api_base": f"{URL}/v1",
                "supports_schema": True,
                "supports_tools": True,
            }
        ]
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps(settings))
        Path(folder, "keys.json").write_text(json.dumps({"openai": KEY}))
        command = [str(Path(sys.executable).with_name("llm")), *arguments, "-m", "here", "-o", "temperature", "0"]
        ran = subprocess.run(
            command, env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr[-500:]
        return ran.stdout


@check("llm")
def llm_prompt() -> None:
    _llm(ASK, "-s", "Be brief.")
    _llm(ASK, "--no-stream")


@check("llm")
def llm_schema() -> None:
    assert json.loads(_llm(IN_JSON, "--schema", "name, is_capital bool")).keys() >= {"name", "is_capital"}


@check("llm")
def llm_tools() -> None:
    _llm("What is the version of llm?", "-T", "llm_version")


# --- lm-eval ------------------------------------------------------------------------------------------


@check("lm-eval")
def lmeval_multiple_choice() -> None:
    """Log-likelihoods of all choices equal those of transformers, with PEFT for adapters, in float32."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    questions = [
        ("The capital of France is", [" Paris", " London", " a small town in the north"], 0),
        ("Grass is usually", [" green", " purple", " made of steel"], 0),
        ("Two and two are", [" five", " four", " several thousand"], 1),
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data.jsonl").write_text(
            "\n".join(json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in questions)
        )
        task = {
            "task": "capitals",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": f"{folder}/data.jsonl"}, "cache_dir": folder},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "target_delimiter": "",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
        Path(folder, "capitals.yaml").write_text(json.dumps(task))
        found = []
        base = os.environ["BASE_FOLDER"]
        adapter = os.environ.get("ADAPTER_FOLDER")
        for kind, arguments in (
            ("local-completions", f"model={MODEL},base_url={URL}/v1/completions,tokenizer={base},num_concurrent=4"),
            ("hf", f"pretrained={base},dtype=float32" + (f",peft={adapter}" if adapter else "")),
        ):
            results = lm_eval.simple_evaluate(
                kind,
                model_args=arguments,
                tasks=["capitals"],
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                device="cpu",
                log_samples=True,
                bootstrap_iters=0,
            )
            found.append(
                [float(one[0]) for sample in results["samples"]["capitals"] for one in sample["filtered_resps"]]
            )
    worst = max(abs(ours - theirs) for ours, theirs in zip(*found, strict=True))
    assert len(found[0]) == 9 and worst < 1e-3, f"they differ by {worst}"


# --- guidellm, lorax-client, TRL ----------------------------------------------------------------------


@check("guidellm")
def guidellm_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "run",
            *("--backend", f"kind=openai_http,target={URL},model={MODEL}"),
            *("--tokenizer", f"kind=hf_auto,model={os.environ['BASE_FOLDER']}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--disable-progress", "--output", f"kind=json,path={folder}/report.json"),
        ]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-600:]
        (benchmark,) = json.loads(next(Path(folder).glob("*.json")).read_text())["benchmarks"]
        assert len(benchmark["requests"]["successful"]) >= 4 and not benchmark["requests"]["errored"]


@check("lorax-client")
def lorax_generate() -> None:
    from lorax import Client

    client = Client(URL, timeout=60)
    adapter = os.environ.get("ADAPTER_FOLDER") and MODEL
    answer = client.generate("The capital of France is", adapter_id=adapter, max_new_tokens=8)
    assert answer.generated_text and 0 < answer.details.generated_tokens <= 8
    tokens = [
        part.token.text
        for part in client.generate_stream("The capital of France is", adapter_id=adapter, max_new_tokens=8)
    ]
    assert "".join(tokens)


def _trl() -> Any:
    from trl.generation import vllm_client

    vllm_client.is_vllm_available = lambda *given, **named: True  # it needs the package only to transfer weights
    client = vllm_client.VLLMClient(base_url=URL)
    client.model = MODEL
    return client


@check("trl")
def trl_generate() -> None:
    answer = _trl().generate(["The sky is", "Grass is"], n=2, max_tokens=8, logprobs=2)
    assert [len(ids) for ids in answer["completion_ids"]] == [8] * 4 and len(answer["prompt_ids"]) == 2
    assert len(answer["logprobs"][0]) == 8 and answer["logprob_token_ids"][0][0]


@check("trl")
def trl_chat() -> None:
    answer = _trl().chat([MESSAGES, MESSAGES], max_tokens=8, temperature=0.5, tools=TOOLS)
    assert len(answer["completion_ids"]) == 2 and answer["prompt_ids"][0] == answer["prompt_ids"][1]


@check("trl")
def trl_sequence_logprobs() -> None:
    sequences = [[504, 3575, 314, 2461, 30], [504, 3575, 314, 260]]
    answer = _trl().get_sequence_logprobs(sequences, [2, 2], top_logprobs=5)
    assert [len(each) for each in answer["actual_logprobs"]] == [3, 2]


@check("trl")
def trl_training_loop() -> None:
    """Calls of asynchronous GRPO, which loads each new policy under a new name while generation is paused."""
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()  # the trainer's, which TRL's log asks for
    client = VLLMClient(URL)
    client.wait_for_server_ready()
    assert client.get_max_model_len() > 0 and client.get_world_size() == 1 and client.get_dtype() == "torch.float32"
    client.pause()
    client.load_lora_adapter("policy-1", os.environ["SAMPLE_ADAPTER"])
    client.resume()
    try:
        policy = _trl()
        policy.model = "policy-1"
        assert policy.generate(["The sky is"], max_tokens=4)["completion_ids"]
    finally:
        client.unload_lora_adapter("policy-1")
    _trl().reset_prefix_cache()


# --- SkyRL, renderers, ART ----------------------------------------------------------------------------


def _skyrl() -> Any:
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses typing's before Python 3.12
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    return RemoteInferenceClient(proxy_url=URL, server_urls=[URL], data_parallel_size=1, model_name=MODEL)


PROMPTS = [[504, 3575, 314], [504, 3575]]


@check("skyrl")
async def skyrl_generate() -> None:
    async with _skyrl() as client:
        sampling = {"max_tokens": 6, "temperature": 1.0, "logprobs": 1, "seed": 3}
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": sampling, "session_ids": ["a", "b"]}
        answer = await client.generate(batch, model=MODEL)
        assert (
            [len(ids) for ids in answer["response_ids"]]
            == [6, 6]
            == [len(each) for each in answer["response_logprobs"]]
        )
        assert all(answer["responses"]) and answer["stop_reasons"] == ["length", "length"]
        await client.finish_session("a")


@check("skyrl")
async def skyrl_sample() -> None:
    async with _skyrl() as client:
        body = {
            "model": MODEL,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 4, "temperature": 0.7, "seed": 1, "stop_strings": ["zzz"]},
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "session_id": "a",
        }
        answer = await client.sample({"json": body})
        assert [len(each["tokens"]) for each in answer["sequences"]] == [4, 4]
        assert answer["prompt_logprobs"][0] is None and all(each < 0 for each in answer["prompt_logprobs"][1:])
        assert [len(each) for each in answer["topk_prompt_logprobs"][1:]] == [2, 2]


@check("skyrl")
async def skyrl_chat_and_texts() -> None:
    async with _skyrl() as client:
        chat = {"json": {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "session_id": "a"}}
        assert (await client.chat_completion(chat))["choices"][0]["message"]["content"]
        assert (await client.render_chat_completion(chat))["token_ids"]
        plain = {"json": {"model": MODEL, "prompt": "The sky is", "max_tokens": 4}}
        assert (await client.completion(plain))["choices"][0]["text"]
        assert await client.detokenize(await client.tokenize(["The sky"])) == ["The sky"]


@check("skyrl")
async def skyrl_control() -> None:
    async with _skyrl() as client:
        assert await client.get_world_size() == (1, 1)
        await client.pause()
        await client.load_lora_adapter("skyrl-lora", os.environ["SAMPLE_ADAPTER"])
        await client.resume()
        await client.load_lora_adapter("skyrl-lora", os.environ["SAMPLE_ADAPTER"])  # each step has the same name
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": {"max_tokens": 2}}
        assert all((await client.generate(batch, model="skyrl-lora"))["response_ids"])
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.sleep(level=2, tags=["weights", "kv_cache"])
        await client.wake_up(tags=["weights"])
        await client.wake_up(tags=["kv_cache"])
        assert all((await client.generate(batch, model="skyrl-lora"))["response_ids"])
        await client.unload_lora_adapter("skyrl-lora")


@check("renderers")
async def renderers_generate() -> None:
    from openai import AsyncOpenAI
    from renderers import create_renderer
    from renderers.client import generate
    from transformers import AutoTokenizer

    renderer = create_renderer(AutoTokenizer.from_pretrained(os.environ["BASE_FOLDER"]))
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    sampling = {"max_tokens": 6, "temperature": 1.0}
    extra = {"X-Session-ID": "a"}
    answer = await generate(
        client=client,
        renderer=renderer,
        messages=MESSAGES,
        model=MODEL,
        sampling_params=sampling,
        cache_salt="salt",
        extra_headers=extra,
    )
    assert 0 < len(answer["completion_ids"]) == len(answer["completion_logprobs"]) <= 6
    assert all(each <= 0 for each in answer["completion_logprobs"])
    assert answer["finish_reason"] in ("stop", "length") and answer["prompt_ids"]


@check("art")
async def art_dedicated_lora() -> None:
    """ART's own launcher starts a server; the calls after each step are made as its service makes them."""
    import importlib.util
    import shlex
    import shutil
    import socket

    import httpx

    (folder,) = importlib.util.find_spec("art").submodule_search_locations
    spec = importlib.util.spec_from_file_location("vllm_runtime", Path(folder, "vllm_runtime.py"))
    runtime = importlib.util.module_from_spec(spec)
    sys.modules["vllm_runtime"] = runtime
    spec.loader.exec_module(runtime)
    os.environ["ART_VLLM_RUNTIME_BIN"] = f"{shlex.quote(os.environ['LORIKEET'])} art-runtime"
    with socket.socket() as free, tempfile.TemporaryDirectory() as steps:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        for step in ("0000", "0001"):
            shutil.copytree(os.environ["SAMPLE_ADAPTER"], Path(steps, step))
        config = runtime.VllmRuntimeLaunchConfig(
            base_model=os.environ["BASE_FOLDER"],
            port=port,
            cuda_visible_devices="",
            lora_path=str(Path(steps, "0000")),
            served_model_name="agent@0",
            rollout_weights_mode="lora",
            engine_args={
                **{"generation_config": "vllm", "enable_lora": True, "max_loras": 2, "enable_sleep_mode": False},
                **{
                    "lora_target_modules": ["q_proj", "v_proj"],
                    "max_model_len": 512,
                    "store_dir": str(Path(steps, "s")),
                },
            },
            server_args={
                **{"return_tokens_as_token_ids": True, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
                "api_key": "default",
            },
        )
        free.close()
        process = subprocess.Popen(runtime.build_vllm_runtime_server_cmd(config), start_new_session=True)
        try:
            await runtime.wait_for_vllm_runtime(process=process, host="127.0.0.1", port=port, timeout=300)
            key = {"Authorization": "Bearer default"}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=key, timeout=60) as client:
                load = {"lora_name": "agent@1", "lora_path": str(Path(steps, "0001")), "load_inplace": True}
                assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
                names = {each["id"] for each in (await client.get("/v1/models")).json()["data"]}
                assert {"agent@0", "agent@1"} <= names
                chat = {"model": "agent@1", "messages": MESSAGES, "max_tokens": 4, "logprobs": True}
                answer = (await client.post("/v1/chat/completions", json=chat)).json()
                assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
                unload = await client.post("/v1/unload_lora_adapter", json={"lora_name": "agent@0"})
                assert unload.status_code == 200
                slept = await client.post("/sleep", params={"level": 1, "mode": "wait"})
                woken = await client.post("/wake_up")
                assert (slept.status_code, woken.status_code) == (200, 200)
                assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
