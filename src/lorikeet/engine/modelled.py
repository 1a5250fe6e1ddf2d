"""An executor without arithmetic whose steps take as long as a cost model says.

On a virtual clock it is the simulator's; on the real one it sleeps, and a replica with everything but the arithmetic
runs in a fraction of a core (design, idea 2).
"""

from collections.abc import Iterator
from typing import Protocol

from lorikeet.core.clock import WaitableClock
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm, SequenceStart, StepPlan, StepResult, Tier, Token, TransferDone
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.links import Link


class PlanTimes(Protocol):
    """How long plans take."""

    def steps_s(self, plan: StepPlan, limit_s: float) -> tuple[int, float, float]:
        """Return how many of a plan's identical steps run until ``limit_s`` is over, and the seconds they take.

        Returns:
            Steps run, at least one; seconds of them; seconds that the loop takes after them.
        """
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

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...]:
        """See ``TokenChoice``."""
        known, stops = self._tokens, start.sampling.stop_token_ids
        first = start.sampling.seed * 1_000_003 + 12_345
        chosen = [known[(first + at * 7_919) % len(known)] for at in range(position, position + count)]
        if stops:
            chosen = [self._after(token, stops) for token in chosen]
        return tuple(chosen)

    def _after(self, token: Token, stops: tuple[int, ...]) -> Token:
        index = token.token_id - self._tokens[0].token_id
        while self._tokens[index % len(self._tokens)].token_id in stops:
            index += 1
        return self._tokens[index % len(self._tokens)]


class ModelledTimes:
    """Times by a cost model.

    Args:
        profile: the constants.
        form: kernel form of the adapters.
        loop_each_step: whether a repeat stands for as many turns of the engine's loop, or is one turn of it.
    """

    def __init__(self, profile: CostProfile, form: KernelForm, *, loop_each_step: bool) -> None:
        self._model = CostModel(profile, form)
        self._loop_each_step = loop_each_step
        self._ranks: dict[AdapterDigest, float] = {}
        self._adapters: dict[RequestId, AdapterDigest | None] = {}

    def steps_s(self, plan: StepPlan, limit_s: float) -> tuple[int, float, float]:
        """See ``PlanTimes``."""
        self._remember(plan)
        if not plan.sequences:
            return 0, 0.0, 0.0
        work = step_work(self._work(plan), plan.kernel_form)
        step_s, growth_s = self._model.step_s(work), self._model.growth_s(work)
        loop_s = self._model.loop_s(len(plan.sequences))
        between_s = loop_s if self._loop_each_step else 0.0
        ran, seconds = 1, step_s
        while ran < plan.repeat and seconds + ran * between_s < limit_s:
            step_s += growth_s
            seconds += step_s
            ran += 1
        return ran, seconds, loop_s + (ran - 1) * between_s

    def _remember(self, plan: StepPlan) -> None:
        for digest in plan.evictions:
            self._ranks.pop(digest, None)
        for transfer in plan.transfers:
            if transfer.adapter is not None and transfer.target is Tier.DEVICE:
                self._ranks[transfer.adapter.digest] = self._model.adapter_rank(transfer.adapter)
        for request_id in plan.drops:
            del self._adapters[request_id]
        for start in plan.starts:
            self._adapters[start.request_id] = start.adapter

    def _work(self, plan: StepPlan) -> Iterator[SequenceWork]:
        for step in plan.sequences:
            adapter = self._adapters[step.request_id]
            rank = 0.0 if adapter is None else self._ranks[adapter]
            yield SequenceWork(step.start, step.tokens, step.samples, adapter, rank)


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
        ran, steps_s, loop_s = self._times.steps_s(plan, limit_s)
        if plan.sequences:
            began_s = self._ended_s if now - self._ended_s < self._catch_up_s else now
            self._ended_s = began_s + steps_s + loop_s
            self._clock.wait_until(self._ended_s)
        chosen = [
            self._choice.tokens(self._starts[step.request_id], step.start + step.tokens, ran) if step.samples else ()
            for step in plan.sequences
        ]
        failed = tuple(step.request_id for step, tokens in zip(plan.sequences, chosen, strict=True) if tokens is None)
        return StepResult(plan.step, tuple(tokens or () for tokens in chosen), ran, steps_s, failed)

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers whose time has come."""
        return self._link.take_done(self._clock.now())

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

    def close(self) -> None:
        """Nothing is held."""
