"""Runs a workload through an engine in this process, on the real clock or a virtual one."""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

import msgspec

from lorikeet.bench.load_report import LoadFigures, RequestResult, distribution, summarise
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import WaitableClock
from lorikeet.core.events import Admitted, Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams, Slo
from lorikeet.engine.driver import drive
from lorikeet.engine.loop import Engine
from lorikeet.workloads.conversations import Turns
from lorikeet.workloads.predictors import Predictor
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.workload import WorkloadRequest


class WorkloadAdapterUnknown(ValueError):
    """A workload names an unknown adapter."""


STOPPED = "stopped"
"""Error of requests that had not ended when a run was stopped."""
_COUNT_EVERY_TURNS = 16


class MissBudget(NamedTuple):
    """Counts requests that miss their limits, so that a hopeless run can be stopped.

    Attributes:
        slo: limits of requests that have no limits.
        most: largest allowed number of misses.
    """

    slo: Slo
    most: int


class WorkloadRun(NamedTuple):
    """The result of a workload.

    Attributes:
        exchanges: records of all requests, in the order of the workload. Times count from the start of the workload,
            and ``token_times_s`` are the times of the first and the last token. A run that was stopped early contains
            only the sent requests. Unfinished requests have the error ``STOPPED``.
        gaps_s: all gaps between two tokens of an answer (ITL).
    """

    exchanges: list[RequestResult]
    gaps_s: "array[float]"

    def figures(self, slo: Slo) -> LoadFigures:
        """Return the figures of the run. ``slo`` applies to requests without limits."""
        return msgspec.structs.replace(
            summarise(self.exchanges, slo), itl_s=distribution(self.gaps_s), tokens_per_event=None
        )


