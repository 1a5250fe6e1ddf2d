"""Which files of Lorikeet one streaming chat passes: ``python -m benchmarks.request_path``.

It starts a real server with the sample adapters and sends a first chat, so that the adapter is loaded and everything is
imported. During a second chat ``sys.setprofile`` observes every Python call in the API process and the engine process,
on all threads. The files are those of the package whose functions were called.

Work that needs no request (gauges, health checks) is counted, too; it is a few files.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.harness import chat_body, default_model, print_setup, print_table, running_server, sample_flags

HOOK = '''\
"""Counts calls of functions of Lorikeet between two signal files; imported at the start of every Python."""

import json
import os
import sys
import threading
import time

FOLDER = os.environ["REQUEST_PATH_FOLDER"]
PACKAGE = os.sep + "lorikeet" + os.sep
calls = {}
is_on = False


def note(frame, event, argument):
    if is_on and event == "call":
        code = frame.f_code
        calls[code] = calls.get(code, 0) + 1


def watch():
    """Turn counting on and off as the files ``begin`` and ``end`` appear, then write what was counted."""
    global is_on
    while not os.path.exists(os.path.join(FOLDER, "begin")):
        time.sleep(0.01)
    is_on = True
    while not os.path.exists(os.path.join(FOLDER, "end")):
        time.sleep(0.01)
    is_on = False
    found = [(code.co_filename, code.co_qualname, count) for code, count in list(calls.items())]
    ours = [each for each in found if PACKAGE in each[0]]
    name = os.path.join(FOLDER, f"{os.getpid()}.json")
    with open(name + ".part", "w") as file:
        json.dump({"command": sys.orig_argv, "calls": ours}, file)
    os.rename(name + ".part", name)


threading.Thread(target=watch, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
'''
SETTLE_S = 0.5
"""From the last token to the end of counting, so that the cleanup of the request counts."""


def main() -> None:
    """Run a server, send two chats and print the files of the second."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--tokens", type=int, default=16, help="of the answer")
    parser.add_argument("--adapter", default="pirate", help="sample adapter of the chat")
    parser.add_argument("--no-files", action="store_true", help="print the counts alone")
    options = parser.parse_args()
    print_setup()
    with tempfile.TemporaryDirectory(prefix="lorikeet-path-") as scratch:
        processes = observe(Path(scratch), options.adapter, options.tokens)
    show(processes, with_files=not options.no_files)


def observe(scratch: Path, adapter: str, tokens: int) -> dict[str, Counter[tuple[str, str]]]:
    """Return by process how often each function, by file and name, was called during a chat."""
    (scratch / "sitecustomize.py").write_text(HOOK)
    environment = {"PYTHONPATH": f"{scratch}:{Path(__file__).parents[1] / 'src'}", "REQUEST_PATH_FOLDER": str(scratch)}
    flags = [str(default_model()), *sample_flags(), "--store-dir", str(scratch / "store")]
    with running_server(flags, scratch / "serve.log", environment=environment) as server:
        for content in ("What is a lorikeet?", "Where do parrots sleep?"):
            if content.startswith("Where"):
                (scratch / "begin").touch()
                time.sleep(0.1)
            body = chat_body(adapter, content, tokens)
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
                response.raise_for_status()
                if not response.read().rstrip().endswith(b"data: [DONE]"):
                    raise RuntimeError("the stream did not end with its end mark")
            time.sleep(SETTLE_S)
        (scratch / "end").touch()
        time.sleep(SETTLE_S)
    processes: dict[str, Counter[tuple[str, str]]] = {}
    for file in scratch.glob("*.json"):
        found = json.loads(file.read_text())
        if found["calls"]:
            counted = processes.setdefault(_process(found["command"]), Counter())
            counted.update({(_inside(path), function): count for path, function, count in found["calls"]})
    return processes


def show(processes: dict[str, Counter[tuple[str, str]]], *, with_files: bool) -> None:
    """Print counts by process and by package, and the files."""
    union: Counter[tuple[str, str]] = Counter()
    for counted in processes.values():
        union.update(counted)
    sides = {**dict(sorted(processes.items())), "all together": union}
    print_table(
        "One streaming chat, adapter resident",
        ["process", "files", "functions", "calls"],
        [[name, len(_files(counted)), len(counted), counted.total()] for name, counted in sides.items()],
    )
    packages = Counter(file.partition("/")[0] if "/" in file else "(top)" for file in _files(union))
    rows = [[package, count] for package, count in sorted(packages.items())]
    print_table("Files by package, all processes", ["package", "files"], rows)
    if with_files:
        in_processes = {file: [name for name in processes if file in _files(processes[name])] for file in _files(union)}
        rows = [[file, ", ".join(sorted(names))] for file, names in sorted(in_processes.items())]
        print_table("Files", ["file", "process"], rows)


def _files(counted: Counter[tuple[str, str]]) -> set[str]:
    return {file for file, _ in counted}


def _inside(path: str) -> str:
    """Return a file's path inside the package."""
    return path.rpartition("/lorikeet/")[2]


def _process(command: list[str]) -> str:
    """Return the role of a process by its command line."""
    module = next((word for word in command if word.startswith("lorikeet.")), "")
    return {"": "API", "lorikeet.engine": "engine"}.get(module, module.rpartition(".")[2])


if __name__ == "__main__":
    main()
