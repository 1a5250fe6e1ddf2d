"""``lorikeet batch``: a file of requests, by a server that runs or one that it starts."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorikeet.cli.batch_sender import BatchCounts, BatchError, BatchFiles, send_batch
from lorikeet.serving.batches.lines import LineError, error_line
from tests.support.api_server import Start, sources, start  # noqa: F401 - fixtures
from tests.support.batch_lines import MESSAGES, line
from tests.support.fakes import write_adapter
from tests.support.live import has_ended
from tests.support.served import COMMAND, make_model
from tests.support.waiting import until


def requests_in(folder: Path, number: int, models: str = "base formal") -> Path:
    names = models.split()
    bodies = ({"messages": MESSAGES, "model": names[index % len(names)], "max_tokens": 8} for index in range(number))
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(line(str(index), body) for index, body in enumerate(bodies)))
    return path


def lines_of(path: Path) -> dict[str, Any]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


@pytest.mark.slow
async def test_a_file_is_answered_in_the_background_and_goes_on_where_it_stopped(start: Start, tmp_path: Path) -> None:  # noqa: F811
    source, target, shown = requests_in(tmp_path, 20, "base formal nobody"), tmp_path / "out.jsonl", list[BatchCounts]()
    async with start() as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        server.engine.open.clear()
        files = BatchFiles(source, target)
        with pytest.raises(BatchError, match="another process writes to it"):
            BatchFiles(source, target)
        sending = asyncio.create_task(send_batch(files, str(server.http.base_url), None, 3, shown.append))
        await until(lambda: len(server.engine.submitted) == 3, "three requests are in flight")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        files.close()
        server.engine.open.set()
        target.write_bytes(target.read_bytes() + b'{"custom_id": "half')
        before = len(lines_of_whole(target))
        files = BatchFiles(source, target)
        assert files.counts == (20, before, 0)
        server.engine.submitted.clear()
        counts = await send_batch(files, str(server.http.base_url), None, 3, shown.append)
        files.close()
        assert counts == shown[-1] == (20, 20, shown[-1].failed)
        assert all(request.background for request in server.engine.submitted)
    answers = lines_of(target)
    assert len(answers) == 20
    assert answers["1"]["response"]["body"]["model"] == "formal"
    assert answers["2"]["response"]["status_code"] == 404
    assert answers["2"]["error"]["message"] == "The model `nobody` does not exist."


def lines_of_whole(path: Path) -> list[bytes]:
    return [each for each in path.read_bytes().splitlines(keepends=True) if each.endswith(b"\n")]


async def test_a_server_that_is_gone_ends_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.cli.batch_sender._FIRST_PAUSE_S", 0.0)
    files = BatchFiles(requests_in(tmp_path, 2), tmp_path / "out.jsonl")
    with pytest.raises(BatchError, match=r"http://127\.0\.0\.1:9: "):
        await send_batch(files, "http://127.0.0.1:9", None, 2, lambda counts: None)
    files.close()


async def test_a_wrong_key_ends_the_batch_and_answers_nothing(start: Start, tmp_path: Path) -> None:  # noqa: F811
    async with start(api_keys=("right",)) as server:
        files = BatchFiles(requests_in(tmp_path, 2), tmp_path / "out.jsonl")
        with pytest.raises(BatchError, match="needs a key"):
            await send_batch(files, str(server.http.base_url), "wrong", 2, lambda counts: None)
        assert files.counts.done == 0
        files.close()


def test_wrong_files_are_refused_before_anything_starts(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(line("a") + b"{}\n")
    with pytest.raises(LineError, match="line 2: "):
        BatchFiles(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    source.write_bytes(line("a"))
    with pytest.raises(BatchError, match="cannot be in the file of the requests"):
        BatchFiles(source, source)
    (tmp_path / "other").write_text("text\n")
    with pytest.raises(BatchError, match="does not contain answers"):
        BatchFiles(source, tmp_path / "other")


@pytest.mark.slow
async def test_the_command_starts_a_server_and_ends_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    write_adapter(tmp_path / "adapters" / "one", layers=3, hidden=48)
    source, target = requests_in(tmp_path, 400, "tiny one"), tmp_path / "out.jsonl"
    target.write_bytes(b"".join(error_line("x", str(index), "code", "message") for index in range(380)))
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "home"), "LORIKEET_ENGINE__MEMORY_BYTES": str(2**24)}
    files = ["-i", str(source), "-o", str(target)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "run-batch", *files, "--model", str(model), "--concurrency", "1"),
        *("--adapter-dir", str(tmp_path / "adapters")),
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    await until(lambda: len(target.read_bytes().splitlines()) > 383, "some answers are there")
    (server,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    _, said = await process.communicate()
    assert process.returncode == 130
    assert "380 of 400 requests have answers; going on" in said.decode()
    assert "run the command again to go on" in said.decode()
    assert has_ended(server)
    answers = lines_of(target)
    assert {answers[str(index)]["response"]["body"]["model"] for index in (380, 381)} == {"tiny", "one"}
