"""Computes how many blocks a rank's arenas get.

On a GPU, profiling steps compile the kernels and measure the memory of the largest step.
"""

from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import Any

import psutil
import torch
from torch import Tensor

from lorikeet.config import EngineSettings, Settings
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.machine import free_memory_bytes
from lorikeet.core.plan import KernelForm, SequenceStart
from lorikeet.core.request import SamplingParams
from lorikeet.kernels.interface import LONG_TOKENS
from lorikeet.kernels.lora import LoraWeights
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.host_arena import HOST_TIMES_DEVICE
from lorikeet.memory.packing import pack
from lorikeet.memory.sizing import check_blocks, min_blocks, sequence_blocks
from lorikeet.presets import resolve_preset
from lorikeet.worker.batch import BatchRow, RankSequence, build_batch, lora_batch
from lorikeet.worker.decode_graphs import build_graphs, padded_rows
from lorikeet.worker.rank_setup import RankModel

_RANKS = (16, 32, 64)
"""Rank tiles of the LoRA kernels. Larger ranks take several tiles."""
_MANY_ROWS = 17
"""Rows of one adapter from which on all LoRA kernels of a step use larger tiles."""


def measure_step_bytes(model: RankModel, engine: EngineSettings, rank: int, longest_tokens: int) -> int:
    """Return the peak bytes of the largest step on the model's GPU, and run steps of all kinds to compile kernels.

    Args:
        model: the model that runs the steps.
        engine: engine settings with the limits of a step.
        rank: the adapters' rank; 0 for no adapters.
        longest_tokens: number of tokens of the longest sequence.
    """
    torch.cuda.reset_peak_memory_stats(model.device)
    before_bytes = torch.cuda.memory_allocated(model.device)
    arena_bytes = run_step(model, engine, rank, largest_step(engine, longest_tokens))
    torch.cuda.synchronize(model.device)
    taken_bytes = torch.cuda.max_memory_allocated(model.device) - before_bytes - arena_bytes
    compile_kernels(model, engine, rank, longest_tokens)
    torch.cuda.synchronize(model.device)
    torch.cuda.empty_cache()
    return taken_bytes


def largest_step(engine: EngineSettings, longest_tokens: int) -> list[int]:
    """Return the prompt lengths of a step with the most tokens and sequences.

    The first prompt is as long as possible.
    """
    lengths: list[int] = []
    tokens = engine.max_num_batched_tokens
    sequences = engine.max_num_seqs
    while tokens and len(lengths) < sequences:
        others = min(sequences - len(lengths) - 1, tokens - 1)
        lengths.append(min(tokens - others, longest_tokens))
        tokens -= lengths[-1]
    return lengths


def compile_kernels(model: RankModel, engine: EngineSettings, rank: int, longest_tokens: int) -> None:
    """Run steps that need different kernels: with different numbers of tokens, sequences, adapters and ranks.

    Args:
        model: the model that runs the steps.
        engine: engine settings with the limits of a step.
        rank: rank of the largest adapters; 0 for no adapters.
        longest_tokens: number of tokens of the longest sequence.
    """
    most_tokens = min(engine.max_num_batched_tokens, longest_tokens)
    most_rows = min(engine.max_num_seqs, engine.max_num_batched_tokens)
    most_others = min(most_rows - 1, most_tokens - _MANY_ROWS)
    ranks = sorted({min(ranks, rank) for ranks in (0, *_RANKS, rank)})
    for each in ranks:
        for tokens in _multiples(2, 4 if each else 2, most_tokens):
            run_step(model, engine, each, [tokens])
        for others in _multiples(1, 2, most_others) if each and most_others > 0 else ():
            run_step(model, engine, each, [_MANY_ROWS, *[1] * others])
    for rows in sorted({min(padded_rows(rows), most_rows) for rows in range(1, most_rows + 1)}):
        for each in ranks:
            run_decodes(model, engine, each, rows, longest_tokens)
    for rows in _multiples(1, 2, most_rows):
        logits = torch.zeros(rows, model.config.vocab_size, device=model.device)  # Edited logits are fp32.
        model.kernels.choose(logits, _sampling_tensors(rows).on(model.device))


def _multiples(least: int, factor: int, most: int) -> list[int]:
    """Return ``least * factor**n`` below ``most`` for n = 0, 1, 2 ..., and ``most``."""
    return [*takewhile(lambda number: number < most, (least * factor**times for times in count())), most]


