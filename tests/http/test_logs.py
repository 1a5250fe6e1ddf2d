"""What reaches the log, and what must not."""

import errno
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from lorikeet.core.logs import configure_logs
from lorikeet.http.logs import RequestIds, log
from tests.support.api_server import Start


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave structlog, logging and the hook for uncaught exceptions as they were."""
    before = structlog.get_config()
    root = logging.getLogger()
    hook = sys.excepthook
    handlers = root.handlers
    level = root.level
    yield
    structlog.configure(**before)
    root.handlers = handlers
    sys.excepthook = hook
    root.setLevel(level)
    logging.captureWarnings(False)


def test_lines_of_libraries_warnings_and_uncaught_exceptions_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    logging.captureWarnings(False)  # an earlier test may have left it on, with another test's function
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


async def test_disconnect_while_sending_the_request_is_not_a_failure() -> None:
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


class Broken(io.StringIO):
    """A stream that cannot be written, as of a closed pipe or a full disk."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left"), ValueError("closed")]
)
async def test_unwritable_log_does_not_change_answers(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    configure_logs("info", as_json=True)
    written = io.StringIO()
    async with start() as server:
        monkeypatch.setattr(sys, "stderr", Broken(error))
        added = await server.http.post("/v1/adapters", json={"name": "a", "source": str(server.sources / "formal")})
        logging.getLogger("asyncio").error("Exception in %s", "app")
        monkeypatch.setattr(sys, "stderr", written)
        removed = await server.http.delete("/v1/adapters/a")
    assert (added.status_code, removed.status_code) == (201, 200)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    lost = [line for line in lines if line["event"] == "log could not be written"]
    assert [(line["level"], line["lines_lost"], line["reason"]) for line in lost] == [("warning", 3, str(error))]
    assert lines.index(lost[0]) == 1


@pytest.mark.slow
def test_process_with_a_full_log_continues() -> None:
    code = (
        "from lorikeet.core.logs import configure_logs; import structlog, sys\n"
        "configure_logs('info', as_json=False)\n"
        "for _ in range(3000): structlog.get_logger('lorikeet').info('line', text='x' * 100)\n"
        "print('done')"
    )
    with open("/dev/full", "w") as full:
        # Unbuffered: else Python fails at its exit, when it flushes what it could not write.
        ran = subprocess.run([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=full, check=True)
    assert ran.stdout == b"done\n"
