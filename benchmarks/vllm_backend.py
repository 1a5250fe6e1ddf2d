"""vLLM in its own environment as a backend of the offline benchmark, and the process that runs it."""

import contextlib
import glob
import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.offline_backends import OfflineBatch, OfflineResult
from lorikeet.core.machine import usable_cores

DEFAULT_PYTHON = Path(".venvs/vllm/bin/python")
"""Default Python of vLLM's environment, relative to the working directory."""

WORKER = Path(__file__).with_name("vllm_worker.py")

_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as ``max_lora_rank``; all adapters are padded to it."""
LARGEST_RANK = _MAX_RANKS[-1]

_LEAST_KV_GIB = 2
_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")
_LIBRARY_FOLDERS = ("/usr/lib/*", "/usr/lib", "/usr/local/lib")

_LOG_LINES = 15


class VllmBackend:
    """``LLM.generate`` on the whole batch, timed around that call inside the other process.

    vLLM in its fastest configuration on CPUs: compiled, bound to the cores (``VLLM_CPU_OMP_THREADS_BIND``), tcmalloc
    and Intel's OpenMP preloaded if they are found (see ``versions``), ``max_lora_rank`` no larger than needed, memory
    for all adapters. Prefix caching is off, because no prompt is repeated.

    Args:
        model_folder: of the base model.
        dtype: by name.
        folders: of the adapters.
        ranks: of the adapters.
        requests: largest batch.
        max_model_len: longest request.
        kv_bytes: KV of a full batch.
        threads: number of this process's cores to use.
        python: of vLLM's environment.

    Raises:
        WorkerError: vLLM did not load.
    """

    name = "vllm"

    def __init__(
        self,
        model_folder: Path,
        dtype: str,
        folders: Sequence[Path],
        ranks: Sequence[int],
        *,
        requests: int,
        max_model_len: int,
        kv_bytes: int,
        threads: int,
        python: Path = DEFAULT_PYTHON,
    ) -> None:
        libraries = _preloads(python)
        cores = sorted(usable_cores())[:threads]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # vLLM 0.32 cannot load its ahead-of-time compiled code ("finalize_loading") and compiles it at every start.
            # Its other cache works, and the compiled code is as fast.
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_CPU_KVCACHE_SPACE": str(max(_LEAST_KV_GIB, math.ceil(kv_bytes / 2**30))),
            "LD_PRELOAD": ":".join(str(library) for library in libraries),
        }
        # -P: the script's folder has modules that would shadow the standard library.
        self._worker = WorkerProcess([str(python), "-P", str(WORKER)], environment)
        settings = {
            "model": str(model_folder),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": requests,
            "adapters": [[folder.name, str(folder)] for folder in folders],
            "max_rank": next(rank for rank in _MAX_RANKS if rank >= max(ranks, default=1)),
        }
        try:
            self.versions = dict(self._worker.ask(settings)["versions"])
        except BaseException:
            self._worker.close()
            raise
        self.versions["preloaded"] = " ".join(library.name for library in libraries) or "nothing"

    def run(self, work: OfflineBatch) -> OfflineResult:
        """Run one batch with greedy sampling."""
        answer = self._worker.ask(work._asdict())
        return OfflineResult(answer["seconds"], answer["tokens"])

    def close(self) -> None:
        """Kill the other process."""
        self._worker.close()


def _preloads(python: Path) -> list[Path]:
    """Return the paths of the ``_LIBRARIES`` that are installed, in vLLM's environment or in the system's folders."""
    folders = [str(python.parent.parent / "lib"), *_LIBRARY_FOLDERS]
    found = [[path for folder in folders for path in sorted(glob.glob(f"{folder}/{name}"))] for name in _LIBRARIES]
    return [Path(paths[0]).absolute() for paths in found if paths]


class WorkerError(RuntimeError):
    """The program ended instead of answering. The message ends with the last lines of its standard error."""


class WorkerProcess:
    """Sends one JSON line, reads one JSON line, and stops the program with all its children in between.

    Otherwise programs that poll, or whose OpenMP threads spin, would slow down the backend whose turn it is. The
    children are reached through the process group. The group stays in this session, so the kernel ends a stopped group
    whose parent has died.

    Args:
        command: the program and its arguments.
        environment: its complete environment.

    Attributes:
        pid: of the program and of its process group.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = command[-1]
        # Stays open as long as the program runs.
        self._log = tempfile.TemporaryFile("w+", prefix="lorikeet-worker-")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            text=True,
            process_group=0,
        )
        self.pid = self._process.pid

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let the program run until it has answered with one line.

        Raises:
            WorkerError: it ended without an answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            os.killpg(self.pid, signal.SIGCONT)
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ProcessLookupError):
            line = ""
        if not line:
            raise WorkerError(f"{self._name} ended without an answer:\n{self._log_end()}")
        os.killpg(self.pid, signal.SIGSTOP)
        return dict(json.loads(line))

    def close(self) -> None:
        """Kill the program and its children."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # closing flushes what was never read
                if stream is not None:
                    stream.close()

    def _log_end(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-_LOG_LINES:])
