"""The state of sequences between steps, and the tensors of a step's batch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.images import PromptImage
from lorikeet.core.plan import KernelForm, SequenceStart, StateStep
from lorikeet.core.request import Pooling, PromptEmbeds, SamplingParams
from lorikeet.kernels.devices import to_device, torch_dtype
from lorikeet.kernels.interface import Batch, HostMetadata, StateTable
from lorikeet.kernels.lora import LoraBatch, LoraSegment, LoraWeights
from lorikeet.models.image_features import ImageFeatures

Ints = npt.NDArray[np.int64]


class GrowingInts:
    """An int64 array that grows at its end.

    Slices of the array are views.

    Args:
        values: the first values. An array is copied only when it has to grow.
    """

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._buffer: Ints = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.int64)
        self._length = len(self._buffer)

    def __len__(self) -> int:
        return self._length

    def extend(self, values: Iterable[int]) -> None:
        """Append ``values``, in amortised constant time per value."""
        added = np.fromiter(values, dtype=np.int64)
        length = self._length + len(added)
        self._reserve(length)
        self._buffer[self._length : length] = added
        self._length = length

    def append(self, value: int) -> None:
        """Append one value. This is ten times as fast as :meth:`extend`."""
        self._reserve(self._length + 1)
        self._buffer[self._length] = value
        self._length += 1

    @property
    def values(self) -> Ints:
        """View of the values, int64 ``[len]``."""
        return self._buffer[: self._length]

    def _reserve(self, length: int) -> None:
        if length > len(self._buffer):
            grown = np.zeros(max(length, 2 * len(self._buffer), 16), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown


class SequenceImage:
    """An image of a sequence.

    Attributes:
        image: the image.
        key: key of its embeddings.
        start, stop: the range of its tokens in the prompt.
        features: its embeddings; None unless a step needs them.
    """

    def __init__(self, image: PromptImage, key: bytes) -> None:
        self.image = image
        self.key = key
        self.start = image.offset
        self.stop = image.offset + image.length
        self.features: ImageFeatures | None = None

    def is_in(self, start: int, tokens: int) -> bool:
        """Return whether some of its tokens are among the ``tokens`` from ``start`` on."""
        return self.start < start + tokens and self.stop > start


class RankSequence:
    """The state of one sequence on a rank.

    Attributes:
        request_id: the sequence's request.
        sampling: the request's sampling parameters.
        adapter: the sequence's adapter version, None for the base model.
        adapter_start: position of the first token on which the adapter acts.
        prompt_tokens: the number of prompt tokens in ``token_ids``.
        token_ids: prompt and output tokens, including outputs from before a preemption.
        blocks: the sequence's block table.
        embeds: embeddings given with the prompt, ``[tokens, hidden]``. None if the model embeds the tokens.
        scores_prompt: whether to compute log probabilities of the prompt. False if they were reported before a
            preemption.
        pooling: how to make a vector from the prompt. None if tokens are sampled.
        pooled_sum: weighted sum of the hidden states pooled so far, fp32 ``[hidden]``.
        state_blocks: blocks of the sequence's state; empty if no layer has a state.
        save_blocks, save_at: blocks to which the state is copied once so many tokens are computed; empty for none.
        images: images of the prompt, with their embeddings once a step needs them.
        axes: positions of the prompt's tokens on each axis, int64 ``[axes, tokens]``; None if there is one axis.
        blocks_seen: ranges of tokens in which each token sees the whole range.
        is_placed: whether ``axes`` and ``blocks_seen`` are known, for a prompt with images.
    """

    def __init__(self, start: SequenceStart) -> None:
        self.request_id: RequestId = start.request_id
        self.sampling: SamplingParams = start.sampling
        self.adapter: AdapterDigest | None = start.adapter
        self.prompt_tokens = start.prompt_tokens
        self.token_ids = GrowingInts(start.token_ids)
        self.blocks = GrowingInts()
        self.embeds = None if start.prompt_embeds is None else _rows_of(start.prompt_embeds, start.prompt_tokens)
        self.scores_prompt = start.sampling.prompt_logprobs is not None and len(start.token_ids) == start.prompt_tokens
        self.adapter_start = start.adapter_start
        self.pooling: Pooling | None = start.pooling
        self.pooled_sum: Tensor | None = None
        self.state_blocks: tuple[BlockId, ...] = ()
        self.save_blocks: tuple[BlockId, ...] = ()
        self.save_at = 0
        self.images = tuple(SequenceImage(*each) for each in zip(start.images, start.image_keys, strict=True))
        self.axes: Ints | None = None
        self.blocks_seen: tuple[tuple[int, int], ...] = ()
        self.is_placed = False

    def positions(self, axes: int, start: int, tokens: int) -> Ints:
        """Return the positions of the ``tokens`` from ``start`` on, int64 ``[axes, tokens]``."""
        plain = np.tile(np.arange(start, start + tokens), (axes, 1))
        if self.axes is None:
            return plain
        inside = self.axes[:, start : start + tokens]
        plain += self.axes.max() + 1 - self.axes.shape[1]
        plain[:, : inside.shape[1]] = inside
        return plain

    @property
    def origin(self) -> "RankSequence":
        """The sequence without drafted tokens."""
        return self

    @property
    def embedded_tokens(self) -> int:
        """Number of leading tokens whose embeddings were given with the prompt."""
        return 0 if self.embeds is None else len(self.embeds)

    def scored_tokens(self, start: int, tokens: int) -> int:
        """Return how many of the ``tokens`` from ``start`` on are followed by a prompt token to score."""
        return max(0, min(tokens, self.prompt_tokens - 1 - start)) if self.scores_prompt else 0

    def pooled_tokens(self, start: int, tokens: int) -> int:
        """Return how many of the ``tokens`` from ``start`` on, counted from the end, have hidden states to pool."""
        if self.pooling is None:
            return 0
        return tokens if self.pooling.needs_all_tokens else int(start + tokens == self.prompt_tokens)

    def add_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Append blocks to the block table."""
        self.blocks.extend(blocks)

    def add_token(self, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)

    def order_state(self, state: StateStep) -> None:
        """Record the blocks of the state, and when to copy it."""
        self.state_blocks = state.blocks or self.state_blocks
        if state.save:
            self.save_blocks = state.save
            self.save_at = state.save_at


