"""Reads answers of the messages API and of the responses API."""

import json
from typing import Any

import httpx


async def events(http: httpx.AsyncClient, path: str, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a stream, whose events must be named in both places."""
    found = []
    async with http.stream("POST", path, json={**content, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        text = "".join([part async for part in reply.aiter_text()])
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def merged(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream together, as Anthropic's client does."""
    message: dict[str, Any] = stream[0]["message"]
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    partial = ""
    for event in stream[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                partial = ""
            case "content_block_delta":
                block = message["content"][event["index"]]
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                    block["input"] = partial
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block["input"])
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))
