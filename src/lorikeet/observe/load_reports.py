"""Adds ORCA reports of the server's load to answers, for gateways that request them.

The header and its two forms: https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto, with the
names of vLLM's metrics.
"""

import json
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FORMAT_HEADER = "endpoint-load-metrics-format"
_REPORT_HEADER = "endpoint-load-metrics"


class LoadReports:
    """Middleware that adds the header ``endpoint-load-metrics`` where a request's format is ``TEXT`` or ``JSON``.

    Args:
        app: the wrapped application.
        load: returns the values of the metrics by name.
    """

    def __init__(self, app: ASGIApp, load: Callable[[], dict[str, float]]) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        form = Headers(scope=scope).get(_FORMAT_HEADER, "").upper() if scope["type"] == "http" else ""
        if form not in ("TEXT", "JSON"):
            await self._app(scope, receive, send)
            return

        async def send_with_report(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REPORT_HEADER] = f"{form} {_written(form, self._load())}"
            await send(message)

        await self._app(scope, receive, send_with_report)


def _written(form: str, load: dict[str, float]) -> str:
    if form == "JSON":
        return json.dumps({"named_metrics": load})
    return ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