def run_step(model: RankModel, engine: EngineSettings, rank: int, lengths: Sequence[int]) -> int:
    """Prefill sequences, each with its own adapter of all modules, and sample a token for each.

    The adapters share their blocks, but kernels treat them as different adapters: einsums pad and copy each.

    Args:
        model: the model that runs the step.
        engine: settings.
        rank: the adapters' rank; 0 for no adapters.
        lengths: number of tokens of each sequence.

    Returns:
        The bytes of the temporary arena that the step used.
    """
    arena, rows, adapters = _sequences(model, engine, rank, lengths)
    batch = build_batch(rows, adapters, engine.block_size, model.device, _form(engine))
    hidden = model.decoder.hidden(batch, model.decoder.view_kv(arena, engine.block_size))
    if len(hidden):  # Only the last pipeline stage has logits.
        logits = model.decoder.head(hidden, batch.head_lora)
        model.kernels.choose(logits, _sampling_tensors(len(lengths)).on(model.device))
    return arena.nbytes


def run_decodes(model: RankModel, engine: EngineSettings, rank: int, sequences: int, longest_tokens: int) -> None:
    """Run decode steps as graphs do, with one, two, four ... adapters in the segment table.

    Without graphs, run one eager decode step with :func:`run_step`.

    Args:
        model: the model that runs the steps.
        engine: settings.
        rank: the adapters' rank; 0 for no adapters.
        sequences: number of sequences.
        longest_tokens: number of tokens of the longest sequence. If long contexts have their own graphs, these run too.
    """
    arena, rows, adapters = _sequences(model, engine, rank, [1] * sequences)
    device: Any = EagerDevice()
    is_einsum = _form(engine) is KernelForm.EINSUM
    graphs = None if is_einsum else build_graphs(engine, model, arena, device, longest_tokens)
    if graphs is None:
        run_step(model, engine, rank, [1] * sequences)
        return
    names = [row.sequence.adapter for row in rows]
    for adapters_used in sorted({*_multiples(1, 2, sequences), max(1, sequences - 1)} if rank else {sequences}):
        for i, row in enumerate(rows):
            row.sequence.adapter = names[min(i, adapters_used - 1)]
        graphs.start(rows, lora_batch(rows, adapters, _form(engine)), _sampling_tensors(sequences))
    if not rank and longest_tokens > LONG_TOKENS:
        rows[0].sequence.add_blocks(range(LONG_TOKENS // engine.block_size))  # type: ignore[arg-type]
        graphs.start(rows, None, _sampling_tensors(sequences))
    graphs.close()


class EagerDevice:
    """A device that runs the work of a graph once instead of capturing it, and copies nothing.

    All inputs of graphs stay zero, which means padding rows.
    """

    has_graphs = True

    @property
    def steps(self) -> "EagerDevice":
        """This object, which is also the stream of steps."""
        return self

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Do nothing."""

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None

    def capture(self, work: Callable[[], None]) -> "EagerDevice":
        """Run the work once. The returned object cannot be replayed."""
        work()
        return self


def _form(engine: EngineSettings) -> KernelForm:
    return resolve_preset(engine.preset)[1].kernel_form


def _sequences(
    model: RankModel, engine: EngineSettings, rank: int, lengths: Sequence[int]
) -> tuple[Tensor, list[BatchRow], dict[AdapterDigest, LoraWeights]]:
    """Return an arena, sequences to prefill with blocks in the arena, and adapters that share their blocks."""
    geometry = model.geometry
    elements = geometry.block_elements(engine.block_size)
    packing = pack(geometry.full_ranks(rank), geometry, elements)
    state_blocks = geometry.state_blocks(engine.block_size)
    blocks = [-(-tokens // engine.block_size) + state_blocks for tokens in lengths]
    arena = torch.zeros(packing.blocks + sum(blocks), elements, dtype=model.dtype, device=model.device)
    rows = []
    first = packing.blocks
    for i, (tokens, own_blocks) in enumerate(zip(lengths, blocks, strict=True)):
        digest = AdapterDigest(str(i)) if rank else None
        start = SequenceStart(RequestId(str(i)), [0] * tokens, tokens, SamplingParams(max_tokens=1), digest)
        sequence = RankSequence(start)
        own = [BlockId(block) for block in range(first, first + own_blocks)]
        sequence.state_blocks = tuple(own[:state_blocks])
        sequence.add_blocks(own[state_blocks:])
        rows.append(BatchRow(sequence, 0, tokens, samples=True))
        first += own_blocks
    layout = AdapterLayout(packing, geometry)
    names = [row.sequence.adapter for row in rows]
    adapters = {name: layout.weights(range(packing.blocks), arena) for name in names if name is not None}
    return arena, rows, adapters


def _sampling_tensors(rows: int) -> SamplingTensors:
    """Return sampling parameters that use all filters."""
    ones = torch.ones(rows)
    numbers = torch.ones(rows, dtype=torch.int64)
    return SamplingTensors(ones, 2 * numbers, ones / 2, ones / 2, numbers, numbers)


_CPU_MEMORY_SHARE = 0.4
"""Share of the free memory of a CPU that an arena may take."""
_CPU_BYTES = 4 * 2**30
_HOST_MEMORY_SHARE = 0.25
"""Share of the free memory that the host arenas of all ranks take if their size is not set."""
_ADAPTER_BYTES = 4 * 2**30
_LARGE_RANK = 128


def arena_blocks(settings: Settings, model: RankModel, longest_tokens: int) -> int:
    """Return the number of blocks of this rank's device arena.

    The setting ``memory_bytes`` determines the number if given. Otherwise, on a GPU, the arena gets the share
    ``gpu_memory_utilization`` of the memory less weights and the largest step. On a CPU, the arena gets a share of the
    free memory. The arena is limited to the blocks that all running sequences need at full length, plus some adapters.
    On a CPU, whose memory other programs use too, it is also limited to 4 GiB, or to the minimum that works if that is
    more.

    Raises:
        ConfigError: the arena cannot hold the longest sequence and a small adapter.
        ExecutorError: the device cannot run the largest step.
    """
    engine = settings.engine
    step_bytes = measured_step_bytes(settings, model, longest_tokens)
    block_bytes = model.geometry.block_bytes(engine.block_size)
    most_blocks = sequence_blocks(settings, model.geometry, longest_tokens)
    least = min_blocks(settings, model.geometry, longest_tokens)
    if engine.memory_bytes:
        blocks = engine.memory_bytes // block_bytes
    else:
        useful_bytes = engine.max_num_seqs * most_blocks * block_bytes + _ADAPTER_BYTES
        if model.device.type == "cpu":
            free_bytes = int(psutil.virtual_memory().available / engine.local_ranks * _CPU_MEMORY_SHARE)
            useful_bytes = min(useful_bytes, max(_CPU_BYTES, least * block_bytes))
        else:
            free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
            free_bytes = share_left_bytes(engine.gpu_memory_utilization, total_bytes, free_bytes, step_bytes)
        blocks = min(free_bytes, useful_bytes) // block_bytes
    check_blocks(settings, model.geometry, longest_tokens, blocks)
    return blocks


def host_arena_blocks(settings: Settings, model: RankModel, device_blocks: int) -> int:
    """Return the number of blocks of this rank's host arena.

    The setting ``host_memory_bytes`` determines the number if given. Otherwise the host arena has twice as many blocks
    as the device arena, limited to this rank's part of a share of the free memory.
    """
    engine = settings.engine
    block_bytes = model.geometry.block_bytes(engine.block_size)
    if engine.host_memory_bytes is not None:
        return engine.host_memory_bytes // block_bytes
    ranks = engine.local_ranks * settings.cluster.replicas
    return min(HOST_TIMES_DEVICE * device_blocks, int(_HOST_MEMORY_SHARE * free_memory_bytes() / ranks) // block_bytes)


def share_left_bytes(share: float, total_bytes: int, free_bytes: int, step_bytes: int) -> int:
    """Return the bytes that remain of ``share`` of a GPU after all processes' present allocations and after steps.

    Eager steps take at most ``step_bytes``. The same amount is reserved for graphs, which need less but keep it.
    """
    return max(0, int(share * total_bytes) - (total_bytes - free_bytes) - 2 * step_bytes)


def measured_step_bytes(settings: Settings, model: RankModel, longest_tokens: int) -> int:
    """Run profiling steps on this rank's GPU and return the bytes of the largest; 0 on a CPU.

    All ranks must call this.

    The steps also compile kernels and load libraries, so that failures show before the first request.

    Raises:
        ExecutorError: a step cannot be run.
    """
    if model.device.type == "cpu":
        return 0
    rank = (settings.adapters.max_rank or _LARGE_RANK) if settings.adapters.enabled else 0
    try:
        return measure_step_bytes(model, settings.engine, rank, longest_tokens)
    except Exception as error:  # The error comes from torch, Triton's compiler or a library.
        raise ExecutorError(
            f"a step of {settings.engine.max_num_batched_tokens} tokens in {settings.engine.max_num_seqs} sequences "
            f"cannot be run by the kernels {model.kernels.name!r}: {type(error).__name__}: {error}"
        ) from error
