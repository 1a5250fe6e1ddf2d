"""Builds the plan of one step: the sequences that run, and the number of tokens that each computes.

``PlanBuilder`` collects the sequences of a step within the token budget, and ``build_plan`` makes a plan of them.
"""

import collections.abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import ImageStep, KernelForm, SequenceStart, SequenceStep, StepPlan, StepResult
from lorikeet.memory.blocks import WaitReason
from lorikeet.memory.memory import Memory
from lorikeet.scheduling.drafts import Drafts
from lorikeet.scheduling.image_steps import StepImages
from lorikeet.scheduling.state import Sequence


@dataclass(slots=True)
class PlanBuilder:
    """Collects the sequences of a step with their token counts, within the token budget.

    Attributes:
        budget_tokens: remaining tokens of the budget.
        tokens: number of tokens to compute, by sequence.
        assisted: number of tokens to compute in prefills that host cores assist, by sequence.
        preempted: whether a sequence was preempted because blocks were short.
        adapters_without_slot: adapters without a slot in this step, whose requests are not tried again.
        deferred: tokens of decodes that run only if the step has no prefill (:meth:`defer_decodes`).
        drafts: drafted tokens to verify in the step, by request.
        images: images of the step.
    """

    budget_tokens: int
    images: StepImages
    tokens: dict[Sequence, int] = field(default_factory=dict)
    assisted: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    adapters_without_slot: set[AdapterDigest | None] = field(default_factory=set)
    deferred: dict[Sequence, int] = field(default_factory=dict)
    drafts: Drafts = field(default_factory=dict)

    def add_decodes(self, sequences: collections.abc.Sequence[Sequence]) -> None:
        """Add sequences with one remaining token each. No sequence may be cold, and the budget must suffice."""
        self.tokens.update(dict.fromkeys(sequences, 1))
        self.budget_tokens -= len(sequences)

    def prefills(self) -> dict[Sequence, int]:
        """Return the sequences that prefill, with their token counts."""
        return {
            sequence: tokens
            for sequence, tokens in self.tokens.items()
            # ``Sequence.is_decoding`` is inlined, because this loop runs over all sequences in every step.
            if (known := len(sequence.token_ids)) - sequence.computed_tokens != 1 or known <= sequence.prompt_tokens
        }

    def add(self, sequence: Sequence) -> None:
        """Add a sequence with as many remaining tokens as the budget allows, up to its next stop for a snapshot."""
        tokens = min(sequence.remaining_tokens, self.budget_tokens)
        if not tokens:
            return
        if sequence.lease is not None and sequence.lease.stops:
            tokens = sequence.lease.until_stop(sequence.computed_tokens, tokens)
        if sequence.request.images:
            tokens = self.images.fit(sequence, tokens, is_first=not (self.assisted or self.prefills()))
            if not tokens:
                return
        is_assisted = sequence.lease is not None and sequence.lease.assisted and sequence.is_cold
        group = self.assisted if is_assisted else self.tokens
        group[sequence] = tokens
        self.budget_tokens = max(0, self.budget_tokens - tokens)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and return its tokens to the budget."""
        self.budget_tokens += self.tokens.pop(sequence, 0) + self.assisted.pop(sequence, 0)
        self.deferred.pop(sequence, None)

    def defer_decodes(self) -> None:
        """Defer the sequences added so far. Deferred sequences run only if the step has no prefill."""
        self.budget_tokens += sum(self.tokens.values())
        self.deferred.update(self.tokens)
        self.tokens.clear()

    def run_deferred_decodes(self) -> None:
        """Fill a step that has no prefill with the deferred decodes."""
        if not (self.tokens or self.assisted):
            self.tokens.update(self.deferred)

    def lacks_slot(self, digest: AdapterDigest | None) -> bool:
        """Return whether a request of the adapter was refused in this step because it lacked a slot."""
        return digest in self.adapters_without_slot

    def note_refusal(self, digest: AdapterDigest | None, why: WaitReason) -> WaitReason:
        """Record why a request was not admitted, and return the reason.

        After ``SLOT``, further requests of its adapter are skipped in this step.
        """
        if why is WaitReason.SLOT:
            self.adapters_without_slot.add(digest)
        return why

    def grouped_by_adapter(self) -> list[tuple[Sequence, int]]:
        """Return the sequences and their token counts, grouped by adapter."""
        return sorted(self.tokens.items(), key=lambda item: item[0].digest or "")


class PlanLength(NamedTuple):
    """Limits the length of a plan.

    Attributes:
        repeat: largest number of identical steps.
        limit_s: seconds after which the plan starts no further step.
        overlapped: whether the executor returns each step while the next one runs (async scheduling).
    """

    repeat: int
    limit_s: float
    overlapped: bool


def build_plan(
    builder: PlanBuilder,
    length: PlanLength,
    step: int,
    memory: Memory,
    kernel_form: KernelForm,
    drops: tuple[RequestId, ...],
    merged: AdapterDigest | None,
    now: float,
) -> StepPlan:
    """Return the plan of a step, with the transfers and evictions that the memory began since the last plan.

    Args:
        builder: the sequences of the step.
        length: limits of the plan's length.
        step: number of the step.
        memory: memory that returns the transfers and evictions.
        kernel_form: form in which kernels compute mixed ranks.
        drops: sequences that the executor may delete.
        merged: adapter that is merged for the step; None for none.
        now: the time.
    """
    starts: list[SequenceStart] = []
    steps: list[SequenceStep] = []
    adapters: dict[AdapterDigest, None] = {}
    assisted: dict[AdapterDigest, None] = {}
    for sequence, tokens in builder.grouped_by_adapter():
        if not sequence.started:
            starts.append(sequence.start())
            sequence.started = True
        if sequence.digest is not None:
            adapters[sequence.digest] = None
            if sequence in builder.assisted:
                assisted[sequence.digest] = None
        state = None
        if memory.snapshots.blocks and sequence.lease is not None:
            ends = tokens == sequence.remaining_tokens
            state = memory.snapshots.orders(
                sequence.lease, sequence.computed_tokens, tokens, length.repeat, now, ends=ends
            )
        steps.append(sequence.step(tokens, builder.drafts.get(sequence.request_id, ()), state))
    transfers, urgent = memory.take_transfers()
    images: tuple[ImageStep, ...] = ()
    dropped_images: tuple[bytes, ...] = ()
    if any(sequence.request.images for sequence in builder.tokens):
        images, dropped_images = builder.images.take(builder.grouped_by_adapter())
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
        repeat=length.repeat,
        max_duration_s=length.limit_s,
        assisted=tuple(assisted),
        overlapped=length.overlapped,
        images=images,
        dropped_images=dropped_images,
    )


def continue_plan(
    plan: StepPlan, result: StepResult, step: int, sequences: Mapping[RequestId, Sequence], *, further: bool
) -> StepPlan | None:
    """Return the plan of a step that the executor has already started (async scheduling).

    Args:
        plan, result: plan and result of the previous step.
        step: number of the step.
        sequences: all sequences by request.
        further: whether the executor may run the remaining repeats of ``plan`` after this step.

    Returns:
        The plan; None if no sequence of the previous step is left.
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
        continues=True,
    )
