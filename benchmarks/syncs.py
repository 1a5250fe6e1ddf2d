"""Times a sync of a trainer's adapter until the first token under the new weights: ``python -m benchmarks.syncs``.

Three ways to the server are compared: a folder that PEFT writes, the body of a request, and shared memory. The floor is
one copy of the bytes at the measured bandwidth of memory, and one step.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.harness import default_model, print_setup, print_table, running_server
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
            rows = []
            for way, send in ways.items():
                times = [timed(policy, send, server.url) for _ in range(options.runs + 1)][1:]
                size = times[0][0]
                syncs, firsts = ([each[column] * 1e3 for each in times] for column in (1, 2))
                steps = [first_token(server.url) * 1e3 for _ in range(options.runs)]
                floor = size / bandwidth(size) * 1e3 + statistics.median(steps)
                whole = statistics.median(one + other for one, other in zip(syncs, firsts, strict=True))
                rows.append(
                    [
                        way,
                        f"{size / 1000000.0:.1f} MB",
                        *(f"{statistics.median(each):.0f} ms" for each in (syncs, firsts)),
                        f"{whole:.0f} ms",
                        f"{floor:.0f} ms",
                        f"{whole / floor:.2f}",
                    ]
                )
    heads = ["way", "size", "sync", "first token", "both", "floor", "both / floor"]
    print_table("sync to the first token, medians", heads, rows)


def timed(policy: Any, send: Callable[[], int], url: str) -> tuple[int, float, float]:
    """Change all weights, send them, and request a token; return the bytes sent, and the seconds of both."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.0 + 1e-3)
    began_s = time.perf_counter()
    size = send()
    return size, time.perf_counter() - began_s, first_token(url)


def first_token(url: str) -> float:
    """Return the seconds of a request of one token."""
    began_s = time.perf_counter()
    body = {"model": NAME, "prompt": [504, 3575, 314], "max_tokens": 1, "temperature": 0}
    post(url, "/v1/completions", body)
    return time.perf_counter() - began_s


def bandwidth(size: int) -> float:
    """Return the bytes a second of a copy in memory, the median of nine."""
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    times = []
    for _ in range(9):
        began_s = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began_s)
    return size / statistics.median(times)


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
