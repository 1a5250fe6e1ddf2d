"""Generates workloads from plain values, for ``lorikeet workload`` and other commands."""

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from lorikeet.workloads.adapter_choice import choose_adapters
from lorikeet.workloads.arrivals import Rates, arrival_times, arrivals_until, at_rate
from lorikeet.workloads.conversations import (
    flatten,
    group_conversations,
    sample_complete,
    scale_blocks,
    scale_conversation,
    scale_lengths,
)
from lorikeet.workloads.function_trace import (
    MINUTE_S,
    Invocation,
    calls_of_minutes,
    map_functions,
    popularity,
    unit_calls,
)
from lorikeet.workloads.shapes import SHAPES, Dialogues
from lorikeet.workloads.workload import MADE_BLOCK_TOKENS, OptionError, Range, WorkloadRequest, block_tokens_of

FUNCTION_ARRIVALS = "functions"
SHAPE_NAMES = ("plain", "chat", *SHAPES)

DEFAULT_COUNT = 1000

_LENGTHS = ("prompt_tokens", "output_tokens")
_GENERATED_ONLY = ("arrivals", "cv", "burstiness", *_LENGTHS)
_TRACE_ONLY = ("length_scale", "most_tokens", "prefix_block_tokens")
_VARIED = ("gamma", FUNCTION_ARRIVALS)


