import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.vllm_backend import WorkerError, WorkerProcess

ECHO = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "fail" in message:
        sys.exit(message["fail"])
    print(json.dumps({"got": message}), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    script = tmp_path / "worker.py"
    script.write_text(ECHO)
    process = WorkerProcess([sys.executable, str(script)], dict(os.environ))
    yield process
    process.close()


def test_each_line_gets_its_answer(worker: WorkerProcess) -> None:
    assert worker.ask({"a": [1, None]}) == {"got": {"a": [1, None]}}
    assert worker.ask({"b": "ü"}) == {"got": {"b": "ü"}}


def test_between_its_turns_the_program_stands_still(worker: WorkerProcess) -> None:
    for turn in range(2):
        worker.ask({"turn": turn})
        stopped = os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
        assert stopped is not None
        assert stopped.si_code == os.CLD_STOPPED


def test_a_program_that_ends_says_why(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerError, match=r"worker\.py ended without an answer:\nno such model"):
        worker.ask({"fail": "no such model"})
    with pytest.raises(WorkerError, match="no such model"):
        worker.ask({})


def test_closing_ends_a_program_that_stands_still(worker: WorkerProcess) -> None:
    worker.ask({})
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