class RunObserver:
    """Observes a run. Subclasses override the methods that they need."""

    def on_arrival(self, request: Request) -> None:
        """Handle a request that is about to be submitted."""

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Handle the outputs of a turn of the engine."""

    def on_finished(self, request: Request, token_ids: Sequence[int]) -> None:
        """Handle the tokens of a request that has ended."""


def run_workload(
    engine: Engine,
    clock: WaitableClock,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    *,
    coalesced: bool = False,
    on_finished: Callable[[int], None] = lambda finished: None,
    observer: RunObserver | None = None,
    predictor: Predictor | None = None,
    budget: MissBudget | None = None,
) -> WorkloadRun:
    """Run a workload with greedy sampling and answers of exactly the requested length.

    A turn of a conversation contains the generated answer to the turn before. The turn is sent when it is due and that
    answer is complete. Its wait for the answer is ``RequestResult.held_s``. All other requests are sent when they are
    due, even if the engine is behind.

    Args:
        engine: engine that runs on ``clock``.
        clock: real or virtual clock.
        workload: the requests, ordered by arrival.
        adapters: adapters by their names in the workload.
        prompts: maker of the prompts. A prompt is made when its request arrives.
        coalesced: see ``drive``.
        on_finished: called with the number of requests that have ended.
        observer: observer of the arrivals, turns and ends of the run.
        predictor: predicts the lengths of answers. With None, policies use the largest number of tokens that a request
            may generate, which is its true length in this run.
        budget: budget of misses, above which the run ends soon; None for a whole run.

    Raises:
        WorkloadAdapterUnknown: the workload names an unknown adapter.
        ExecutorError: a step failed.
    """
    arrivals = WorkloadArrivals(workload, adapters, prompts, clock.now(), observer, predictor)
    collector = RecordCollector(workload, arrivals, on_finished, budget)
    for outputs in drive(engine, clock, arrivals, coalesced=coalesced):
        collector.take(outputs, clock.now())
        if collector.is_over_budget:
            break
    return collector.run()


class WorkloadArrivals:
    """Yields the requests of a workload when they are due; implements ``driver.Arrivals``.

    Args:
        workload, adapters, prompts, observer, predictor: see ``run_workload``.
        start_s: time at which the workload starts, on the caller's clock.

    Raises:
        WorkloadAdapterUnknown: the workload names an unknown adapter.
    """

    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        adapters: Mapping[str, AdapterRef],
        prompts: Prompts,
        start_s: float,
        observer: RunObserver | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        for request in workload:
            if request.adapter is not None and request.adapter not in adapters:
                raise WorkloadAdapterUnknown(f"the workload names an unknown adapter: {request.adapter!r}")
        self._workload = workload
        self._adapters = adapters
        self._turns = Turns(workload, prompts)
        self._due = [(workload[index].arrival_s, index) for index in self._turns.first()]
        heapify(self._due)
        self._in_flight: dict[int, tuple[float, Request]] = {}
        self._predictor = predictor
        self.observer = observer or RunObserver()
        self.start_s = start_s

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and have not ended."""
        return len(self._in_flight)

    def under_way(self) -> Iterator[tuple[int, float]]:
        """Yield the index of each request in flight, and the time at which it was sent, counted from the start."""
        for index, (sent_s, _) in self._in_flight.items():
            yield index, sent_s

    @property
    def follow_answers(self) -> bool:
        """Return whether requests still wait for the answer to another."""
        return self._turns.await_answers

    def next_s(self) -> float:
        """Return the time at which the next request is due; infinity if there is none."""
        return self.start_s + self._due[0][0] if self._due else math.inf

    def take(self) -> Request:
        """Return the next request."""
        sent_s, index = heappop(self._due)
        planned = self._workload[index]
        request = Request(
            RequestId(str(index)),
            self._turns.prompt(index),
            SamplingParams(max_tokens=planned.output_tokens, temperature=0.0, seed=index),
            self.start_s + sent_s,
            None if planned.adapter is None else self._adapters[planned.adapter],
            planned.priority,
            tenant=planned.tenant or "",
            slo=planned.slo,
            predicted_tokens=None if self._predictor is None else self._predictor.predict(planned, index),
        )
        self._in_flight[index] = sent_s, request
        self.observer.on_arrival(request)
        return request

    def ended(self, index: int, token_ids: Sequence[int], ended_s: float) -> float:
        """Release the turns that continue a request.

        Return the time at which the request was sent. Times count from the start.
        """
        sent_s, request = self._in_flight.pop(index)
        self.observer.on_finished(request, token_ids)
        if self._predictor is not None:
            self._predictor.ended(self._workload[index], len(token_ids))
        for after in self._turns.answered(index, token_ids):
            heappush(self._due, (max(ended_s, self._workload[after].arrival_s), after))
        return sent_s


@dataclass(slots=True)
class _Answer:
    """Holds the answer so far, with times on the engine's clock."""

    first_s: float | None = None
    last_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None

    def add(self, tokens: tuple[Token, ...], now: float, gaps_s: "array[float]") -> None:
        """Add tokens that had arrived by ``now``."""
        if len(tokens) == 1 and self.first_s is not None:  # as a rule
            self.token_ids.append(tokens[0].token_id)
            gaps_s.append(now - self.last_s)
            self.last_s = now
            return
        for token in tokens:
            self.token_ids.append(token.token_id)
        if self.first_s is None:  # the first token has no gap before it
            self.first_s = self.last_s = now
            tokens = tokens[1:]
        if tokens:
            gap_s = (now - self.last_s) / len(tokens)
            self.last_s = now
            gaps_s.extend([gap_s] * len(tokens))


