"""Predicts when the first token of a request would come, if it were queued now."""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

from lorikeet.core.events import RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.scheduling.policies.deadline import DEFAULT_TTFT_S
from lorikeet.scheduling.policies.fair import by_adapter, by_tenant
from lorikeet.scheduling.policies.sjf import AGING_TOKENS_PER_S

_MEMORY_S = 30.0
"""What was seen so long ago counts 1/e of what is seen now."""
_STARTS = 32
"""Requests whose time from admission to first token is remembered."""


CountAhead = Callable[[Sequence[Request], Request], int]
"""Of the waiting requests, how many would go before a new one."""


def _ranked(rank: Callable[[Request], float]) -> CountAhead:
    """By a rank that never changes, the lowest first."""

    def count(waiting: Sequence[Request], new: Request) -> int:
        return sum(rank(other) <= rank(new) for other in waiting)

    return count


def _in_turn(owner: Callable[[Request], str]) -> CountAhead:
    """Owners take turns: before each request of its own, and before the new one, everybody else may have had one."""

    def count(waiting: Sequence[Request], new: Request) -> int:
        by_owner = Counter(map(owner, waiting))
        own = by_owner.pop(owner(new), 0)
        return own + sum(min(others, own + 1) for others in by_owner.values())

    return count


def _everybody(waiting: Sequence[Request], new: Request) -> int:
    return len(waiting)


def _due_s(request: Request) -> float:
    limit_s = None if request.slo is None else request.slo.ttft_s
    return request.arrival_s + (DEFAULT_TTFT_S if limit_s is None else limit_s)


_AHEAD: dict[str, CountAhead] = {
    "fifo": _ranked(lambda request: request.arrival_s),
    "priority": _ranked(lambda request: request.priority),
    "deadline": _ranked(_due_s),
    "sjf": _ranked(lambda request: request.expected_tokens),
    "sjf:aging": _ranked(lambda request: request.expected_tokens + AGING_TOKENS_PER_S * request.arrival_s),
    "fair": _in_turn(by_tenant),
    "fair:literal": _in_turn(by_tenant),
    "fair:adapter": _in_turn(by_adapter),
}
"""By the name of the admission policy; under all others everybody who waits is ahead."""


class TtftForecast:
    """Predicts TTFT from what the API process sees: who waits, and how fast such queues have moved.

    A new request waits until those ahead of it are admitted, and then as long as requests lately took from there to
    their first token (the median). Queues move faster the longer they are, since a step has room for several requests;
    so the pace counts only times at which at least a quarter as many waited. It is (admissions + 1) / seconds of such
    times, newer ones counting more: before anything was seen the wait is predicted as next to none, and while nothing
    moves it grows with the time. All of it is ours. Whoever waits for a slot or an adapter and is passed over by those
    who came later is not part of a queue in order of arrival.

    It does not know how large a request is, whether its adapter must be fetched, nor who will come later and go first;
    of Chameleon's queues it assumes that they are one, first come, first served.

    Args:
        admission: name of the engine's policy, which tells who would go first.
        clock: seconds, that of the requests' timings; replaced in tests.
    """

    def __init__(self, admission: str = "fifo", clock: Callable[[], float] = time.monotonic) -> None:
        self._count_ahead = _AHEAD.get(admission, _everybody)
        self._is_in_order = admission == "fifo"
        self._overtaken: set[RequestId] = set()
        self._clock = clock
        self._waiting: dict[RequestId, tuple[Request, RequestTimings]] = {}
        self._admissions: dict[int, float] = defaultdict(float)
        self._seconds: dict[int, float] = defaultdict(float)
        self._starts_s: deque[float] = deque(maxlen=_STARTS)
        self._looked_s = clock()

    def begin(self, request: Request, timings: RequestTimings) -> None:
        """A request was submitted; ``timings`` will tell how far it has come."""
        self.look()
        self._waiting[request.request_id] = request, timings

    def first_token(self, timings: RequestTimings) -> None:
        """A request has its first token."""
        self.look()
        if timings.admitted_s is not None and timings.first_token_s is not None:
            self._starts_s.append(timings.first_token_s - timings.admitted_s)

    def end(self, request: Request) -> None:
        """A request has ended, admitted or not."""
        self.look()
        self._leave(request.request_id)

    def look(self) -> None:
        """Take in who was admitted since the last look. The time between counts for the queue as it was then."""
        now_s = self._clock()
        size = _size(len(self._waiting) - len(self._overtaken))
        before_s, self._looked_s = self._looked_s, now_s
        passed_s = now_s - before_s
        kept = math.exp(-passed_s / _MEMORY_S)
        for counts in (self._admissions, self._seconds):
            for each in counts:
                counts[each] *= kept
        admitted = {name: t.admitted_s for name, (_, t) in self._waiting.items() if t.admitted_s is not None}
        if admitted and self._is_in_order:
            # By arrival, as the engine has them: whose prompt takes long to read comes here later than others.
            last_s = max(self._waiting[name][0].arrival_s for name in admitted)
            before = (name for name, (request, _) in self._waiting.items() if request.arrival_s < last_s)
            self._overtaken.update(name for name in before if name not in admitted)
        for name in admitted:
            self._leave(name)
        if size:
            if len(self._waiting) == len(self._overtaken):  # the queue was empty from then on
                passed_s = min(passed_s, max(0.0, max(admitted.values(), default=now_s) - before_s))
            self._admissions[size] += len(admitted)
            self._seconds[size] += passed_s

    def ttft_s(self, request: Request, siblings: int = 0) -> float:
        """Return the TTFT, in seconds, of a request that is not yet submitted; 0 if nobody waits before it.

        Args:
            request: which.
            siblings: others that come with it, of which the last one is meant.
        """
        self.look()
        queue = [waiting for name, (waiting, _) in self._waiting.items() if name not in self._overtaken]
        ahead = self._count_ahead(queue, request)
        if not ahead:
            return 0.0
        ahead += siblings
        sizes = [size for size in self._seconds if size >= _size(ahead) - 1]
        admissions = sum(self._admissions[size] for size in sizes)
        passed_s = sum(self._seconds[size] for size in sizes)
        start_s = median(self._starts_s) if self._starts_s else 0.0
        return self._looked_s - request.arrival_s + ahead * passed_s / (admissions + 1) + start_s

    def _leave(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)
        self._overtaken.discard(request_id)


def _size(length: int) -> int:
    """Return 0, 1, 2, 2, 3, 3, 3, 3, 4, … for queues of 0, 1, 2, … requests."""
    return length.bit_length()
