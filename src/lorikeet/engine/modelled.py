"""An executor without arithmetic whose steps take as long as a cost model says.

On a virtual clock it is the simulator's; on the real one it sleeps, and a replica with everything but the arithmetic
runs in a fraction of a core (design, idea 2).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from lorikeet.core.clock import WaitableClock
from lorikeet.core.ids import BlockId, RequestId
from lorikeet.core.plan import SequenceStart, StepPlan, StepResult, Token, TransferDone
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.links import Link

GroupEnds = Callable[[int], Sequence[float]]
"""When each group of a transfer under way ends, by its id, in seconds from the plan's begin."""


class Times(NamedTuple):
    """How long a plan takes.

    Attributes:
        steps: that run; 0 of a plan without sequences, else at least one.
        seconds: of the steps, and of the switch before them.
        loop_s: that the engine's loop takes after them.
        switch_s: of ``seconds``, until another adapter was merged.
        next_runs: whether the next of the plan's steps runs by then.
    """

    steps: int
    seconds: float
    loop_s: float
    switch_s: float = 0.0
    next_runs: bool = False


class PlanTimes(Protocol):
    """How long plans take."""

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> Times:
        """Return how many of a plan's identical steps run until ``limit_s`` is over, and the seconds they take."""
        ...


class TokenChoice(Protocol):
    """Which tokens come out."""

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...] | None:
        """Return ``count`` tokens from ``position`` on; None if the output is not finite."""
        ...


class SeededTokens:
    """Ordinary tokens as a function of (seed, position).

    They pass over a request's stop tokens, so that an answer has the length that it asks for.

    Args:
        low, high: the token ids to choose from, both included.
    """

    def __init__(self, low: int, high: int) -> None:
        self._tokens = [Token(token_id) for token_id in range(low, high + 1)]
        # Every answer goes round the same circle of tokens from a place of its own.
        self._circle = tuple(self._tokens[at * 7_919 % len(self._tokens)] for at in range(len(self._tokens)))

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...]:
        """See ``TokenChoice``."""
        circle, stops = self._circle, start.sampling.stop_token_ids
        first = (start.sampling.seed * 1_000_003 + 12_345 + position) % len(circle)
        chosen = circle[first : first + count]
        while len(chosen) < count:
            chosen += circle[: count - len(chosen)]
        return tuple(self._after(token, stops) for token in chosen) if stops else chosen

    def _after(self, token: Token, stops: tuple[int, ...]) -> Token:
        index = token.token_id - self._tokens[0].token_id
        while self._tokens[index % len(self._tokens)].token_id in stops:
            index += 1
        return self._tokens[index % len(self._tokens)]


class ModelledExecutor:
    """See the module. Transfers go on beside the steps.

    Args:
        clock: virtual or real.
        times: of plans.
        link: of the transfers.
        choice: of the tokens.
        catch_up_s: how late, on a real clock, a step may begin and count as beginning with the last one's end.
        coalesced: whether repeats stand for single steps, so that one ends when a transfer does and the engine may
            decide anew. Live repeats do not look at transfers.
    """

    def __init__(
        self,
        clock: WaitableClock,
        times: PlanTimes,
        link: Link,
        choice: TokenChoice,
        catch_up_s: float = 0.0,
        *,
        coalesced: bool = False,
    ) -> None:
        self._clock = clock
        self._times = times
        self._link = link
        self._choice = choice
        self._catch_up_s = catch_up_s
        self._coalesced = coalesced
        self._starts: dict[RequestId, SequenceStart] = {}
        self._ended_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the time of a plan pass."""
        for request_id in plan.drops:
            del self._starts[request_id]
        for start in plan.starts:
            self._starts[start.request_id] = start
        now = self._clock.now()
        if plan.urgent:
            self._link.promote(plan.urgent, now)
        for transfer in plan.transfers:
            self._link.begin(transfer, now)
        limit_s = plan.max_duration_s
        if self._coalesced and (next_end_s := self._link.next_s()) is not None:
            limit_s = min(limit_s, next_end_s - now)
        times = self._times.steps_s(plan, limit_s, partial(self._group_ends_s, now))
        if plan.sequences:
            began_s = self._ended_s if now - self._ended_s < self._catch_up_s else now
            self._ended_s = began_s + times.seconds + times.loop_s
            self._clock.wait_until(self._ended_s)
        chosen = [
            self._choice.tokens(self._starts[step.request_id], step.start + step.tokens, times.steps)
            if step.samples
            else ()
            for step in plan.sequences
        ]
        failed = tuple(step.request_id for step, tokens in zip(plan.sequences, chosen, strict=True) if tokens is None)
        given = tuple(tokens or () for tokens in chosen)
        return StepResult(plan.step, given, times.steps, times.seconds, failed, times.switch_s, times.next_runs)

    def assist_counters(self) -> None:
        """Return nothing: there are no host workers."""

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers whose time has come."""
        return self._link.take_done(self._clock.now())

    def next_transfer_s(self) -> float | None:
        """Return when the next transfer ends, as things stand; None if none is under way."""
        return self._link.next_s()

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Wait until the next transfer has ended, or for ``timeout_s``.

        Raises:
            ExecutorError: neither will ever come.
        """
        next_end_s = self._link.next_s()
        due = [] if next_end_s is None else [next_end_s]
        if timeout_s is not None:
            due.append(self._clock.now() + timeout_s)
        if not due:
            raise ExecutorError("a transfer is awaited, and none is under way")
        self._clock.wait_until(min(due))

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """See ``Executor``: blocks hold nothing here."""
        return (b"",) * len(blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """See ``Executor``."""

    def close(self) -> None:
        """Nothing is held."""

    def _group_ends_s(self, now: float, transfer_id: int) -> list[float]:
        return [end_s - now for end_s in self._link.group_ends_s(transfer_id, now)]
