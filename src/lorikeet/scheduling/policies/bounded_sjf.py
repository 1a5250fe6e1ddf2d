"""Short requests first, while no request is delayed much beyond first come, first served."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import Admission, AdmissionQueue, AdmissionView

_Floats = npt.NDArray[np.float64]

_DELAY_SHARE: Final = 0.3
_DELAY_S: Final = 0.4
"""A request may be delayed by this share of its wait under FIFO and so many seconds. Both are below what the class
promises, since delays are estimates."""
_WORST_HALF_LIFE_S: Final = 60.0
"""Half-life of the longest wait under FIFO that is remembered."""
_COLD_FACTOR: Final = 1.1
"""A request whose adapter is not on the device comes after one that costs up to so many times as much."""
_CANDIDATES: Final = 256
"""Only so many of the oldest requests are considered, so that a long queue does not slow down the steps."""
_REFRESH_S: Final = 0.25
"""Costs are computed again after so many seconds, or when the queue has changed."""

_DELAYED, _WAITED, _QUEUED = range(3)


class BoundedShortestFirst(AdmissionQueue):
    """Admits the request that takes the least of the engine's time, unless that delays an older one too much.

    A request that is admitted before older ones delays them by the time that the engine spends on it: its part of the
    steps, of the places of running sequences and of the memory, whichever is largest. An older request can afford a
    delay as long as

    * it will wait at most 1.5 times as long as under FIFO and one second (its wait under FIFO so far is what it has
      waited less the delays), and
    * it will not wait longer than the longest wait under FIFO of late, so that the tail stays what it was.

    A younger request passes only if all older ones can afford it. If none can, the oldest is next, as under FIFO. A
    request for which blocks are lacking ends admission, so that it keeps its turn.

    Args:
        view: of the engine.
    """

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self._waiting: list[Request] = []
        self._times = np.zeros((0, 3))  # of each waiting request: by how much it was delayed, waited before, queued at
        self._admitted: dict[RequestId, tuple[float, float]] = {}  # delayed, waited
        self._costs, self._order = np.zeros(0), np.zeros(0, np.int64)
        self._fresh_until_s = -np.inf
        self._worst_s, self._worst_at_s = 0.0, 0.0

    def add(self, request: Request, now: float) -> None:
        """Queue a request by time of arrival; one that resumes keeps what it has waited."""
        delayed_s, waited_s = self._admitted.pop(request.request_id, (0.0, 0.0))
        place = bisect_right(self._waiting, request.arrival_s, key=_arrival)
        self._waiting.insert(place, request)
        self._times = np.insert(self._times, place, (delayed_s, waited_s, now), axis=0)
        self._fresh_until_s = -np.inf

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        self._take(self._waiting.index(request))

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        """Forget a request, unless it will be queued again."""
        if not will_resume:
            self._admitted.pop(request.request_id, None)

    def admit(self, now: float) -> Admission:
        """Yield the cheapest request that may pass all older ones, again and again."""
        if not self._waiting:
            return
        if now >= self._fresh_until_s:
            self._refresh(now)
        requests, costs = self._waiting[: len(self._costs)], self._costs
        allowances = self._allowances_s(now)[: len(costs)]
        passed = np.zeros(len(costs), np.bool_)  # admitted, or tried in vain
        while not passed.all():
            least = np.minimum.accumulate(np.where(passed, np.inf, allowances))
            may_pass = ~passed & (costs <= np.concatenate(([np.inf], least[:-1])))
            chosen = int(self._order[np.argmax(may_pass[self._order])])
            reason = yield requests[chosen]
            passed[chosen] = True
            if reason in (WaitReason.KV_BLOCKS, WaitReason.ADAPTER_BLOCKS):
                return
            if reason is None:
                older_s = costs[:chosen][~passed[:chosen]]
                self.saved_s = float((older_s - costs[chosen]).sum()) if np.isfinite(costs[chosen]) else 0.0
                allowances[:chosen] -= costs[chosen] * (1 + _DELAY_SHARE)
                self._note_admitted(requests[chosen], float(costs[chosen]), now)

    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests: of the oldest the cheapest first, then the others by arrival."""
        requests, count = tuple(self._waiting), len(self._costs)
        if self._fresh_until_s == -np.inf:
            return requests
        return (*(requests[at] for at in self._order.tolist()), *requests[count:])

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def _take(self, place: int) -> tuple[float, float, float]:
        """Remove the request at a place of the queue, and return its times."""
        del self._waiting[place]
        delayed_s, waited_s, queued_s = self._times[place].tolist()
        self._times = np.delete(self._times, place, axis=0)
        self._fresh_until_s = -np.inf
        return delayed_s, waited_s, queued_s

    def _note_admitted(self, request: Request, cost_s: float, now: float) -> None:
        place = self._waiting.index(request)
        self._times[:place, _DELAYED] += cost_s
        delayed_s, waited_s, queued_s = self._take(place)
        waited_s += now - queued_s
        self._admitted[request.request_id] = delayed_s, waited_s
        self._note_fifo_wait(waited_s - delayed_s, now)

    def _allowances_s(self, now: float) -> _Floats:
        """Return by how much each waiting request may still be delayed."""
        delayed_s, waited_s = self._times[:, _DELAYED], self._times[:, _WAITED] + now - self._times[:, _QUEUED]
        under_fifo_s = np.maximum(0.0, waited_s - delayed_s)
        return np.minimum(_DELAY_SHARE * under_fifo_s + _DELAY_S - delayed_s, self._worst_s - waited_s)

    def _note_fifo_wait(self, under_fifo_s: float, now: float) -> None:
        """Record the wait of a request under FIFO; the longest of recent ones is remembered and fades."""
        faded_s = self._worst_s * 0.5 ** ((now - self._worst_at_s) / _WORST_HALF_LIFE_S)
        self._worst_s, self._worst_at_s = max(faded_s, under_fifo_s), now

    def _refresh(self, now: float) -> None:
        """Compute the costs of the oldest requests, and their order."""
        requests = self._waiting[:_CANDIDATES]
        self._costs = self._costs_s(requests)
        resident = [self.view.is_resident(request.adapter) for request in requests]
        self._order = np.argsort(self._costs * np.where(resident, 1.0, _COLD_FACTOR), kind="stable")
        self._fresh_until_s = now + _REFRESH_S
        delayed_s, waited_s, queued_s = self._times[0].tolist()
        self._note_fifo_wait(waited_s + now - queued_s - delayed_s, now)

    def _costs_s(self, requests: Sequence[Request]) -> _Floats:
        """Return the seconds by which each request delays others that are admitted after it; infinite if not known.

        If answers of running requests are longer than predicted, the others count as that much longer, too.
        """
        times, view = self.view.step_times, self.view
        if not times.is_known:
            return np.full(len(requests), np.inf)
        there = view.running()
        running, kv_tokens = max(1, len(there)), view.free_tokens() + sum(each.kv_tokens for each in there)
        expected = sum(each.request.expected_tokens for each in there)
        overrun = sum(max(each.request.expected_tokens, each.output_tokens) for each in there) / max(1, expected)
        inputs = np.array([len(each.prompt_token_ids) + len(each.output_token_ids) for each in requests], np.float64)
        outputs = np.array([max(1, each.expected_tokens - len(each.output_token_ids)) for each in requests], np.float64)
        prefill_s = times.prefill_s(1) * inputs
        runs_s = prefill_s + outputs * times.step_s(0, running)
        steps_s = prefill_s + outputs * (times.step_s(0, 1) - times.step_s(0, 0))
        memory_s = runs_s * (inputs + outputs) / max(1, kv_tokens)
        costs: _Floats = np.maximum.reduce((steps_s, runs_s / running, memory_s)) * max(1.0, overrun)
        return costs


def _arrival(request: Request) -> float:
    return request.arrival_s
