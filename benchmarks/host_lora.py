"""Measures handing a layer to a host LoRA worker by synchronisation, IPC and kind of worker (TOPPINGS, section 4.2).

    python -m benchmarks.host_lora

prints for each variant the median and the 90 % quantile in µs, over 1,000 layers of a 135M model with 16 tokens under
an adapter of rank 16. A thread that runs work in order simulates the device:

- invoke: ``sync-free``, the copy of x and the wait for y are queued on the device; or ``native sync``, the caller waits
  for x before it signals, and for y before it continues.
- ipc: ``shared memory``, the ring that engines use, or ``socket``, a UNIX socket.
- worker: a ``process``, or a ``thread`` of the same process.

Hand-over is the time of a layer beyond the longer of its two parts, the base product and the worker's computation.
"""

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from itertools import product
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import default_model, print_setup, print_table
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.host_arena import HostArena
from lorikeet.memory.packing import pack
from lorikeet.models.config import read_model_config
from lorikeet.models.weights import lora_targets
from lorikeet.worker.host_lora.pool import HostPool, HostRows, PoolSizes, RowAssignment, start_worker_process
from lorikeet.worker.host_lora.ring import Ring, RingShape, RingSlice
from lorikeet.worker.host_lora.worker import HostAdapter, SliceWorker, site_of, write_delta

LAYERS = 1000
TOKENS = 16
RANK = 16
BLOCK_TOKENS = 16
QKV = ("q", "k", "v")


class Store(NamedTuple):
    """Holds a host arena with one adapter."""

    arena: HostArena
    host: Tensor
    adapter: HostAdapter
    geometry: ModelGeometry


def make_store(geometry: ModelGeometry) -> Store:
    """Return a store, whose content is the same in every process."""
    ranks = dict.fromkeys(QKV, (RANK,) * geometry.layers)
    elements = geometry.block_elements(BLOCK_TOKENS)
    blocks = pack(ranks, geometry, elements).blocks
    arena = HostArena.create(blocks, elements * 4)
    host = torch.from_numpy(arena.bytes).view(torch.float32)
    host.normal_(generator=torch.Generator().manual_seed(0))
    return Store(arena, host, HostAdapter(ranks, tuple(BlockId(block) for block in range(blocks))), geometry)


class Exchange(Protocol):
    """Sends x to a worker and receives y."""

    @property
    def computed_s(self) -> float:
        """Seconds of the worker for the last layer."""
        ...

    def send(self, layer: int, x: Tensor) -> None:
        """Send x to the worker."""
        ...

    def add_to(self, qkv: Tensor) -> None:
        """Wait for y and add it."""
        ...

    def close(self) -> None:
        """Stop the worker."""
        ...


class _RingToProcess:
    """Shared memory and a process, as in engines."""

    def __init__(self, store: Store, core: int) -> None:
        parts = [HostRows(0, 0, TOKENS)]
        self._pool = HostPool(
            [start_worker_process()],
            [core],
            [store.arena],
            PoolSizes(store.host.dtype, store.geometry, rows=TOKENS, parts=1),
        )
        self._pool.wait_until_ready()
        self._pool.begin([store.adapter])
        self._assignment: RowAssignment = self._pool.assign(parts)

    @property
    def computed_s(self) -> float:
        return self._pool.computed_s

    def send(self, layer: int, x: Tensor) -> None:
        self._pool.submit("qkv", layer, x, self._assignment)

    def add_to(self, qkv: Tensor) -> None:
        self._pool.add_to(qkv)

    def close(self) -> None:
        self._pool.end()
        self._pool.close()


