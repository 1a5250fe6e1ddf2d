"""A plan in the making."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm, SequenceStart, SequenceStep, StepPlan, StepResult
from lorikeet.memory.leases import Wait
from lorikeet.memory.memory import Memory
from lorikeet.scheduling.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """Who gets how many tokens, and what is left of the step's budget.

    Attributes:
        budget_tokens: not given to anybody yet.
        tokens: by sequence.
        cold: the same of prefills that the host assists.
        preempted: whether a sequence lost its blocks for want of room.
        without_slot: adapters that others are in the way of; their requests need not be tried again in this step.
    """

    budget_tokens: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    cold: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    without_slot: set[AdapterDigest | None] = field(default_factory=set)

    def give(self, sequence: Sequence) -> None:
        """Give a sequence what it can use of the budget."""
        tokens = min(sequence.remaining_tokens, self.budget_tokens)
        if tokens:
            (self.cold if sequence.is_cold else self.tokens)[sequence] = tokens
            self.budget_tokens -= tokens

    def take_back(self, sequence: Sequence) -> None:
        """Take from a sequence what it was given."""
        self.budget_tokens += self.tokens.pop(sequence, 0) + self.cold.pop(sequence, 0)

    def lacks_slot(self, digest: AdapterDigest | None, running: Iterable[Sequence], most: int) -> bool:
        """Whether an adapter beside those of the running sequences makes more than ``most``; 0 is no limit."""
        if digest is not None and most and digest not in self.without_slot:
            used = {sequence.digest for sequence in running} - {None}
            if digest not in used and len(used) >= most:
                self.without_slot.add(digest)
        return digest in self.without_slot

    def refused(self, digest: AdapterDigest | None, why: Wait) -> Wait:
        """A request was not admitted; note what that says of others under its adapter, and return the reason."""
        if why is Wait.SLOT:
            self.without_slot.add(digest)
        return why

    def by_adapter(self) -> list[tuple[Sequence, int]]:
        """Return who gets what, sequences of one adapter side by side."""
        return sorted(self.tokens.items(), key=lambda item: item[0].digest or "")


def seal(
    draft: Draft,
    step: int,
    memory: Memory,
    kernel_form: KernelForm,
    drops: tuple[RequestId, ...],
    merged: AdapterDigest | None,
    repeat: int,
    limit_s: float,
    overlapped: bool,
) -> StepPlan:
    """Turn a draft into a value, with all that the memory has begun since the last one.

    Args:
        draft: who runs.
        step: its number.
        memory: tells of transfers and evictions.
        kernel_form: of the row.
        drops: sequences that the executor may forget.
        merged: the adapter that is merged meanwhile.
        repeat, limit_s, overlapped: of the plan.
    """
    starts: list[SequenceStart] = []
    steps: list[SequenceStep] = []
    adapters: dict[AdapterDigest, None] = {}
    assisted: dict[AdapterDigest, None] = {}
    for sequence, tokens in draft.by_adapter():
        if not sequence.started:
            starts.append(sequence.start())
            sequence.started = True
        if sequence.digest is not None:
            adapters[sequence.digest] = None
            if sequence.is_cold:
                assisted[sequence.digest] = None
        steps.append(sequence.step(tokens))
    transfers, urgent = memory.take_transfers()
    return StepPlan(
        step=step,
        sequences=tuple(steps),
        starts=tuple(starts),
        drops=drops,
        adapters=tuple(adapters),
        transfers=transfers,
        urgent=urgent,
        evictions=memory.take_evictions(),
        kernel_form=kernel_form,
        merged=merged,
        repeat=repeat,
        max_duration_s=limit_s,
        assisted=tuple(assisted),
        overlapped=overlapped,
    )


def going_on(
    plan: StepPlan, result: StepResult, step: int, sequences: Mapping[RequestId, Sequence], *, further: bool
) -> StepPlan | None:
    """Return a plan for the step that runs since another returned; None if all of its sequences have left.

    Args:
        plan, result: that one, and what it brought.
        step: its number.
        sequences: of all requests.
        further: whether it may have steps after that one, as many as are left of ``plan``.
    """
    found = (sequences.get(each.request_id) for each in plan.sequences)
    staying = [sequence for sequence in found if sequence is not None and sequence.is_ready and sequence.is_decoding]
    limit_s = plan.max_duration_s - result.duration_s
    further = further and limit_s > 0 and len(staying) == len(plan.sequences)
    if not staying:
        return None
    return StepPlan(
        step=step,
        sequences=tuple(sequence.step(1) for sequence in staying),
        adapters=tuple(dict.fromkeys(sequence.digest for sequence in staying if sequence.digest is not None)),
        kernel_form=plan.kernel_form,
        merged=plan.merged,
        repeat=plan.repeat - result.steps_run if further else 1,
        max_duration_s=limit_s,
        overlapped=True,
        goes_on=True,
    )
