"""A workload through an engine in this process: the same for real arithmetic and for a modelled one."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lorikeet.bench.exchange import Exchange
from lorikeet.bench.load_report import LoadFigures, distribution, summarise
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.workload import Slo, WorkloadRequest
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import WaitableClock
from lorikeet.core.events import Admitted, Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.driver import drive
from lorikeet.engine.loop import Engine


class UnknownAdapter(ValueError):
    """A workload names an adapter that there is not."""


class Run(NamedTuple):
    """What became of a workload.

    Attributes:
        exchanges: of all requests, in the order of the workload; times count from the start of the workload, and
            ``token_times_s`` are those of the first and the last token.
        gaps_s: ITL, all gaps between two tokens of an answer.
    """

    exchanges: list[Exchange]
    gaps_s: "array[float]"

    def figures(self, slo: Slo) -> LoadFigures:
        """Return the figures of the run; ``slo`` for requests without limits of their own."""
        return msgspec.structs.replace(
            summarise(self.exchanges, slo), itl_s=distribution(self.gaps_s), tokens_per_event=None
        )


def run_workload(
    engine: Engine,
    clock: WaitableClock,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    *,
    coalesced: bool = False,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> Run:
    """Run a workload, greedily and with answers of exactly the length asked for.

    Args:
        engine: on ``clock``.
        clock: real or virtual.
        workload: by arrival.
        adapters: by the names in the workload.
        prompts: makes the prompts, each when its request arrives.
        coalesced: see ``drive``.
        on_finished: called with the number of requests that have ended.

    Raises:
        UnknownAdapter: the workload names another one.
        ExecutorError: a step failed.
    """
    for request in workload:
        if request.adapter is not None and request.adapter not in adapters:
            raise UnknownAdapter(f"the workload names adapter {request.adapter!r}, which there is not")
    collector = _Collector(workload, clock, on_finished)
    requests = _requests(workload, adapters, prompts, collector.start_s)
    drive(engine, clock, requests, collector.take, coalesced=coalesced)
    return collector.run()


def _requests(
    workload: Sequence[WorkloadRequest], adapters: Mapping[str, AdapterRef], prompts: Prompts, start_s: float
) -> Iterator[Request]:
    for index, asked in enumerate(workload):
        yield Request(
            RequestId(str(index)),
            prompts.token_ids(index, asked),
            SamplingParams(max_tokens=asked.output_tokens, temperature=0.0, seed=index),
            start_s + asked.arrival_s,
            None if asked.adapter is None else adapters[asked.adapter],
            asked.priority,
        )


@dataclass
class _Answer:
    """How far an answer is, with times on the engine's clock."""

    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0

    def add(self, tokens: int, now: float, gaps_s: "array[float]") -> None:
        """Take in ``tokens`` that came by ``now``."""
        self.tokens += tokens
        if self.first_s is None:
            self.first_s = self.last_s = now
            tokens -= 1
        if tokens:
            gaps_s.extend([(now - self.last_s) / tokens] * tokens)
            self.last_s = now


class _Collector:
    """Makes exchanges of what the engine tells."""

    def __init__(
        self, workload: Sequence[WorkloadRequest], clock: WaitableClock, on_finished: Callable[[int], None]
    ) -> None:
        self._workload = workload
        self._clock = clock
        self._on_finished = on_finished
        self._answers: dict[RequestId, _Answer] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._gaps_s = array("d")
        self.start_s = clock.now()

    def take(self, outputs: StepOutputs) -> None:
        """Take in what a turn brought: tokens at its end, several of one answer evenly over the time before."""
        for event in outputs.events:
            if isinstance(event, Admitted):
                answer = self._answers.setdefault(event.request_id, _Answer())
                answer.cached_tokens = answer.cached_tokens or event.cached_tokens
        if outputs.tokens:
            now = self._clock.now()
            for request_id, tokens in Counter([output.request_id for output in outputs.tokens]).items():
                self._answers[request_id].add(tokens, now, self._gaps_s)
        for event in outputs.events:
            if isinstance(event, Finished):
                self._finish(event)

    def _finish(self, event: Finished) -> None:
        index = int(event.request_id)
        asked, answer = self._workload[index], self._answers.pop(event.request_id, _Answer())
        times_s = () if answer.first_s is None else (answer.first_s - self.start_s, answer.last_s - self.start_s)
        whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._exchanges[index] = Exchange(
            adapter=asked.adapter,
            due_s=asked.arrival_s,
            sent_s=asked.arrival_s,
            ended_s=event.at_s - self.start_s,
            token_times_s=times_s,
            input_tokens=asked.input_tokens,
            output_tokens=answer.tokens,
            asked_tokens=asked.output_tokens,
            cached_tokens=answer.cached_tokens,
            error=None if whole else event.reason.value,
            message=event.error or "",
            slo=asked.slo,
        )
        self._on_finished(len(self._exchanges))

    def run(self) -> Run:
        """Return all that came, in the order of the workload."""
        return Run([self._exchanges[index] for index in sorted(self._exchanges)], self._gaps_s)