class RecordCollector:
    """Makes request records from the outputs of engines.

    Args:
        workload: the requests, ordered by arrival.
        arrivals: arrivals of the same workload, which receive the answers.
        on_finished: called with the number of requests that have ended.
        budget: budget of misses; None if misses are not counted.

    Attributes:
        is_over_budget: whether more requests have missed their limits. Checked every few turns.
    """

    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        arrivals: WorkloadArrivals,
        on_finished: Callable[[int], None],
        budget: MissBudget | None = None,
    ) -> None:
        self._workload = workload
        self._arrivals = arrivals
        self._on_finished = on_finished
        self._answers: dict[RequestId, _Answer] = {}
        self._exchanges: dict[int, RequestResult] = {}
        self._gaps_s = array("d")
        self._budget = budget
        self._missed = 0
        self._now_s = 0.0
        self._turns = count()
        self.is_over_budget = False

    def take(self, outputs: StepOutputs, now: float) -> None:
        """Add the outputs of a turn that ended ``now``.

        Several tokens of one answer are spread evenly over the turn.
        """
        self._arrivals.observer.on_outputs(outputs)
        for event in outputs.events:
            if isinstance(event, Admitted):
                answer = self._answers.setdefault(event.request_id, _Answer())
                # Later admissions include tokens that were computed before a preemption
                if answer.cached_tokens is None:
                    answer.cached_tokens = event.cached_tokens
        for output in outputs.tokens:
            self._answers[output.request_id].add(output.tokens, now, self._gaps_s)
        for event in outputs.events:
            if isinstance(event, Finished):
                self._finish(event)
        if self._budget is not None and next(self._turns) % _COUNT_EVERY_TURNS == 0:
            self._now_s = now - self._arrivals.start_s
            self.is_over_budget = self._missed + self._late(self._budget.slo) > self._budget.most

    def _late(self, slo: Slo) -> int:
        """Return the number of requests in flight that have missed their limit on TTFT."""
        late = 0
        for index, sent_s in self._arrivals.under_way():
            limit_s = (self._workload[index].slo or slo).ttft_s
            if limit_s is not None:
                answer = self._answers.get(RequestId(str(index)))
                first_s = None if answer is None else answer.first_s
                late += (self._now_s if first_s is None else first_s - self._arrivals.start_s) - sent_s > limit_s
        return late

    def _finish(self, event: Finished) -> None:
        index = int(event.request_id)
        answer = self._answers.pop(event.request_id, _Answer())
        ended_s = event.at_s - self._arrivals.start_s
        sent_s = self._arrivals.ended(index, answer.token_ids, ended_s)
        whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        error = None if whole else event.reason.value
        record = self._exchanges[index] = self._record(index, answer, sent_s, ended_s, error, event.error or "")
        if self._budget is not None:
            self._missed += not record.meets(self._budget.slo)
        self._on_finished(len(self._exchanges))

    def _record(
        self, index: int, answer: _Answer, sent_s: float, ended_s: float, error: str | None, message: str
    ) -> RequestResult:
        planned = self._workload[index]
        start_s = self._arrivals.start_s
        return RequestResult(
            adapter=planned.adapter,
            due_s=planned.arrival_s,
            sent_s=sent_s,
            ended_s=ended_s,
            held_s=sent_s - planned.arrival_s,
            token_times_s=() if answer.first_s is None else (answer.first_s - start_s, answer.last_s - start_s),
            input_tokens=planned.input_tokens,
            output_tokens=len(answer.token_ids),
            asked_tokens=planned.output_tokens,
            cached_tokens=answer.cached_tokens,
            error=error,
            message=message,
            slo=planned.slo,
        )

    def exchange(self, request_id: RequestId) -> RequestResult:
        """Return the record of a request that has ended."""
        return self._exchanges[int(request_id)]

    def run(self) -> WorkloadRun:
        """Return all records, in the order of the workload."""
        for index, sent_s in self._arrivals.under_way():  # empty, unless the run was stopped
            answer = self._answers.get(RequestId(str(index)), _Answer())
            self._exchanges[index] = self._record(index, answer, sent_s, self._now_s, STOPPED, "")
        return WorkloadRun([self._exchanges[index] for index in sorted(self._exchanges)], self._gaps_s)
