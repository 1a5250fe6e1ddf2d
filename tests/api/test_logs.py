"""What reaches the log, and what must not."""

import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from lorikeet.api.logs import RequestIds, log
from lorikeet.core.logs import configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave structlog, logging and the hook for uncaught exceptions as they were."""
    before, root, hook = structlog.get_config(), logging.getLogger(), sys.excepthook
    handlers, level = root.handlers, root.level
    yield
    structlog.configure(**before)
    root.handlers, sys.excepthook = handlers, hook
    root.setLevel(level)
    logging.captureWarnings(False)


def test_lines_of_libraries_warnings_and_uncaught_exceptions_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", as_json=True)
    log.info("ours", adapter="one")
    logging.getLogger("asyncio").error("Exception in %s", "app")
    logging.getLogger("asyncio").info("not shown")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        sys.excepthook(RuntimeError, error, error.__traceback__)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["info", "error", "warning", "critical"]
    assert (lines[0]["event"], lines[0]["adapter"], lines[1]["event"]) == ("ours", "one", "Exception in app")
    assert "RuntimeError: broken" in lines[3]["exception"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_tracebacks_show_no_local_variables(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure_logs("info", as_json=as_json)

    def fails(key: str) -> None:
        raise RuntimeError("broken")

    try:
        fails("sk-" + "secret")
    except RuntimeError:
        log.exception("unexpected error")
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert "broken" in shown
    assert "sk-secret" not in shown


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_request_path_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure_logs("info", as_json=as_json)
    log.info("request", path="/a\x1b]0;title\x07\x9b1m/é")
    shown = capsys.readouterr().err
    assert not {"\x1b", "\x07", "\x9b"} & set(shown.replace("\x1b[0m", ""))
    assert "title" in shown


async def test_a_client_that_hangs_up_while_it_sends_its_request_is_no_failure() -> None:
    async def route(http: Request) -> Response:
        await http.body()
        return Response()

    app = Starlette()
    app.add_route("/", route, methods=["POST"])
    app.add_middleware(RequestIds)
    messages: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    with structlog.testing.capture_logs() as logged:
        await app(scope, receive, send)
    assert [(entry["event"], entry["status"]) for entry in logged] == [("request", 499)]
    assert sent == []