def without_effect(given: Collection[str], shape: str, arrivals: str, *, has_trace: bool) -> tuple[str, str] | None:
    """Return the first given option without effect, and the reason; None if all have an effect.

    Args:
        given: names of the given options, as in ``Scenario`` and the commands.
        shape, arrivals: see ``Recipe``.
        has_trace: whether a trace is given.
    """
    rules = (
        (_GENERATED_ONLY if has_trace else (), "has no effect on a trace, whose requests have their own"),
        (() if has_trace else _TRACE_ONLY, "needs a trace"),
        (_LENGTHS if shape in SHAPES else (), f"has no effect on the shape {shape}, which has its own lengths"),
        (() if arrivals in _VARIED else ("cv", "burstiness"), f"has no effect on {arrivals} arrivals"),
    )
    return next(((name, reason) for names, reason in rules for name in names if name in given), None)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the options of a workload.

    Attributes:
        trace: requests to start from; empty to generate them. Requests without an adapter get one. All requests of a
            conversation get the same adapter.
        shape: ``plain``; ``chat``, complete conversations of ``trace``; or one of ``SHAPES``.
        arrivals: one of ``ARRIVALS``, or ``functions`` to call each adapter like one of Azure's functions.
        function_minutes: calls of functions per minute (functions, minutes), for ``functions``; None to generate them.
        function_chunk: see ``function_trace.map_functions``.
        rates: requests per second. None for the times of ``trace`` or ``function_minutes``, or without them for all at
            time 0.
        variation: variation of the gaps of ``gamma`` and ``functions``.
        count: number of requests; 1,000 by default if they are generated. For a trace, the first requests. For
            ``chat``, random conversations that together have at least this number.
        duration_s: time before which all arrivals are included, instead of ``count``.
        adapters: names of adapters, with None for the base model; empty for the base model alone.
        ranks: the adapters' ranks, for rules that use them.
        adapter_choice: see ``choose_adapters``; ignored by ``functions``.
        prompt_tokens, output_tokens: lengths of generated plain requests.
        lengths: requests whose lengths are drawn at random for generated plain requests, instead of ``prompt_tokens``
            and ``output_tokens``.
        length_scale: factor on the lengths of ``trace`` and ``lengths``.
        answer_scale: factor on the answers of ``chat``, instead of ``length_scale``.
        block_size: length of a prefix block of ``trace`` before scaling, and of ``SHAPES``. 0 for the trace's length,
            and 32 for ``SHAPES``.
        most_tokens: length of prompt and answer above which requests (for ``chat``, conversations) are left out.
        least_turns: number of requests below which conversations of ``chat`` are left out.
        seed: seed of all random draws. Arrivals, adapters and lengths have separate generators, so that a change of the
            rate does not change adapters and lengths.
        run: number of the run; each run draws again.
    """

    trace: tuple[WorkloadRequest, ...] = ()
    shape: str = "plain"
    arrivals: str = "poisson"
    function_minutes: np.ndarray | None = None
    function_chunk: int | None = None
    rates: Rates | None = None
    variation: float = 1.0
    count: int | None = None
    duration_s: float | None = None
    adapters: tuple[str | None, ...] = ()
    ranks: tuple[int, ...] | None = None
    adapter_choice: str = "uniform"
    prompt_tokens: Range = Range(128, 128)
    output_tokens: Range = Range(64, 64)
    lengths: tuple[WorkloadRequest, ...] = ()
    length_scale: float = 1.0
    answer_scale: float | None = None
    block_size: int = 0
    most_tokens: int | None = None
    least_turns: int = 1
    seed: int = 0
    run: int = 0

    def requests(self) -> list[WorkloadRequest]:
        """Return the requests in the order of arrival.

        Raises:
            OptionError: options exclude each other, or an option is invalid.
        """
        if self.shape not in SHAPE_NAMES:
            raise OptionError(f"unknown shape {self.shape!r}; choose one of {', '.join(SHAPE_NAMES)}")
        if self.count is not None and self.duration_s is not None:
            raise OptionError("count and duration exclude each other")
        if self.shape == "chat" and not self.trace:
            raise OptionError("the shape chat needs a trace of conversations")
        if self.shape in SHAPES and self.trace:
            raise OptionError(f"the shape {self.shape} generates its own requests and takes no trace")
        self._check_numbers()
        of_arrivals, of_adapters, of_lengths = np.random.default_rng((self.seed, self.run)).spawn(3)
        if self.trace:
            made = self._chat(of_lengths, of_adapters) if self.shape == "chat" else self._replay(of_adapters)
            return self._before_duration(made if self.rates is None else at_rate(made, self.rates))
        names = self.adapters or (None,)
        calls = self._calls(names, of_arrivals, of_adapters)
        if self.shape in SHAPES:
            block_size = self.block_size or MADE_BLOCK_TOKENS
            requests = SHAPES[self.shape].requests(calls, names, block_size, of_lengths)
            is_all = self.duration_s is not None or self.function_minutes is not None
            return self._before_duration(requests)[: self.count or (None if is_all else DEFAULT_COUNT)]
        return [
            WorkloadRequest(call.at_s, names[call.adapter], *lengths)
            for call, lengths in zip(calls, self._lengths(len(calls), of_lengths), strict=True)
        ]

    def _check_numbers(self) -> None:
        """Raise ``OptionError`` if a number is out of range."""
        for name in ("count", "duration_s", "length_scale"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise OptionError(f"{name} {number:g} is not a positive number")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name).low < 1:
                raise OptionError(f"{name} must be at least 1: prompts and answers have at least one token")

    def _lengths(self, count: int, generator: np.random.Generator) -> list[tuple[int, int]]:
        """Return prompt and answer of each generated plain request."""
        if self.lengths:
            known = scale_lengths(self.lengths, self.length_scale)
            drawn = (known[place] for place in generator.integers(len(known), size=count))
            return [(request.input_tokens, request.output_tokens) for request in drawn]
        inputs = self.prompt_tokens.draw(count, generator)
        return list(zip(inputs, self.output_tokens.draw(count, generator), strict=True))

    def _chat(self, of_choice: np.random.Generator, of_adapters: np.random.Generator) -> list[WorkloadRequest]:
        """Return complete conversations, each with one adapter."""
        block_size = block_tokens_of(self.trace, self.block_size)
        scaled = [
            scale_conversation(turns, self.length_scale, block_size, self.answer_scale)
            for turns in group_conversations(self._in_order())
        ]
        conversations = sample_complete(scaled, of_choice, self.count, self.most_tokens, self.least_turns)
        starts_s = [turns[0].arrival_s for turns in conversations]
        chosen = self._choose(starts_s, of_adapters)
        return flatten(
            [[_with_adapter(turn, name) for turn in turns] for turns, name in zip(conversations, chosen, strict=True)]
        )

    def _replay(self, generator: np.random.Generator) -> list[WorkloadRequest]:
        """Return the first requests of the trace that are within the length limit."""
        ordered = self._in_order()
        if any(request.prefix_blocks for request in ordered):
            whole = scale_blocks(ordered, self.length_scale, block_tokens_of(ordered, self.block_size))
        else:
            whole = scale_lengths(ordered, self.length_scale)
        scaled = [
            request
            for request in whole
            if self.most_tokens is None or request.input_tokens + request.output_tokens <= self.most_tokens
        ][: self.count]
        # The first turn of a conversation chooses the adapter of all its turns.
        groups = [request.conversation or index for index, request in enumerate(scaled)]
        starts_s: dict[str | int, float] = {}
        for each, request in zip(groups, scaled, strict=True):
            starts_s.setdefault(each, request.arrival_s)
        chosen = dict(zip(starts_s, self._choose(list(starts_s.values()), generator), strict=True))
        return [_with_adapter(request, chosen[each]) for each, request in zip(groups, scaled, strict=True)]

    def _in_order(self) -> list[WorkloadRequest]:
        return sorted(self.trace, key=lambda request: request.arrival_s)

    def _choose(self, times_s: Sequence[float], generator: np.random.Generator) -> list[str | None]:
        return choose_adapters(self.adapter_choice, self.adapters or (None,), times_s, generator, self.ranks)

    def _before_duration(self, requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
        if self.duration_s is None:
            return requests
        return [request for request in requests if request.arrival_s < self.duration_s]

    def _calls(
        self, names: Sequence[str | None], of_arrivals: np.random.Generator, of_adapters: np.random.Generator
    ) -> list[Invocation]:
        """Return the calls of each adapter. For dialogues, only the first turns are calls."""
        if self.arrivals == FUNCTION_ARRIVALS:
            return self._function_calls(len(names), of_arrivals)
        kind = "now" if self.rates is None else self.arrivals
        rates = self._call_rates(self.rates or Rates.constant(1.0))
        if self.duration_s is not None:
            times_s = arrivals_until(kind, self.duration_s, rates, of_arrivals, self.variation)
        else:
            times_s = arrival_times(kind, self._call_count(), rates, of_arrivals, self.variation)
        places = choose_adapters(self.adapter_choice, range(len(names)), times_s, of_adapters, self.ranks)
        return [Invocation(at_s, place) for at_s, place in zip(times_s, places, strict=True)]

    def _function_calls(self, adapters: int, generator: np.random.Generator) -> list[Invocation]:
        if self.function_minutes is not None:
            minutes = map_functions(self.function_minutes, adapters, self.function_chunk)
            calls = calls_of_minutes(minutes, generator)
            if self.rates is None:
                return self._cut(calls)
            # The times are scaled to one call per unit of time on average, which keeps bursts and lulls.
            scale = len(calls) / (minutes.shape[1] * MINUTE_S)
            units = [call._replace(at_s=call.at_s * scale) for call in calls]
        else:
            if self.rates is None:
                raise OptionError("arrivals 'functions' need a rate")
            shares = popularity(adapters, chunk=self.function_chunk).tolist()
            if self.duration_s is not None:
                until = self._call_rates(self.rates).expected(self.duration_s)
                units = unit_calls(shares, self.variation, generator, until=until)
            else:
                units = unit_calls(shares, self.variation, generator, count=self._call_count())
        rates = self._call_rates(self.rates)
        times_s = rates.stretch(np.array([call.at_s for call in units])).tolist()
        return self._cut([Invocation(at_s, call.adapter) for at_s, call in zip(times_s, units, strict=True)])

    def _cut(self, calls: list[Invocation]) -> list[Invocation]:
        if self.duration_s is not None:
            return [call for call in calls if call.at_s < self.duration_s]
        return calls[: self._call_count()] if self.count is not None else calls

    def _turns(self) -> float:
        shape = SHAPES.get(self.shape)
        return shape.turns if isinstance(shape, Dialogues) else 1.0

    def _call_rates(self, rates: Rates) -> Rates:
        """Convert rates of requests to rates of calls. A call may be a dialogue of several requests."""
        return Rates(rates.times_s, tuple(rate / self._turns() for rate in rates.per_s))

    def _call_count(self) -> int:
        """Return the number of calls for the requested number of requests.

        With a rate, the number of dialogues equals the number of requests, so that no dialogue is missing before the
        last request. Without a rate, the number is that of dialogues which have these requests on average.
        """
        count = DEFAULT_COUNT if self.count is None else self.count
        return count if self.rates is not None else math.ceil(count / self._turns())


def _with_adapter(request: WorkloadRequest, name: str | None) -> WorkloadRequest:
    return request if request.adapter is not None else msgspec.structs.replace(request, adapter=name)
