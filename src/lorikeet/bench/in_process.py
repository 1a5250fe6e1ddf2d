"""Runs a workload through an engine in this process, on the real clock or a virtual one."""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

from lorikeet.bench.conversations import Turns
from lorikeet.bench.load_report import LoadFigures, RequestRecord, distribution, summarise
from lorikeet.bench.predictors import Predictor
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import WaitableClock
from lorikeet.core.events import Admitted, Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams, Slo
from lorikeet.engine.driver import drive
from lorikeet.engine.loop import Engine


class WorkloadAdapterUnknown(ValueError):
    """A workload names an adapter that there is not."""


class WorkloadRun(NamedTuple):
    """What became of a workload.

    Attributes:
        exchanges: of all requests, in the order of the workload; times count from the start of the workload, and
            ``token_times_s`` are those of the first and the last token.
        gaps_s: ITL, all gaps between two tokens of an answer.
    """

    exchanges: list[RequestRecord]
    gaps_s: "array[float]"

    def figures(self, slo: Slo) -> LoadFigures:
        """Return the figures of the run; ``slo`` for requests without limits of their own."""
        return msgspec.structs.replace(
            summarise(self.exchanges, slo), itl_s=distribution(self.gaps_s), tokens_per_event=None
        )


class RunObserver:
    """Whoever wants to see a run from within overrides what it wants to see."""

    def arrived(self, request: Request) -> None:
        """A request is about to be submitted."""

    def turned(self, outputs: StepOutputs) -> None:
        """The engine has run a turn, which brought this."""

    def ended(self, request: Request, token_ids: Sequence[int]) -> None:
        """A request has got its answer, or what there is of it."""


def run_workload(
    engine: Engine,
    clock: WaitableClock,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    *,
    coalesced: bool = False,
    on_finished: Callable[[int], None] = lambda finished: None,
    watch: RunObserver | None = None,
    predict: Predictor | None = None,
) -> WorkloadRun:
    """Run a workload, greedily and with answers of exactly the length asked for, and stop after each turn.

    A turn of a conversation holds the answer to the turn before as it was generated, and is sent when it is due and
    that answer is there: what it waits for it is in ``RequestRecord.held_s``. All other requests are sent when they are
        due,
    however far behind the engine is.

    Args:
        engine: on ``clock``.
        clock: real or virtual.
        workload: by arrival.
        adapters: by the names in the workload.
        prompts: makes the prompts, each when its request arrives.
        coalesced: see ``drive``.
        on_finished: called with the number of requests that have ended.
        watch: sees the run.
        predict: predicts the lengths of answers; None leaves policies to the most that a request may generate, which
            here is what it will.

    Raises:
        WorkloadAdapterUnknown: the workload names another one.
        ExecutorError: a step failed.
    """
    arrivals = WorkloadArrivals(workload, adapters, prompts, clock.now(), watch, predict)
    collector = RecordCollector(workload, arrivals, on_finished)
    for outputs in drive(engine, clock, arrivals, coalesced=coalesced):
        collector.take(outputs, clock.now())
    return collector.run()


class WorkloadArrivals:
    """The requests of a workload by the time they are sent; see ``driver.Arrivals``.

    Args:
        workload, adapters, prompts, watch, predict: see ``run_workload``.
        start_s: when the workload starts, on the clock of whoever asks.

    Raises:
        WorkloadAdapterUnknown: the workload names an adapter that there is not.
    """

    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        adapters: Mapping[str, AdapterRef],
        prompts: Prompts,
        start_s: float,
        watch: RunObserver | None = None,
        predict: Predictor | None = None,
    ) -> None:
        for request in workload:
            if request.adapter is not None and request.adapter not in adapters:
                raise WorkloadAdapterUnknown(f"the workload names adapter {request.adapter!r}, which there is not")
        self._workload = workload
        self._adapters = adapters
        self._turns = Turns(workload, prompts)
        self._due = [(workload[index].arrival_s, index) for index in self._turns.first()]
        heapify(self._due)
        self._under_way: dict[int, tuple[float, Request]] = {}
        self._predict = predict
        self.watch = watch or RunObserver()
        self.start_s = start_s

    @property
    def under_way(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._under_way)

    @property
    def follow_answers(self) -> bool:
        """Whether requests are still to come that wait for the answer to another."""
        return self._turns.await_answers

    def next_s(self) -> float:
        """See ``driver.Arrivals``."""
        return self.start_s + self._due[0][0] if self._due else math.inf

    def take(self) -> Request:
        """See ``driver.Arrivals``."""
        sent_s, index = heappop(self._due)
        asked = self._workload[index]
        request = Request(
            RequestId(str(index)),
            self._turns.prompt(index),
            SamplingParams(max_tokens=asked.output_tokens, temperature=0.0, seed=index),
            self.start_s + sent_s,
            None if asked.adapter is None else self._adapters[asked.adapter],
            asked.priority,
            tenant=asked.tenant or "",
            slo=asked.slo,
            predicted_tokens=None if self._predict is None else self._predict.predict(asked, index),
        )
        self._under_way[index] = sent_s, request
        self.watch.arrived(request)
        return request

    def ended(self, index: int, token_ids: Sequence[int], ended_s: float) -> float:
        """Let the turns come that go on from a request; return when it was sent. Times count from the start."""
        sent_s, request = self._under_way.pop(index)
        self.watch.ended(request, token_ids)
        if self._predict is not None:
            self._predict.ended(self._workload[index], len(token_ids))
        for after in self._turns.answered(index, token_ids):
            heappush(self._due, (max(ended_s, self._workload[after].arrival_s), after))
        return sent_s