class DraftedSequence:
    """A sequence extended by the first tokens of a draft, for the sampler.

    Args:
        origin: the sequence.
        token_ids: the sequence's tokens and the drafted tokens.
    """

    def __init__(self, origin: RankSequence, token_ids: Ints) -> None:
        self.origin = origin
        self.sampling: SamplingParams = origin.sampling
        self.prompt_tokens = origin.prompt_tokens
        self.embedded_tokens = origin.embedded_tokens
        self.token_ids = GrowingInts(token_ids)


def drafted_sequences(sequence: RankSequence, draft: Sequence[int]) -> list[DraftedSequence]:
    """Return the sequence extended by 0, 1, 2 ... tokens of the draft."""
    known = len(sequence.token_ids)
    token_ids = np.concatenate((sequence.token_ids.values, np.array(draft, dtype=np.int64)))
    return [DraftedSequence(sequence, token_ids[: known + came]) for came in range(len(draft) + 1)]


def _rows_of(embeds: PromptEmbeds, tokens: int) -> Tensor:
    numbers = torch.frombuffer(bytearray(embeds.data), dtype=torch_dtype(embeds.dtype))
    return numbers.view(tokens, -1)


class BatchRow(NamedTuple):
    """One sequence's share of a batch.

    Attributes:
        sequence: token ids and block table.
        start: position of the first token computed.
        tokens: number of tokens to compute.
        samples: whether to sample from the last token's logits.
        scored: number of tokens, from the first on, whose logits score the prompt.
        pooled: number of tokens at the end whose hidden states are pooled. If above 0, nothing is sampled.
        draft: the drafted tokens, which come last. A token is sampled before the draft and after each drafted token.
    """

    sequence: RankSequence
    start: int
    tokens: int
    samples: bool
    scored: int = 0
    pooled: int = 0
    draft: Sequence[int] = ()

    @property
    def token_ids(self) -> Ints:
        """Ids of the tokens to compute."""
        known = self.sequence.token_ids.values[self.start : self.start + self.tokens - len(self.draft)]
        return np.concatenate((known, np.array(self.draft, dtype=np.int64))) if self.draft else known


class AdapterRows(NamedTuple):
    """Rows ``start`` to ``stop`` (half-open) of a batch, which use ``adapter``."""

    adapter: AdapterDigest
    start: int
    stop: int


def adapter_rows(adapters: Sequence[AdapterDigest | None], tokens: Sequence[int]) -> list[AdapterRows]:
    """Merge consecutive sequences of one adapter into ranges of rows.

    Args:
        adapters: adapter of each sequence in batch order, None for the base model.
        tokens: rows of each sequence, at least 1.

    Returns:
        Ranges in row order. Adjacent ranges have different adapters. Rows of the base model are in no range.
    """
    ranges: list[AdapterRows] = []
    row = 0
    for adapter, count in zip(adapters, tokens, strict=True):
        stop = row + count
        if adapter is not None:
            if ranges and ranges[-1].adapter == adapter and ranges[-1].stop == row:
                ranges[-1] = ranges[-1]._replace(stop=stop)
            else:
                ranges.append(AdapterRows(adapter, row, stop))
        row = stop
    return ranges


