"""Observes an engine's memory during a run, and counts the hits of an infinite cache."""

from collections.abc import Sequence
from typing import NamedTuple

from lorikeet.bench.in_process import RunObserver
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import Clock
from lorikeet.core.events import Finished, RequestTimings
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import MemoryStats, StepOutputs, TierBytes
from lorikeet.core.request import Request
from lorikeet.engine.loop import Engine
from lorikeet.memory.tree import block_keys


class InfiniteCache:
    """Counts whole blocks of text by adapter version. Text is known as soon as it is added, and is never evicted.

    Args:
        block_size: tokens of KV in a block.

    Attributes:
        adapters: adapters that requests used.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys: set[bytes] = set()
        self.adapters: dict[AdapterDigest, AdapterRef] = {}

    def reusable_tokens(self, adapter: AdapterRef | None, prompt: Sequence[int]) -> int:
        """Return the length of the longest known prefix of ``prompt``, in whole blocks.

        The last token never counts, because an engine always computes it for its logits.
        """
        found = 0
        for key in self._keys_of(adapter, prompt[:-1]):
            if key not in self._keys:
                break
            found += self._block_size
        return found

    def add(self, adapter: AdapterRef | None, token_ids: Sequence[int]) -> None:
        """Add a prompt, or a prompt and its answer."""
        if adapter is not None:
            self.adapters[adapter.digest] = adapter
        self._keys.update(self._keys_of(adapter, token_ids))

    @property
    def kv_blocks(self) -> int:
        """Number of KV blocks of all added text."""
        return len(self._keys)

    def _keys_of(self, adapter: AdapterRef | None, token_ids: Sequence[int]) -> list[bytes]:
        return block_keys(None if adapter is None else adapter.digest, token_ids, self._block_size)


class PoolSample(NamedTuple):
    """Holds the contents of the tiers at a time, in seconds since the start of the workload."""

    at_s: float
    device: TierBytes
    host: TierBytes


class TtftParts(NamedTuple):
    """Holds the consecutive parts of a TTFT (see ``RequestTimings``).

    Attributes:
        queue_s: time until the request's blocks were allocated.
        adapter_cold_s: further time until the adapter was on the device.
        kv_cold_s: further wait for KV from the host.
        prefill_s: the remaining time.
    """

    queue_s: float
    adapter_cold_s: float
    kv_cold_s: float
    prefill_s: float

    @classmethod
    def of(cls, timings: RequestTimings) -> "TtftParts | None":
        """Return the parts; None if the request had no token."""
        if timings.admitted_s is None or timings.first_token_s is None:
            return None
        cold_s = timings.adapter_wait_s + timings.kv_wait_s
        return cls(
            timings.admitted_s - timings.arrival_s,
            timings.adapter_wait_s,
            timings.kv_wait_s,
            timings.first_token_s - timings.admitted_s - cold_s,
        )


class MemoryWatch(RunObserver):
    """Samples the memory of an engine, and collects TTFT parts and reusable tokens. Earlier events are not counted.

    Args:
        engine: engine to observe.
        clock: clock of the engine.
        block_size: tokens of KV in a block.
        sample_s: seconds between two samples.

    Attributes:
        samples: samples of the pool, with the first at the start.
        parts: parts of the TTFT of each request with a token.
        reusable_tokens: number of prompt tokens that an infinite cache would have found.
        began: memory statistics at the start.
    """

    def __init__(self, engine: Engine, clock: Clock, block_size: int, sample_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._sample_s = sample_s
        self._cache = InfiniteCache(block_size)
        self._timings: dict[RequestId, RequestTimings] = {}
        self._start_s = clock.now()
        self.samples: list[PoolSample] = []
        self.parts: list[TtftParts] = []
        self.reusable_tokens = 0
        self.began = self._sample()

    def on_arrival(self, request: Request) -> None:
        """Count the tokens that the infinite cache finds, and add the prompt to the cache."""
        self._timings[request.request_id] = RequestTimings(request.arrival_s)
        self.reusable_tokens += self._cache.reusable_tokens(request.adapter, request.prompt_token_ids)
        self._cache.add(request.adapter, request.prompt_token_ids)

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Collect timings, and take a sample if it is due."""
        for event in outputs.events:
            self._timings[event.request_id].apply(event)
            if isinstance(event, Finished):
                parts = TtftParts.of(self._timings.pop(event.request_id))
                self.parts += [] if parts is None else [parts]
        if self._clock.now() - self._start_s - self.samples[-1].at_s >= self._sample_s:
            self._sample()

    def on_finished(self, request: Request, token_ids: Sequence[int]) -> None:
        """Add the answer to the infinite cache, except the last token, whose KV is never computed."""
        self._cache.add(request.adapter, [*request.prompt_token_ids, *token_ids[:-1]])

    def _sample(self) -> MemoryStats:
        stats = self._engine.memory_stats()
        self.samples.append(PoolSample(self._clock.now() - self._start_s, stats.device, stats.host))
        return stats
