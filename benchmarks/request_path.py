"""Lists the files of Lorikeet that a streaming chat passes: ``python -m benchmarks.request_path``.

The program starts a real server with the sample adapters and sends a first chat, so that the adapter is loaded and all
modules are imported. During a second chat ``sys.setprofile`` observes every Python call in the API process and the
engine process, on all threads. The files are those of the package whose functions were called.

Work without a request (gauges, health checks) is also counted; it concerns a few files.

The way in is followed call by call in the asyncio task of the request in the API process, from the route's handler
(``chat_completions``) to the submission to the engine (``submit`` of ``client/client.py``). A call into another file
than the last call begins a stay. A return to the caller does not begin a stay, but another call in the caller's file
does. A stay in a file that was left before is a return to it. The same walk is counted for the calls that get the
request's body. Leases are uses of an adapter version: ``AdapterCatalog.acquire`` and ``release`` during the whole chat.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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
HANDLER, LAST = "chat_completions", ("client/client.py", "submit")
calls = {}
way, of_body = [], []
is_on = False
body = task = None


def note(frame, event, argument):
    if is_on and event == "call":
        code = frame.f_code
        calls[code] = calls.get(code, 0) + 1
        if PACKAGE in code.co_filename:
            follow(frame, code)


def follow(frame, code):
    """Note a call on the way from the handler to the submission, and whether it gets the body."""
    global body, task
    asyncio = sys.modules["asyncio"]
    if code.co_name == HANDLER and not way:
        body = frame.f_locals["body"]
        task = asyncio.current_task()
    try:
        if task is None or asyncio.current_task() is not task:
            return
    except RuntimeError:  # a thread without an event loop
        return
    step = (code.co_filename, code.co_qualname)
    way.append(step)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(frame.f_locals.get(name) is body for name in names):
        of_body.append(step)
    if code.co_name == LAST[1] and code.co_filename.endswith(LAST[0]):
        task = None


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
        json.dump({"command": sys.orig_argv, "calls": ours, "way": way, "of_body": of_body}, file)
    os.rename(name + ".part", name)


threading.Thread(target=watch, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
'''
SETTLE_S = 0.5
"""From the last token to the end of counting, so that the cleanup of the request counts."""

Function = tuple[str, str]
"""File inside the package, and qualified name."""


class RequestPath(NamedTuple):
    """Holds the calls of one chat.

    Attributes:
        processes: number of calls of each function, by process.
        way: functions in the order of their calls, from the handler to the submission.
        of_body: the calls with the body as an argument.
    """

    processes: dict[str, Counter[Function]]
    way: list[Function]
    of_body: list[Function]


def main() -> None:
    """Run a server, send two chats and print the files of the second."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--tokens", type=int, default=16, help="of the answer")
    parser.add_argument("--adapter", default="pirate", help="sample adapter of the chat")
    parser.add_argument("--no-files", action="store_true", help="print the counts alone")
    options = parser.parse_args()
    print_setup()
    with tempfile.TemporaryDirectory(prefix="lorikeet-path-") as scratch:
        path = observe(Path(scratch), options.adapter, options.tokens)
    show(path.processes, with_files=not options.no_files)
    show_way(path, with_files=not options.no_files)


def observe(scratch: Path, adapter: str, tokens: int) -> RequestPath:
    """Return the calls of a chat with an adapter. The server has answered an earlier chat with the same adapter."""
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
    path = RequestPath({}, [], [])
    for file in scratch.glob("*.json"):
        found = json.loads(file.read_text())
        if found["calls"]:
            counted = path.processes.setdefault(_process(found["command"]), Counter())
            counted.update({(_inside(name), function): count for name, function, count in found["calls"]})
        path.way.extend((_inside(name), function) for name, function in found["way"])
        path.of_body.extend((_inside(name), function) for name, function in found["of_body"])
    return path


def show(processes: dict[str, Counter[Function]], *, with_files: bool) -> None:
    """Print counts by process and by package, and the files."""
    union: Counter[Function] = Counter()
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


def show_way(path: RequestPath, *, with_files: bool) -> None:
    """Print the returns on the way in and the leases, and each file's stays with its functions."""
    rows = []
    for name, followed in (("all calls", path.way), ("calls that get the body", path.of_body)):
        stays = stays_of(followed)
        files = {file for file, _ in stays}
        rows.append([name, len(followed), len(files), len(stays), len(stays) - len(files)])
    title = "The way in, from the handler to the submission"
    print_table(title, ["of", "calls", "files", "stays", "returns to a file"], rows)
    calls = path.processes["API"]
    leases = [calls["adapters/catalog.py", f"AdapterCatalog.{name}"] for name in ("acquire", "release")]
    print_table("Leases of the adapter's version", ["acquired", "released"], [leases])
    if with_files:
        print("\nStays, each with the functions that were called")
        for file, functions in stays_of(path.way):
            print(f"  {file}: {' '.join(functions)}")


def stays_of(calls: Iterable[Function]) -> list[tuple[str, list[str]]]:
    """Return the stays in order: each file with the functions that were called in it."""
    return [(file, [name for _, name in stay]) for file, stay in groupby(calls, lambda call: call[0])]


def _files(counted: Counter[Function]) -> set[str]:
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
