"""What every tensor-parallel rank does with a plan: keep its sequences, run its share of the decoder."""

import time
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import SequenceStep, StepPlan
from lorikeet.kernels.base import LoraBatch, LoraWeights, kv_view
from lorikeet.worker.batch import BatchRow, SequenceState, build_batch, check_rows, lora_batch
from lorikeet.worker.host_lora.assisted_step import HostLoraSide
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.threads import CpuBudget, ThreadPinning
from lorikeet.worker.transfer.state import PartialAdapter
from lorikeet.worker.transfer.transfers import TransferManager


class Rank:
    """One rank's sequences, arena and decoder.

    Args:
        model: this rank's share.
        arena: ``[blocks, elements]``, for KV and adapters.
        block_size: tokens of KV in a block.
        transfers: move blocks beside the steps, and know which adapters are in the arena.
        cores: says before every plan how many threads compute.
        host_lora: computes for adapters that are on their way; None if plans never ask for it.
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
        self._team = ThreadPinning(model.kernels, cores)
        self._host_lora = host_lora
        geometry = model.geometry
        self._kv = kv_view(arena, geometry.layers, block_size, geometry.kv_heads, geometry.head_dim)
        self._block_tokens = block_size
        self._transfers = transfers
        self._sequences: dict[RequestId, SequenceState] = {}

    def apply(self, plan: StepPlan) -> float:
        """Do what the plan asks for before its first step, and return the seconds in which weights were merged.

        Raises:
            ExecutorError: it runs or drops a sequence that this rank does not know, or merges an adapter that is not
                loaded, or any where the row never does.
        """
        self._team.resize()
        for request_id in plan.drops:
            if self._sequences.pop(request_id, None) is None:
                raise ExecutorError(f"request {request_id} is dropped, but was never started")
        for digest in plan.evictions:
            self._transfers.evict(digest)
        for start in plan.starts:
            self._sequences[start.request_id] = SequenceState(start)
        for transfer in plan.transfers:
            self._transfers.start(transfer)
        if plan.urgent:
            self._transfers.promote(plan.urgent)
        if plan.transfers:
            self._transfers.begin_copies()
        for step in plan.sequences:
            self.sequence(step.request_id).add_blocks(step.new_blocks)
        return self._switch(plan) if plan.sequences else 0.0

    def at_work(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return what is to be entered while the steps of an applied plan run."""
        return self._team.at_work(plan)

    def forward(self, plan: StepPlan, ran: int, *, logits: bool = True) -> Tensor:
        """Run one step.

        Args:
            plan: an applied plan with sequences.
            ran: how many of its identical steps have run.
            logits: False leaves the output layer out, for ranks that do not sample.

        Returns:
            Logits ``[S, vocab]`` of the sequences that sample, in the model's dtype; ``S`` is 0 without ``logits``.

        Raises:
            ExecutorError: an adapter, tokens or blocks that the plan counts on are not there.
        """
        rows = self._rows(plan, ran)
        try:
            weights, arrivals = self._adapters(rows, plan)
            batch = build_batch(rows, weights, self._block_tokens, self.device, plan.kernel_form, plan.merged)
        except ValueError as error:
            raise ExecutorError(f"step {plan.step}: {error}") from error
        if not arrivals:
            return self._decoder.forward(batch, self._kv, logits=logits)
        if self._host_lora is None or batch.lora is None:
            raise ExecutorError(f"step {plan.step}: prefills are to be assisted, but there are no host workers")
        with self._host_lora.assisting(batch.lora, arrivals) as assist:
            return self._decoder.forward(replace(batch, assist=assist), self._kv, logits=logits)

    def wait(self) -> None:
        """Block until the device has done all steps so far.

        Raises:
            RuntimeError: the device has failed.
        """
        self._transfers.device.steps.mark().wait()

    def decodes(self, plan: StepPlan, ran: int) -> tuple[list[BatchRow], LoraBatch | None]:
        """Return the sequences of a step in which all decode, and their adapters; none is still on its way.

        They have the blocks of the plan's last step, too.

        Raises:
            ExecutorError: an adapter, tokens or blocks that the plan counts on are not there.
        """
        rows = self._rows(plan, ran)
        try:
            check_rows(rows, self._block_tokens, plan.repeat - ran - 1)
        except ValueError as error:
            raise ExecutorError(f"step {plan.step}: {error}") from error
        weights, _ = self._adapters(rows, plan)
        return rows, lora_batch(rows, weights, plan.kernel_form, plan.merged)

    def append(self, steps: Seq[SequenceStep], token_ids: Seq[int]) -> None:
        """Append one sampled token to each of ``steps``, which are those that sample."""
        for step, token_id in zip(steps, token_ids, strict=True):
            self.sequence(step.request_id).add_token(token_id)

    def sequence(self, request_id: RequestId) -> SequenceState:
        """Return a sequence.

        Raises:
            ExecutorError: it was never started, or dropped.
        """
        if request_id not in self._sequences:
            raise ExecutorError(f"request {request_id} runs, but was never started")
        return self._sequences[request_id]

    def _rows(self, plan: StepPlan, ran: int) -> list[BatchRow]:
        """Return the sequences of a plan's step."""
        rows = [
            BatchRow(self.sequence(step.request_id), step.start + ran, step.tokens, step.samples)
            for step in plan.sequences
        ]
        if plan.merged is not None and any(row.sequence.adapter != plan.merged for row in rows):
            raise ExecutorError(f"step {plan.step}: only adapter {plan.merged} can run while it is merged")
        return rows

    def _adapters(
        self, rows: Seq[BatchRow], plan: StepPlan
    ) -> tuple[dict[AdapterDigest, LoraWeights], list[PartialAdapter]]:
        """Return where the weights of each adapter lie, and of those that have not all arrived what has."""
        weights: dict[AdapterDigest, LoraWeights] = {}
        arrivals = []
        used = {row.sequence.adapter for row in rows} - {None, plan.merged}
        for digest in sorted(digest for digest in used if digest is not None):  # on all ranks in the same order
            arrival = self._transfers.arrival(digest) if digest in plan.assisted else None
            if arrival is not None:
                arrivals.append(arrival)
            weights[digest] = self._transfers.adapters.weights(digest) if arrival is None else arrival.weights
        return weights, arrivals

    def _switch(self, plan: StepPlan) -> float:
        """Have merged what the plan wants merged; return the seconds that took."""
        if self._merger is None:
            if plan.merged is not None:
                raise ExecutorError(f"step {plan.step}: adapter {plan.merged} cannot be merged: this row never merges")
            return 0.0
        if plan.merged == self._merger.merged:
            return 0.0
        started_s = time.monotonic()
        adapter = None if plan.merged is None else self._transfers.adapters.weights(plan.merged)
        self._merger.switch(plan.merged, adapter)
        return time.monotonic() - started_s


def sampling_steps(plan: StepPlan) -> list[SequenceStep]:
    """Return the sequences of a plan that yield a token, in the order of their logits."""
    return [step for step in plan.sequences if step.samples]
