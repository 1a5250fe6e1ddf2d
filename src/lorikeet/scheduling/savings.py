"""Estimates the time that an engine's mechanisms save each request, compared with an engine without them.

Each estimate is a difference of two measured times of steps, transfers or waiting. The estimate counts the work or the
waiting that a mechanism replaced, but not the consequences for later steps.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from lorikeet.core.events import Decided, Mechanism
from lorikeet.core.guard import Switch
from lorikeet.core.plan import StepPlan, StepResult, Tier
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.memory import Memory
from lorikeet.memory.tree import BASE, NodeKind, NodeTransfer
from lorikeet.presets import ColdStart
from lorikeet.scheduling.assist_planner import AssistPlanner
from lorikeet.scheduling.state import Sequence, StepTimeEstimator
from lorikeet.scheduling.step_costs import StepCostMeter


class SavingsEstimator:
    """Estimates the time that each decision saved a request.

    Args:
        memory: the engine's memory, which measures transfers.
        step_times: estimator of the duration of steps.
        meter: estimator of the duration of steps with adapters.
        assist: planner of assisted prefills, which learns the duration of cold prefills; None without assistance.
    """

    def __init__(
        self,
        memory: Memory,
        step_times: StepTimeEstimator,
        meter: StepCostMeter,
        assist: AssistPlanner | None,
    ) -> None:
        self._memory = memory
        self._step_times = step_times
        self._meter = meter
        self._assist = assist

    def admitted(self, sequence: Sequence, lease: SequenceLease, now: float) -> Iterator[Decided]:
        """Yield the seconds that the cache and prefetches saved an admitted request."""
        tree = self._memory.tree
        name = sequence.request_id
        if lease.adapter != BASE:
            yield from self._adapter(sequence, lease, now)
        if not lease.cached_blocks:
            return
        block_size = self._memory.block_size
        path = lease.path[: lease.cached_blocks]
        away = int(np.count_nonzero(tree.moving[path] == NodeTransfer.IN))
        ahead = sum(bool(tree.kind[node] == NodeKind.KV) for node in lease.prefetched)
        tokens = lease.cached_blocks * block_size
        compute_s = self._step_times.prefill_s(tokens)
        loaded_s = self._copy_s(Tier.HOST, ahead)
        if ahead:
            # Without the prefetch, these blocks would be loaded now, or computed if that is faster.
            loaded_s = min(loaded_s, compute_s * ahead / lease.cached_blocks)
            yield Decided(name, now, Mechanism.PREFETCH, loaded_s, f"{ahead * block_size} tokens of KV had been loaded")
        total = len(sequence.token_ids)
        where = f", {away * block_size} of them on the host" if away else ""
        saved_s = compute_s - loaded_s - self._copy_s(Tier.HOST, away)
        yield Decided(name, now, Mechanism.PREFIX_REUSE, saved_s, f"KV of {tokens} of {total} tokens was there{where}")

    def _adapter(self, sequence: Sequence, lease: SequenceLease, now: float) -> Iterator[Decided]:
        tree = self._memory.tree
        node = lease.adapter
        name = sequence.request_id
        blocks = int(tree.size[node])
        is_on_host = bool(tree.on_host[node])
        host_s = self._copy_s(Tier.HOST, blocks)
        source_s = self._copy_s(Tier.SOURCE, blocks)
        if lease.adapter_transfers:
            from_where, saved_s = ("the host", max(0.0, source_s - host_s)) if is_on_host else ("its files", 0.0)
            why = f"its adapter ({blocks} blocks) was not on the device, and is loaded from {from_where}"
            yield Decided(name, now, Mechanism.ADAPTER_CACHE, saved_s, why)
            return
        load_s = host_s if is_on_host else source_s
        if node in lease.prefetched:
            yield Decided(name, now, Mechanism.PREFETCH, load_s, f"its adapter ({blocks} blocks) had been loaded")
        else:
            yield Decided(
                name, now, Mechanism.ADAPTER_CACHE, load_s, f"its adapter ({blocks} blocks) was on the device"
            )

    def cold_ended(self, sequence: Sequence, now: float) -> Iterator[Decided]:
        """Record a cold request's time to its first token, and yield the time that host cores saved."""
        ref = sequence.request.adapter
        is_assisted = sequence.cold_start is ColdStart.ASSIST
        sequence.cold_start = None
        if self._assist is None or ref is None or not self._assist.costs.can_assist(ref):
            return
        costs = self._assist.costs
        tokens = sequence.cold_tokens
        took_s = now - sequence.admitted_s
        waiting_s = costs.waiting_s(ref, tokens)
        predicted_s = costs.assisted(ref, tokens).first_token_s if is_assisted else waiting_s
        self._assist.record.note(predicted_s, took_s, is_assisted=is_assisted)
        if is_assisted:
            why = f"its prefill began before its adapter was there: {took_s:.3f} s, else {waiting_s:.3f} s"
            yield Decided(sequence.request_id, now, Mechanism.ASSIST, waiting_s - took_s, why)

    def order(self, sequence: Sequence, saved_s: float, now: float) -> Iterator[Decided]:
        """Yield the time that the order of admission saved.

        Without it, older requests would have been served before this request.
        """
        if saved_s:
            why = "it was admitted before older requests that take longer"
            yield Decided(sequence.request_id, now, Mechanism.ORDER, saved_s, why)

    def switched(self, sequence: Sequence, switches: Iterable[Switch], now: float) -> Iterator[Decided]:
        """Yield the switches of guarded parts since the admission before this one; they save nothing by themselves."""
        for each in switches:
            yield Decided(sequence.request_id, now, Mechanism.GUARD, 0.0, str(each))

    def note_merged(self, plan: StepPlan, sequences: list[Sequence], result: StepResult, step_s: float) -> None:
        """Add the time that merged steps saved, compared with unmerged steps, to each of their sequences."""
        costs = self._meter.costs()
        if costs is None or plan.merged is None:
            return
        ref = next((each.request.adapter for each in sequences), None)
        decodes = sum(step.tokens for step in plan.sequences if step.known_tokens == 1)
        prompts = sum(step.tokens for step in plan.sequences if step.known_tokens > 1)
        rank = 0 if ref is None else ref.max_rank
        lora_s = costs.lora_s + rank * (costs.lora_decode_s * decodes + costs.lora_prefill_s * prompts)
        base_s = costs.step_s + costs.prefill_token_s * prompts + costs.decode_s * decodes
        for sequence in sequences:
            sequence.merge_saved_s += result.steps_run * (base_s + lora_s - step_s) - result.switch_s

    def merged(self, sequence: Sequence, now: float) -> Iterator[Decided]:
        """Yield the time that merged steps saved a request that has ended."""
        if sequence.merge_saved_s:
            why = "steps ran with its adapter merged into the base weights"
            yield Decided(sequence.request_id, now, Mechanism.MERGING, sequence.merge_saved_s, why)

    def _copy_s(self, source: Tier, blocks: int) -> float:
        return self._memory.tiers.copy_s(source, Tier.DEVICE, blocks) if blocks else 0.0