class _RingToThread:
    """Shared memory and a thread."""

    def __init__(self, store: Store, core: int) -> None:
        outputs = sum(store.geometry.modules[module].out_features for module in QKV)
        inputs = store.geometry.modules["q"].in_features
        shape = RingShape(2, 2, TOKENS, inputs, outputs, ranks=1, workers=1, cuts=1, slices=1, dtype="float32")
        self._ring = Ring.create(shape)
        self._ring.write_cut(1, [RingSlice(0, 0, 0, TOKENS)])
        self._x, self._y = (torch.from_numpy(memory) for memory in (self._ring.x, self._ring.y))
        self._worker = SliceWorker(self._ring, 0, [store.host], store.geometry)
        self._worker.begin([store.adapter])
        self._worker.prepare()
        self._ticket = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, args=(core,), daemon=True)
        self._thread.start()
        self.computed_s = 0.0

    def send(self, layer: int, x: Tensor) -> None:
        self._ticket += 1
        self._x[self._ring.slot(self._ticket), :TOKENS].copy_(x)
        self._ring.describe(self._ticket, 1, site_of(layer, "qkv"), 1)
        self._ring.signal_x(self._ticket)

    def add_to(self, qkv: Tensor) -> None:
        while not self._ring.has_y(self._ticket, 0):
            time.sleep(0)
        qkv.add_(self._y[self._ring.slot(self._ticket), 0, :TOKENS])
        self._ring.free(self._ticket)
        began_ns, ended_ns = self._ring.times_ns(self._ticket, 0)
        self.computed_s = (ended_ns - began_ns) / 1e9

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        self._ring.close()

    def _work(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        ticket = 1
        while not self._is_closing:
            if self._ring.has_x(ticket):
                self._worker.run(ticket)
                ticket += 1
            else:
                time.sleep(0)


class _Socket:
    """A UNIX socket, and a process or a thread."""

    def __init__(self, geometry: ModelGeometry, core: int, *, to_process: bool) -> None:
        self.computed_s = 0.0
        self._connection, theirs = multiprocessing.Pipe()
        self._worker: Any
        if to_process:
            spawn = multiprocessing.get_context("spawn")
            self._worker = spawn.Process(target=serve_socket, args=(theirs, geometry, core), daemon=True)
        else:
            self._worker = threading.Thread(target=serve_socket, args=(theirs, geometry, core), daemon=True)
        self._worker.start()
        self._connection.recv_bytes()

    def send(self, layer: int, x: Tensor) -> None:
        self._connection.send_bytes(layer.to_bytes(8, "little") + x.numpy().tobytes())

    def add_to(self, qkv: Tensor) -> None:
        message = self._connection.recv_bytes()
        self.computed_s = float(np.frombuffer(message, np.float64, 1)[0])
        qkv.add_(torch.from_numpy(np.frombuffer(bytearray(message[8:]), np.float32).reshape(qkv.shape)))

    def close(self) -> None:
        self._connection.send_bytes(b"")
        self._worker.join()


def serve_socket(connection: Connection, geometry: ModelGeometry, core: int) -> None:
    """Run the worker at the other end of a socket until an empty message arrives."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    store = make_store(geometry)
    packing = pack(store.adapter.ranks, geometry, store.host.shape[1])
    pieces = AdapterLayout(packing, geometry).weights(store.adapter.blocks, store.host).pieces
    targets = lora_targets(geometry)["qkv"]
    y = torch.empty(TOKENS, sum(geometry.modules[module].out_features for module in QKV))
    connection.send_bytes(b"ready")
    while message := connection.recv_bytes():
        x = torch.from_numpy(np.frombuffer(bytearray(message[8:]), np.float32).reshape(TOKENS, -1))
        began_s = time.monotonic()
        write_delta(x, [pieces], int.from_bytes(message[:8], "little"), targets, y[None])
        connection.send_bytes(np.float64(time.monotonic() - began_s).tobytes() + y.numpy().tobytes())


class Stream:
    """Simulates the device: runs work in order, concurrently with the caller."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, act: Callable[[], object]) -> None:
        """Queue work."""
        self._queue.put(act)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()

    def close(self) -> None:
        """Stop the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            act()


def measure(exchange: Exchange, stream: Stream, sync_free: bool, geometry: ModelGeometry) -> dict[str, float]:
    """Run layers and return the times of their hand-over."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, geometry.modules["q"].in_features, generator=generator)
    weight = torch.randn(sum(geometry.modules[module].out_features for module in QKV), x.shape[1], generator=generator)
    staged = torch.empty_like(x)
    qkv = x @ weight.T
    base_s = 0.0

    def multiply() -> None:
        nonlocal base_s
        began_s = time.monotonic()
        torch.mm(x, weight.T, out=qkv)
        base_s = time.monotonic() - began_s

    found = []
    computed = []
    for number in range(LAYERS):
        layer = number % geometry.layers
        began_s = time.monotonic()
        if sync_free:
            stream.enqueue(lambda layer=layer: exchange.send(layer, x))  # type: ignore[misc]
            stream.enqueue(multiply)
            stream.enqueue(lambda: exchange.add_to(qkv))
        else:
            stream.enqueue(lambda: staged.copy_(x))
            stream.synchronize()
            exchange.send(layer, staged)
            stream.enqueue(multiply)
            y = torch.zeros_like(qkv)
            exchange.add_to(y)
            stream.enqueue(lambda y=y: qkv.add_(y))  # type: ignore[misc]
        stream.synchronize()
        took_s = time.monotonic() - began_s
        found.append(took_s - max(base_s, exchange.computed_s))
        computed.append(exchange.computed_s)
    return {
        "handover_us": median(found) * 1e6,
        "handover_p90_us": float(np.quantile(found, 0.9)) * 1e6,
        "computing_us": median(computed) * 1e6,
    }


def main() -> None:
    """Measure all variants: this process on one core, workers on another."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    print_setup()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("a worker needs a core of its own, and this machine has one core")
    torch.set_num_threads(1)
    geometry = read_model_config(default_model()).geometry(4)
    store = make_store(geometry)
    os.sched_setaffinity(0, {cores[0]})
    makers: dict[tuple[str, str], Callable[[], Exchange]] = {
        ("shared memory", "process"): lambda: _RingToProcess(store, cores[-1]),
        ("shared memory", "thread"): lambda: _RingToThread(store, cores[-1]),
        ("socket", "process"): lambda: _Socket(geometry, cores[-1], to_process=True),
        ("socket", "thread"): lambda: _Socket(geometry, cores[-1], to_process=False),
    }
    results = []
    for ((ipc, worker), make), invoke in product(makers.items(), ("sync-free", "native sync")):
        exchange = make()
        stream = Stream()
        try:
            figures = measure(exchange, stream, invoke == "sync-free", geometry)
        finally:
            stream.close()
            exchange.close()
        results.append([invoke, ipc, worker, *(f"{us:.1f}" for us in figures.values())])
    headings = ["invoke", "ipc", "worker", "hand-over, us", "P90, us", "computing, us"]
    print_table(f"Hand-over of a layer, {LAYERS:,} layers", headings, results)


if __name__ == "__main__":
    main()