def build_batch(
    rows: Sequence[BatchRow],
    weights: Mapping[AdapterDigest, LoraWeights],
    block_size: int,
    device: torch.device,
    form: KernelForm = KernelForm.UNPADDED,
    merged: AdapterDigest | None = None,
) -> Batch:
    """Build the metadata of one step.

    Args:
        rows: sequences in batch order; sequences of one adapter are consecutive.
        weights: weights of each adapter in use.
        block_size: tokens of KV in a block.
        device: device of the tensors.
        form: the form in which the kernels compute mixed ranks.
        merged: the adapter that is merged into the base weights. Rows with this adapter need no LoRA.

    Raises:
        ValueError: a sequence has fewer tokens or blocks than the step computes.
    """
    check_rows(rows, block_size)
    counts = np.array([row.tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    stops = np.cumsum(counts)
    firsts = stops - counts
    positions = np.arange(counts.sum()) + np.repeat(starts - firsts, counts)
    tables = [row.sequence.blocks.values[: _blocks(row.start + row.tokens, block_size)] for row in rows]

    def tensor(array: Ints) -> Tensor:
        return to_device(_tensor(array), device)

    host = HostMetadata(
        row_starts=_tensor(np.concatenate(([0], stops))),
        contexts=_tensor(starts + counts),
        block_tables=_tensor(_padded(tables)),
        sample_rows=_tensor(_sample_rows(rows, firsts, stops)),
        adapter_starts=_adapter_starts(rows),
    )
    replaced = _replaced(rows, firsts, device)
    token_ids = tensor(_concatenate([row.token_ids for row in rows]))
    if replaced is not None:
        token_ids[replaced.rows] = 0  # Placeholders may be no tokens of the model.
    return Batch(
        token_ids=token_ids,
        positions=tensor(positions),
        slot_blocks=tensor(
            _concatenate(
                [
                    table[positions[first:stop] // block_size]
                    for table, first, stop in zip(tables, firsts, stops, strict=True)
                ]
            )
        ),
        slot_offsets=tensor(positions % block_size),
        row_starts=to_device(host.row_starts, device),
        contexts=to_device(host.contexts, device),
        block_tables=to_device(host.block_tables, device),
        sample_rows=to_device(host.sample_rows, device),
        lora=lora_batch(rows, weights, form, merged),
        embeds=replaced and (replaced.rows, replaced.embeds),
        host=host,
        states=_states(rows, starts, device),
        layer_embeds=() if replaced is None else replaced.layers,
        axes=_axes(rows, device),
        seen=_seen(rows, positions, firsts, device),
    )


def _states(rows: Sequence[BatchRow], starts: Ints, device: torch.device) -> StateTable | None:
    """Return the states of the sequences; None if no layer has a state."""
    if not rows or not rows[0].sequence.state_blocks:
        return None
    blocks = _tensor(np.array([row.sequence.state_blocks for row in rows], dtype=np.int64))
    resumed = _tensor((starts > 0).astype(np.int64))
    return StateTable(to_device(blocks, device), to_device(resumed, device), resumed)


class _Replaced(NamedTuple):
    """Rows of a batch whose embeddings are given, see ``Batch.embeds`` and ``Batch.layer_embeds``."""

    rows: Tensor
    embeds: Tensor
    layers: tuple[Tensor, ...]


def _replaced(rows: Sequence[BatchRow], firsts: Ints, device: torch.device) -> _Replaced | None:
    """Return the rows whose embeddings were given with the prompt or computed from images; None without such rows.

    Raises:
        ValueError: an image has no embeddings.
    """
    at = list[Tensor]()
    found = list[ImageFeatures]()
    for row, first in zip(rows, firsts.tolist(), strict=True):
        tokens = min(row.tokens, row.sequence.embedded_tokens - row.start)
        if row.sequence.embeds is not None and tokens > 0:
            at.append(first + torch.arange(tokens))
            embeds = row.sequence.embeds[row.start : row.start + tokens].float()
            found.append(ImageFeatures(at[-1], to_device(embeds, device)))
        for image in row.sequence.images:
            if not image.is_in(row.start, row.tokens):
                continue
            if image.features is not None and not len(image.features.rows):
                continue
            if image.features is None:
                raise ValueError(f"request {row.sequence.request_id}: the image at {image.start} has no embeddings")
            tokens_at = image.features.rows + image.start - row.start
            inside = ((tokens_at >= 0) & (tokens_at < row.tokens)).nonzero()[:, 0]
            at.append(first + tokens_at[inside])
            chosen = to_device(inside, device)
            _, embeds, layers = image.features
            found.append(ImageFeatures(at[-1], embeds[chosen], tuple(each[chosen] for each in layers)))
    if not at:
        return None
    depth = max(len(each.layers) for each in found)
    by_layer = [
        torch.cat([each.layers[n] if n < len(each.layers) else torch.zeros_like(each.embeds) for each in found])
        for n in range(depth)
    ]
    return _Replaced(to_device(torch.cat(at), device), torch.cat([each.embeds for each in found]), tuple(by_layer))


def _axes(rows: Sequence[BatchRow], device: torch.device) -> Tensor | None:
    """Return the positions of all rows on several axes, ``[axes, T]``; None if all positions are plain."""
    axes = max((0 if row.sequence.axes is None else len(row.sequence.axes) for row in rows), default=0)
    if not axes:
        return None
    parts = [row.sequence.positions(axes, row.start, row.tokens) for row in rows]
    return to_device(_tensor(np.concatenate(parts, axis=1)), device)


def _seen(rows: Sequence[BatchRow], positions: Ints, firsts: Ints, device: torch.device) -> Tensor | None:
    """Return the number of tokens that each row sees; None if no row sees later tokens."""
    found: Ints | None = None
    for row, first in zip(rows, firsts.tolist(), strict=True):
        for start, stop in row.sequence.blocks_seen:
            begin = max(start, row.start) - row.start
            end = min(stop, row.start + row.tokens) - row.start
            if begin < end:
                found = positions + 1 if found is None else found
                found[first + begin : first + end] = stop
    return None if found is None else to_device(_tensor(found), device)


def _adapter_starts(rows: Sequence[BatchRow]) -> Tensor | None:
    """Return ``HostMetadata.adapter_starts``."""
    found = np.array([row.sequence.adapter_start for row in rows], dtype=np.int64)
    return _tensor(found) if found.any() else None


def _sample_rows(rows: Sequence[BatchRow], firsts: Ints, stops: Ints) -> Ints:
    """Return the rows of a batch whose hidden states are needed.

    A sequence needs the rows that score its prompt, the rows that are pooled, and, if it samples, its last row and the
    rows of its draft.
    """
    last = stops[np.array([row.samples for row in rows], dtype=bool)] - 1
    if not any(row.scored or row.pooled or row.draft for row in rows):
        return last
    scored = [first + np.arange(row.scored) for row, first in zip(rows, firsts, strict=True)]
    pooled = [stop - row.pooled + np.arange(row.pooled) for row, stop in zip(rows, stops, strict=True)]
    drafted = [stop - 1 - len(row.draft) + np.arange(len(row.draft)) for row, stop in zip(rows, stops, strict=True)]
    return np.sort(np.concatenate([last, *scored, *pooled, *drafted]))


def lora_batch(
    rows: Sequence[BatchRow],
    weights: Mapping[AdapterDigest, LoraWeights],
    form: KernelForm = KernelForm.UNPADDED,
    merged: AdapterDigest | None = None,
) -> LoraBatch | None:
    """Return the LoRA part of a batch, None if no row needs LoRA. See :func:`build_batch` for the arguments."""
    added = list[AdapterDigest | None]()
    counts = list[int]()
    for row in rows:
        plain = min(max(row.sequence.adapter_start - row.start, 0), row.tokens)
        adapter = None if row.sequence.adapter == merged else row.sequence.adapter
        parts = [(None, plain), (adapter, row.tokens - plain)] if plain else [(adapter, row.tokens)]
        added += [each for each, count in parts if count]
        counts += [count for _, count in parts if count]
    ranges = adapter_rows(added, counts)
    return LoraBatch([LoraSegment(r.start, r.stop, weights[r.adapter]) for r in ranges], form) if ranges else None


def check_rows(rows: Sequence[BatchRow], block_size: int, more: int = 0) -> None:
    """Check that every sequence has the tokens and blocks that the step computes.

    Args:
        rows: sequences of a batch.
        block_size: tokens of KV in a block.
        more: number of further tokens for which each sequence must have blocks.

    Raises:
        ValueError: a sequence has too few; the message names its request.
    """
    for row in rows:
        context = row.start + row.tokens
        sequence = row.sequence
        known = context - len(row.draft)
        if row.tokens < 1 or row.start < 0 or known > len(sequence.token_ids):
            raise ValueError(
                f"request {sequence.request_id}: tokens {row.start} to {known} are to be computed, "
                f"it has {len(sequence.token_ids)}"
            )
        if _blocks(context + more, block_size) > len(sequence.blocks):
            raise ValueError(
                f"request {sequence.request_id}: {context + more} tokens do not fit its {len(sequence.blocks)} blocks "
                f"of {block_size}"
            )


def _tensor(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _concatenate(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _padded(tables: list[Ints]) -> Ints:
    width = max((len(table) for table in tables), default=0)
    padded = np.zeros((len(tables), width), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
