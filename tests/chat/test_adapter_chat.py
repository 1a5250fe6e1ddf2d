"""Chat templates, parsers, tokens and defaults of an adapter's own, over HTTP."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from lorikeet.adapters.chat import AddedToken
from lorikeet.adapters.errors import AdapterError
from lorikeet.chat.added_tokens import with_tokens
from lorikeet.chat.text_processor import TextProcessor
from tests.chat.templates import OWN_TEMPLATE
from tests.support.api_server import TEMPLATE, TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, MESSAGES, body
from tests.support.fakes import write_adapter
from tests.support.tool_calls import LONG, TOOLS


def make(server: Running, name: str, files: dict[str, Any], seed: int = 1) -> Path:
    """Write an adapter with further files; those that are no text are written as JSON."""
    folder = write_adapter(server.sources / name, seed=seed)
    for file, content in files.items():
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


async def add(server: Running, name: str, files: dict[str, Any], seed: int = 1, **fields: Any) -> Any:
    make(server, name, files, seed)
    return await server.http.post("/v1/adapters", json={"name": name, "source": name, "replace": True, **fields})


def prompts(server: Running) -> list[str]:
    return [TOKENIZER.decode(each.prompt_token_ids, skip_special_tokens=False) for each in server.engine.submitted]


@pytest.mark.slow
async def test_adapters_with_and_without_own_chat_settings_are_served_together(start: Start) -> None:
    settings = 'system_prompt = "Be odd."\nreasoning_parser = "qwen3"\n[generation]\ntop_k = 7\n'
    files = {
        "chat_template.jinja": OWN_TEMPLATE,
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}, "chat_template": "not this one"},
        "generation_config.json": {"temperature": 0.25, "top_k": 3, "eos_token_id": [0]},
        "lorikeet.toml": settings,
    }
    calls = 'hm</think><|tool_call|>[{"name": "now", "arguments": {}}]'
    async with start(answer=f"<think>{calls}", max_model_len=LONG) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        assert (await add(server, "own", files)).status_code == 201
        odd, plain = await asyncio.gather(
            *(server.http.post(CHAT, json=body(model=name, tools=TOOLS)) for name in ("own", "formal"))
        )
        message = odd.json()["choices"][0]["message"]
        assert message["reasoning"] == "hm"
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
        assert plain.json()["choices"][0]["message"] == {"role": "assistant", "content": f"<think>{calls}"}

        by_name = {request.adapter.name: request for request in server.engine.submitted if request.adapter}
        own = by_name["own"]
        other = by_name["formal"]
        text = TOKENIZER.decode(own.prompt_token_ids, skip_special_tokens=False)
        assert text == "[system]Be odd.[user]hello<|tool_call|>2<|end|>"
        assert (own.sampling.temperature, own.sampling.top_k) == (0.25, 7)
        assert 0 in own.sampling.stop_token_ids
        assert (other.sampling.temperature, other.sampling.top_k) == (1.0, 0)
        assert 0 not in other.sampling.stop_token_ids

        counted = await server.http.post("/tokenize", json={"model": "own", "messages": MESSAGES, "tools": TOOLS})
        assert counted.json()["tokens"] == own.prompt_token_ids
        spaced = json.dumps(body(model="own", tools=TOOLS)).encode() + b" " * 70_000
        await server.http.post(CHAT, content=spaced, headers={"Content-Type": "application/json"})
        assert server.engine.submitted[-1].prompt_token_ids == own.prompt_token_ids

        card = (await server.http.get("/v1/models/own")).json()
        assert card["chat"] == {
            "chat_template": "its own",
            "generation_config": {"temperature": 0.25, "top_k": 7},
            "eos_token_ids": [0],
            "system_prompt": "Be odd.",
            "reasoning_parser": "qwen3",
        }
        assert "chat" not in (await server.http.get("/v1/models/formal")).json()


@pytest.mark.slow
async def test_fields_of_the_load_route_override_the_adapters_files(start: Start) -> None:
    async with start() as server:
        fields = {
            "chat_template": "{{ messages[-1].content }}!",
            "system_prompt": "ignored by the template",
            "generation_config": {"temperature": 0.5},
            "tool_call_parser": "mistral",
        }
        files = {"lorikeet.toml": 'system_prompt = "no"\ntool_call_parser = "hermes"', "chat_template.jinja": "no"}
        assert (await add(server, "own", files, **fields)).status_code == 201
        await server.http.post(CHAT, json=body(model="own"))
        assert prompts(server) == ["hello!"]
        assert server.engine.submitted[0].sampling.temperature == 0.5
        card = (await server.http.get("/v1/adapters/own")).json()
        assert card["chat"]["tool_call_parser"] == "mistral"
        assert card["chat"]["system_prompt"] == "ignored by the template"


@pytest.mark.slow
async def test_new_template_replaces_the_old_one_and_survives_a_restart(
    start: Start,
) -> None:
    async with start() as server:
        first = (await add(server, "own", {"chat_template.jinja": "one {{ messages[0].content }}"})).json()
        second = (await add(server, "own", {"chat_template.jinja": "two {{ messages[0].content }}"})).json()
        twin = (await add(server, "twin", {"tokenizer_config.json": {"chat_template": TEMPLATE}})).json()
        assert first["digest"] == second["digest"] == twin["digest"]
        assert "chat" not in twin, "its template is the base's"
        assert server.engine.dropped == []
    async with start() as server:
        for name in ("own", "twin"):
            await server.http.post(CHAT, json=body(model=name))
        assert prompts(server)[0] == "two hello"
        assert prompts(server)[1].startswith("<|im_start|>")
        await server.http.delete("/v1/adapters/own")
        assert (await add(server, "own", {"chat_template.jinja": ""})).status_code == 201
        assert "chat" not in (await server.http.get("/v1/models/own")).json()


@pytest.mark.slow
async def test_files_that_are_not_valid_are_refused_by_name(start: Start) -> None:
    of_tokens = {"added_tokens_decoder": {"x": {"content": "y"}}}
    too_high = {"added_tokens_decoder": {"9999": {"content": "<mine>"}}}
    async with start() as server:
        for at, (file, content, words) in enumerate(
            [
                ("chat_template.jinja", "{% for %}", "chat template does not compile"),
                ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
                ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
                ("tokenizer_config.json", of_tokens, "added tokens"),
                ("tokenizer_config.json", too_high, "'<mine>' as token 9999"),
                ("generation_config.json", {"temperature": -1}, "generation_config.json"),
                ("generation_config.json", {"eos_token_id": "end"}, "eos_token_id"),
                ("lorikeet.toml", "sytem_prompt = 'x'", "sytem_prompt"),
                ("lorikeet.toml", "[generation]\ntemperature = nan", "lorikeet.toml"),
                ("lorikeet.toml", "tool_call_parser = 'martian'", "'martian' must be one of"),
            ]
        ):
            reply = await add(server, f"own{at}", {file: content})
            assert reply.status_code == 400, (file, content)
            assert words in reply.json()["error"]["message"]


@pytest.mark.slow
async def test_a_hostile_template_harms_only_requests_of_its_adapter(start: Start) -> None:
    async with start() as server:
        await add(server, "own", {"chat_template.jinja": "fine {{ messages[0].content }}"})
        for name, template, status, words in (
            ("secret", "{{ ''.__class__.__mro__ }}", 400, "refuses these messages"),
            ("large", "{{ 'x' * 10**11 }}", 413, "too much memory"),
            ("slow", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", 400, "or time"),
        ):
            await add(server, name, {"chat_template.jinja": template})
            asked = (server.http.post(CHAT, json=body(model=model)) for model in (name, "own", "base"))
            bad, own, base = await asyncio.gather(*asked)
            assert (bad.status_code, own.status_code, base.status_code) == (status, 200, 200)
            assert words in bad.json()["error"]["message"]


def added(*tokens: tuple[int, str]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(at): {"content": text, "special": True} for at, text in tokens}}


@pytest.mark.slow
async def test_adapters_with_different_added_tokens_are_served(start: Start) -> None:
    async with start() as server:
        last = TOKENIZER.get_vocab_size()
        server.service.chats.base = _with_vocabulary(server, last + 2)
        one = added((last, "<one>"))
        two = added((last, "<two>"), (last + 1, "<three>"))
        pad = {**added((last + 99, "<pad>")), "pad_token": "<pad>"}
        for name, files in (("one", one), ("two", two), ("pad", pad)):
            assert (await add(server, name, {"tokenizer_config.json": files})).status_code == 201
        said = [{"role": "user", "content": "<one><two><three>"}]
        counts = []
        for name in ("one", "two", "pad"):
            reply = await server.http.post("/tokenize", json={"model": name, "messages": said})
            tokens = reply.json()["tokens"]
            counts.append([token for token in tokens if token >= last])
            text = await server.http.post("/detokenize", json={"model": name, "tokens": tokens})
            assert "<one><two><three>" in text.json()["prompt"]
        assert counts == [[last], [last, last + 1], []]
        server.engine.script = lambda request: [last, *TOKENIZER.encode("hello").ids]
        answers = [
            (
                await server.http.post(
                    "/v1/completions", json={"model": name, "prompt": "x", "skip_special_tokens": False}
                )
            )
            for name in ("one", "two")
        ]
        assert [each.json()["choices"][0]["text"] for each in answers] == ["<one>hello", "<two>hello"]


def _with_vocabulary(server: Running, size: int) -> Any:

    base = server.service.chats.base
    return dataclasses.replace(base, limits=msgspec.structs.replace(base.limits, vocabulary=size))


def test_a_reserved_token_may_get_another_name() -> None:
    reserved = TOKENIZER.token_to_id("<|im_start|>")
    assert reserved is not None
    made = TextProcessor(with_tokens(TOKENIZER, (AddedToken(reserved, "<mine>", special=True),)), None)
    assert made.token_ids("<mine>", add_special_tokens=False) == [reserved]
    assert made.token_ids("<|im_start|>", add_special_tokens=False) != [reserved]


def test_a_token_that_would_get_another_id_is_refused() -> None:
    words = Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    with pytest.raises(AdapterError, match="as token 400"):
        with_tokens(words, (AddedToken(400, "<mine>"),))


def test_a_token_behind_a_gap_keeps_its_id() -> None:
    made = with_tokens(TOKENIZER, (AddedToken(400, "<mine>"), AddedToken(390, "<yours>", special=True)))
    assert made.encode("<mine><yours>").ids == [400, 390]


def test_two_tokens_may_change_their_places() -> None:
    names = "<|im_start|>", "<|im_end|>"
    one, two = (TOKENIZER.token_to_id(name) for name in names)
    assert one is not None
    assert two is not None
    made = with_tokens(TOKENIZER, (AddedToken(one, names[1], special=True), AddedToken(two, names[0], special=True)))
    assert made.encode(names[0] + names[1]).ids == [two, one]


async def test_an_adapter_whose_template_leaves_the_text_out_is_refused_with_a_reason(start: Start) -> None:
    async with start() as server:
        await add(server, "own", {"chat_template.jinja": "{% for m in messages %}{{ m.role }}{% endfor %}"})
        reply = await server.http.post(CHAT, json=body(model="own"))
        assert reply.status_code == 400
        assert "drops user messages" in reply.json()["error"]["message"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json", "files"])
async def test_an_adapter_has_templates_for_tools_and_documents_and_by_name(start: Start, file: str) -> None:
    texts = {name: f"{name}:{{{{ messages[0].content }}}}" for name in ("default", "tool_use", "rag", "short")}
    texts["tool_use"] += "{{ tools | length if tools else 0 }}<tool_call>"
    texts["rag"] += "{{ documents[0].text }}"
    files: dict[str, Any] = {
        "tokenizer_config.json": {"chat_template": [{"name": name, "template": text} for name, text in texts.items()]}
    }
    if file == "chat_template.json":
        files = {file: {"chat_template": texts}}
    async with start(max_model_len=LONG) as server:
        if file == "files":
            folder = server.sources / "own" / "additional_chat_templates"
            folder.mkdir(parents=True)
            for name in ("tool_use", "rag", "short"):
                (folder / f"{name}.jinja").write_text(texts[name])
            files = {"chat_template.jinja": texts["default"]}
        assert (await add(server, "own", files)).status_code == 201
        for fields, expected in (
            ({}, "default:hello"),
            ({"tools": TOOLS}, "tool_use:hello2<tool_call>"),
            ({"documents": [{"title": "a", "text": "doc"}]}, "rag:hellodoc"),
            ({"chat_template": "tool_use" if file == "files" else "short"}, "" if file == "files" else "short:hello"),
            ({"chat_template": "default", "tools": TOOLS}, ""),
        ):
            reply = await server.http.post(CHAT, json=body(model="own", **fields))
            assert reply.status_code == 200, reply.text
            assert prompts(server)[-1] == expected or not expected
        reply = await server.http.post(CHAT, json=body(model="own", chat_template="{{ messages[0]['content'] }}"))
        assert reply.status_code == 200, reply.text
        assert prompts(server)[-1] == "hello"
        reply = await server.http.post(CHAT, json=body(model="own", chat_template="{{ messages"))
        assert reply.status_code == 400
        assert "chat_template" in reply.json()["error"]["message"]
