"""Requests to the chat API, and the events and texts of its answers."""

import json
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": MESSAGES, **fields}


async def events(http: httpx.AsyncClient, url: str, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a stream to its end, which must be [DONE]."""
    async with http.stream("POST", url, json={**content, "stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
