"""Bodies of requests through the router."""

from typing import Any


def body(model: str = "base", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "once", "max_tokens": 5, **fields}
