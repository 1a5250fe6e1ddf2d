"""Predicts the TTFT of a request that would be queued now, for load shedding."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

from lorikeet.core.events import RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.policies import ADMISSION

_DECAY_S = 30.0
"""Time constant in seconds: an observation of that age counts 1/e of a new one."""
_MAX_PREFILL_TIMES = 32
"""Number of requests whose time from admission to first token is kept."""


class TtftForecast:
    """Predicts TTFT in the API process from the waiting requests and the rate at which such queues have moved.

    A new request waits until the requests ahead of it are admitted, and then for the recent median time from admission
    to first token. Queues move faster the longer they are, since a step admits several requests, so the rate counts
    only times at which at least a quarter as many requests waited. The rate is (admissions + 1) / seconds of such
    times, with more weight on recent ones. Without observations the predicted wait is almost zero, and while nothing is
    admitted it grows. This estimate is Lorikeet's and follows no paper. In a first-come queue, a request that waits for
    a slot or an adapter and is bypassed by later ones does not count as ahead.

    The forecast ignores the size of requests, the loading of adapters, and later requests that will be admitted first.
    It treats Chameleon's queues as one first-come queue.

    Args:
        admission: name of the engine's admission policy in its preset.
        clock: returns the time in seconds on the clock of the requests' timings. Tests replace it.
    """

    def __init__(self, admission: str = "fifo", clock: Callable[[], float] = time.monotonic) -> None:
        self._count_ahead: Callable[[Sequence[Request], Request], int] = ADMISSION.bind(admission, "count_ahead")
        self._is_in_order = admission == "fifo"
        self._bypassed: set[RequestId] = set()
        self._clock = clock
        self._waiting: dict[RequestId, tuple[Request, RequestTimings]] = {}
        self._admissions: dict[int, float] = defaultdict(float)
        self._seconds: dict[int, float] = defaultdict(float)
        self._prefill_times_s: deque[float] = deque(maxlen=_MAX_PREFILL_TIMES)
        self._updated_s = clock()

    def on_submitted(self, request: Request, timings: RequestTimings) -> None:
        """Count a submitted request. ``timings`` changes while the request runs."""
        self.update()
        self._waiting[request.request_id] = request, timings

    def on_first_token(self, timings: RequestTimings) -> None:
        """Count the time from admission to first token of a request that has its first token."""
        self.update()
        if timings.admitted_s is not None and timings.first_token_s is not None:
            self._prefill_times_s.append(timings.first_token_s - timings.admitted_s)

    def on_ended(self, ended: EndedRequest) -> None:
        """Count an ended request, whether or not it was admitted."""
        self.update()
        self._remove(ended.request.request_id)

    def update(self) -> None:
        """Count admissions since the last update. The time since then counts for that update's queue length."""
        now_s = self._clock()
        size = _size(len(self._waiting) - len(self._bypassed))
        before_s = self._updated_s
        self._updated_s = now_s
        passed_s = now_s - before_s
        kept = math.exp(-passed_s / _DECAY_S)
        for counts in (self._admissions, self._seconds):
            for each in counts:
                counts[each] *= kept
        admitted = {name: t.admitted_s for name, (_, t) in self._waiting.items() if t.admitted_s is not None}
        if admitted and self._is_in_order:
            # The queue is sorted by arrival, as in the engine: a request with a long tokenization may be submitted
            # after later requests.
            last_s = max(self._waiting[name][0].arrival_s for name in admitted)
            before = (name for name, (request, _) in self._waiting.items() if request.arrival_s < last_s)
            self._bypassed.update(name for name in before if name not in admitted)
        for name in admitted:
            self._remove(name)
        if size:
            if len(self._waiting) == len(self._bypassed):  # The queue has been empty since the last admission.
                passed_s = min(passed_s, max(0.0, max(admitted.values(), default=now_s) - before_s))
            self._admissions[size] += len(admitted)
            self._seconds[size] += passed_s

    def ttft_s(self, request: Request, siblings: int = 0) -> float:
        """Predict the TTFT, in seconds, of a request that is not submitted yet; 0 if no request waits before it.

        Args:
            request: the request.
            siblings: number of other sequences of the same HTTP request. The prediction is for the last sequence.
        """
        self.update()
        queue = [waiting for name, (waiting, _) in self._waiting.items() if name not in self._bypassed]
        ahead = self._count_ahead(queue, request)
        if not ahead:
            return 0.0
        ahead += siblings
        sizes = [size for size in self._seconds if size >= _size(ahead) - 1]
        admissions = sum(self._admissions[size] for size in sizes)
        passed_s = sum(self._seconds[size] for size in sizes)
        prefill_s = median(self._prefill_times_s) if self._prefill_times_s else 0.0
        return self._updated_s - request.arrival_s + ahead * passed_s / (admissions + 1) + prefill_s

    def _remove(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)
        self._bypassed.discard(request_id)


def _size(length: int) -> int:
    """Return 0, 1, 2, 2, 3, 3, 3, 3, 4, … for queues of 0, 1, 2, … requests."""
    return length.bit_length()
