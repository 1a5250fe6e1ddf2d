"""One rank, which keeps sequences and runs its share of the decoder for each step of a plan."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import Pooled, PromptLogprobs, SequenceStep, StepPlan
from lorikeet.kernels.devices import to_device
from lorikeet.kernels.lora import LoraBatch, LoraWeights
from lorikeet.models.image_features import ImageFeatures, SeesImages, TowerChanges, TowerError
from lorikeet.worker.batch import BatchRow, RankSequence, SequenceImage, build_batch, check_rows, lora_batch
from lorikeet.worker.host_lora.assisted_step import HostLoraSide
from lorikeet.worker.pooling import PooledRows, pool
from lorikeet.worker.prompt_logprobs import ScoredRows, score_prompts
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.threads import CpuBudget, ThreadPinning
from lorikeet.worker.tower_adapters import TowerAdapters
from lorikeet.worker.transfer.device import BlockCopy
from lorikeet.worker.transfer.state import PartialAdapter
from lorikeet.worker.transfer.transfers import TransferManager

_NO_FEATURES = ImageFeatures(torch.zeros(0, dtype=torch.int64), torch.zeros(0))


class Encoded(NamedTuple):
    """The result of computing the images of a plan.

    Attributes:
        failed: requests with an image that could not be computed, with the reason.
        seconds: time that it took.
    """

    failed: dict[RequestId, str]
    seconds: float


class StepOutput(NamedTuple):
    """The results of a step.

    Attributes:
        logits: logits of the sampling sequences, ``[S, vocab]`` in the dtype of ``Kernels.logits``.
        prompt_logprobs: log probabilities of the scored prompts.
        pooled: vectors of the prompts whose last token was computed.
    """

    logits: Tensor
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[Pooled, ...] = ()


class Rank:
    """One rank's sequences, arena and decoder.

    Args:
        model: this rank's share of the model.
        arena: the device arena, ``[blocks, elements]``, for KV and adapters.
        block_size: tokens of KV in a block.
        transfers: the transfers, which copy blocks in the background and record the adapters in the arena.
        cores: the rank's share of the cores, which sets the number of compute threads before every plan.
        host_lora: the host LoRA for adapters that are being loaded; None without assisted prefills.
    """

    def __init__(
        self,
        model: RankModel,
        arena: Tensor,
        block_size: int,
        transfers: TransferManager,
        cores: CpuBudget,
        host_lora: HostLoraSide | None = None,
    ) -> None:
        self.device: torch.device = arena.device
        self._decoder = model.decoder
        self._merger = model.merger
        self._threads = ThreadPinning(model.kernels, cores)
        self._host_lora = host_lora
        self._arena = arena
        self._kv = model.decoder.view_kv(arena, block_size)
        self._block_size = block_size
        self._transfers = transfers
        self._sequences: dict[RequestId, RankSequence] = {}
        self._tower = model.tower
        self._tower_adapters = TowerAdapters(model.whole_geometry or model.geometry, model.dtype, model.device)
        self._features: dict[bytes, ImageFeatures] = {}
        self._seeing: set[RequestId] = set()

    def apply(self, plan: StepPlan) -> float:
        """Apply a plan before its first step: drops, evictions, starts, transfers, new blocks, merging.

        Returns:
            Seconds spent in merging weights.

        Raises:
            ExecutorError: the plan runs or drops an unknown sequence, merges an adapter that is not loaded, or merges
                though the preset never does.
        """
        self._threads.resize()
        for request_id in plan.drops:
            if self._sequences.pop(request_id, None) is None:
                raise ExecutorError(f"request {request_id} is dropped, but was never started")
            self._seeing.discard(request_id)
        for digest in plan.evictions:
            self._transfers.evict(digest)
        for start in plan.starts:
            self._sequences[start.request_id] = RankSequence(start)
            if start.images:
                self._seeing.add(start.request_id)
        for transfer in plan.transfers:
            self._transfers.start(transfer)
        if plan.urgent:
            self._transfers.promote(plan.urgent)
        if plan.transfers:
            self._transfers.begin_copies()
        for step in plan.sequences:
            sequence = self.sequence(step.request_id)
            sequence.add_blocks(step.new_blocks)
            if step.state is not None:
                sequence.order_state(step.state)
                self._copy_blocks(step.state.load, step.state.blocks)
        return self._switch_merged(plan) if plan.sequences else 0.0

    def encode(self, plan: StepPlan) -> Encoded:
        """Compute the images of an applied plan, and give its sequences the embeddings that the step needs.

        Raises:
            ExecutorError: embeddings are needed that were neither computed nor kept.
        """
        if not self._seeing:
            return Encoded({}, 0.0)
        started_s = time.monotonic()
        for key in plan.dropped_images:
            self._features.pop(key, None)
        broken: dict[bytes, str] = {}
        for each in plan.images:
            sequence = self.sequence(each.request_id)
            try:
                changes = self._tower_adapters.changes(each.adapter)
                self._features[each.key] = self._encoded(sequence, sequence.images[each.number], changes)
            except TowerError as error:
                broken[each.key] = str(error)
        failed: dict[RequestId, str] = {}
        for step in plan.sequences:
            if step.request_id in self._seeing:
                why = self._use_features(self.sequence(step.request_id), step, broken)
                failed |= {step.request_id: why} if why else {}
        return Encoded(failed, time.monotonic() - started_s if plan.images else 0.0)

    def _encoded(self, sequence: RankSequence, image: SequenceImage, changes: TowerChanges) -> ImageFeatures:
        """Return the embeddings of an image.

        Raises:
            TowerError: the tower cannot compute it.
        """
        if self._tower is None:
            raise TowerError("the model takes no images")
        token_ids = sequence.token_ids.values[image.start : image.stop].tolist()
        return self._tower.encode(token_ids, image.image.tensors, changes)

    def _use_features(self, sequence: RankSequence, step: SequenceStep, broken: Mapping[bytes, str]) -> str:
        """Give a sequence the embeddings that a step needs.

        Returns:
            Why an image could not be computed; empty if all could.
        """
        why = ""
        for image in sequence.images:
            image.features = None
            if not image.is_in(step.start, step.tokens):
                continue
            if image.key in broken:
                why = f"the image at token {image.start}: {broken[image.key]}"
                sequence.token_ids.values[image.start : image.stop] = 0  # Placeholders may be no tokens of the model.
            elif image.key not in self._features:
                raise ExecutorError(f"an image of request {sequence.request_id} was not computed")
            image.features = self._features.get(image.key, _NO_FEATURES)
        if not (why or sequence.is_placed) and self._tower is not None:
            try:
                self._place(sequence, self._tower)
            except TowerError as error:
                why = str(error)
        return why

    def _place(self, sequence: RankSequence, tower: SeesImages) -> None:
        """Set the positions of a sequence's tokens, and the ranges that see each other.

        Raises:
            TowerError: the tower cannot compute the positions.
        """
        prompt = sequence.token_ids.values[: sequence.prompt_tokens]
        images = [each.image for each in sequence.images]
        axes = tower.positions(prompt.tolist(), images)
        sequence.axes = None if axes is None else axes.numpy()
        sequence.blocks_seen = tower.blocks_seen(prompt, images)
        sequence.is_placed = True

    def pin_threads(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return a context for the steps of an applied plan. Threads may be pinned to cores within it."""
        return self._threads.pinned(plan)

    def forward(self, plan: StepPlan, ran: int, *, samples: bool = True) -> StepOutput:
        """Run one step.

        Args:
            plan: an applied plan with sequences.
            ran: number of the plan's identical steps that have run before.
            samples: whether to compute the output layer. False for ranks that do not sample.

        Returns:
            The step's output, which is empty without ``samples``. A sequence with a draft has one more row of logits
            for each drafted token.

        Raises:
            ExecutorError: an adapter, tokens or blocks that the plan needs are missing.
        """
        rows = self._rows(plan, ran)
        try:
            weights, partial = self._adapters(rows, plan)
            batch = build_batch(rows, weights, self._block_size, self.device, plan.kernel_form, plan.merged)
        except ValueError as error:
            raise ExecutorError(f"step {plan.step}: {error}") from error
        if not partial:
            hidden = self._decoder.hidden(batch, self._kv)
            self.save_states(rows)
            return self._outputs(hidden, rows, batch.head_lora, samples=samples)
        if self._host_lora is None or batch.lora is None:
            raise ExecutorError(f"step {plan.step} has assisted prefills, but there are no host workers")
        with self._host_lora.assisting(batch.lora, partial) as assist:
            hidden = self._decoder.hidden(replace(batch, assist=assist), self._kv)
        self.save_states(rows)
        return self._outputs(hidden, rows, batch.head_lora, samples=samples)

    def save_states(self, rows: Sequence[BatchRow]) -> None:
        """Copy the states of sequences that have computed the number of tokens at which a copy was ordered."""
        for row in rows:
            sequence = row.sequence
            if sequence.save_blocks and row.start + row.tokens == sequence.save_at:
                self._copy_blocks(sequence.state_blocks, sequence.save_blocks)
                sequence.save_blocks = ()

    def _copy_blocks(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> None:
        """Copy blocks within the arena, in the order of the steps."""
        if source:
            copy = BlockCopy(self._arena, source, self._arena, target)
            self._transfers.device.steps.copy_blocks(copy, until_s=0.0)

    def wait(self) -> None:
        """Block until the device has finished all steps so far.

        Raises:
            RuntimeError: the device has failed.
        """
        self._transfers.device.steps.record_event().wait()

    def decode_rows(self, plan: StepPlan, ran: int) -> tuple[list[BatchRow], LoraBatch | None]:
        """Return the sequences and the adapters of a step in which every sequence decodes.

        All adapters must be loaded.

        The sequences must have blocks for all remaining steps of the plan.

        Raises:
            ExecutorError: an adapter, tokens or blocks that the plan needs are missing.
        """
        rows = self._rows(plan, ran)
        try:
            check_rows(rows, self._block_size, plan.repeat - ran - 1)
        except ValueError as error:
            raise ExecutorError(f"step {plan.step}: {error}") from error
        weights, _ = self._adapters(rows, plan)
        return rows, lora_batch(rows, weights, plan.kernel_form, plan.merged)

    def has_extras(self, plan: StepPlan) -> bool:
        """Return whether an adapter of a plan has more than A and B. All adapters of the plan must be loaded."""
        digests = {self.sequence(step.request_id).adapter for step in plan.sequences}
        return any(digest is not None and self._transfers.adapters.has_extras(digest) for digest in digests)

    def append(self, steps: Sequence[SequenceStep], token_ids: Sequence[int]) -> None:
        """Append one sampled token to the sequence of each of ``steps``, which must be steps that sample."""
        for step, token_id in zip(steps, token_ids, strict=True):
            self.sequence(step.request_id).add_token(token_id)

    def sequence(self, request_id: RequestId) -> RankSequence:
        """Return a sequence.

        Raises:
            ExecutorError: the sequence was never started, or was dropped.
        """
        if request_id not in self._sequences:
            raise ExecutorError(f"request {request_id} runs, but was never started")
        return self._sequences[request_id]

    def _rows(self, plan: StepPlan, ran: int) -> list[BatchRow]:
        """Return the batch rows of one step of a plan."""
        rows = [self._row(step, ran) for step in plan.sequences]
        if plan.merged is not None and any(row.sequence.adapter != plan.merged for row in rows):
            raise ExecutorError(f"step {plan.step}: only adapter {plan.merged} can run while it is merged")
        return rows

    def _row(self, step: SequenceStep, ran: int) -> BatchRow:
        sequence = self.sequence(step.request_id)
        start = step.start + ran
        scored, pooled = (of(start, step.tokens) for of in (sequence.scored_tokens, sequence.pooled_tokens))
        return BatchRow(sequence, start, step.tokens, step.samples, scored, pooled, step.draft)

    def _outputs(
        self, hidden: Tensor, rows: Sequence[BatchRow], lora: LoraBatch | None = None, *, samples: bool
    ) -> StepOutput:
        """Return the results of a step, computed from the hidden states of the rows that need them.

        ``lora`` has the adapters of the rows, if an adapter has more than A and B.
        """
        if not samples:
            return StepOutput(hidden[:0])
        sampled: list[int] = []
        scored: list[ScoredRows] = []
        pooled: list[PooledRows] = []
        at = 0
        for row in rows:
            if row.scored:
                scored.append(ScoredRows(row.sequence, at, row.start + 1, row.scored))
            at += row.scored
            if row.samples:
                sampled += range(at, at + 1 + len(row.draft))
                at += 1 + len(row.draft)
            if row.pooled:
                pooled.append(PooledRows(row.sequence, at, row.start + row.tokens - row.pooled, row.pooled))
            at += row.pooled
        if not (scored or pooled):
            return StepOutput(self._decoder.head(hidden, lora))

        def head(chosen: Sequence[int]) -> Tensor:
            numbers = to_device(torch.tensor(chosen, dtype=torch.int64), hidden.device)
            return self._decoder.head(hidden[numbers], None if lora is None else lora.select_rows(chosen))

        vectors = pool(hidden, pooled, self._transfers.adapters.weights)
        return StepOutput(head(sampled), score_prompts(head, scored), vectors)

    def _adapters(
        self, rows: Sequence[BatchRow], plan: StepPlan
    ) -> tuple[dict[AdapterDigest, LoraWeights], list[PartialAdapter]]:
        """Return the weights of each adapter in the batch, and the adapters that are only partly loaded."""
        weights: dict[AdapterDigest, LoraWeights] = {}
        partial = []
        used = {row.sequence.adapter for row in rows} - {None, plan.merged}
        for digest in sorted(digest for digest in used if digest is not None):  # The order is the same on all ranks.
            arriving = self._transfers.partial_adapter(digest) if digest in plan.assisted else None
            if arriving is not None:
                partial.append(arriving)
            found = self._transfers.adapters.weights(digest) if arriving is None else arriving.weights
            if found.extras is not None and not found.extras.is_prepared:
                self._decoder.prepare(found)
                found.extras.is_prepared = True
            weights[digest] = found
        return weights, partial

    def _switch_merged(self, plan: StepPlan) -> float:
        """Merge the plan's adapter into the weights, or unmerge; return the seconds spent."""
        if self._merger is None:
            if plan.merged is not None:
                raise ExecutorError(f"step {plan.step}: cannot merge adapter {plan.merged}: this preset never merges")
            return 0.0
        if plan.merged == self._merger.merged:
            return 0.0
        started_s = time.monotonic()
        adapter = None if plan.merged is None else self._transfers.adapters.weights(plan.merged)
        if adapter is not None and adapter.extras is not None:
            raise ExecutorError(f"step {plan.step}: adapter {plan.merged} has more than A and B, and cannot be merged")
        self._merger.switch(plan.merged, adapter)
        return time.monotonic() - started_s


def sampling_steps(plan: StepPlan) -> list[SequenceStep]:
    """Return the steps of a plan's sequences that yield a token, in the order of their logits."""
    return [step for step in plan.sequences if step.samples]
