"""Adapters from misbehaving web servers: redirects, trickles, refusals."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler
from math import ceil
from pathlib import Path

import pytest

from lorikeet.adapters.errors import AdapterError, AdapterNotFound
from lorikeet.adapters.sources import fetch
from lorikeet.config import AdapterSettings
from tests.adapters.builders import write_adapter
from tests.support.web_server import serving_http

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class Handler(BaseHTTPRequestHandler):
    """Answers as the test says."""

    answer: Callable[["Handler"], None]

    def do_GET(self) -> None:
        with suppress(ConnectionError):
            self.answer()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def send(self, content: bytes, *, announced: int | None = None, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if announced is None else announced))
        self.end_headers()
        self.wfile.write(content)

    def redirect(self, url: str, status: int = 307) -> None:
        self.send_response(status)
        self.send_header("Location", url)
        self.send_header("Content-Length", "0")
        self.end_headers()


def web_server(answer: Callable[[Handler], None]) -> AbstractContextManager[str]:
    """Serve in threads; enter for the address."""
    return serving_http(type("Answering", (Handler,), {"answer": answer}))


@pytest.fixture
def uploaded(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "uploaded")


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


@pytest.fixture
def files(uploaded: Path) -> Iterator[str]:
    """A server with the adapter, whatever the folder and the query."""

    def answer(request: Handler) -> None:
        file = uploaded / request.path.partition("?")[0].rpartition("/")[2]
        if file.exists():
            request.send(file.read_bytes())
        else:
            request.send(b"", status=403)

    with web_server(answer) as url:
        yield url


def assert_same(into: Path, uploaded: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        assert (into / name).read_bytes() == (uploaded / name).read_bytes()


def failure(source: str, into: Path, allowed: str = "", **settings: float) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        fetch(source, AdapterSettings(allowed_sources=(allowed or source,), **settings), into)  # type: ignore[arg-type]
    return caught.value


def test_redirects_below_allowed_urls_are_followed(files: str, uploaded: Path, into: Path) -> None:
    def answer(request: Handler) -> None:
        request.redirect(f"{files}/signed/{request.path.rpartition('/')[2]}?key=a/../b%20c", 302)

    with web_server(answer) as moved:
        fetch(f"{moved}/team/a", AdapterSettings(allowed_sources=(f"{moved}/team", f"{files}/signed/")), into)
        assert_same(into, uploaded)
        for copied in into.iterdir():
            copied.unlink()
        fetch(f"{moved}/team/a", AdapterSettings(), into, trusted=True)
    assert_same(into, uploaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{files}/x", "redirects to http://127.0.0.1"),
        ("/other/x", "not below an allowed source"),
        ("/team/../other/x", "/other/x, which is not below"),
        ("/team/%2e%2e/other/x", "escapes"),
        ("file:///etc/passwd", "not on the web"),
        ("/team/again", "more than 5 redirects"),
    ],
)
@pytest.mark.parametrize("status", [301, 307])
def test_any_other_redirect_is_refused(files: str, into: Path, target: str, said: str, status: int) -> None:
    with web_server(lambda request: request.redirect(target.format(files=files), status)) as moved:
        found = failure(f"{moved}/team/a", into, f"{moved}/team/")
    assert said in str(found)
    assert not isinstance(found, AdapterNotFound)
    assert not list(into.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("source", ["{url}/a", "hf://org/repo", "s3://bucket/a"])
def test_time_limit_ends_a_trickle_in_the_middle_of_a_read(
    into: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    def answer(request: Handler) -> None:
        if not trickles:
            request.send(b"", status=404)
            return
        asked.append(request.path)
        request.send(b"", announced=1000)
        while request.command == "GET":  # an answer to HEAD has no body
            request.wfile.write(b" ")
            request.wfile.flush()
            time.sleep(0.05)

    asked: list[str] = []
    trickles = False
    with web_server(answer) as url:
        for name in ("HF_ENDPOINT", "AWS_ENDPOINT_URL"):
            monkeypatch.setenv(name, url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        began_s = time.monotonic()
        failure(source.format(url=url), into)
        limit_s = ceil(1 + 2 * (time.monotonic() - began_s))  # the process starts and imports within it
        trickles = True
        began_s = time.monotonic()
        found = failure(source.format(url=url), into, source_timeout_s=limit_s)
        assert asked
        assert time.monotonic() - began_s < limit_s + 30.0, "no read has to time out by itself, after 60 s"
    assert f"not read within {limit_s} s (--source-timeout)" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403, 404])
def test_refused_and_missing_urls_have_different_errors(into: Path, status: int) -> None:
    with web_server(lambda request: request.send(b"", status=status)) as url:
        found = failure(url + "/a", into)
    assert str(status) in str(found)
    assert isinstance(found, AdapterNotFound) == (status == 404)


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 404])
def test_refused_and_missing_repositories_have_different_errors(
    into: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def answer(request: Handler) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", "RepoNotFound")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with web_server(answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        found = failure("hf://org/repo", into)
    assert isinstance(found, AdapterNotFound) == (status == 404), str(found)
    assert ("HF_TOKEN" in str(found)) == (status == 401)


@pytest.mark.slow
def test_a_file_that_ends_early_or_is_too_large_is_refused(into: Path) -> None:
    with web_server(lambda request: request.send(b"{}", announced=3)) as url:
        assert "ended after 2 of 3 bytes" in str(failure(url + "/a", into))
    with web_server(lambda request: request.send(b" " * 2**21)) as url:
        assert "at most" in str(failure(url + "/a", into))
