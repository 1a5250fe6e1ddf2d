"""Syncs thousands of versions of one adapter beside running streams: ``python -m benchmarks.versions FOLDER``.

Every version has a new name, ``policy@STEP``, and the one three steps older is unloaded. Each stream names
the newest version, and its digest is checked. Memory, disk, open files and series of metrics must stay flat.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
from safetensors.numpy import load_file, save

from benchmarks.harness import RunningServer, print_setup, print_table, running_server, sample_adapters

KEPT = 3
TOKENS = 40


class Usage(NamedTuple):
    """What the server holds.

    Attributes:
        memory: resident bytes of all its processes.
        disk: bytes of the store.
        files: open files of all its processes.
        series: lines of ``/metrics``.
    """

    memory: int
    disk: int
    files: int
    series: int


def main() -> None:
    """Run the syncs and print what the server held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("base", help="folder of the base model")
    parser.add_argument("--adapter", default=str(sample_adapters()["terse"]), help="folder of an adapter of that model")
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=20)
    options = parser.parse_args()
    print_setup()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch, "store")
        flags = [
            options.base,
            "--dtype",
            "float32",
            "--memory",
            "256MiB",
            "--store-dir",
            str(store),
            "--log-level",
            "error",
        ]
        with running_server(flags, Path(scratch, "log")) as server:
            asyncio.run(Soak(server, store, Path(options.adapter), options.streams).run(options.versions))


class Soak:
    """The syncs and the streams beside them.

    Args:
        server: the running server.
        store: its adapter store.
        adapter: an adapter of its base.
        streams: number of streams at once.
    """

    def __init__(self, server: RunningServer, store: Path, adapter: Path, streams: int) -> None:
        self._server = server
        self._store = store
        self._tensors = load_file(adapter / "adapter_model.safetensors")
        self._config = (adapter / "adapter_config.json").read_text()
        self._streams = streams
        self._current: tuple[str, str] = ("", "")
        self._gaps: list[float] = []
        self._wrong: list[str] = []
        self._answers = 0
        self._is_done = False

    async def run(self, versions: int) -> None:
        """Measure the streams alone, then beside the syncs."""
        limits = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(self._server.url, timeout=limits) as http:
            await self._sync(http, 0)
            streams = [asyncio.create_task(self._stream(http)) for _ in range(self._streams)]
            await asyncio.sleep(10)
            alone = self._take_gaps()
            usages: list[Usage] = []
            times: list[float] = []
            for step in range(1, versions + 1):
                began_s = time.monotonic()
                await self._sync(http, step)
                times.append(time.monotonic() - began_s)
                if step > KEPT:
                    await self._post(http, "/v1/unload_lora_adapter", json={"lora_name": f"policy@{step - KEPT}"})
                if step in (versions // 4, versions // 2, versions):
                    usages.append(await self._usage(http))
            beside = self._take_gaps()
            self._is_done = True
            await asyncio.gather(*streams)
        rows = [
            [at, f"{each.memory / 2**20:.0f} MiB", f"{each.disk / 2**20:.2f} MiB", each.files, each.series]
            for at, each in zip((versions // 4, versions // 2, versions), usages, strict=True)
        ]
        print_table("held after so many versions", ["versions", "memory", "disk", "files", "series"], rows)
        gaps = [f"{np.percentile(each, 99) * 1e3:.0f} ms" for each in (alone, beside)]
        print(
            f"median sync {statistics.median(times) * 1e3:.0f} ms; P99 gap of tokens alone {gaps[0]}, beside {gaps[1]}"
        )
        print(f"{self._answers} answers, {len(self._wrong)} under a wrong digest", *self._wrong[:5], sep="\n")

    async def _sync(self, http: aiohttp.ClientSession, step: int) -> None:
        tensors = {name: tensor * np.float32(1 + step * 1e-4) for name, tensor in self._tensors.items()}
        query = {"name": f"policy@{step}", "config": self._config}
        card = await self._post(http, "/v1/adapters/upload", params=query, data=save(tensors, {"format": "pt"}))
        self._current = (f"policy@{step}", json.loads(card)["digest"])

    async def _stream(self, http: aiohttp.ClientSession) -> None:
        while not self._is_done:
            name, digest = self._current
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            async with http.post("/v1/completions", json=body) as reply:
                if reply.status == 404:  # It has been unloaded meanwhile.
                    continue
                reply.raise_for_status()
                if not reply.headers["X-Lorikeet-Digest"].endswith(digest):
                    self._wrong.append(f"{name}: {reply.headers['X-Lorikeet-Digest']}, expected {digest}")
                last_s = 0.0
                async for _ in events(reply):
                    now_s = time.monotonic()
                    if last_s:
                        self._gaps.append(now_s - last_s)
                    last_s = now_s
                self._answers += 1

    def _take_gaps(self) -> list[float]:
        taken = self._gaps
        self._gaps = []
        return taken

    async def _post(self, http: aiohttp.ClientSession, path: str, **given: Any) -> str:
        async with http.post(path, **given) as reply:
            text = await reply.text()
            assert reply.status < 400, text
            return text

    async def _usage(self, http: aiohttp.ClientSession) -> Usage:
        own = psutil.Process(self._server.process.pid)
        processes = [own, *own.children(recursive=True)]
        async with http.get("/metrics") as reply:
            series = sum(not line.startswith("#") for line in (await reply.text()).splitlines())
        disk = sum(file.stat().st_size for file in self._store.rglob("*") if file.is_file())
        memory = sum(each.memory_info().rss for each in processes)
        return Usage(memory, disk, sum(each.num_fds() for each in processes), series)


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the events of a stream that have tokens."""
    async for line in reply.content:
        if line.startswith(b"data: {"):
            yield line


if __name__ == "__main__":
    main()
