"""Executes the papers' runs in a few processes, and stores each result under the run's specification."""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import ROOT
from benchmarks.papers.measure import Run


class Kept(NamedTuple):
    """A result, and the revision of the code that computed it."""

    result: Any
    revision: str


class Cache:
    """Stores results in a folder, one file each. Changes of the code do not invalidate results; each has its revision.

    A result is valid only while the results that it was computed from are stored unchanged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Kept] = {}

    def get(self, run: Run) -> Kept | None:
        """Return the stored result of a run."""
        if run.key not in self._known:
            file = self._file(run)
            if not file.is_file():
                return None
            entry = json.loads(file.read_text())
            if entry["made_from"] != self._made_from(run):
                return None
            self._known[run.key] = Kept(entry["result"], entry["revision"])
        return self._known[run.key]

    def put(self, run: Run, result: Any, revision: str) -> None:
        """Store a result. If the process dies during the call, no partial file remains."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known.clear()
        entry = {"run": run.specification, "made_from": self._made_from(run), "revision": revision, "result": result}
        part = self._file(run).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(entry))
        part.rename(self._file(run))

    def _made_from(self, run: Run) -> list[str | None]:
        """Return digests of the results of a run's ``after`` runs."""
        kept = [self.get(each) for each in run.after]
        return [each and hashlib.sha256(json.dumps(each.result).encode()).hexdigest()[:24] for each in kept]

    def forget(self, runs: Iterable[Run]) -> None:
        """Remove the stored results of runs, and of the runs before them."""
        self._known.clear()
        for run in in_order(runs):
            self._file(run).unlink(missing_ok=True)

    def _file(self, run: Run) -> Path:
        paper = run.function.__module__.rpartition(".")[2]
        return self._folder / f"{paper}-{run.function.__name__}-{run.key}.json"


def default_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/lorikeet/papers``, else below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorikeet" / "papers"


def revision() -> str:
    """Return the commit of the code, followed by a plus if files have changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    return f"{commit}+" if commit and changed else commit or "unknown"


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Return each run once, with the runs in its ``after`` before it."""
    found: dict[str, Run] = {}

    def visit(run: Run) -> None:
        if run.key not in found:
            for earlier in run.after:
                visit(earlier)
            found[run.key] = run

    for run in runs:
        visit(run)
    return list(found.values())


def run_missing(runs: Iterable[Run], cache: Cache, processes: int, say: Callable[[str], None]) -> None:
    """Execute the runs that the cache lacks, each as soon as the runs before it have results.

    Args:
        runs: runs in any order.
        cache: store of the results.
        processes: number of parallel processes; 1 means this process.
        say: called with a line after each run.

    Raises:
        RuntimeError: some runs failed. The results of the others are stored.
    """
    waiting = [run for run in in_order(runs) if cache.get(run) is None]
    if not waiting:
        return
    made_by, total, began_s = revision(), len(waiting), time.monotonic()
    failed: list[str] = []
    done = 0
    with _pool(processes) as pool:
        going: dict[Future[Any], Run] = {}
        while waiting or going:
            ready = [run for run in waiting if all(cache.get(each) is not None for each in run.after)]
            for run in ready:
                earlier = [kept.result for each in run.after if (kept := cache.get(each)) is not None]
                going[pool.submit(run.function, *earlier, *run.arguments)] = run
                waiting.remove(run)
            if not going:
                failed += [f"{run}: a run before it failed" for run in waiting]
                break
            finished, _ = wait(going, return_when=FIRST_COMPLETED)
            for future in finished:
                run = going.pop(future)
                if (error := future.exception()) is None:
                    cache.put(run, future.result(), made_by)
                else:
                    failed.append(f"{run}: {error!r}")
                done += 1
                spent_s = time.monotonic() - began_s
                left_s = spent_s / done * (total - done)
                say(f"[{done}/{total}] {spent_s:.0f} s, about {left_s:.0f} s left: {run}")
    if failed:
        raise RuntimeError("\n".join([f"{len(failed)} of {total} runs failed:", *failed]))


def _pool(processes: int) -> Executor:
    if processes == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
