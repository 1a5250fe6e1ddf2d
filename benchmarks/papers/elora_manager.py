"""Measures the time and memory of ELORA's cache manager and swapper in our code (VI-C, VII, VIII-L)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.papers.elora_work import BLOCK_TOKENS, HOST_BYTES, RANKS, profile_of
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import TransferDone
from lorikeet.engine.build import memory_options
from lorikeet.memory.blocks import WaitReason
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.memory import Memory
from lorikeet.memory.packing import pack
from lorikeet.memory.prefix_insertion import ComputedTokens
from lorikeet.memory.tree import NodeKind
from lorikeet.presets import resolve_preset
from lorikeet.workloads.synthetic import synthetic_adapters

ADAPTERS, TURNS, TURN_TOKENS = 100, 4, 256
"""Each query is a turn of a dialogue of one adapter, behind all turns before."""
QUERIES = 400
GAP_S, TICK_S = 0.2, 0.1
"""5 queries/s, the one rate that the paper prints (Fig. 9), and a tick of the swapper every 100 ms (VI-C)."""


class Manager:
    """Serves queries with the memory of ``elora`` alone: every transfer ends at once, and nothing is computed.

    Args:
        device_blocks, host_blocks: sizes of the tiers.

    Attributes:
        memory: the memory.
        spent_s: processor seconds of each call, by part: ``query`` is matching and updating, ``tick`` the swapper.
    """

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        geometry = profile_of("8B").geometry
        elements, preset = geometry.block_elements(BLOCK_TOKENS), resolve_preset("elora")[1]

        def size(ref: AdapterRef) -> AdapterSize:
            packing = pack(ref.ranks, geometry, elements, ref.extras)
            return AdapterSize(packing.blocks, packing.used_elements * geometry.dtype_bytes)

        self.memory = Memory(
            device_blocks,
            host_blocks,
            BLOCK_TOKENS,
            geometry.block_bytes(BLOCK_TOKENS),
            size,
            preset.eviction,
            preset.prefetch,
            memory_options(preset),
        )
        self._refs = synthetic_adapters(ADAPTERS, RANKS, geometry, modules=LORA_MODULES)
        self._generator = np.random.default_rng(1)
        self._dialogues: list[tuple[AdapterRef, list[int]]] = []
        self._now = 0.0
        self.spent_s: dict[str, list[float]] = {"query": [], "tick": []}
        for ref in self._refs:
            self.memory.register(ref)
        self.memory.swapper.after_admission(self._now)
        while self._end_transfers():
            self.memory.swapper.after_admission(self._now)

    def query(self) -> None:
        """Serve a query, and make the ticks up to the next one."""
        tokens_of, memory = self._generator.integers, self.memory
        if not self._dialogues or self._generator.random() < 1 / TURNS:
            self._dialogues.append((self._refs[int(tokens_of(len(self._refs)))], []))
        number = int(tokens_of(len(self._dialogues)))
        ref, history = self._dialogues[number]
        history += tokens_of(32_000, size=TURN_TOKENS).tolist()
        with self._timed("query"):
            keys = memory.keys_of(ref.digest, history)
            memory.arrive(ref, keys, len(history), self._now)
        lease = memory.try_admit(ref, keys, len(history), self._now)
        while isinstance(lease, WaitReason):  # for the end of a read or of an eviction's copy
            self._end_transfers()
            self._tick()
            lease = memory.try_admit(ref, keys, len(history), self._now)
        self._end_transfers()
        inserted = time.thread_time()
        memory.commit([ComputedTokens(lease, history, len(history))], self._now)
        self.spent_s["query"][-1] += time.thread_time() - inserted
        memory.release(lease, self._now)
        if len(history) >= TURNS * TURN_TOKENS:
            del self._dialogues[number]
        for _ in range(round(GAP_S / TICK_S)):
            self._tick()

    def eval_s(self) -> float:
        """Return the processor seconds of one update of Eval for one node, over all nodes."""
        tree = self.memory.tree
        nodes = np.flatnonzero(tree.kind[: tree.end] >= NodeKind.ADAPTER)
        began_s = time.thread_time()
        self.memory._eviction.scores(nodes, self._now)
        return (time.thread_time() - began_s) / len(nodes)

    def _tick(self) -> None:
        self._now += TICK_S
        with self._timed("tick"):
            self.memory.swapper.tick(self._now)
        self._end_transfers()

    def _end_transfers(self) -> bool:
        transfers, _ = self.memory.take_transfers()
        for each in transfers:
            self.memory.finish_transfer(TransferDone(each.transfer_id), self._now)
        return bool(transfers)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        self.spent_s[part].append(time.thread_time() - began_s)


def manager_costs(queries: int = QUERIES, share: float = 1.0) -> dict[str, float]:
    """Return the costs of the manager on 8B while both tiers are full.

    Args:
        queries: number of queries that are measured.
        share: share of the tiers' sizes, for tests.

    Returns:
        ``query_mean_ms``, ``query_most_ms``: processor time of matching and updating per query. ``tick_most_ms``: that
        of the swapper's tick. Of "most", the 99th percentile. ``eval_us``: that of one update of Eval. ``nodes``,
        ``node_bytes``, ``tree_bytes``: size of the tree.
    """
    profile = profile_of("8B")
    block_bytes = profile.geometry.block_bytes(BLOCK_TOKENS)
    manager = Manager(int(share * profile.pool_bytes / block_bytes), int(share * HOST_BYTES / block_bytes))
    memory, before = manager.memory, -1
    while len(memory.tree) > before:  # until both tiers are full
        before = len(memory.tree)
        for _ in range(100):
            manager.query()
    for spent in manager.spent_s.values():
        spent.clear()
    for _ in range(queries):
        manager.query()
    query_ms, tick_ms = (1e3 * np.array(manager.spent_s[part]) for part in ("query", "tick"))
    return {
        "query_mean_ms": float(query_ms.mean()),
        "query_most_ms": float(np.percentile(query_ms, 99)),
        "tick_most_ms": float(np.percentile(tick_ms, 99)),
        "eval_us": 1e6 * float(np.median([manager.eval_s() for _ in range(20)])),
        "nodes": len(memory.tree),
        "node_bytes": memory.tree.metadata_bytes() / len(memory.tree),
        "tree_bytes": memory.tree.metadata_bytes(),
    }
