"""Queues background requests, which run only when no other request waits."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import QueueStats
from lorikeet.core.request import Request
from lorikeet.scheduling.admission import (
    Admission,
    AdmissionCandidate,
    AdmissionQueue,
    AdmissionView,
    RunningRequest,
    tokens_needed,
)


class BackgroundView(AdmissionView, Protocol):
    """Provides the engine's state with its background requests."""

    def background(self) -> Sequence[RunningRequest]:
        """Return the running background requests. The last request is preempted first."""
        ...

    def free_slots(self) -> int:
        """Return the number of further sequences that may run."""
        ...


class BackgroundLast(AdmissionQueue):
    """Puts background requests behind all others, under any admission policy.

    A background request is admitted, by time of arrival, when no other request waits. When another request waits for a
    slot or for blocks, running background requests are preempted for it. Preempted requests resume later with their
    tokens. The admission policy never sees background requests.

    Args:
        foreground: queue of the admission policy, for all other requests.
        view: state of the engine.
    """

    def __init__(self, foreground: AdmissionQueue, view: BackgroundView) -> None:
        super().__init__(view)
        self.foreground = foreground
        self._view = view
        self._background: list[Request] = []

    @property
    def due_s(self) -> float:  # type: ignore[override]
        """Time at which the policy's decision may change."""
        return self.foreground.due_s

    @property
    def restarts_squashed(self) -> bool:  # type: ignore[override]
        """Whether requests that the policy preempts start again from the prompt. Background requests never do."""
        return self.foreground.restarts_squashed

    def add(self, request: Request, now: float) -> None:
        """Add a request to its queue."""
        if request.background:
            insort(self._background, request, key=lambda waiting: waiting.arrival_s)
        else:
            self.foreground.add(request, now)

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        if request.background:
            self._background.remove(request)
        else:
            self.foreground.remove(request, now)

    def admit(self, now: float) -> Admission:
        """Yield the policy's requests. If none of them waits, yield the background requests."""
        yield from self.foreground.admit(now)
        if len(self.foreground):
            return
        for request in tuple(self._background):
            if (yield AdmissionCandidate(request)) is None:
                self._background.remove(request)
            else:
                return

    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests, background requests last."""
        return (*self.foreground.waiting(), *self._background)

    def wanted(self) -> Counter[AdapterDigest]:
        """Return the adapters of the waiting requests."""
        wanted = Counter(self.foreground.wanted())
        wanted.update(request.digest for request in self._background if request.digest is not None)
        return wanted

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.foreground) + len(self._background)

    def answered(self, request: Request, output_tokens: int, now: float) -> None:
        """Pass the length of a foreground request's answer to the policy."""
        if not request.background:
            self.foreground.answered(request, output_tokens, now)

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        """Pass the end of a foreground request to the policy."""
        if not request.background:
            self.foreground.ended(request, now, will_resume=will_resume)

    def review(self, now: float) -> Iterable[Request]:
        """Return the requests to preempt before the next step.

        These are the requests that the policy preempts, and background requests whose slots or blocks other requests
        need.
        """
        preempted = list(self.foreground.review(now))
        running = list(self._view.background()) if len(self.foreground) else []
        if not running:
            return preempted
        waiting = list(self.foreground.waiting())
        lacking_slots = len(waiting) - self._view.free_slots()
        lacking_tokens = sum(tokens_needed(each, self.view) for each in waiting) - self.view.free_tokens()
        while running and (lacking_slots > 0 or lacking_tokens > 0):
            last = running.pop()
            preempted.append(last.request)
            lacking_slots = lacking_slots - 1
            lacking_tokens = lacking_tokens - last.kv_tokens
        return preempted

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        """Return the number of tokens that may be generated before the policy's next review."""
        return self.foreground.tokens_until_review(each for each in running if not each[0].background)

    def precedence(self, request: Request) -> Any:
        """Return the policy's key. Background requests are preempted before all others."""
        return (True, request.arrival_s) if request.background else (False, self.foreground.precedence(request))

    def urgency(self, request: Request) -> Any:
        """Return the policy's key. Background requests come after all others."""
        return (True, request.arrival_s) if request.background else (False, self.foreground.urgency(request))

    def stats(self) -> QueueStats | None:
        """Return the policy's statistics."""
        return self.foreground.stats()
