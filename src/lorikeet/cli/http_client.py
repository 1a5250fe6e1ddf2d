"""HTTP client of a running server, for the commands that talk to one."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from lorikeet.cli.console import fail
from lorikeet.core.urls import server_root

Url = Annotated[str, typer.Option(help="Address of the server.", envvar="LORIKEET_URL")]
ApiKey = Annotated[str | None, typer.Option(help="Key for the server.", envvar="LORIKEET_API_KEY", show_default=False)]
DEFAULT_URL = "http://127.0.0.1:8000"

_CONNECT_S = 5.0


class AnswerError(Exception):
    """What the server says instead of an answer, or of its end."""


class ServerClient:
    """The routes that the commands use. Errors of the server end the command with its message, but for answers.

    Args:
        url: where it listens.
        api_key: sent as a bearer token.
        transport: for tests.
    """

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._http = httpx.Client(base_url=server_root(url), headers=headers, timeout=timeout, transport=transport)

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """GET a JSON object."""
        return self._call("GET", path, params=parameters)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST ``body`` and return the JSON object that comes back."""
        return self._call("POST", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        """DELETE and return the JSON object that comes back."""
        return self._call("DELETE", path)

    def stream_chat(self, model: str, messages: list[dict[str, str]], **parameters: Any) -> Iterator[str]:
        """Yield the pieces of an answer as they arrive.

        Raises:
            AnswerError: the server refuses the request, or its answer ends with an error.
        """
        body = {"model": model, "messages": messages, "stream": True, **parameters}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise AnswerError(_message(response))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from _pieces(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise AnswerError(f"{self._http.base_url}: {error}") from error

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            fail(f"{self._http.base_url}: {error}; is a server running there?")
        if response.is_error:
            fail(_message(response))
        return dict(response.json())


def _pieces(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise AnswerError(str(chunk["error"].get("message", chunk["error"])))
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            yield text


def _message(response: httpx.Response) -> str:
    """The server's own words where they have OpenAI's form, else the body."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:500]}"
    return str(error["message"] if isinstance(error, dict) else error)
