"""A proxy of the gateway's own parts that only passes on: what HTTP alone costs behind ``lorikeet route``.

Run as a program: ``python -m benchmarks.accept.bare_proxy URL --port PORT``.
"""

import argparse
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lorikeet.gateway.connections import Connections, Reply


def main(url: str, port: int) -> None:
    """Pass completions on to one server, and say nothing else."""
    connections = Connections(url)

    async def complete(http: Request) -> Response:
        headers = [(b"content-type", b"application/json")]
        reply = await connections.send("POST", http.url.path, headers, await http.body())
        return StreamingResponse(_pieces(reply), reply.status, media_type="text/event-stream")

    async def health(http: Request) -> Response:
        return Response()

    routes = [Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)]
    uvicorn.run(Starlette(routes=routes), port=port, loop="uvloop", access_log=False, log_level="warning")


async def _pieces(reply: Reply) -> AsyncIterator[bytes]:
    while piece := await reply.piece():
        yield piece


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    main(given.url, given.port)
