"""memory.7: what looking up, ticking and deciding cost with many adapters and nodes, and what is kept of a block."""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.prompts import DEFAULT_IDS
from lorikeet.bench.synthetic import synthetic_adapters
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.plan import TransferDone
from lorikeet.costs.devices import MODELS
from lorikeet.engine.memory_build import memory_rules
from lorikeet.memory.insertion import Computed
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.leases import SequenceLease
from lorikeet.memory.memory import Memory
from lorikeet.memory.packing import pack
from lorikeet.rows import ROWS

ADAPTERS, RANKS, NODES, BLOCK_TOKENS, PROMPT_TOKENS = 2_000, (32, 64), 100_000, 16, 2_048
DEVICE_BLOCKS, HOST_BLOCKS = 25_000, 250_000
LOOKUPS, TICKS, DECISIONS, WARM_UP = 300, 30, 300, 10
MATCH_S, TICK_S, DECISION_S, BLOCK_BYTES = 0.5e-3, 10e-3, 1e-3, 256
_GEOMETRY = MODELS["llama-2-7b"].geometry


@line(
    "memory.7",
    title=f"Decisions of elora with {ADAPTERS:,} adapters and {NODES:,} nodes",
    bound=f"match of {PROMPT_TOKENS:,} tokens < {MATCH_S * 1e3:g} ms, a full tick ≤ {TICK_S * 1e3:g} ms, a swap "
    f"decision ≤ {DECISION_S * 1e3:g} ms, metadata ≤ {BLOCK_BYTES} B a block",
)
def run(runs: StoredRuns) -> Result:
    """Fill the tree, then time each kind of call."""
    found = runs.get("decisions", _measure)
    medians = {name: statistics.median(found[f"{name}_s"]) for name in ("match", "tick", "decision")}
    bounds = {"match": MATCH_S, "tick": TICK_S, "decision": DECISION_S}
    failures = [f"a {name} takes {seconds * 1e3:.2f} ms" for name, seconds in medians.items() if seconds > bounds[name]]
    if found["bytes_a_block"] > BLOCK_BYTES:
        failures.append(f"{found['bytes_a_block']:.0f} B a block")
    return Result(
        figure={
            **{
                f"{name}_ms": f"{seconds * 1e3:.3f} (P95 {float(np.quantile(found[f'{name}_s'], 0.95)) * 1e3:.3f})"
                for name, seconds in medians.items()
            },
            "evictions_a_full_tick": statistics.median(found["evictions"]),
            "idle_tick_ms": statistics.median(found["idle_tick_s"]) * 1e3,
            "bytes_a_block": found["bytes_a_block"],
            "as the tree itself estimates": found["told_bytes_a_block"],
            "nodes": found["nodes"],
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"row elora; {DEVICE_BLOCKS:,} device and {HOST_BLOCKS:,} host blocks of {BLOCK_TOKENS} tokens; medians; "
        "match: keys of a prompt that is wholly known, the walk, and the update of visits, last uses and scores; full "
        "tick: of a device without a free block, which lets nodes leave until 95 % are in use; decision: room for one "
        "more block in a full device; metadata: all that Python allocates while the tree is filled, tuples of "
        "adapters' blocks included, divided by blocks of KV and adapters on either tier",
        details=found,
    )


class _Filled:
    """A memory whose transfers end as soon as one asks."""

    def __init__(self, refs: Sequence[AdapterRef]) -> None:
        self.refs = refs
        sizes = {ref.max_rank: _size(ref) for ref in refs[:2]}
        row = ROWS["elora"]
        self.memory = Memory(
            DEVICE_BLOCKS,
            HOST_BLOCKS,
            BLOCK_TOKENS,
            _GEOMETRY.block_bytes(BLOCK_TOKENS),
            lambda ref: sizes[ref.max_rank],
            row.eviction,
            row.prefetch,
            memory_rules(row),
        )
        self.now = 0.0

    def settle(self) -> None:
        """End all transfers."""
        self.memory.take_transfers()
        while self.memory.tiers.flights:
            for transfer_id in list(self.memory.tiers.flights):
                self.memory.finish_transfer(TransferDone(transfer_id), self.now)
            self.memory.take_transfers()
        self.memory.take_evictions()
        self.memory.take_events()

    def admit(self, ref: AdapterRef, token_ids: Sequence[int]) -> SequenceLease:
        """Admit a sequence and let what it waits for arrive."""
        self.now += 0.01
        keys = self.memory.keys_of(ref.digest, token_ids)
        self.memory.arrive(ref, keys, len(token_ids), self.now)
        for _ in range(100):
            lease = self.memory.try_admit(ref, keys, len(token_ids), self.now)
            self.settle()
            if isinstance(lease, SequenceLease):
                return lease
        raise RuntimeError(f"a sequence of {len(token_ids)} tokens finds no room: {lease}")

    def leave_kv(self, ref: AdapterRef, token_ids: list[int]) -> None:
        """Run a sequence that leaves its KV behind."""
        lease = self.admit(ref, token_ids)
        self.memory.commit([Computed(lease, token_ids, len(token_ids))], self.now)
        self.memory.release(lease, self.now)
        self.settle()

    def fill_device(self) -> None:
        """Use every device block, by a sequence that ends."""
        free = self.memory.counts().free
        while free:
            tokens = _tokens(min(free, 500) * BLOCK_TOKENS, self._generator)
            self.leave_kv(self.refs[0], tokens)
            free = self.memory.counts().free

    _generator = np.random.default_rng(1)


def _size(ref: AdapterRef) -> AdapterSize:
    packing = pack(ref.ranks, _GEOMETRY, _GEOMETRY.block_elements(BLOCK_TOKENS))
    return AdapterSize(packing.blocks, packing.used_elements * _GEOMETRY.dtype_bytes)


def _tokens(count: int, generator: np.random.Generator) -> list[int]:
    return generator.integers(DEFAULT_IDS.low, DEFAULT_IDS.high, count).tolist()


def _measure() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    refs = synthetic_adapters(ADAPTERS, RANKS, _GEOMETRY)
    looked_up = [(ref, _tokens(PROMPT_TOKENS, generator)) for ref in refs[:50]]
    tracemalloc.start()
    filled = _Filled(refs)
    memory = filled.memory
    for ref, token_ids in looked_up:
        filled.leave_kv(ref, token_ids)
    each = (NODES - memory.stats().nodes) // (ADAPTERS - len(looked_up)) + 1
    for ref in filled.refs[len(looked_up) :]:
        filled.leave_kv(ref, _tokens(each * BLOCK_TOKENS, generator))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counts, host = memory.counts(), memory.host_counts()
    blocks = DEVICE_BLOCKS - counts.free + HOST_BLOCKS - host.free
    return {
        "nodes": memory.stats().nodes,
        "bytes_a_block": kept_bytes / blocks,
        "told_bytes_a_block": memory.stats().metadata_bytes / blocks,
        "match_s": _timed(LOOKUPS, lambda i: _match(filled, *looked_up[i % len(looked_up)])),
        **_ticks(filled),
        "decision_s": _decisions(filled),
    }


def _match(filled: _Filled, ref: AdapterRef, token_ids: list[int]) -> None:
    filled.now += 0.01
    keys = filled.memory.keys_of(ref.digest, token_ids)
    filled.memory.arrive(ref, keys, len(token_ids), filled.now)


def _ticks(filled: _Filled) -> dict[str, list[float]]:
    """Time ticks of a full device, and those after them, which find room and move nothing."""
    full_s, idle_s, evictions = [], [], list[float]()
    for number in range(TICKS + 3):
        filled.fill_device()
        before = filled.memory.tiers.device.total - filled.memory.room.unused()
        seconds = _tick_s(filled)
        left = before - (filled.memory.tiers.device.total - filled.memory.room.unused())
        filled.settle()
        nothing_s = _tick_s(filled)
        filled.settle()
        if number >= 3:
            full_s.append(seconds)
            idle_s.append(nothing_s)
            evictions.append(left)
    return {"tick_s": full_s, "idle_tick_s": idle_s, "evictions": evictions}


def _tick_s(filled: _Filled) -> float:
    filled.now += 1.0
    return _seconds(lambda: filled.memory.swapper.tick(filled.now))


def _decisions(filled: _Filled) -> list[float]:
    """Time the growth by one block of a sequence in a full device."""
    ref, memory = filled.refs[0], filled.memory
    lease = filled.admit(ref, _tokens(BLOCK_TOKENS, np.random.default_rng(2)))
    filled.fill_device()
    seconds = []
    for number in range(WARM_UP + DECISIONS):
        filled.now += 0.01
        tokens = (len(lease.blocks) + 1) * BLOCK_TOKENS
        took_s = _seconds(lambda tokens=tokens: memory.try_grow([(lease, tokens)], filled.now))  # type: ignore[misc]
        filled.settle()
        if not memory.try_grow([(lease, tokens)], filled.now):
            raise RuntimeError("nothing could leave a full device")
        if number >= WARM_UP:
            seconds.append(took_s)
    return seconds


def _timed(times: int, call: Callable[[int], None]) -> list[float]:
    return [_seconds(lambda number=number: call(number)) for number in range(WARM_UP + times)][WARM_UP:]  # type: ignore[misc]


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
