"""The request log: one line for each request, in the workload format."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lorikeet.core.events import AdapterArrived, Admitted, FirstToken, KvArrived, Queued, RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.request_log import RequestLog
from tests.support.api_server import Start
from tests.support.chat_requests import CHAT, body, events
from tests.support.waiting import wait_until


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(log: RequestLog, arrival_s: float, name: str = "r") -> None:
    request = Request(RequestId(name), [1, 2, 3], SamplingParams(4), arrival_s)
    timings = RequestTimings(arrival_s, first_token_s=arrival_s + 0.5)
    log.on_ended(EndedRequest(request, timings, 2, "stop", arrival_s + 1.5, text="text"))


@pytest.mark.parametrize("whole", [0, 1, 2])
@pytest.mark.parametrize("half", ["", '{"arr', "x" * 200_000])
def test_half_a_line_of_a_process_that_was_killed_is_cut_off(tmp_path: Path, whole: int, half: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"arrival_s": 0.0, "unix_s": 5.0}\n' * whole + half)
    log = RequestLog(path, max_bytes=10**6, keep=1)
    write(log, 1.0)
    log.close()
    assert len(lines(path)) == whole + 1


async def test_every_request_leaves_a_line(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=10**6, keep=1)
    async with start(request_log=log) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        answer = (await server.http.post(CHAT, json=body())).json()
        await events(server.http, CHAT, body(model="formal", max_tokens=1))
        server.engine.refusal = "no"
        await server.http.post(CHAT, json=body(), headers={"X-Request-Id": "mine"})
    log.close()
    first, second, third = lines(path)
    assert first["arrival_s"] == 0
    assert first["adapter"] is None
    assert first["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert first["output_tokens"] == answer["usage"]["completion_tokens"]
    assert 0 < first["queue_s"] <= first["ttft_s"] <= first["e2e_s"]
    assert first["adapter_wait_s"] == first["kv_wait_s"] == 0
    assert (second["adapter"], second["finish_reason"], second["output_tokens"]) == ("formal", "length", 1)
    assert second["arrival_s"] > 0
    assert (third["finish_reason"], third["queue_s"], third["ttft_s"]) == ("error", None, None)
    assert third["request_id"].startswith("mine-")
    assert "hello" not in path.read_text()


def test_the_parts_of_ttft_add_up(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", max_bytes=10**6, keep=1)
    name = RequestId("r")
    timings = RequestTimings(arrival_s=10.0)
    for event in (
        Queued(name, 10.25),
        Admitted(name, 11.0, 32, waits_for_adapter=True, waits_for_kv=True),
        KvArrived(name, 11.5),
        AdapterArrived(name, 13.0),
        FirstToken(name, 13.5),
    ):
        timings.apply(event)
    log.on_ended(EndedRequest(Request(name, [1], SamplingParams(4), 10.0), timings, 1, "stop", 14.0))
    log.close()
    (line,) = lines(tmp_path / "requests.jsonl")
    parts = [line[part] for part in ("queue_s", "adapter_wait_s", "kv_wait_s")]
    assert parts == [1.0, 2.0, 0.0], "the KV came while the adapter was awaited"
    assert line["ttft_s"] - sum(parts) == 0.5, "prefill"


def test_assisted_request_does_not_wait_for_its_adapter() -> None:
    name = RequestId("r")
    timings = RequestTimings(arrival_s=10.0)
    for event in (
        Queued(name, 10.25),
        Admitted(name, 11.0, 0),
        AdapterArrived(name, 13.0),
        FirstToken(name, 13.5),
    ):
        timings.apply(event)
    assert (timings.adapter_wait_s, timings.first_token_s) == (0.0, 13.5)


async def test_text_is_logged_only_on_request(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=10**6, keep=1, text=True)
    async with start(request_log=log) as server:
        await server.http.post(CHAT, json=body())
        prompt = server.engine.submitted[0].prompt_token_ids
    log.close()
    (line,) = lines(path)
    assert (line["text"], line["prompt_token_ids"]) == ("hello world", prompt)


def test_files_are_rotated_by_size_and_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=1, keep=2)
    for number in range(5):
        write(log, float(number), f"r{number}")
    log.close()
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2"]
    kept = [lines(tmp_path / name)[0] for name in files]
    assert [line["request_id"] for line in kept] == ["r4", "r3", "r2"]
    assert all(line["arrival_s"] == 0 for line in kept)


def test_a_rotation_that_fails_loses_no_line_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=1, keep=1)
    obstacle = tmp_path / "requests.jsonl.1"
    obstacle.mkdir()
    for number in range(3):
        write(log, float(number), f"r{number}")
    # The writer flushes when it has caught up.
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= 3, "three lines are written")
    obstacle.rmdir()
    write(log, 3.0, "r3")
    log.close()
    assert [line["request_id"] for line in lines(obstacle)] == ["r0", "r1", "r2"]
    assert [line["request_id"] for line in lines(path)] == ["r3"]


def test_a_line_that_cannot_be_written_does_not_end_the_log(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=10**6, keep=1)
    write(log, 1.0, "half a character: \ud800")
    write(log, 2.0, "r1")
    log.close()
    assert [line["request_id"] for line in lines(path)] == ["r1"]


def test_lines_that_the_disk_cannot_take_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.observe.request_log._MAX_QUEUED", 2)
    writing = threading.Event()
    go_on = threading.Event()
    written = RequestLog._write

    def slow(log: RequestLog, line: dict[str, Any]) -> None:
        writing.set()
        go_on.wait()
        written(log, line)

    monkeypatch.setattr(RequestLog, "_write", slow)
    log = RequestLog(tmp_path / "requests.jsonl", max_bytes=10**6, keep=1)
    write(log, 0.0, "r0")
    writing.wait()
    for number in range(1, 6):
        write(log, float(number), f"r{number}")
    assert log.dropped == 3
    go_on.set()
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "requests.jsonl")] == ["r0", "r1", "r2"]


def test_arrivals_go_on_counting_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for arrival_s in (100.0, 107.0):
        log = RequestLog(path, max_bytes=10**6, keep=1)
        write(log, arrival_s)
        log.close()
    first, second = lines(path)
    assert first["arrival_s"] == 0
    assert abs(second["arrival_s"] - 7) < 0.1


def test_file_that_is_not_a_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("something else\n")
    log = RequestLog(path, max_bytes=10**6, keep=1)
    write(log, 5.0)
    log.close()
    assert path.read_text().startswith("something else\n{")
