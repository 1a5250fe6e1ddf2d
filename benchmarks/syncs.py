"""Times a sync of a trainer's adapter until the first token under the new weights: ``python -m benchmarks.syncs``.

Three ways to the server are compared in turns: a folder that PEFT writes, the body of a request, and shared memory. The
floor is one copy of the bytes in memory, and one step: a request of one token to an adapter that is loaded.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.harness import RunningServer, default_model, print_setup, print_table, running_server
from lorikeet.training import SharedWeights, sync

NAME = "policy"


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapter; 32 makes 39 MB")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    print_setup()
    base = default_model()
    config = LoraConfig(r=options.rank, target_modules="all-linear", init_lora_weights=False)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with tempfile.TemporaryDirectory() as scratch, SharedWeights() as shared:
        folder = Path(scratch, "adapters")
        folder.mkdir()
        flags = [
            "--dtype",
            "float32",
            "--memory",
            "1GiB",
            "--store-dir",
            f"{scratch}/store",
            "--adapter-dir",
            str(folder),
        ]
        with running_server(flags, Path(scratch, "log")) as server:

            def by_folder() -> int:
                policy.save_pretrained(folder / NAME)
                body = {"lora_name": NAME, "lora_path": NAME, "load_inplace": True}
                post(server.url, "/v1/load_lora_adapter", body)
                return (folder / NAME / "adapter_model.safetensors").stat().st_size

            ways: dict[str, Callable[[], int]] = {
                "folder": by_folder,
                "body": lambda: sync(policy, NAME, server.url).bytes,
                "shared memory": lambda: sync(policy, NAME, server.url, shared_memory=shared).bytes,
            }
            size = by_folder()
            found: dict[str, list[Timed]] = {way: [] for way in ways}
            floors: list[float] = []
            for run in range(options.runs + 1):
                # In turns, since the load of the machine changes from one minute to the next.
                floor_s = copy_s(size) + first_token(server.url)
                for way, send in ways.items():
                    once = timed(policy, send, server)
                    if run:  # The first sync of a way prepares what later ones use again.
                        found[way].append(once)
                if run:
                    floors.append((floor_s + copy_s(size) + first_token(server.url)) / 2)
            rows = [
                [
                    way,
                    *(f"{statistics.median(column) * 1e3:.0f} ms" for column in zip(*times, strict=True)),
                    f"{statistics.median(each.whole_s / floor for each, floor in zip(times, floors, strict=True)):.2f}",
                ]
                for way, times in found.items()
            ]
    heads = ["way", "sync", "first token", "both", "CPU of the client", "CPU of the server", "both / floor"]
    floor_ms = statistics.median(floors) * 1e3
    print_table(f"{size / 1e6:.1f} MB from the sync to the first token, medians; floor {floor_ms:.0f} ms", heads, rows)


class Timed(NamedTuple):
    """The seconds of a sync: its call, a first token, both, and the CPU time of client and server for both."""

    sync_s: float
    first_s: float
    whole_s: float
    client_cpu_s: float
    server_cpu_s: float


def timed(policy: Any, send: Callable[[], int], server: RunningServer) -> Timed:
    """Change all weights, send them, and request a token."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.0 + 1e-3)
    client_s = time.process_time()
    server_s = cpu_s(server.process.pid)
    began_s = time.perf_counter()
    send()
    sync_s = time.perf_counter() - began_s
    first_s = first_token(server.url)
    spent = (time.process_time() - client_s, cpu_s(server.process.pid) - server_s)
    return Timed(sync_s, first_s, sync_s + first_s, *spent)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def copy_s(size: int) -> float:
    """Return the seconds of a copy in memory, the median of five."""
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def first_token(url: str) -> float:
    """Return the seconds of a request of one token."""
    began_s = time.perf_counter()
    body = {"model": NAME, "prompt": [504, 3575, 314], "max_tokens": 1, "temperature": 0}
    post(url, "/v1/completions", body)
    return time.perf_counter() - began_s


def post(url: str, path: str, body: dict[str, Any]) -> bytes:
    """Send a body and return the answer's.

    Raises:
        RuntimeError: the answer is an error.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    if reply.status >= 400:
        raise RuntimeError(f"{path}: {content.decode()}")
    return content


if __name__ == "__main__":
    main()
