"""Steps of a GPU before there is an arena: they compile kernels, and show what the largest takes besides weights."""

from collections.abc import Sequence

import torch

from lorikeet.config import EngineSettings
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import SequenceStart
from lorikeet.core.request import SamplingParams
from lorikeet.engine.batch_builder import BatchRow, build_batch
from lorikeet.engine.rank_setup import RankModel
from lorikeet.engine.sequences import Sequence as RankSequence
from lorikeet.kernels.base import kv_view
from lorikeet.kernels.choose import ChoiceParameters
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack
from lorikeet.rows import resolve_row


def measure_step_bytes(model: RankModel, engine: EngineSettings, rank: int, longest_tokens: int) -> int:
    """Return the most bytes that a step takes on the model's GPU.

    Steps of many and of one sequence with a row each follow, so that the kernels of decodes are compiled, too.

    Args:
        model: computes.
        engine: limits of a step.
        rank: of adapters; 0 for none.
        longest_tokens: of a sequence.
    """
    torch.cuda.reset_peak_memory_stats(model.device)
    before_bytes = torch.cuda.memory_allocated(model.device)
    arena_bytes = run_step(model, engine, rank, largest_step(engine, longest_tokens))
    torch.cuda.synchronize(model.device)
    taken_bytes = torch.cuda.max_memory_allocated(model.device) - before_bytes - arena_bytes
    for sequences in (min(engine.max_running, engine.max_step_tokens), 1):
        run_step(model, engine, rank, [1] * sequences)
    torch.cuda.synchronize(model.device)
    torch.cuda.empty_cache()
    return taken_bytes


def largest_step(engine: EngineSettings, longest_tokens: int) -> list[int]:
    """Return prompts of as many tokens and sequences as a step may have, the first as long as can be."""
    lengths: list[int] = []
    tokens, sequences = engine.max_step_tokens, engine.max_running
    while tokens and len(lengths) < sequences:
        others = min(sequences - len(lengths) - 1, tokens - 1)
        lengths.append(min(tokens - others, longest_tokens))
        tokens -= lengths[-1]
    return lengths


def run_step(model: RankModel, engine: EngineSettings, rank: int, lengths: Sequence[int]) -> int:
    """Prefill sequences, each under an adapter of its own of all modules, and choose a token for each.

    The adapters have the same weights, but no kernel knows that: einsums pad and copy all of them.

    Args:
        model: computes.
        engine: settings.
        rank: of the adapters; 0 for none.
        lengths: tokens of each sequence.

    Returns:
        Bytes of an arena of its own, which is gone again.
    """
    geometry = model.geometry
    elements = geometry.block_elements(engine.block_tokens)
    packing = pack(dict.fromkeys(LORA_MODULES, (rank,) * geometry.layers), geometry, elements)
    blocks = [-(-tokens // engine.block_tokens) for tokens in lengths]
    arena = torch.zeros(packing.blocks + sum(blocks), elements, dtype=model.dtype, device=model.device)
    rows, first = [], packing.blocks
    for i, (tokens, count) in enumerate(zip(lengths, blocks, strict=True)):
        digest = AdapterDigest(str(i)) if rank else None
        start = SequenceStart(RequestId(str(i)), [0] * tokens, tokens, SamplingParams(max_tokens=1), digest)
        sequence = RankSequence(start)
        sequence.add_blocks(range(first, first + count))  # type: ignore[arg-type]
        rows.append(BatchRow(sequence, 0, tokens, samples=True))
        first += count
    weights = AdapterLayout(packing, geometry).weights(range(packing.blocks), arena)
    adapters = {row.sequence.adapter: weights for row in rows if row.sequence.adapter is not None}
    form = resolve_row(engine.row)[1].kernel_form
    batch = build_batch(rows, adapters, engine.block_tokens, model.device, form)
    kv = kv_view(arena, geometry.layers, engine.block_tokens, geometry.kv_heads, geometry.head_dim)
    logits = model.decoder.forward(batch, kv)
    model.kernels.choose(logits, _drawn(len(lengths), model.device))
    return arena.nbytes


def _drawn(rows: int, device: torch.device) -> ChoiceParameters:
    """Return parameters for tokens that are drawn among few."""
    ones, numbers = torch.ones(rows, device=device), torch.ones(rows, dtype=torch.int64, device=device)
    return ChoiceParameters(ones, 2 * numbers, ones / 2, ones / 2, numbers, numbers)
