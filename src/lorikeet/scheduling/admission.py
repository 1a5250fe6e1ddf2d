"""Defines the interface of admission policies, which choose the next waiting request to try.

A policy is a queue of requests, which may also track running requests. A policy never touches the memory. Each policy
is one file; ``lorikeet.policies.ADMISSION`` finds a policy by its name.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.guard import Guards
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import QueueStats
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.state import StepTimeEstimator


class AdmissionCandidate(NamedTuple):
    """Holds the next request to try.

    Attributes:
        request: the request.
        saved_s: seconds that admitting the request now saves over all requests, compared with first come, first served.
    """

    request: Request
    saved_s: float = 0.0


Admission = Generator[AdmissionCandidate, WaitReason | None, None]
"""Yields requests to try, one by one.

The scheduler sends the outcome back: None if the request was admitted, otherwise the reason why it must wait.
"""


class RunningRequest(msgspec.Struct, frozen=True, gc=False):
    """Describes a request that holds blocks.

    Attributes:
        request: the request as it was admitted.
        output_tokens: number of tokens generated so far, including earlier attempts.
        kv_tokens: size of the request's blocks in tokens of KV. Other requests may share some of the blocks.
    """

    request: Request
    output_tokens: int
    kv_tokens: int


class AdmissionView(Protocol):
    """Provides the engine's state that an admission policy may read.

    All sizes, also of adapters, are in tokens of KV.
    """

    @property
    def total_tokens(self) -> int:
        """Size of the whole device memory."""
        ...

    @property
    def max_running(self) -> int:
        """Largest number of sequences in a step."""
        ...

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens in a sequence."""
        ...

    @property
    def step_times(self) -> StepTimeEstimator:
        """Estimator of the duration of steps."""
        ...

    @property
    def guards(self) -> Guards:
        """The engine's guards."""
        ...

    def free_tokens(self) -> int:
        """Return the number of tokens of KV that could be leased now if all evictable nodes were evicted."""
        ...

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        """Return the size of an adapter; 0 for the base model."""
        ...

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        """Return whether an adapter is on the device or in flight to it. The base model is always resident."""
        ...

    def may_run(self, request: Request) -> bool:
        """Return whether the batching mode lets a waiting request run now."""
        ...

    def running(self) -> Sequence[RunningRequest]:
        """Return the running requests that are not in the background. The last request is preempted first."""
        ...


class AdmissionQueue(ABC):
    """Holds the waiting requests, and chooses the next request to try.

    Args:
        view: state of the engine.
    """

    due_s = float("inf")
    """Time at which the policy's decision may change without an event. A plan ends at this time at the latest."""
    restarts_squashed = False
    """Whether requests that :meth:`review` returns lose their output and start again from the prompt."""

    def __init__(self, view: AdmissionView) -> None:
        self.view = view

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return the number of waiting requests that would be admitted before a new one. By default, all would be.

        Load shedding uses the number to predict the wait of a request, outside of the engine.

        Args:
            waiting: the waiting requests.
            new: a request that is not queued yet.
            parameters: parameters of the policy that the preset sets.
        """
        return len(waiting)

    @abstractmethod
    def add(self, request: Request, now: float) -> None:
        """Add a new request, or a request that resumes after a preemption or a move to this engine."""

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request that was aborted or moved to another engine."""

    @abstractmethod
    def admit(self, now: float) -> Admission:
        """Yield the requests to try, and receive the outcome of each request.

        A request that was admitted (outcome None) must leave the queue. The scheduler may stop at any ``yield`` because
        the step is full. In that case the last request was not tried.
        """

    def skip(self, now: float) -> None:
        """Update the queue in a step that is full already. By default, a candidate is chosen and not tried."""
        policy = self.admit(now)
        next(policy, None)
        policy.close()

    @abstractmethod
    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests, roughly in their order of admission. Prefetch policies use this order."""

    def wanted(self) -> Counter[AdapterDigest]:
        """Return each adapter and its number of waiting requests, in the order of :meth:`waiting`."""
        return Counter(request.digest for request in self.waiting() if request.digest is not None)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:  # noqa: B027  # optional
        """Handle the end of a running request. With ``will_resume``, the request was preempted or exported."""

    def answered(self, request: Request, output_tokens: int, now: float) -> None:  # noqa: B027  # optional
        """Handle the length of the answer of a running request that ends; :meth:`ended` follows."""

    def review(self, now: float) -> Iterable[Request]:
        """Return the running requests to preempt before the next step."""
        return ()

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        """Return the number of tokens that each request may generate before the next :meth:`review`.

        Args:
            running: running requests with their numbers of generated tokens.
        """
        return float("inf")

    def precedence(self, request: Request) -> Any:
        """Return the key by which running requests keep their blocks.

        The request with the largest key is preempted first. A request's key never changes.
        """
        return request.arrival_s

    def urgency(self, request: Request) -> Any:
        """Return the key that orders waiting and running requests for the batching mode, smallest first."""
        return request.arrival_s

    def stats(self) -> QueueStats | None:
        """Return statistics of the queue's classes; None if the queue has no classes."""
        return None


def tokens_needed(request: Request, view: AdmissionView) -> int:
    """Return the number of tokens of KV that a request needs to be admitted now.

    An adapter that is not resident is included.
    """
    adapter = 0 if view.is_resident(request.adapter) else view.adapter_tokens(request.adapter)
    return len(request.prompt_token_ids) + len(request.output_token_ids) + adapter


AdmissionPolicy = Callable[[AdmissionView], AdmissionQueue]
"""Creates the queue of an admission policy."""


class OrderedQueue(AdmissionQueue):
    """Admits requests by a rank that never changes, so that a preempted request returns to its position.

    A request that lacks blocks ends admission, so that later requests cannot starve it. A request that waits for
    another reason is skipped.
    """

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self._waiting: list[Request] = []

    @abstractmethod
    def rank(self, request: Request) -> Any:
        """Return the rank of a request. The request with the smallest rank is admitted first."""

    def urgency(self, request: Request) -> Any:
        """Return the rank."""
        return self.rank(request)

    def add(self, request: Request, now: float) -> None:
        """Insert a request by rank, after requests of equal rank."""
        insort(self._waiting, request, key=self.rank)

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        self._waiting.remove(request)

    def skip(self, now: float) -> None:
        """Do nothing, because ranks never change."""

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
    """Return the number of requests whose rank does not exceed a new request's, for policies that admit by rank."""
    return sum(rank(other) <= rank(new) for other in waiting)
