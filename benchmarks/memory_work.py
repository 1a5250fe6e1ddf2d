"""Makes the workload for comparing memory management and its adapters, and computes the memory that they would fill."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.memory_watch import InfiniteCache
from lorikeet.adapters.store import reference
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.memory.packing import pack
from lorikeet.workloads.arrivals import Rates, at_rate
from lorikeet.workloads.conversations import Turns, first_complete
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.random_adapters import write_random_adapter
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.shapes import SHAPES
from lorikeet.workloads.synthetic import ATTENTION, adapter_names, spread
from lorikeet.workloads.workload import OptionError, Range, WorkloadRequest, block_tokens_of, read_any

_REQUESTS = 240
_TRACE_SCALE = 1 / 32
_SPARE = 20
"""Times the requested number of requests that are generated, so that the first conversations are complete."""


class WorkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the workload.

    Attributes:
        source: file of a workload, or one of ``SHAPES``.
        requests: smallest number of requests, in complete conversations; None for all of a file, or 240 of a shape.
        rate: mean requests per second; None for the times of a file, or 1 for a shape.
        adapters: number of adapters.
        ranks: ranks that the adapters get in turn.
        modules: target modules.
        adapter_choice: see ``choose_adapters``; for workloads that name no adapters.
        length_scale: factor on the lengths of a file; None for 1/32 of a trace of conversations, otherwise 1.
        prefix_block_tokens: length of a prefix block before scaling; None for the file's length, or 32 for a shape.
        seed: seed of all random draws.
    """

    source: str
    requests: int | None = None
    rate: float | None = None
    adapters: int = 100
    ranks: tuple[int, ...] = (32, 64)
    modules: tuple[str, ...] = ATTENTION
    adapter_choice: str = "zipf:1"
    length_scale: float | None = None
    prefix_block_tokens: int | None = None
    seed: int = 0


