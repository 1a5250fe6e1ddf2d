"""Tools, and the answers of a model that calls them."""

import dataclasses

from tests.support.api_server import TOKENIZER, Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

NOW = {"type": "function", "function": {"name": "now"}}

TOOLS = [WEATHER, NOW]

LONG = 2048

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def prompt_of(server: Running, at: int = -1) -> str:
    return TOKENIZER.decode(server.engine.submitted[at].prompt_token_ids, skip_special_tokens=False)


def set_reasoning(server: Running, parser: str) -> None:
    server.service.chats.base = dataclasses.replace(server.service.chats.base, reasoning_parser=parser)
