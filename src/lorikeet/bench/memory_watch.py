"""What a cache that forgets nothing would find: the most that any policy could have reused."""

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
    """Counts whole blocks of text by adapter version; a text is known from when it is added.

    Args:
        block_size: tokens of KV in a block.

    Attributes:
        adapters: those that requests asked for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_tokens = block_size
        self._keys: set[bytes] = set()
        self.adapters: dict[AdapterDigest, AdapterRef] = {}

    def reusable_tokens(self, adapter: AdapterRef | None, prompt: Sequence[int]) -> int:
        """Return the length of the longest known beginning of ``prompt``, in whole blocks.

        The last token never counts: an engine computes it anew, since it wants its logits.
        """
        found = 0
        for key in self._keys_of(adapter, prompt[:-1]):
            if key not in self._keys:
                break
            found += self._block_tokens
        return found

    def add(self, adapter: AdapterRef | None, token_ids: Sequence[int]) -> None:
        """Know a prompt, or a prompt and its answer."""
        if adapter is not None:
            self.adapters[adapter.digest] = adapter
        self._keys.update(self._keys_of(adapter, token_ids))

    @property
    def kv_blocks(self) -> int:
        """Blocks of KV of all that was added."""
        return len(self._keys)

    def _keys_of(self, adapter: AdapterRef | None, token_ids: Sequence[int]) -> list[bytes]:
        return block_keys(None if adapter is None else adapter.digest, token_ids, self._block_tokens)


class PoolSample(NamedTuple):
    """What the tiers held at a time, in seconds since the start of the workload."""

    at_s: float
    device: TierBytes
    host: TierBytes


class TtftParts(NamedTuple):
    """What a request's first token took, one part after the other (see ``RequestTimings``).

    Attributes:
        queue_s: until it had its blocks.
        adapter_cold_s: then, until its adapter was on the device.
        kv_cold_s: what KV from the host took beyond that.
        prefill_s: the rest.
    """

    queue_s: float
    adapter_cold_s: float
    kv_cold_s: float
    prefill_s: float

    @classmethod
    def of(cls, timings: RequestTimings) -> "TtftParts | None":
        """Return the parts, None if no token came."""
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
    """See the module. What went before it was made is not counted.

    Args:
        engine: whose memory.
        clock: of the engine.
        block_size: tokens of KV in a block.
        sample_s: time between two samples.

    Attributes:
        samples: of the pool, the first from the start.
        parts: of the TTFT of each request that got a token.
        reusable_tokens: prompt tokens that an infinite cache would have found.
        began: what the memory told at the start.
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

    def arrived(self, request: Request) -> None:
        """See ``RunObserver``. A prompt is known to the infinite cache from its arrival on."""
        self._timings[request.request_id] = RequestTimings(request.arrival_s)
        self.reusable_tokens += self._cache.reusable_tokens(request.adapter, request.prompt_token_ids)
        self._cache.add(request.adapter, request.prompt_token_ids)

    def turned(self, outputs: StepOutputs) -> None:
        """See ``RunObserver``."""
        for event in outputs.events:
            self._timings[event.request_id].apply(event)
            if isinstance(event, Finished):
                parts = TtftParts.of(self._timings.pop(event.request_id))
                self.parts += [] if parts is None else [parts]
        if self._clock.now() - self._start_s - self.samples[-1].at_s >= self._sample_s:
            self._sample()

    def ended(self, request: Request, token_ids: Sequence[int]) -> None:
        """See ``RunObserver``. The last token's KV is never computed."""
        self._cache.add(request.adapter, [*request.prompt_token_ids, *token_ids[:-1]])

    def _sample(self) -> MemoryStats:
        stats = self._engine.memory_stats()
        self.samples.append(PoolSample(self._clock.now() - self._start_s, stats.device, stats.host))
        return stats
