"""What the largest step takes of a GPU's memory besides weights and arena, measured before there is an arena."""

import torch

from lorikeet.config import EngineSettings
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import SequenceStart
from lorikeet.core.request import SamplingParams
from lorikeet.engine.batch_builder import BatchRow, build_batch
from lorikeet.engine.rank_setup import RankModel
from lorikeet.engine.sequences import Sequence
from lorikeet.kernels.base import kv_view
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack
from lorikeet.rows import resolve_row


def measure_step_bytes(model: RankModel, engine: EngineSettings, rank: int, longest_tokens: int) -> int:
    """Return the most bytes that it takes on the model's GPU; arguments as of :func:`run_largest_step`."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before_bytes = torch.cuda.memory_allocated(model.device)
    arena_bytes = run_largest_step(model, engine, rank, longest_tokens)
    torch.cuda.synchronize(model.device)
    taken_bytes = torch.cuda.max_memory_allocated(model.device) - before_bytes - arena_bytes
    torch.cuda.empty_cache()
    return taken_bytes


def run_largest_step(model: RankModel, engine: EngineSettings, rank: int, longest_tokens: int) -> int:
    """Run a step of as many tokens and sequences as there may be, each under an adapter of its own of all modules.

    They have the same weights, but no kernel knows that: einsums pad and copy all of them.

    Args:
        model: computes.
        engine: limits of a step.
        rank: of the adapters; 0 for none.
        longest_tokens: of a sequence.

    Returns:
        Bytes of an arena of its own, which is gone again.
    """
    geometry = model.geometry
    elements = geometry.block_elements(engine.block_tokens)
    packing = pack(dict.fromkeys(LORA_MODULES, (rank,) * geometry.layers), geometry, elements)
    lengths = _lengths(engine.max_step_tokens, engine.max_running, longest_tokens)
    blocks = [-(-tokens // engine.block_tokens) for tokens in lengths]
    arena = torch.zeros(packing.blocks + sum(blocks), elements, dtype=model.dtype, device=model.device)
    rows, first = [], packing.blocks
    for i, (tokens, count) in enumerate(zip(lengths, blocks, strict=True)):
        digest = AdapterDigest(str(i)) if rank else None
        start = SequenceStart(RequestId(str(i)), [0] * tokens, tokens, SamplingParams(max_tokens=1), digest)
        sequence = Sequence(start)
        sequence.add_blocks(range(first, first + count))  # type: ignore[arg-type]
        rows.append(BatchRow(sequence, 0, tokens, samples=True))
        first += count
    weights = AdapterLayout(packing, geometry).weights(range(packing.blocks), arena)
    adapters = {row.sequence.adapter: weights for row in rows if row.sequence.adapter is not None}
    form = resolve_row(engine.row)[1].kernel_form
    batch = build_batch(rows, adapters, engine.block_tokens, model.device, form)
    kv = kv_view(arena, geometry.layers, engine.block_tokens, geometry.kv_heads, geometry.head_dim)
    model.decoder.forward(batch, kv)
    return arena.nbytes


def _lengths(tokens: int, sequences: int, longest_tokens: int) -> list[int]:
    """Return prompts of so many tokens in all, the first as long as can be, and as many sequences as there may be."""
    lengths: list[int] = []
    while tokens and len(lengths) < sequences:
        others = min(sequences - len(lengths) - 1, tokens - 1)
        lengths.append(min(tokens - others, longest_tokens))
        tokens -= lengths[-1]
    return lengths
