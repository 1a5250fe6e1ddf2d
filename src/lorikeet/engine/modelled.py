"""An executor without arithmetic whose steps take as long as a cost model says.

On a virtual clock it is the simulator's; on the real one it sleeps, and a replica with everything but the arithmetic
runs in a fraction of a core (design, idea 2).
"""

import heapq
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import WaitableClock
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import AdapterLoad, AdapterLoadDone, KernelForm, SequenceStart, StepPlan, StepResult, Token
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile

CATCH_UP_S = 0.01
"""A step that begins so soon after the last one's end counts as beginning right then: the loop's own time between two
steps is the model's, not this machine's."""


class PlanTimes(Protocol):
    """How long plans and loads take."""

    def steps_s(self, plan: StepPlan, limit_s: float) -> tuple[int, float, float]:
        """Return how many of a plan's identical steps run until ``limit_s`` is over, and the seconds they take.

        Returns:
            Steps run, at least one; seconds of them; seconds that the loop takes after them.
        """
        ...

    def load_s(self, ref: AdapterRef) -> float:
        """Return the seconds of an adapter's transfer, alone on its link."""
        ...


class TokenChoice(Protocol):
    """Which tokens come out."""

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...]:
        """Return the tokens at ``position`` and the following ones, ``count`` in all."""
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

    def load_s(self, ref: AdapterRef) -> float:
        """See ``PlanTimes``."""
        return self._model.load_s(ref)

    def _remember(self, plan: StepPlan) -> None:
        for digest in plan.evictions:
            self._ranks.pop(digest, None)
        for load in plan.loads:
            self._ranks[load.adapter.digest] = self._model.adapter_rank(load.adapter)
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
    """See the module. Loads follow one another on one link, beside the steps.

    Args:
        clock: virtual or real.
        times: of plans and loads.
        choice: of the tokens.
        on_load_done: on the real clock called, on another thread, when ``completed_loads`` has something new.
    """

    def __init__(
        self,
        clock: WaitableClock,
        times: PlanTimes,
        choice: TokenChoice,
        on_load_done: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self._times = times
        self._choice = choice
        self._on_load_done = on_load_done
        self._starts: dict[RequestId, SequenceStart] = {}
        self._loads: list[tuple[float, int, AdapterLoadDone]] = []
        self._load_number = count()
        self._link_free_s = 0.0
        self._ended_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the time of a plan pass. A repeat ends early at the next load's end, as its result is awaited."""
        for request_id in plan.drops:
            del self._starts[request_id]
        for start in plan.starts:
            self._starts[start.request_id] = start
        now = self._clock.now()
        for load in plan.loads:
            self._begin(load, now)
        limit_s = min(plan.max_duration_s, self._loads[0][0] - now) if self._loads else plan.max_duration_s
        ran, steps_s, loop_s = self._times.steps_s(plan, limit_s)
        if plan.sequences:
            began_s = self._ended_s if now - self._ended_s < CATCH_UP_S else now
            self._ended_s = began_s + steps_s + loop_s
            self._clock.wait_until(self._ended_s)
        tokens = tuple(
            self._choice.tokens(self._starts[step.request_id], step.start + step.tokens, ran) if step.samples else ()
            for step in plan.sequences
        )
        return StepResult(plan.step, tokens, ran, steps_s)

    def completed_loads(self) -> list[AdapterLoadDone]:
        """Return the loads whose time has come."""
        done = []
        while self._loads and self._loads[0][0] <= self._clock.now():
            done.append(heapq.heappop(self._loads)[2])
        return done

    def wait_for_load(self, timeout_s: float | None) -> None:
        """Wait until the next load has ended, or for ``timeout_s``."""
        due = [self._loads[0][0]] if self._loads else []
        if timeout_s is not None:
            due.append(self._clock.now() + timeout_s)
        if due:
            self._clock.wait_until(min(due))

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, load: AdapterLoad, now: float) -> None:
        load_s = self._times.load_s(load.adapter)
        self._link_free_s = max(self._link_free_s, now) + load_s
        done = AdapterLoadDone(load.adapter.digest, load.generation)
        heapq.heappush(self._loads, (self._link_free_s, next(self._load_number), done))
        if self._on_load_done is not None:
            timer = threading.Timer(self._link_free_s - now, self._on_load_done)
            timer.daemon = True
            timer.start()
