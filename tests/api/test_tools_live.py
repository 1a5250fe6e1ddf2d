"""Tools and adapters with the default model, the whole server as users start it."""

import asyncio
import json
from pathlib import Path

import pytest

from lorikeet.models.default import NAME
from tests.api.test_chat import CHAT
from tests.api.test_serve import serving
from tests.api.test_tools import NOW, WEATHER

pytestmark = pytest.mark.slow

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"


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