@dataclass(slots=True)
class _Answer:
    """How far an answer is, with times on the clock of whoever tells."""

    first_s: float | None = None
    last_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None

    def add(self, tokens: tuple[Token, ...], now: float, gaps_s: "array[float]") -> None:
        """Take in tokens that came by ``now``."""
        for token in tokens:
            self.token_ids.append(token.token_id)
        if self.first_s is None:  # there is no gap before it
            self.first_s = self.last_s = now
            tokens = tokens[1:]
        if tokens:
            gap_s, self.last_s = (now - self.last_s) / len(tokens), now
            for _ in tokens:
                gaps_s.append(gap_s)


class RecordCollector:
    """Makes exchanges of what engines tell.

    Args:
        workload: by arrival.
        arrivals: of the same; is told of answers.
        on_finished: called with the number of requests that have ended.
    """

    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        arrivals: WorkloadArrivals,
        on_finished: Callable[[int], None],
    ) -> None:
        self._workload = workload
        self._arrivals = arrivals
        self._on_finished = on_finished
        self._answers: dict[RequestId, _Answer] = {}
        self._exchanges: dict[int, RequestRecord] = {}
        self._gaps_s = array("d")

    def take(self, outputs: StepOutputs, now: float) -> None:
        """Take in what a turn that ended ``now`` brought: several tokens of one answer evenly over the time before."""
        self._arrivals.watch.turned(outputs)
        for event in outputs.events:
            if isinstance(event, Admitted):
                answer = self._answers.setdefault(event.request_id, _Answer())
                if answer.cached_tokens is None:  # later ones count what it computed itself before a preemption
                    answer.cached_tokens = event.cached_tokens
        for output in outputs.tokens:
            self._answers[output.request_id].add(output.tokens, now, self._gaps_s)
        for event in outputs.events:
            if isinstance(event, Finished):
                self._finish(event)

    def _finish(self, event: Finished) -> None:
        index, start_s = int(event.request_id), self._arrivals.start_s
        asked, answer = self._workload[index], self._answers.pop(event.request_id, _Answer())
        ended_s = event.at_s - start_s
        sent_s = self._arrivals.ended(index, answer.token_ids, ended_s)
        times_s = () if answer.first_s is None else (answer.first_s - start_s, answer.last_s - start_s)
        whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._exchanges[index] = RequestRecord(
            adapter=asked.adapter,
            due_s=asked.arrival_s,
            sent_s=sent_s,
            ended_s=ended_s,
            held_s=sent_s - asked.arrival_s,
            token_times_s=times_s,
            input_tokens=asked.input_tokens,
            output_tokens=len(answer.token_ids),
            asked_tokens=asked.output_tokens,
            cached_tokens=answer.cached_tokens,
            error=None if whole else event.reason.value,
            message=event.error or "",
            slo=asked.slo,
        )
        self._on_finished(len(self._exchanges))

    def exchange(self, request_id: RequestId) -> RequestRecord:
        """Return what became of a request that has ended."""
        return self._exchanges[int(request_id)]

    def run(self) -> WorkloadRun:
        """Return all that came, in the order of the workload."""
        return WorkloadRun([self._exchanges[index] for index in sorted(self._exchanges)], self._gaps_s)
