"""Tools and adapters with the default model, the whole server as users start it."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from lorikeet.models.default import NAME
from tests.support.chat_requests import CHAT
from tests.support.served import serving
from tests.support.tool_calls import NOW, WEATHER

pytestmark = pytest.mark.slow

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.mark.long
async def test_the_default_model_and_its_adapters_make_valid_calls(default_model_cache: Path, tmp_path: Path) -> None:
    flags = ("--adapter-dir", str(ADAPTERS), "--memory", "256MiB")
    async with serving(default_model_cache / NAME, tmp_path, *flags) as server:
        names = [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]]
        assert names[1:] == ["formal", "json", "pirate", "terse"]
        asked = {
            "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
            "tools": [WEATHER, NOW],
            "temperature": 0,
            "max_tokens": 64,
            "parallel_tool_calls": False,
        }
        named = {"type": "function", "function": {"name": "get_weather"}}
        replies = await asyncio.gather(
            *(
                server.http.post(CHAT, json={**asked, "model": model, "tool_choice": choice})
                for model in (names[0], "pirate", "terse")
                for choice in ("required", named)
            )
        )
        for reply in replies:
            (choice,) = reply.json()["choices"]
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert choice["message"]["content"] is None
            assert call["function"]["name"] in ("get_weather", "now")
            assert arguments.keys() == ({"city"} if call["function"]["name"] == "get_weather" else set())
        cities = [json.loads(each.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["city"]
                  for each in replies[1::2]]  # fmt: skip
        assert all("Oslo" in city for city in cities)
        assert (await server.http.post(CHAT, json={**asked, "model": "parrot"})).status_code == 404


OWN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
OWN_SETTINGS = 'system_prompt = "Be odd."\nreasoning_parser = "deepseek_r1"\n[generation]\ntemperature = 0.0\n'


async def test_adapters_with_and_without_own_chat_settings_run_together(
    default_model_cache: Path, tmp_path: Path
) -> None:
    """In the same steps: its template, parser and defaults are its own, and the other's answer is not touched."""
    folder = tmp_path / "adapters"
    for name, sample in (("own", "pirate"), ("plain", "formal")):
        shutil.copytree(ADAPTERS / sample, folder / name)
    (folder / "own" / "chat_template.jinja").write_text(OWN_TEMPLATE)
    (folder / "own" / "lorikeet.toml").write_text(OWN_SETTINGS)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    # In bfloat16 a token that is nearly as likely may win where a step computes other numbers of tokens.
    flags = ("--adapter-dir", str(folder), "--memory", "256MiB", "--dtype", "float32", "--max-model-len", "1024")
    async with serving(default_model_cache / NAME, tmp_path, *flags) as server:
        begun = asyncio.Event()

        async def ask(model: str, max_tokens: int, **fields: object) -> dict[str, str]:
            said = {"content": "", "reasoning": ""}
            asked = {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}
            async with server.http.stream("POST", CHAT, json={**asked, "stream": True}) as reply:
                assert reply.status_code == 200
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        delta = json.loads(line[6:])["choices"][0]["delta"]
                        for kind in said:
                            said[kind] += delta.get(kind) or ""
                        if model == "own":
                            begun.set()
            return said

        alone = await ask("plain", 16, temperature=0)
        own_alone = await ask("own", 64)
        begun.clear()
        running = asyncio.create_task(ask("own", 64))
        await begun.wait()
        beside = await ask("plain", 16, temperature=0)
        assert not running.done(), "they ran in the same steps"
        own = await running
        assert own == own_alone, "its temperature is 0"
        assert (own["content"], bool(own["reasoning"])) == ("", True)
        assert beside == alone
        assert (bool(beside["content"]), beside["reasoning"]) == (True, "")

        prompts = [
            (await server.http.post("/tokenize", json={"model": model, "messages": messages})).json()["tokens"]
            for model in ("own", "plain")
        ]
        reply = await server.http.post("/detokenize", json={"model": "own", "tokens": prompts[0]})
        assert reply.json()["prompt"] == f"[system] Be odd.\n[user] {messages[0]['content']}\n[assistant] "
        whole = await server.http.post(CHAT, json={"model": "own", "messages": messages, "max_tokens": 1})
        assert whole.json()["usage"]["prompt_tokens"] == len(prompts[0]) != len(prompts[1])
