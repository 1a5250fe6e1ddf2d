"""Fair shares of the tokens served."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count

from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import Admission, AdmissionQueue, AdmissionView, tokens_needed

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Of a token, as in the paper's evaluation; a token of the answer takes longer to make."""
SPARE = 0.15
"""Most of the pool that an owner beyond its share leaves free."""
_MOST_PAID = 1024
"""So many interrupted requests are remembered at least."""
_MOST_IDLE = 1024
"""So many owners are remembered at least before those whose counter no longer matters are forgotten."""


def by_tenant(request: Request) -> str:
    """Return whose request it is."""
    return request.tenant


def by_adapter(request: Request) -> str:
    """Return the version of the adapter, empty for the base model."""
    return request.digest or ""


class FairShares(AdmissionQueue):
    """Whoever has been served the fewest tokens goes first; inside one owner first come, first served.

    Every owner has a counter of tokens: those of a prompt are added when it is admitted, those of the answer when they
    are generated. One that comes back after a pause is lifted to the smallest counter among those who wait (or to that
    of the last who did, if nobody waits), so that nobody saves up service. Whoever finds no room ends admission, so an
    owner of large requests does not lose its turn. The prompt of a request that was interrupted is not charged again.

    Turns alone let those who hardly ever ask wait for the running requests of those who always do: the paper's bound on
    the difference between two owners grows with the pool. So, and this is ours, an owner that would hold more
    than an equal share of the pool leaves as much of it free as it holds beyond, up to ``spare`` of the whole, for
    those who hold less. If blocks run out all the same, the last admitted gives way; by arrival it would often be a
    request of an owner that has hardly waited.

    Source: Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4 (virtual token counter).

    Args:
        view: of the engine.
        owner: of a request: ``by_tenant`` or ``by_adapter``.
        spare: share of the pool; 0 for the paper's policy.
    """

    def __init__(self, view: AdmissionView, owner: Callable[[Request], str] = by_tenant, spare: float = SPARE) -> None:
        super().__init__(view)
        self._spare = spare
        self._owner = owner
        self._served: dict[str, int] = {}
        self._queues: dict[str, list[Request]] = {}  # none is empty
        self._last_owner: str | None = None
        self._turns = count()
        self._turn: dict[RequestId, int] = {}
        self._charged_tokens: dict[RequestId, int] = {}
        self._paid: set[RequestId] = set()
        self._forget_at = _MOST_IDLE

    def served(self, owner: str) -> int:
        """Return an owner's counter: weighted tokens that it was served or, after a pause, is taken to have been."""
        return self._served.get(owner, 0)

    def add(self, request: Request, now: float) -> None:
        """Insert by arrival into the queue of its owner, whose counter is lifted if it had nothing waiting."""
        owner = self._owner(request)
        if owner not in self._queues:
            self._served[owner] = max(self.served(owner), self._level())
            self._queues[owner] = []
        insort(self._queues[owner], request, key=lambda waiting: waiting.arrival_s)
        if len(self._served) > self._forget_at:
            self._forget()

    def remove(self, request: Request, now: float) -> None:
        """Take it out."""
        self._take_out(request)
        self._turn.pop(request.request_id, None)
        self._paid.discard(request.request_id)

    def admit(self, now: float) -> Admission:
        """Yield the oldest of whoever has the smallest counter, charge it, and so on."""
        heads = [self._head(owner, 0) for owner in self._queues]
        heapify(heads)
        held_tokens = self._held_tokens()
        share_tokens = self.view.total_tokens / max(1, len({*self._queues, *held_tokens}))
        while heads:
            _, _, owner, place = heappop(heads)
            request = self._queues[owner][place]
            needed_tokens = tokens_needed(request, self.view)
            # Whoever holds nothing takes its turn, however much it needs: else it might never.
            beyond_tokens = held_tokens[owner] and held_tokens[owner] + needed_tokens - share_tokens
            if self._must_leave(needed_tokens, beyond_tokens):
                continue
            self._turn[request.request_id] = next(self._turns)
            match (yield request):
                case None:
                    self._charge_prompt(request)
                    self._take_out(request)
                    held_tokens[owner] += needed_tokens
                case WaitReason.ROOM | WaitReason.ADAPTER_ROOM:
                    return
                case _:
                    place += 1
            if place < len(self._queues.get(owner, ())):
                heappush(heads, self._head(owner, place))

    def _must_leave(self, needed_tokens: int, beyond_tokens: float) -> bool:
        """Whether that much room must be left to others by an owner that would hold so much beyond its share."""
        left_tokens = min(beyond_tokens, self._spare * self.view.total_tokens)
        return left_tokens > 0 and self.view.free_tokens() - needed_tokens < left_tokens

    def _held_tokens(self) -> Counter[str]:
        """Return what every owner holds: tokens of its running requests, whoever shares their room."""
        held_tokens = Counter[str]()
        for request, output_tokens, _ in self.view.running():
            held_tokens[self._owner(request)] += len(request.prompt_token_ids) + output_tokens
        return held_tokens

    def _head(self, owner: str, place: int) -> tuple[int, float, str, int]:
        return self.served(owner), self._queues[owner][place].arrival_s, owner, place

    def waiting(self) -> Iterable[Request]:
        """Return the first of every owner, then the second, each time by counter."""
        places = [
            (place, self.served(owner), request.arrival_s, request.request_id, request)
            for owner, queue in self._queues.items()
            for place, request in enumerate(queue)
        ]
        return [request for *_, request in sorted(places, key=lambda each: each[:4])]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._queues.values()))

    def ended(self, request: Request, now: float, *, goes_on: bool = False) -> None:
        """Charge what was generated since the last step; whoever goes on has paid for its prompt."""
        self._charge_answers()
        if goes_on:
            if len(self._paid) >= _MOST_PAID:  # some go on elsewhere, and do not come back
                self._paid &= {waiting.request_id for queue in self._queues.values() for waiting in queue}
            self._paid.add(request.request_id)
        del self._charged_tokens[request.request_id], self._turn[request.request_id]

    def review(self, now: float) -> Iterable[Request]:
        """Charge what was generated."""
        self._charge_answers()
        return ()

    def precedence(self, request: Request) -> int:
        """Return the order of admission."""
        return self._turn[request.request_id]

    def _charge_prompt(self, request: Request) -> None:
        if request.request_id in self._paid:
            self._paid.remove(request.request_id)
        elif not request.output_token_ids:  # else it has run elsewhere
            self._served[self._owner(request)] += INPUT_WEIGHT * len(request.prompt_token_ids)
        self._charged_tokens[request.request_id] = len(request.output_token_ids)

    def _charge_answers(self) -> None:
        for request, output_tokens, _ in self.view.running():
            fresh = output_tokens - self._charged_tokens[request.request_id]
            if fresh:
                self._served[self._owner(request)] += OUTPUT_WEIGHT * fresh
                self._charged_tokens[request.request_id] = output_tokens

    def _take_out(self, request: Request) -> None:
        owner = self._owner(request)
        self._queues[owner].remove(request)
        if not self._queues[owner]:
            del self._queues[owner]
            self._last_owner = owner

    def _level(self) -> int:
        """Return the counter that somebody who comes now has at least."""
        if self._queues:
            return min(map(self.served, self._queues))
        return 0 if self._last_owner is None else self.served(self._last_owner)

    def _forget(self) -> None:
        """Drop counters that coming back would lift anyway: the level never falls."""
        level = self._level()
        needed = {*self._queues, self._last_owner, *(self._owner(each.request) for each in self.view.running())}
        self._served = {owner: n for owner, n in self._served.items() if n > level or owner in needed}
        self._forget_at = max(_MOST_IDLE, 2 * len(self._served))
