"""Start of ``lorikeet serve`` from a cached model: time to ready and to the first token; what registered adapters add.

``python -m benchmarks.startup [--rounds N]``. Servers with no adapters and with 10,000 registered ones start in turns,
so that a change of the machine's speed affects both alike. The adapters are copies of a sample under digests of their
own: a start reads their names and versions, and no weights. Processor time is that of all processes of a server until
it is ready: it says what a start costs where several share the cores.
"""

import argparse
import json
import shutil
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from benchmarks.harness import (
    chat_body,
    default_model,
    in_turns,
    print_setup,
    print_table,
    running_server,
    sample_adapters,
    with_interval,
)

ADAPTERS = 10_000


class Start(NamedTuple):
    """One start of a server.

    Attributes:
        ready_s: from the command to a healthy server.
        cpu_s: processor time of its processes until then.
        first_token_s: from the first request to its first token.
    """

    ready_s: float
    cpu_s: float
    first_token_s: float


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print_setup()
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as text:
        folder = Path(text)
        _start(folder, "none")  # makes the store, and brings the model's files into the page cache
        fill_store(folder / "many", folder / "fill.log", ADAPTERS)
        names = {"no adapters": "none", f"{ADAPTERS:,} adapters": "many"}
        sides = {title: lambda _, store=store: _start(folder, store) for title, store in names.items()}
        found = in_turns(sides, rounds)
    rows = [
        [title, *(with_interval(values, ".2f") for values in zip(*starts, strict=True))]
        for title, starts in found.items()
    ]
    print_table("Start of a server", ["adapters", "ready, s", "processor, s", "first token after that, s"], rows)
    plain, many = found.values()
    for what in ("ready_s", "cpu_s"):
        added = [getattr(one, what) - getattr(other, what) for one, other in zip(many, plain, strict=True)]
        print(f"{ADAPTERS:,} adapters add {statistics.median(added):.2f} s to {what}")


def fill_store(store: Path, log: Path, adapters: int) -> None:
    """Make a store in which so many versions are registered, each under a name."""
    name, source = next(iter(sample_adapters().items()))
    # Adapters of flags are not kept in the registry, so this one is loaded by a request.
    folder = ["--adapter-dir", str(Path(source).parent), "--adapter-dir-mode", "allow"]
    with running_server([str(default_model()), "--store-dir", str(store), *folder], log) as server:
        body = {"lora_name": name, "lora_path": str(source)}
        httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
    with sqlite3.connect(store / "registry.sqlite3") as registry:
        version = registry.execute("SELECT digest FROM versions").fetchone()[0]
        for number in range(adapters - 1):
            digest = f"{number:0{len(version)}x}"
            registry.execute(
                "INSERT INTO versions SELECT ?, ranks, max_rank, weight_bytes, source, created_at FROM versions "
                "WHERE digest = ?",
                (digest, version),
            )
            registry.execute(
                "INSERT INTO adapters SELECT base, ?, ?, source, created_at FROM adapters WHERE name = ?",
                (f"copy-{number}", digest, name),
            )
            shutil.copytree(store / "versions" / version, store / "versions" / digest, copy_function=_link)


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _start(folder: Path, store: str) -> Start:
    """Start a server on a store, ask for one token, and stop it."""
    flags = [str(default_model()), "--store-dir", str(folder / store)]
    began_s = time.monotonic()
    with running_server(flags, folder / f"{store}.log") as server:
        ready_s = time.monotonic() - began_s
        process = psutil.Process(server.process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        body = json.dumps(chat_body(default_model().name, "Say hello.", 1))
        with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as http:
            asked_s = time.monotonic()
            http.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = http.getresponse()
            answer.read1()
            first_token_s = time.monotonic() - asked_s
            if answer.status != 200:
                raise RuntimeError(f"the first request was answered with {answer.status}")
            answer.read()
        return Start(ready_s, sum(each.user + each.system for each in times), first_token_s)


if __name__ == "__main__":
    main()