class MemoryWork(NamedTuple):
    """Holds a workload and its needs.

    Attributes:
        requests: requests in order of arrival.
        names: names of all adapters.
        block_size: length of a prefix block.
        seed: seed of the prompts.
    """

    requests: list[WorkloadRequest]
    names: tuple[str, ...]
    block_size: int
    seed: int

    def prompts_of(self, vocabulary: int, run: int = 0) -> Prompts:
        """Return the prompts for a model, made of ordinary tokens, or of the upper half of a small vocabulary."""
        low, high = DEFAULT_IDS
        ids = Range(min(low, vocabulary // 2), min(high, vocabulary - 1))
        return Prompts(self.seed, run, ids, self.block_size)

    @property
    def longest_tokens(self) -> int:
        """Number of tokens of the longest request, prompt and answer together."""
        return max(request.input_tokens + request.output_tokens for request in self.requests)


def make_work(options: WorkOptions) -> MemoryWork:
    """Return the workload for ``options``.

    Raises:
        OptionError: the workload is unknown, or an option is invalid.
        OSError, WorkloadError: the file cannot be read.
    """
    if options.source in SHAPES:
        requests = _generated(options)
    elif options.source == "chat":
        raise OptionError("the shape chat needs a trace of conversations: pass its file instead")
    elif Path(options.source).is_file():
        requests = _from_file(options)
    else:
        raise OptionError(f"{options.source!r} is neither a file nor a shape; shapes are {', '.join(SHAPES)}")
    names = tuple(dict.fromkeys(request.adapter for request in requests if request.adapter is not None))
    if len(names) > options.adapters:
        raise OptionError(f"{options.source} names {len(names)} adapters, more than the {options.adapters} requested")
    others = [name for name in adapter_names(options.adapters + len(names)) if name not in names]
    # Names are in the order in which the recipe assigned ranks, if it chose the adapters.
    names = tuple(sorted((*names, *others[: options.adapters - len(names)])))
    return MemoryWork(requests, names, block_tokens_of(requests), options.seed)


def _generated(options: WorkOptions) -> list[WorkloadRequest]:
    count = options.requests or _REQUESTS
    rates = Rates.constant(1.0 if options.rate is None else options.rate)
    recipe = Recipe(
        shape=options.source,
        rates=rates,
        count=_SPARE * count,
        block_size=options.prefix_block_tokens or 0,
        **_choice(options),
    )
    return at_rate(first_complete(recipe.requests(), count), rates)


def _from_file(options: WorkOptions) -> list[WorkloadRequest]:
    trace = tuple(read_any(Path(options.source)))
    if not trace:
        raise OptionError(f"{options.source} has no requests")
    is_chat = any(request.prefix_blocks for request in trace) and not any(
        request.conversation or request.adapter for request in trace
    )
    scale = options.length_scale or (_TRACE_SCALE if is_chat else 1.0)
    block_size = options.prefix_block_tokens or 0
    rates = None if options.rate is None else Rates.constant(options.rate)
    if is_chat:
        recipe = Recipe(
            trace=trace,
            shape="chat",
            rates=rates,
            count=options.requests,
            length_scale=scale,
            block_size=block_size,
            **_choice(options),
        )
        return recipe.requests()
    named = any(request.adapter for request in trace)
    choice = _choice(options) if not named else {}
    requests = Recipe(trace=trace, length_scale=scale, block_size=block_size, **choice).requests()
    requests = first_complete(requests, options.requests or len(requests))
    return requests if rates is None else at_rate(requests, rates)


def _choice(options: WorkOptions) -> dict[str, Any]:
    return {
        "adapters": tuple(adapter_names(options.adapters)),
        "ranks": tuple(spread(options.ranks, options.adapters)) if options.adapters else None,
        "adapter_choice": options.adapter_choice,
        "seed": options.seed,
    }


def files_of_adapters(
    names: Sequence[str], ranks: Sequence[int], modules: Sequence[str], geometry: ModelGeometry, folder: Path
) -> dict[str, AdapterRef]:
    """Write adapters with random weights below ``folder``, and return them by name."""
    refs = {}
    for seed, (name, rank) in enumerate(zip(names, spread(ranks, len(names)), strict=True)):
        written = write_random_adapter(folder / f"{seed:05d}", geometry, rank, modules=modules, seed=seed)
        refs[name] = reference(name, written, geometry)
    return refs


class WorkingSet(NamedTuple):
    """Holds the bytes in whole blocks that a workload would fill without evictions.

    Attributes:
        adapter_bytes: bytes of the adapters that requests use.
        kv_bytes: bytes of all prompts and answers. Shared prefixes under one adapter count once.
        all_adapter_bytes: bytes of all adapters.
    """

    adapter_bytes: int
    kv_bytes: int
    all_adapter_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the adapters that requests use, and of KV."""
        return self.adapter_bytes + self.kv_bytes

    @property
    def host_bytes(self) -> int:
        """Size of a host tier that holds all adapters and all KV. Adapters without requests get half of it."""
        return self.all_adapter_bytes + max(self.all_adapter_bytes, self.kv_bytes)


def working_set(
    work: MemoryWork, adapters: Mapping[str, AdapterRef], geometry: ModelGeometry, block_size: int
) -> WorkingSet:
    """Return the working set of ``work``. The contents of answers do not matter, only their lengths."""
    turns = Turns(work.requests, work.prompts_of(DEFAULT_IDS.high))
    cache = InfiniteCache(block_size)
    for index, request in enumerate(work.requests):  # a turn comes after the turn that it continues
        prompt = turns.prompt(index)
        answer = [index] * request.output_tokens
        adapter = None if request.adapter is None else adapters[request.adapter]
        cache.add(adapter, [*prompt, *answer[:-1]])
        turns.answered(index, answer)
    elements = geometry.block_elements(block_size)
    blocks = {ref.digest: pack(ref.ranks, geometry, elements).blocks for ref in adapters.values()}
    used_blocks = sum(blocks[digest] for digest in cache.adapters)
    block_bytes = geometry.block_bytes(block_size)
    return WorkingSet(used_blocks * block_bytes, cache.kv_blocks * block_bytes, sum(blocks.values()) * block_bytes)


def least_memory_bytes(
    work: MemoryWork, adapters: Mapping[str, AdapterRef], geometry: ModelGeometry, block_size: int
) -> int:
    """Return the bytes of a pool that holds any two requests with different adapters."""
    elements = geometry.block_elements(block_size)
    largest = max((pack(ref.ranks, geometry, elements).blocks for ref in adapters.values()), default=0)
    blocks = 2 * (largest + math.ceil(work.longest_tokens / block_size) + 1)
    return blocks * geometry.block_bytes(block_size)
