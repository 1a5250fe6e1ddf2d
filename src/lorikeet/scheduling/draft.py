"""A plan in the making."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm, SequenceStart, SequenceStep, StepPlan
from lorikeet.memory.memory import Memory
from lorikeet.scheduling.sequence import Sequence


@dataclass
class Draft:
    """Who gets how many tokens, and what is left of the step's budget.

    Attributes:
        budget_tokens: not given to anybody yet.
        tokens: by sequence.
        cold: the same of prefills that the host assists.
        preempted: whether a sequence lost its blocks for want of room.
    """

    budget_tokens: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    cold: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False

    def give(self, sequence: Sequence) -> None:
        """Give a sequence what it can use of the budget."""
        tokens = min(sequence.remaining_tokens, self.budget_tokens)
        if tokens:
            (self.cold if sequence.is_cold else self.tokens)[sequence] = tokens
            self.budget_tokens -= tokens

    def take_back(self, sequence: Sequence) -> None:
        """Take from a sequence what it was given."""
        self.budget_tokens += self.tokens.pop(sequence, 0) + self.cold.pop(sequence, 0)

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
) -> StepPlan:
    """Turn a draft into a value, with all that the memory has begun since the last one.

    Args:
        draft: who runs.
        step: its number.
        memory: tells of transfers and evictions.
        kernel_form: of the row.
        drops: sequences that the executor may forget.
        merged: the adapter that is merged meanwhile.
        repeat, limit_s: of the plan.
    """
    given = draft.by_adapter()
    starts, steps = _sequence_parts(given)
    transfers, urgent = memory.take_transfers()
    cold = (sequence.digest for sequence, _ in given if sequence.digest and sequence.is_cold)
    return StepPlan(
        step=step,
        sequences=steps,
        starts=starts,
        drops=drops,
        adapters=_distinct(sequence.digest for sequence, _ in given),
        transfers=transfers,
        urgent=urgent,
        evictions=memory.take_evictions(),
        kernel_form=kernel_form,
        merged=merged,
        repeat=repeat,
        max_duration_s=limit_s,
        assisted=_distinct(cold),
    )


def _distinct(digests: Iterable[AdapterDigest | None]) -> tuple[AdapterDigest, ...]:
    return tuple(dict.fromkeys(digest for digest in digests if digest is not None))


def _sequence_parts(given: list[tuple[Sequence, int]]) -> tuple[tuple[SequenceStart, ...], tuple[SequenceStep, ...]]:
    """Return what the executor must know of the sequences that are new to it, and the steps of all."""
    starts, steps = [], []
    for sequence, tokens in given:
        assert sequence.lease is not None
        if not sequence.started:
            starts.append(sequence.start())
            sequence.started = True
        known, blocks = sequence.known_blocks, sequence.lease.blocks
        new_blocks = tuple(blocks[known:]) if known < len(blocks) else ()
        sequence.known_blocks = len(blocks)
        samples = tokens == sequence.remaining_tokens
        steps.append(SequenceStep(sequence.request_id, sequence.computed_tokens, tokens, new_blocks, samples))
    return tuple(starts), tuple(steps)


def is_one_too_many(digest: AdapterDigest | None, running: Iterable[Sequence], most: int) -> bool:
    """Whether an adapter beside those of the running sequences makes more than ``most``; 0 is no limit."""
    if digest is None or not most:
        return False
    used = {sequence.digest for sequence in running} - {None}
    return digest not in used and len(used) >= most
