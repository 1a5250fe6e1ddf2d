"""How the steps of one plan run on rank 0: each called by name, or replayed, the next while tokens are under way."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lorikeet.core.plan import StepPlan, Token
from lorikeet.engine.decode_graphs import DecodeGraphs
from lorikeet.engine.rank import Rank
from lorikeet.engine.sampler import Sampler
from lorikeet.engine.sequences import Sequence as RankSequence


class Stepping(Protocol):
    """The steps of one plan.

    Attributes:
        lead: steps that can be launched before the tokens of the last one are known.
    """

    lead: int

    def launch(self) -> None:
        """Begin the next step."""
        ...

    def take(self) -> list[Token | None]:
        """Return what the oldest step chose for each sequence that samples; None where it could not.

        The rank's sequences get these tokens before another step is launched, but for the lead.
        """
        ...


class Called:
    """Steps of any kind.

    Args:
        rank: computes.
        sampler: chooses.
        plan: applied.
        sequences: that sample.
    """

    lead = 0

    def __init__(self, rank: Rank, sampler: Sampler, plan: StepPlan, sequences: Sequence[RankSequence]) -> None:
        self._rank = rank
        self._sampler = sampler
        self._plan = plan
        self._sequences = sequences
        self._ran = 0
        self._logits: Tensor | None = None

    def launch(self) -> None:
        """Compute logits."""
        self._logits = self._rank.forward(self._plan, self._ran)
        self._ran += 1

    def take(self) -> list[Token | None]:
        """Choose; where nobody samples, wait all the same, so that the plan lasts as long as its steps."""
        assert self._logits is not None
        if not self._sequences:
            self._rank.wait()
        return self._sampler.sample(self._logits, self._sequences)


class Replayed:
    """Steps in which every sequence decodes, as graphs. Arguments as of :class:`Called`.

    Where the host has a say in tokens, or reports on logits, each step is given its inputs anew.

    Args:
        graphs: of the rank.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        rank: Rank,
        sampler: Sampler,
        plan: StepPlan,
        sequences: Sequence[RankSequence],
    ) -> None:
        self._graphs = graphs
        self._rank = rank
        self._sampler = sampler
        self._plan = plan
        self._sequences = sequences
        self._kept: Sequence[int] = range(len(sequences))
        self._is_alone = sampler.needs_nothing_more(sequences)
        self._ran = 0
        self.lead = 1 if self._is_alone else 0

    def keep(self, sequences: Sequence[RankSequence]) -> None:
        """Take tokens for these alone of the sequences; unless they are all, nothing more is launched."""
        rows = {sequence.request_id: row for row, sequence in enumerate(self._sequences)}
        self._kept = [rows[sequence.request_id] for sequence in sequences]

    def launch(self) -> None:
        """Replay."""
        assert len(self._kept) == len(self._sequences), "the blocks of those that left may be others' by now"
        if self._ran == 0 or not self._is_alone:
            rows, lora = self._rank.decodes(self._plan, self._ran)
            self._graphs.start(rows, lora, self._sampler.parameters(self._sequences))
        self._graphs.launch()
        self._ran += 1

    def take(self) -> list[Token | None]:
        """Wait for the tokens."""
        chosen = self._graphs.take()
        if self._is_alone:
            return [None if chosen[row] < 0 else Token(chosen[row]) for row in self._kept]
        return self._sampler.sample(self._graphs.logits[: len(chosen)], self._sequences, chosen)
