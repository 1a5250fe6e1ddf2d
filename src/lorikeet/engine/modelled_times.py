"""How long plans take by a cost model."""

from collections.abc import Iterator

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import StepPlan, Tier, Transfer
from lorikeet.costs.assisted import ColdAdapter, assist_costs, layer_arrivals_s, prefill_s
from lorikeet.costs.merging import MergeModel
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.transfers import TransferModel
from lorikeet.engine.modelled import GroupEnds, Times
from lorikeet.presets import Preset

_NOBODY: frozenset[object] = frozenset()


class ModelledTimes:
    """Times by a cost model.

    Steps on merged weights cost what the base model does. A plan with another adapter merged than the last one takes
    the time of the switch first. See ``costs.assisted`` for plans whose prefills the host assists. Of a plan
    that is overlapped one step runs, and the loop has the time of the next one.

    Args:
        transfers: what moves cost; its profile has the constants.
        preset: of the replica.
        loop_each_step: whether a repeat stands for as many turns of the engine's loop, or is one turn of it.
    """

    def __init__(self, transfers: TransferModel, preset: Preset, *, loop_each_step: bool) -> None:
        profile = transfers.profile
        self._transfers = transfers
        self._assist = assist_costs(transfers, preset)
        self._model = CostModel(profile, preset.kernel_form)
        self._merging = MergeModel(profile, preset.merge_by, transfers)
        self._loop_each_step = loop_each_step
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._ranks: dict[AdapterDigest, float] = {}
        self._last_moves: dict[AdapterDigest, Transfer] = {}
        self._adapters: dict[RequestId, AdapterDigest | None] = {}
        self._merged: AdapterRef | None = None

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> Times:
        """See ``PlanTimes``.

        Raises:
            ProfileError: the profile lacks something that the plan needs.
        """
        self.note(plan)
        if not plan.sequences:
            return Times(0, 0.0, 0.0)
        switch_s = self._switch_s(plan)
        loop_s = self._model.loop_s(len(plan.sequences))
        if plan.assisted:
            return Times(1, switch_s + self._assisted_s(plan, group_ends_s), loop_s, switch_s)
        work = step_work(self._work(plan), plan.kernel_form)
        step_s, growth_s = self._model.step_s(work), self._model.growth_s(work)
        if plan.overlapped:
            goes_on = plan.repeat > 1
            step_s = max(step_s, loop_s) if plan.goes_on else step_s
            return Times(1, switch_s + step_s, 0.0 if goes_on else loop_s, switch_s, goes_on)
        between_s = loop_s if self._loop_each_step else 0.0
        ran, seconds = 1, switch_s + step_s
        while ran < plan.repeat and seconds + ran * between_s < limit_s:
            step_s += growth_s
            seconds += step_s
            ran += 1
        return Times(ran, seconds, loop_s + (ran - 1) * between_s, switch_s)

    def note(self, plan: StepPlan) -> None:
        """Take in who comes and goes with a plan."""
        for digest in plan.evictions:
            self._ranks.pop(digest, None)
            self._refs.pop(digest, None)
            self._last_moves.pop(digest, None)
        for transfer in plan.transfers:
            ref = transfer.adapter
            if ref is not None and transfer.target is Tier.DEVICE:
                self._refs[ref.digest] = ref
                self._ranks[ref.digest] = self._model.adapter_rank(ref)
                self._last_moves[ref.digest] = transfer
        for request_id in plan.drops:
            del self._adapters[request_id]
        for start in plan.starts:
            self._adapters[start.request_id] = start.adapter

    def _switch_s(self, plan: StepPlan) -> float:
        """Return the time of the switch that a plan begins with."""
        old = self._merged
        if plan.merged == (None if old is None else old.digest):
            return 0.0
        # Kept apart from the others: an adapter may leave its blocks and stay merged.
        self._merged = None if plan.merged is None else self._refs[plan.merged]
        return self._merging.switch_s(old, self._merged)

    def _work(self, plan: StepPlan, hosted: frozenset[object] = _NOBODY) -> Iterator[SequenceWork]:
        """Yield what the device does; for the adapters in ``hosted`` the host adds theirs."""
        for step in plan.sequences:
            adapter = self._adapters[step.request_id]
            if adapter is None or adapter == plan.merged or adapter in hosted:
                yield SequenceWork(step.start, step.tokens, step.samples, None, 0.0)
            else:
                yield SequenceWork(step.start, step.tokens, step.samples, adapter, self._ranks[adapter])

    def _assisted_s(self, plan: StepPlan, group_ends_s: GroupEnds) -> float:
        """Return the time of a step on some layers of which the host adds what cold adapters add."""
        costs, assisted = self._transfers.profile.need(self._assist, "host_lora"), frozenset(plan.assisted)
        cold: dict[AdapterDigest, ColdAdapter] = {}
        for digest in plan.assisted:
            ref, move = self._refs[digest], self._last_moves[digest]
            arrivals_s = layer_arrivals_s(ref, move.groups, group_ends_s(move.transfer_id), self._transfers)
            rows = tuple(step.tokens for step in plan.sequences if self._adapters[step.request_id] == digest)
            cold[digest] = ColdAdapter(arrivals_s, rows, costs.rank(ref), range(*move.left_to_host))
        return prefill_s(
            lambda there: self._model.step_s(step_work(self._work(plan, assisted - there), plan.kernel_form)),
            cold,
            costs,
        )
