"""The contract between the scheduler and an admission policy: who of the waiting requests is tried next.

A policy is a queue of requests and what it must remember of the running ones; it never touches the memory. Each lies
in a file of its own in ``policies/``, and has a name in the table there.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import QueueStats
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.step_times import StepTimeEstimator

Admission = Generator[Request, WaitReason | None, None]
"""Requests to try, one by one; each time what became of it is sent back: None if it was admitted."""


class RunningRequest(NamedTuple):
    """A request that holds blocks.

    Attributes:
        request: as it was admitted.
        output_tokens: generated so far, earlier attempts included.
        kv_tokens: room for tokens of KV that it holds; others may share some of it.
    """

    request: Request
    output_tokens: int
    kv_tokens: int


class AdmissionView(Protocol):
    """What an admission policy may ask. Sizes are in tokens of KV: an adapter takes the room of so many."""

    @property
    def total_tokens(self) -> int:
        """Room of the whole pool."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence."""
        ...

    @property
    def step_times(self) -> StepTimeEstimator:
        """How long steps take."""
        ...

    def free_tokens(self) -> int:
        """Return the room that could be lent now, if all left that may leave."""
        ...

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        """Return the room that an adapter takes; 0 for the base model."""
        ...

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        """Whether it is on the device or on its way there. The base model is."""
        ...

    def may_run(self, request: Request) -> bool:
        """Whether the batching mode lets a request run now that waits."""
        ...

    def running(self) -> Sequence[RunningRequest]:
        """Return the admitted requests, in the order in which they would keep their room."""
        ...


class AdmissionQueue(ABC):
    """Holds the waiting requests, and decides who is tried next.

    Args:
        view: of the engine.
    """

    due_s = float("inf")
    """When it may decide otherwise though nothing has come or ended; a plan on a virtual clock holds no longer."""

    def __init__(self, view: AdmissionView) -> None:
        self.view = view

    @abstractmethod
    def add(self, request: Request, now: float) -> None:
        """Take a new request in, or one that was admitted before and goes on."""

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Take a waiting request out that was aborted or has moved."""

    @abstractmethod
    def admit(self, now: float) -> Admission:
        """Yield whom to try next, and take in what became of it.

        Whoever was admitted (None is sent) no longer waits. The scheduler may stop asking at any ``yield``, when the
        step is full; the request that was yielded last has then not been tried.
        """

    @abstractmethod
    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests about in the order in which they will be admitted; for prefetching."""

    def wanted(self) -> Counter[AdapterDigest]:
        """Return the adapters of the waiting requests, in the order of :meth:`waiting`, and how many want each."""
        return Counter(request.digest for request in self.waiting() if request.digest is not None)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def ended(self, request: Request, now: float, *, goes_on: bool = False) -> None:  # noqa: B027  # few need to know
        """An admitted request has finished, or gave its blocks back to go on later, here or elsewhere."""

    def review(self, now: float) -> Iterable[Request]:
        """Look at the running requests before a step; return those that must give their blocks back and wait again."""
        return ()

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        """Return how many more tokens each may generate before :meth:`review` must see one of them.

        Args:
            running: requests, and how many tokens they have generated.
        """
        return float("inf")

    def precedence(self, request: Request) -> Any:
        """Return a key by which admitted requests keep their room: the largest gives way first. Never changes."""
        return request.arrival_s

    def urgency(self, request: Request) -> Any:
        """Return by what a batching mode looks at requests, waiting and running ones: the smallest first."""
        return request.arrival_s

    def stats(self) -> QueueStats | None:
        """Return what there is to tell of classes; None where there are none."""
        return None


def tokens_needed(request: Request, view: AdmissionView) -> int:
    """Return the tokens of room that a request needs to be admitted now."""
    adapter = 0 if view.is_resident(request.adapter) else view.adapter_tokens(request.adapter)
    return len(request.prompt_token_ids) + len(request.output_token_ids) + adapter


AdmissionPolicy = Callable[[AdmissionView], AdmissionQueue]
"""What a name in the table of policies stands for."""


class OrderedQueue(AdmissionQueue):
    """By a rank that a request keeps for as long as it lives, so one that was admitted before gets its place again.

    Whoever finds no room ends admission: no later one can starve it. Whoever waits for something else is passed over.
    """

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self._waiting: list[Request] = []

    @abstractmethod
    def rank(self, request: Request) -> Any:
        """Return its place in the order, the smallest first."""

    def urgency(self, request: Request) -> Any:
        """Return its rank."""
        return self.rank(request)

    def add(self, request: Request, now: float) -> None:
        """Insert by rank; those of equal rank keep the order in which they were added."""
        insort(self._waiting, request, key=self.rank)

    def remove(self, request: Request, now: float) -> None:
        """Take it out."""
        self._waiting.remove(request)

    def admit(self, now: float) -> Admission:
        """Yield by rank."""
        for request in tuple(self._waiting):
            match (yield request):
                case None:
                    self._waiting.remove(request)
                case WaitReason.ROOM | WaitReason.ADAPTER_ROOM:
                    return

    def waiting(self) -> Iterable[Request]:
        """Return them by rank."""
        return tuple(self._waiting)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)
