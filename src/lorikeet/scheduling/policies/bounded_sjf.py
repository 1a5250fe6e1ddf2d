"""Admits short requests first, as long as no request is delayed much beyond first come, first served."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lorikeet.core.guard import GuardedPart
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import (
    Admission,
    AdmissionCandidate,
    AdmissionQueue,
    AdmissionView,
    RunningRequest,
    tokens_needed,
)
from lorikeet.scheduling.order_shadow import OrderShadow

_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]

_DELAY_SHARE: Final = 0.15
_DELAY_S: Final = 0.1
"""Share of a request's wait under FIFO, and seconds, by which the request may be delayed.

Both are below the limits that the class promises, because delays are estimates.
"""
_WORST_HALF_LIFE_S: Final = 60.0
"""Half-life in seconds of the remembered longest wait under FIFO."""
_COLD_FACTOR: Final = 1.1
"""Factor of the cost of a request whose adapter is not on the device."""
_GROWTH: Final = 1.25
"""Factor from the current length to the expected length of an answer that is longer than predicted."""
_PACE_S = 5.0
_MOST_PACE = 3.0
"""Half-life of the measured pace in seconds, and the pace's upper limit.

The pace is the time that requests waited, divided by the costs of the requests that were admitted during that time.
"""
_CANDIDATES: Final = 256
"""Number of oldest requests that are considered, so that a long queue does not slow down the steps."""
_REFRESH_S: Final = 0.25
"""Seconds after which costs are computed again even if the queue has not changed."""

_DELAYED, _PENDING, _WAITED, _QUEUED, _INPUTS, _OUTPUTS = range(6)


@dataclass(slots=True)
class _Charge:
    """Holds the delay that an admitted request caused to older requests, and its times in case it resumes."""

    arrival_s: float
    cost_s: float
    output_tokens: int
    delayed_s: float
    waited_s: float


class BoundedShortestFirst(AdmissionQueue):
    """Admits the request that takes the least of the engine's time, unless an older request is delayed too much.

    A request that is admitted before older requests delays them by the time that the engine spends on it: its share of
    the steps, of the running sequences or of the memory, whichever is largest. If its answer becomes longer than
    predicted, the delay of the older requests grows.

    The wait of a request under FIFO is its wait so far, without delays, plus the time that the engine spends on older
    requests that still wait. A request may be delayed as long as

    * the request will wait at most 1.5 times as long as under FIFO plus one second, and
    * the request will not wait longer than the longest recent wait under FIFO, so that the tail does not grow.

    A younger request passes only if all older requests may be delayed by it, and if it does not take memory into which
    the oldest request fits now. Otherwise the oldest request would have to wait until running requests end, and no
    estimate of this time exists. If no request may pass, the oldest request is next, as under FIFO. A request that
    lacks blocks ends admission, so that no other request takes its turn. While ``GuardedPart.ORDER`` is off, the oldest
    request is always next.

    Args:
        view: state of the engine.
    """

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self._waiting: list[Request] = []
        # Per request: delay, part of the delay still to come, earlier wait, time of queueing, tokens to prefill, and
        # predicted tokens to generate
        self._columns = np.zeros((0, 6))
        self._admitted: dict[RequestId, _Charge] = {}
        self._costs = np.zeros(0)
        self._ahead_s = np.zeros(0)  # costs of all older requests
        self._order = np.zeros(0, np.int64)
        self._fresh_until_s = -np.inf
        self._elapsed_until_s = 0.0
        self._worst_s = 0.0
        self._worst_at_s = 0.0
        self._queued_s = _PACE_S
        self._served_s = _PACE_S
        self._prompt_shares = np.zeros(0)
        self._shadow = OrderShadow(view.guards) if view.guards.enabled else None

    def add(self, request: Request, now: float) -> None:
        """Queue a request by time of arrival. A request that resumes keeps its earlier wait."""
        before = self._admitted.pop(request.request_id, None)
        delayed_s, waited_s = (0.0, 0.0) if before is None else (np.inf, before.waited_s)
        made = len(request.output_token_ids)
        inputs = len(request.prompt_token_ids) + made
        row = (delayed_s, 0.0, waited_s, now, inputs, max(1, request.expected_tokens - made))
        if not self._waiting:
            self._elapsed_until_s = now
        place = bisect_right(self._waiting, request.arrival_s, key=_arrival)
        self._waiting.insert(place, request)
        self._columns = np.concatenate((self._columns[:place], (row,), self._columns[place:]))
        self._fresh_until_s = -np.inf

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        self._take(self._waiting.index(request))
        if self._shadow is not None:
            self._shadow.forget(request.request_id)

    def answered(self, request: Request, output_tokens: int, now: float) -> None:
        """Compare the costs of a request with those of the requests that it passed, or which passed it."""
        if self._shadow is not None:
            self._shadow.ended(request.request_id, output_tokens)

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        """Remove a request, unless it will be queued again."""
        if not will_resume:
            self._admitted.pop(request.request_id, None)

    def skip(self, now: float) -> None:
        """Update the costs and the longest wait, but choose no request."""
        if self._waiting:
            if now >= self._fresh_until_s:
                self._refresh(now)
            self._allowances_s(now)

    def admit(self, now: float) -> Admission:
        """Yield the cheapest request that may pass all older requests, repeatedly."""
        if not self._waiting:
            return
        if now >= self._fresh_until_s:
            self._refresh(now)
        requests = self._waiting[: len(self._costs)]
        costs = self._costs
        shares = self._prompt_shares
        allowances = self._allowances_s(now)
        passed = np.zeros(len(costs), np.bool_)  # the request was admitted, or its admission failed
        for left in range(len(costs), 0, -1):
            oldest = int(np.argmin(passed))
            shortest = self._shortest(requests, costs, allowances, passed) if left > 1 else oldest
            chosen = shortest if self.view.guards.is_on(GuardedPart.ORDER) else oldest
            saved_s = 0.0
            if chosen and np.isfinite(costs[chosen]):
                saved_s = float((costs[:chosen][~passed[:chosen]] - costs[chosen]).sum())
            reason = yield AdmissionCandidate(requests[chosen], saved_s)
            if reason is None and self._shadow is not None and np.isfinite(costs[shortest]):
                self._note_order(requests, costs, passed, shortest, now)
            passed[chosen] = True
            if reason in (WaitReason.KV_BLOCKS, WaitReason.ADAPTER_BLOCKS):
                return
            if reason is None:
                allowances[:chosen] -= costs[chosen]
                self._note_admitted(requests[chosen], float(costs[chosen]), float(shares[chosen]), now)

    def _shortest(self, requests: Sequence[Request], costs: _Floats, allowances: _Floats, passed: _Bools) -> int:
        """Return the place of the cheapest request that may pass all older ones; of the oldest if none may."""
        oldest = int(np.argmin(passed))
        least = np.minimum.accumulate(np.where(passed, np.inf, allowances))
        may_pass = ~passed & (costs <= np.concatenate(([np.inf], least[:-1])))
        if self._shadow is not None and (admitted := self._shadow.virtually_admitted):
            may_pass &= [request.request_id not in admitted for request in requests]
            may_pass[oldest] = True
        chosen = int(self._order[np.argmax(may_pass[self._order])])
        takes_room = chosen != oldest and self._takes_room(requests[chosen], requests[oldest])
        return oldest if takes_room else chosen

    def _note_order(
        self, requests: Sequence[Request], costs: _Floats, passed: _Bools, shortest: int, now: float
    ) -> None:
        """Pass the shadow the older requests that the shortest one passes, or would pass if the order were on."""
        older = np.flatnonzero(~passed[:shortest])
        if len(older) and self._shadow is not None:
            ids = [requests[place].request_id for place in older.tolist()]
            name = requests[shortest].request_id
            self._shadow.passes(ids, name, costs[older].tolist(), float(costs[shortest]), now)

    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests: the considered requests by cost, then all others by arrival."""
        requests = tuple(self._waiting)
        count = len(self._costs)
        if self._fresh_until_s == -np.inf:
            return requests
        return (*(requests[at] for at in self._order.tolist()), *requests[count:])

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def _take(self, place: int) -> tuple[float, float]:
        """Remove the request at a position of the queue. Return its delay, and its wait before it was queued."""
        del self._waiting[place]
        delayed_s, _, waited_s, queued_s, *_ = self._columns[place].tolist()
        self._columns = np.concatenate((self._columns[:place], self._columns[place + 1 :]))
        self._fresh_until_s = -np.inf
        return delayed_s, waited_s - queued_s

    def _note_admitted(self, request: Request, cost_s: float, prompt_share: float, now: float) -> None:
        place = self._waiting.index(request)
        self._columns[:place, _DELAYED : _PENDING + 1] += cost_s
        if len(self._waiting) > 1:
            self._served_s += cost_s * self._served_s / self._queued_s
        delayed_s, waited_s = self._take(place)
        waited_s += now
        self._admitted[request.request_id] = _Charge(
            request.arrival_s, cost_s, max(1, request.expected_tokens), delayed_s, waited_s
        )
        self._note_fifo_wait(waited_s - delayed_s, now)
        if self._shadow is not None and np.isfinite(cost_s):
            tokens = request.expected_tokens
            self._shadow.admitted(request.request_id, waited_s, cost_s, prompt_share, tokens, now)

    def _takes_room(self, younger: Request, oldest: Request) -> bool:
        """Return whether the oldest request fits into the memory now, but would not fit beside a younger request."""
        free_tokens = self.view.free_tokens()
        needed = tokens_needed(oldest, self.view)
        return needed <= free_tokens < needed + tokens_needed(younger, self.view)

    def _allowances_s(self, now: float) -> _Floats:
        """Return the seconds by which each considered request may still be delayed."""
        delayed_s, pending_s, waited_s, queued_s, *_ = self._columns[: len(self._costs)].T
        waits_s = waited_s + now - queued_s + pending_s + self._ahead_s
        under_fifo_s = np.maximum(0.0, waits_s - delayed_s)
        self._note_fifo_wait(float(under_fifo_s.max()), now)
        allowances_s: _Floats = np.minimum(_DELAY_SHARE * under_fifo_s + _DELAY_S - delayed_s, self._worst_s - waits_s)
        return allowances_s

    def _note_fifo_wait(self, under_fifo_s: float, now: float) -> None:
        """Record the wait of a request under FIFO. The longest recent wait is remembered and fades."""
        faded_s = self._worst_s * 0.5 ** ((now - self._worst_at_s) / _WORST_HALF_LIFE_S)
        self._worst_s = max(faded_s, under_fifo_s)
        self._worst_at_s = now

    def _refresh(self, now: float) -> None:
        """Compute the costs of the oldest requests, and their order."""
        requests = self._waiting[:_CANDIDATES]
        running = self.view.running()
        passed_s = now - self._elapsed_until_s
        self._columns[:, _PENDING] = np.maximum(0.0, self._columns[:, _PENDING] - passed_s)
        self._elapsed_until_s = now
        fade = 0.5 ** (passed_s / _PACE_S)
        self._queued_s = self._queued_s * fade + passed_s
        self._served_s = self._served_s * fade
        self._charge_overruns(running)
        self._costs = self._costs_s(len(requests), running)
        ahead_s = np.concatenate(([0.0], np.cumsum(self._costs)[:-1]))
        self._ahead_s = np.where(np.isfinite(ahead_s), ahead_s, 0.0)
        adapters = {request.digest: request.adapter for request in requests}
        is_resident = {digest: self.view.is_resident(adapter) for digest, adapter in adapters.items()}
        resident = [is_resident[request.digest] for request in requests]
        self._order = np.argsort(self._costs * np.where(resident, 1.0, _COLD_FACTOR), kind="stable")
        self._fresh_until_s = now + _REFRESH_S

    def _charge_overruns(self, running: Sequence[RunningRequest]) -> None:
        """Add delays to older requests for running requests whose answers have become longer than predicted."""
        for each in running:
            charge = self._admitted.get(each.request.request_id)
            if charge is None or each.output_tokens <= charge.output_tokens:
                continue
            tokens = int(each.output_tokens * _GROWTH) + 1
            more_s = charge.cost_s * (tokens / charge.output_tokens - 1)
            place = bisect_right(self._waiting, charge.arrival_s, key=_arrival)
            self._columns[:place, _DELAYED : _PENDING + 1] += more_s
            charge.cost_s += more_s
            charge.output_tokens = tokens

    def _costs_s(self, count: int, there: Sequence[RunningRequest]) -> _Floats:
        """Return the seconds by which each of the oldest requests delays later requests; infinite if unknown.

        If running requests' answers are longer than predicted, predicted lengths of waiting requests are raised by the
        same factor.
        """
        times = self.view.step_times
        view = self.view
        if not times.is_known:
            self._prompt_shares = np.zeros(count)
            return np.full(count, np.inf)
        kv_tokens = view.free_tokens() + sum(each.kv_tokens for each in there)
        inputs, outputs = self._columns[:count, (_INPUTS, _OUTPUTS)].T
        prefill_s = times.prefill_s(1) * inputs
        # In a step of a busy engine, each running request adds its prompt tokens divided by its answer tokens.
        beside = len(there) * inputs.sum() / outputs.sum()
        runs_s = prefill_s + outputs * times.step_s(beside, len(there) + 1)
        self._prompt_shares = prefill_s / np.maximum(runs_s, 1e-12)
        steps_s = prefill_s + outputs * (times.step_s(0, 1) - times.step_s(0, 0))
        memory_s = runs_s * (inputs + outputs) / max(1, kv_tokens)
        pace = min(_MOST_PACE, max(1 / _MOST_PACE, self._queued_s / self._served_s)) if self._served_s else 1.0
        costs: _Floats = np.maximum.reduce((steps_s, runs_s / view.max_running, memory_s)) * pace
        return costs


def _arrival(request: Request) -> float:
    return request.arrival_s
