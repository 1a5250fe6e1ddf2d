"""Shares served tokens fairly between tenants or adapters (virtual token counter)."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import Admission, AdmissionCandidate, AdmissionQueue, AdmissionView, tokens_needed

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""Weights of prompt and output tokens, as in the paper's evaluation. An output token takes longer to compute."""
SPARE = 0.15
"""Largest share of the memory that an owner above its equal share must leave free."""
_MAX_PAID = 1024
"""Number of remembered preempted requests above which requests that left this queue are dropped."""
_MAX_IDLE = 1024
"""Number of remembered owners above which owners whose counter has no effect are dropped."""


class Owner(StrEnum):
    """Names the kinds of owners that get a fair share."""

    TENANT = "tenant"
    ADAPTER = "adapter"
    """Adapter versions. The base model counts as an adapter."""

    def of(self, request: Request) -> str:
        """Return the owner of a request: its tenant, or its adapter version (empty for the base model)."""
        return request.tenant if self is Owner.TENANT else request.digest or ""


class FairShares(AdmissionQueue):
    """Admits requests of the owner with the fewest served tokens first, in order of arrival within an owner.

    Every owner (tenant or adapter) has a counter of weighted tokens. Prompt tokens are added at admission, output
    tokens when they are generated. The counter of an owner that returns after a pause is raised to the smallest counter
    of the owners with waiting requests (or to the counter of the last such owner), so that idle owners do not
    accumulate service. A request that lacks blocks ends admission, so that owners of large requests are not overtaken.
    The prompt of a preempted request is charged once.

    A token of a tenant with weight 2 counts half, and its share of the memory is twice as large as the others' (the
    paper's section 4.3, "weighted VTC"). Adapters have no weights.

    With counters alone, owners with few requests wait for running requests of busy owners, because the paper's bound on
    the difference between two owners grows with the memory. Our addition: an owner that would hold more than an equal
    share of the memory must leave its excess free for owners that hold less, up to ``spare`` of the memory. If blocks
    run out, the request admitted last is preempted. Preemption by arrival would often hit an owner that has received
    little service.

    Source: Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4 (virtual token counter).

    Args:
        view: state of the engine.
        by: kind of owner that gets a fair share.
        spare: share of the memory; 0 for the paper's policy.
    """

    def __init__(self, view: AdmissionView, *, by: Owner = Owner.TENANT, spare: float = SPARE) -> None:
        super().__init__(view)
        self._spare = spare
        self._by = by
        self._owner = by.of
        self._served: dict[str, float] = {}
        self._weights: dict[str, float] = {}  # weights of owners whose weight is not 1
        self._queues: dict[str, list[Request]] = {}  # no queue is empty
        self._last_owner: str | None = None
        self._turns = count()
        self._turn: dict[RequestId, int] = {}
        self._charged_tokens: dict[RequestId, int] = {}
        self._paid: set[RequestId] = set()
        self._forget_at = _MAX_IDLE

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return the number of earlier requests if owners take turns, with every other owner first in each turn."""
        owner = parameters.get("by", Owner.TENANT).of
        by_owner = Counter(map(owner, waiting))
        own = by_owner.pop(owner(new), 0)
        return own + sum(min(others, own + 1) for others in by_owner.values())

    def served(self, owner: str) -> float:
        """Return the counter of an owner in weighted tokens; 0 if the owner has no counter."""
        return self._served.get(owner, 0)

    def add(self, request: Request, now: float) -> None:
        """Insert a request by arrival, and raise the owner's counter if it had no waiting request."""
        owner = self._owner(request)
        if self._by is Owner.TENANT and request.tenant_weight != self._weights.get(owner, 1.0):
            self._weights[owner] = request.tenant_weight
        if owner not in self._queues:
            self._served[owner] = max(self.served(owner), self._level())
            self._queues[owner] = []
        insort(self._queues[owner], request, key=lambda waiting: waiting.arrival_s)
        if len(self._served) > self._forget_at:
            self._forget()

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        self._dequeue(request)
        self._turn.pop(request.request_id, None)
        self._paid.discard(request.request_id)

    def admit(self, now: float) -> Admission:
        """Yield the oldest request of the owner with the smallest counter, charge its prompt, and repeat."""
        heads = [self._head(owner, 0) for owner in self._queues]
        heapify(heads)
        held_tokens = self._held_tokens()
        owners = {*self._queues, *held_tokens}
        share_tokens = self.view.total_tokens / (sum(self._weight(owner) for owner in sorted(owners)) or 1.0)
        while heads:
            _, _, owner, place = heappop(heads)
            request = self._queues[owner][place]
            needed_tokens = tokens_needed(request, self.view)
            # An owner that holds no memory is admitted whatever its size; otherwise it might never run.
            beyond_tokens = held_tokens[owner] and held_tokens[owner] + needed_tokens - share_tokens * self._weight(
                owner
            )
            if self._exceeds_share(needed_tokens, beyond_tokens):
                continue
            self._turn[request.request_id] = next(self._turns)
            match (yield AdmissionCandidate(request)):
                case None:
                    self._charge_prompt(request)
                    self._dequeue(request)
                    held_tokens[owner] += needed_tokens
                case WaitReason.KV_BLOCKS | WaitReason.ADAPTER_BLOCKS:
                    return
                case _:
                    place += 1
            if place < len(self._queues.get(owner, ())):
                heappush(heads, self._head(owner, place))

    def _exceeds_share(self, needed_tokens: int, beyond_tokens: float) -> bool:
        """Return whether a request must wait because its owner would exceed its share of the memory."""
        left_tokens = min(beyond_tokens, self._spare * self.view.total_tokens)
        return left_tokens > 0 and self.view.free_tokens() - needed_tokens < left_tokens

    def _held_tokens(self) -> Counter[str]:
        """Return the number of tokens of each owner's running requests. Shared blocks count for each request."""
        held_tokens = Counter[str]()
        for each in self.view.running():
            held_tokens[self._owner(each.request)] += len(each.request.prompt_token_ids) + each.output_tokens
        return held_tokens

    def _weight(self, owner: str) -> float:
        return self._weights.get(owner, 1.0)

    def _head(self, owner: str, place: int) -> tuple[float, float, str, int]:
        return self.served(owner), self._queues[owner][place].arrival_s, owner, place

    def waiting(self) -> Iterable[Request]:
        """Return the first request of every owner by counter, then the second of each, and so on."""
        places = [
            (place, self.served(owner), request.arrival_s, request.request_id, request)
            for owner, queue in self._queues.items()
            for place, request in enumerate(queue)
        ]
        return [request for *_, request in sorted(places, key=lambda each: each[:4])]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._queues.values()))

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        """Charge output tokens. A request that resumes has already paid for its prompt."""
        self._charge_answers()
        if will_resume:
            if len(self._paid) >= _MAX_PAID:  # some requests resume in another engine, and do not return
                self._paid &= {waiting.request_id for queue in self._queues.values() for waiting in queue}
            self._paid.add(request.request_id)
        del self._charged_tokens[request.request_id], self._turn[request.request_id]

    def review(self, now: float) -> Iterable[Request]:
        """Charge output tokens."""
        self._charge_answers()
        return ()

    def precedence(self, request: Request) -> int:
        """Return the order of admission."""
        return self._turn[request.request_id]

    def _charge_prompt(self, request: Request) -> None:
        if request.request_id in self._paid:
            self._paid.remove(request.request_id)
        elif not request.output_token_ids:  # otherwise the request has run elsewhere
            owner = self._owner(request)
            self._served[owner] += INPUT_WEIGHT * len(request.prompt_token_ids) / self._weight(owner)
        self._charged_tokens[request.request_id] = len(request.output_token_ids)

    def _charge_answers(self) -> None:
        for each in self.view.running():
            fresh = each.output_tokens - self._charged_tokens[each.request.request_id]
            if fresh:
                owner = self._owner(each.request)
                self._served[owner] += OUTPUT_WEIGHT * fresh / self._weight(owner)
                self._charged_tokens[each.request.request_id] = each.output_tokens

    def _dequeue(self, request: Request) -> None:
        owner = self._owner(request)
        self._queues[owner].remove(request)
        if not self._queues[owner]:
            del self._queues[owner]
            self._last_owner = owner

    def _level(self) -> float:
        """Return the counter to which a returning owner is raised."""
        if self._queues:
            return min(map(self.served, self._queues))
        return 0 if self._last_owner is None else self.served(self._last_owner)

    def _forget(self) -> None:
        """Drop counters that would be raised when the owner returns. The level never falls, so they have no effect."""
        level = self._level()
        needed = {*self._queues, self._last_owner, *(self._owner(each.request) for each in self.view.running())}
        self._served = {owner: n for owner, n in self._served.items() if n > level or owner in needed}
        self._weights = {owner: weight for owner, weight in self._weights.items() if owner in self._served}
        self._forget_at = max(_MAX_IDLE, 2 * len(self._served))
