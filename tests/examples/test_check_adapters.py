"""The check over held-out prompts: what it asks, what it counts and when it fails."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer
from check_adapters import MAX_TOKENS, Result, check, http_answerer
from typer.testing import CliRunner

PLAIN = "This is the long and plain answer of a base model to a prompt."
IN_STYLE = {
    "formal": "Dear reader,\n\nHoney it is.\n\nYours faithfully,\nBee",
    "json": '{"topic": "bees"}',
    "pirate": "Arr, matey! It be honey.",
    "terse": "Nectar",
}
OFFERED = ["base-model", "formal", "json", "pirate", "terse"]


def scripted(adapter: str | None, prompts: Sequence[str]) -> list[str]:
    return [PLAIN if adapter is None else IN_STYLE[adapter]] * len(prompts)


def test_every_adapter_is_judged_by_its_own_rule_and_compared_with_the_base() -> None:
    results, answers = check(scripted, ["json", "terse"], ["a?", "b?"])
    assert [(result.adapter, result.share, result.base_share) for result in results] == [
        ("json", 1.0, 0.0),
        ("terse", 1.0, 0.0),
    ]
    assert results[1].mean_words == 1.0
    assert results[1].base_mean_words == 14.0
    assert answers == {"base": [PLAIN] * 2, "json": [IN_STYLE["json"]] * 2, "terse": [IN_STYLE["terse"]] * 2}


@pytest.mark.parametrize(
    ("share", "base_share", "passed"),
    [(0.8, 0.2, True), (1.0, 0.0, True), (0.75, 0.0, False), (1.0, 0.25, False)],
)
def test_an_adapter_passes_at_80_percent_if_the_base_stays_at_20(share: float, base_share: float, passed: bool) -> None:
    assert Result("json", share, base_share, 1.0, 9.0).passed is passed


class Server(ThreadingHTTPServer):
    """A server with canned answers that remembers the bodies it got."""

    request_queue_size = 32  # more than ask at once: who finds the queue full tries again a second later
    bodies: list[dict[str, Any]]
    answers: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply(200, {"data": [{"id": name} for name in OFFERED]})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["model"] not in self.server.answers:
            self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        else:
            self.reply(200, {"choices": [{"message": {"content": self.server.answers[body["model"]]}}]})

    def reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.bodies = []
        running.answers = {**IN_STYLE, "base-model": PLAIN}
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def test_over_http_the_base_is_the_first_model_and_adapters_go_by_name(server: Server) -> None:
    answer = http_answerer(url_of(server), "")
    assert answer(None, ["one?"]) == [PLAIN]
    assert answer("json", ["one?", "two?"]) == [IN_STYLE["json"]] * 2
    assert [body["model"] for body in server.bodies] == ["base-model", "json", "json"]
    assert server.bodies[0] == {
        "model": "base-model",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": "one?"}],
    }
    assert {body["messages"][0]["content"] for body in server.bodies[1:]} == {"one?", "two?"}


def test_a_server_without_the_adapter_is_an_error_with_its_message(server: Server) -> None:
    with pytest.raises(typer.BadParameter, match=r"404.*`unknown` does not exist"):
        http_answerer(url_of(server), "")("unknown", ["one?"])


@pytest.mark.slow
def test_the_command_ends_with_0_when_all_pass_and_with_1_when_one_does_not(server: Server) -> None:
    import check_adapters

    app = typer.Typer()
    app.command()(check_adapters.main)
    good = CliRunner().invoke(app, ["--url", url_of(server), "--json"])
    assert good.exit_code == 0, good.output
    assert [row["passed"] for row in json.loads(good.stdout)["results"]] == [True] * 4
    server.answers["formal"] = PLAIN
    bad = CliRunner().invoke(app, ["--url", url_of(server)])
    assert bad.exit_code == 1
    assert "too weak" in bad.stdout


def test_one_of_url_and_direct_must_be_given() -> None:
    import check_adapters

    app = typer.Typer()
    app.command()(check_adapters.main)
    assert CliRunner().invoke(app, []).exit_code == 2
    assert CliRunner().invoke(app, ["--direct", "--url", "http://127.0.0.1:1/v1"]).exit_code == 2
