"""A plan in the making."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import SequenceStart, SequenceStep
from lorikeet.scheduling.sequence import Sequence


@dataclass
class Draft:
    """Who gets how many tokens, and what is left of the step's budget.

    Attributes:
        budget_tokens: not given to anybody yet.
        tokens: by sequence.
        preempted: whether a sequence lost its blocks for want of room.
    """

    budget_tokens: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False

    def give(self, sequence: Sequence) -> None:
        """Give a sequence what it can use of the budget."""
        tokens = min(sequence.remaining_tokens, self.budget_tokens)
        if tokens:
            self.tokens[sequence] = tokens
            self.budget_tokens -= tokens

    def take_back(self, sequence: Sequence) -> None:
        """Take from a sequence what it was given."""
        self.budget_tokens += self.tokens.pop(sequence, 0)

    def by_adapter(self) -> list[tuple[Sequence, int]]:
        """Return who gets what, sequences of one adapter side by side."""
        return sorted(self.tokens.items(), key=lambda item: item[0].request.digest or "")


def sequence_parts(given: list[tuple[Sequence, int]]) -> tuple[tuple[SequenceStart, ...], tuple[SequenceStep, ...]]:
    """Return what the executor must know of the sequences that are new to it, and the steps of all."""
    starts, steps = [], []
    for sequence, tokens in given:
        assert sequence.lease is not None
        if not sequence.started:
            starts.append(sequence.start())
            sequence.started = True
        new_blocks = tuple(sequence.lease.blocks[sequence.known_blocks :])
        sequence.known_blocks += len(new_blocks)
        samples = tokens == sequence.remaining_tokens
        steps.append(SequenceStep(sequence.request_id, sequence.computed_tokens, tokens, new_blocks, samples))
    return tuple(starts), tuple(steps)


def is_one_too_many(digest: AdapterDigest | None, running: Iterable[Sequence], most: int) -> bool:
    """Whether an adapter beside those of the running sequences makes more than ``most``; 0 is no limit."""
    if digest is None or not most:
        return False
    used = {sequence.request.digest for sequence in running} - {None}
    return digest not in used and len(used) >= most
