"""Holds outputs of an engine that have arrived and are not passed on yet."""

from itertools import count, islice

import msgspec

from lorikeet.core.events import Finished, RequestEvent
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import EngineStats, StepOutputs, TokenOutput
from lorikeet.core.plan import Pooled, PromptLogprobs

_NOTHING = StepOutputs((), (), ())


class Backlog:
    """Queues outputs, and passes them on in parts of a few requests.

    Requests with events, such as a first token or an end, go first. New tokens of a request join its waiting tokens, so
    that each request waits with only one part, even if this process is far behind.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId | int, TokenOutput | StepOutputs] = {}
        """Tokens by request, and under numbers what must not go before the tokens that came before it."""
        self._events: dict[RequestId, list[RequestEvent]] = {}
        self._logprobs: list[PromptLogprobs] = []
        self._pooled: list[Pooled] = []
        self._stats: EngineStats | None = None
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._events or self._logprobs or self._pooled)

    def add(self, outputs: StepOutputs) -> None:
        """Add outputs that have arrived."""
        waiting = self._waiting
        for tokens in outputs.tokens:
            before = waiting.get(tokens.request_id)
            waiting[tokens.request_id] = _joined(before, tokens) if isinstance(before, TokenOutput) else tokens
        for event in outputs.events:
            self._events.setdefault(event.request_id, []).append(event)
        self._logprobs += outputs.prompt_logprobs
        self._pooled += outputs.pooled
        if outputs.stats is not None:
            self._stats = outputs.stats
        elif any(isinstance(event, Finished) for event in outputs.events):
            self._stats = None  # These gauges still count requests that have ended since then.
        rest = msgspec.structs.replace(outputs, tokens=(), events=(), stats=None, prompt_logprobs=(), pooled=())
        if rest != _NOTHING:
            waiting[next(self._numbers)] = rest

    def take(self, most: int) -> StepOutputs:
        """Return the outputs of at most ``most`` requests. The backlog must not be empty."""
        waiting = self._waiting
        part = _NOTHING
        urgent = [*islice(self._events, most)]
        events = [event for request_id in urgent for event in self._events.pop(request_id)]
        tokens = [waiting.pop(request_id) for request_id in urgent if request_id in waiting]
        for key in [*islice(waiting, most - len(urgent))]:
            found = waiting.pop(key)
            if isinstance(found, StepOutputs):
                part = found
                break
            tokens.append(found)
        logprobs = tuple(self._logprobs)
        self._logprobs = []
        pooled = tuple(self._pooled)
        self._pooled = []
        stats = None
        if not self._events:
            stats = self._stats
            self._stats = None
        return msgspec.structs.replace(
            part, tokens=tuple(tokens), events=tuple(events), stats=stats, prompt_logprobs=logprobs, pooled=pooled
        )


def _joined(before: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Return the tokens of two outputs of a request. Tokens of an earlier attempt are stale and left out."""
    if before.attempt != later.attempt:
        return later
    return msgspec.structs.replace(before, tokens=before.tokens + later.tokens)
