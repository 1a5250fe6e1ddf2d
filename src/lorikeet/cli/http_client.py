"""Sends HTTP requests to a running server, for the commands that need one."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from lorikeet.cli.console import fail
from lorikeet.http.urls import server_root, unix_socket

if TYPE_CHECKING:  # This import takes a third of the import time of all commands, and ``serve`` does not need it.
    import aiohttp

Url = Annotated[str, typer.Option(help="Address of the server; unix:PATH for one with --uds.", envvar="LORIKEET_URL")]
ApiKey = Annotated[str | None, typer.Option(help="Key for the server.", envvar="LORIKEET_API_KEY", show_default=False)]
DEFAULT_URL = "http://127.0.0.1:8000"

_CONNECT_S = 5.0


class AnswerError(Exception):
    """The server answered with an error, or its answer ended with one."""


def connector_to(url: str) -> "tuple[str, aiohttp.BaseConnector]":
    """Return the root of a server's routes, and a connector to it, which uses a Unix socket for ``unix:PATH``.

    The caller must be in a running event loop.
    """
    import aiohttp

    if path := unix_socket(url):
        return "http://localhost", aiohttp.UnixConnector(path, limit=0)
    return server_root(url), aiohttp.TCPConnector(limit=0)


class ServerClient:
    """Calls the routes that commands use.

    Errors of the server end the command with the server's message, except errors of answers. Every call runs a new
    event loop, so it cannot be made inside an event loop.

    Args:
        url: the server's URL.
        api_key: key that is sent as a bearer token.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """Send GET and return the JSON object of the answer."""
        return self._call("GET", path, params=parameters)

    def has_model(self, name: str) -> bool:
        """Return whether the server has a model. A model may have names that the server does not list."""
        status, _ = self._exchange("GET", f"/v1/models/{quote(name)}")
        return status < 400

    def post(self, path: str, body: dict[str, Any], words: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Send POST with ``body`` and return the JSON object of the answer.

        Args:
            path: the route.
            body: the body.
            words: replacements in an error's message, where it names fields of the body for which a command has flags.
        """
        return self._call("POST", path, words, json=body)

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send PATCH with ``body`` and return the JSON object of the answer."""
        return self._call("PATCH", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        """Send DELETE and return the JSON object of the answer."""
        return self._call("DELETE", path)

    def stream_chat(self, model: str, messages: list[dict[str, str]], **parameters: Any) -> Iterator[str]:
        """Yield the pieces of an answer as they arrive.

        Raises:
            AnswerError: the server refuses the request, or the answer ends with an error.
        """
        import aiohttp

        lines = self._stream({"model": model, "messages": messages, "stream": True, **parameters})
        # When the caller stops early, leaving the runner ends the lines, and with them the connection.
        with asyncio.Runner() as runner:
            try:
                while line := runner.run(_next_line(lines)):
                    data = line.rstrip(b"\r\n")
                    if data.startswith(b"data: ") and data != b"data: [DONE]":
                        yield from _pieces(json.loads(data.removeprefix(b"data: ")))
            except aiohttp.ClientError as error:
                raise AnswerError(f"{self._url}: {_reason(error)}") from error

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            if response.status >= 400:
                raise AnswerError(_message(response.status, await response.read()))
            async for line in response.content:
                yield line

    def _call(
        self, method: str, path: str, words: Mapping[str, str] = MappingProxyType({}), **arguments: Any
    ) -> dict[str, Any]:
        status, content = self._exchange(method, path, **arguments)
        if status >= 400:
            message = _message(status, content)
            for said, meant in words.items():
                message = message.replace(said, meant)
            fail(message)
        return dict(json.loads(content))

    def _exchange(self, method: str, path: str, **arguments: Any) -> tuple[int, bytes]:
        """Return the status and body of an answer of any status. If the server cannot be reached, end the command."""
        import aiohttp

        try:
            return asyncio.run(self._answer(method, path, **arguments))
        except aiohttp.ClientError as error:
            fail(f"{self._url}: {_reason(error)}; is a server running there? (--url or LORIKEET_URL names another)")

    async def _answer(self, method: str, path: str, **arguments: Any) -> tuple[int, bytes]:
        async with self._request(method, path, **arguments) as response:
            return response.status, await response.read()

    @asynccontextmanager
    async def _request(self, method: str, path: str, **arguments: Any) -> "AsyncIterator[aiohttp.ClientResponse]":
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        root, connector = connector_to(self._url)
        uses_proxy = not unix_socket(self._url)
        async with (
            aiohttp.ClientSession(
                headers=self._headers, timeout=timeout, connector=connector, trust_env=uses_proxy
            ) as session,
            session.request(method, root + path, allow_redirects=False, **arguments) as response,
        ):
            yield response


async def _next_line(lines: AsyncIterator[bytes]) -> bytes:
    """Return the next line with its line end; empty after the last line."""
    return await anext(lines, b"")


def _pieces(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise AnswerError(str(chunk["error"].get("message", chunk["error"])))
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            yield text


def _message(status: int, content: bytes) -> str:
    """Return the server's error message if it has OpenAI's form; otherwise the body."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{status}: {content.decode(errors='replace')[:500]}"
    return str(error["message"] if isinstance(error, dict) else error)


def _reason(error: "aiohttp.ClientError") -> str:
    """Return the cause of a failed connection as the system's message."""
    import aiohttp

    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return "Request URL is missing an 'http://' or 'https://' protocol."
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        said = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is not trusted ({said}): name its authority's file in SSL_CERT_FILE"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return f"[Errno {number}] {os.strerror(number)}" if number > 0 else str(error.os_error)
    return str(error) or type(error).__name__
