"""Lines of batch files."""

import json
from typing import Any

MESSAGES = [{"role": "user", "content": "hello"}]


def line(name: str, body: dict[str, Any] | None = None, url: str = "/v1/chat/completions", **more: Any) -> bytes:
    """One line of a file of requests."""
    body = {"messages": MESSAGES} if body is None else body
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more}).encode() + b"\n"
