"""Interface of admission policies: which of the waiting requests is tried next.

A policy is a queue of requests, with the state that it needs about running ones; it never touches the memory. Each
policy is one file; ``lorikeet.policies.ADMISSION`` finds it by its name.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import QueueStats
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.state import StepTimeEstimator


class AdmissionCandidate(NamedTuple):
    """A request to try next.

    Attributes:
        request: the request.
        saved_s: seconds that its admission now saves over all requests, against first come, first served.
    """

    request: Request
    saved_s: float = 0.0


Admission = Generator[AdmissionCandidate, WaitReason | None, None]
"""Yields requests to try, one by one. The outcome is sent back: None if it was admitted, else why it must wait."""


class RunningRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that holds blocks.

    Attributes:
        request: the request as it was admitted.
        output_tokens: number of tokens generated so far, earlier attempts included.
        kv_tokens: size of its blocks in tokens of KV; some may be shared with other requests.
    """

    request: Request
    output_tokens: int
    kv_tokens: int


class AdmissionView(Protocol):
    """State of the engine that an admission policy may read. All sizes, also of adapters, are in tokens of KV."""

    @property
    def total_tokens(self) -> int:
        """Size of the whole device memory."""
        ...

    @property
    def max_running(self) -> int:
        """Most sequences in a step."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def step_times(self) -> StepTimeEstimator:
        """Estimates how long steps take."""
        ...

    def free_tokens(self) -> int:
        """Return the tokens of KV that could be leased now if everything evictable were evicted."""
        ...

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        """Return the size of an adapter; 0 for the base model."""
        ...

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        """Return whether an adapter is on the device or in flight to it; True for the base model."""
        ...

    def may_run(self, request: Request) -> bool:
        """Return whether the batching mode lets a waiting request run now."""
        ...

    def running(self) -> Sequence[RunningRequest]:
        """Return the running requests that are not in the background; the last is preempted first."""
        ...


class AdmissionQueue(ABC):
    """Holds the waiting requests, and decides which is tried next.

    Args:
        view: state of the engine.
    """

    due_s = float("inf")
    """Time at which its decision may change without any event. A plan ends at this time at the latest."""
    restarts_squashed = False
    """Whether requests that :meth:`review` returns lose their output and are executed again from the start."""

    def __init__(self, view: AdmissionView) -> None:
        self.view = view

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return how many waiting requests would be admitted before a new one; by default all.

        Load shedding predicts the wait of a request with it, outside of the engine.

        Args:
            waiting: the waiting requests.
            new: a request that is not queued yet.
            parameters: parameters of the policy that the preset sets.
        """
        return len(waiting)

    @abstractmethod
    def add(self, request: Request, now: float) -> None:
        """Add a new request, or one that was preempted or moved here and resumes."""

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request that was aborted or moved to another engine."""

    @abstractmethod
    def admit(self, now: float) -> Admission:
        """Yield the requests to try, and receive the outcome of each.

        A request that was admitted (None is sent) must leave the queue. The scheduler may stop at any ``yield``, when
        the step is full; the request yielded last has then not been tried.
        """

    @abstractmethod
    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests, roughly in the order in which they will be admitted; used for prefetch."""

    def wanted(self) -> Counter[AdapterDigest]:
        """Return the adapters of the waiting requests, in the order of :meth:`waiting`, with the number of requests."""
        return Counter(request.digest for request in self.waiting() if request.digest is not None)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:  # noqa: B027  # optional
        """Handle the end of a running request, or with ``will_resume`` its preemption or export."""

    def review(self, now: float) -> Iterable[Request]:
        """Return the running requests to preempt before the next step."""
        return ()

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        """Return how many more tokens each request may generate before :meth:`review` must be called.

        Args:
            running: requests, each with its number of generated tokens.
        """
        return float("inf")

    def precedence(self, request: Request) -> Any:
        """Return the key by which running requests keep their blocks; the largest is preempted first. Never changes."""
        return request.arrival_s

    def urgency(self, request: Request) -> Any:
        """Return the key by which requests, waiting or running, are passed to the batching mode, smallest first."""
        return request.arrival_s

    def stats(self) -> QueueStats | None:
        """Return statistics of the queue's classes; None if it has none."""
        return None


def tokens_needed(request: Request, view: AdmissionView) -> int:
    """Return the tokens of KV that a request needs to be admitted now; an adapter that is not resident counts too."""
    adapter = 0 if view.is_resident(request.adapter) else view.adapter_tokens(request.adapter)
    return len(request.prompt_token_ids) + len(request.output_token_ids) + adapter


AdmissionPolicy = Callable[[AdmissionView], AdmissionQueue]
"""Creates the queue of an admission policy."""


class OrderedQueue(AdmissionQueue):
    """Admits by a rank that never changes, so that a preempted request gets its place back.

    A request that lacks blocks ends admission, so that later ones cannot starve it. A request that waits for something
    else is passed over.
    """

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self._waiting: list[Request] = []

    @abstractmethod
    def rank(self, request: Request) -> Any:
        """Return the rank of a request; the smallest is admitted first."""

    def urgency(self, request: Request) -> Any:
        """Return the rank."""
        return self.rank(request)

    def add(self, request: Request, now: float) -> None:
        """Insert a request by rank, behind requests of equal rank."""
        insort(self._waiting, request, key=self.rank)

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        self._waiting.remove(request)

    def admit(self, now: float) -> Admission:
        """Yield requests by rank."""
        for request in tuple(self._waiting):
            match (yield AdmissionCandidate(request)):
                case None:
                    self._waiting.remove(request)
                case WaitReason.KV_BLOCKS | WaitReason.ADAPTER_BLOCKS:
                    return

    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests by rank."""
        return tuple(self._waiting)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)


def count_ranked(rank: Callable[[Request], float], waiting: Sequence[Request], new: Request) -> int:
    """Return how many requests have no larger rank than a new one, for policies that admit the lowest rank first."""
    return sum(rank(other) <= rank(new) for other in waiting)
