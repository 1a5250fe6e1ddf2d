"""Processes beside the API process."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from lorikeet.http.helper_processes import HelperProcesses
from tests.support.waiting import until


async def test_a_process_that_is_given_up_ends_with_its_children(tmp_path: Path) -> None:
    made = tmp_path / "child"
    processes = HelperProcesses("tests.http.forking_helper", lambda: os.fsencode(made), 1)
    asked = asyncio.create_task(processes.ask(b"work", timeout_s=60))
    await until(made.exists, "the child runs")
    (process,) = processes._all
    child = psutil.Process(int(made.read_text()))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert processes.pids == []
    await process.wait()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child has ended")


async def test_a_process_whose_start_is_given_up_answers_the_next_message(tmp_path: Path) -> None:
    processes = HelperProcesses("tests.http.forking_helper", lambda: os.fsencode(tmp_path / "child"), 1)
    for steps in range(3):  # Before the process exists, and while it gets ready.
        asked = asyncio.create_task(processes.ask(b"work", timeout_s=60))
        for _ in range(steps):
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    await until(lambda: processes._idle, "a process is ready")
    assert await processes.ask(b"", timeout_s=60) == b""
    await processes.close()
