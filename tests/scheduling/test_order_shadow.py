"""The order of admission under its guard: a server whose predictions of lengths turn wrong and right again."""

import random
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from lorikeet.core.guard import GuardedPart, Guards
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.scheduling.admission import AdmissionQueue
from lorikeet.scheduling.order_shadow import OrderShadow
from lorikeet.scheduling.policies.bounded_sjf import BoundedShortestFirst
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.state import StepTimeEstimator
from tests.support.admission_queues import View, made

PHASE_S = 300.0
PHASES = 4
TOKEN_S = 0.0025


class Decoding(View):
    """An engine whose steps take 2.5 ms for each decode, and nothing else."""

    def __init__(self, guards: Guards) -> None:
        super().__init__()
        self.guards = guards
        self.step_times = StepTimeEstimator()
        for decodes in (1, 2, 4):
            self.step_times.note(0, decodes, TOKEN_S * decodes)


def workload(seed: int) -> list[tuple[Request, int]]:
    """Requests in bursts with the true lengths of their answers; every other phase predicts the opposite."""
    chance = random.Random(seed)
    found: list[tuple[Request, int]] = []
    now = 0.0
    while now < PHASES * PHASE_S:
        now += chance.expovariate(1.0)
        for _ in range(chance.randint(1, 20)):
            tokens = chance.choice((4, 8, 64))
            predicted = tokens if int(now / PHASE_S) % 2 == 0 else 68 - tokens
            request = made(f"request-{len(found)}", now, answer_tokens=100)
            found.append((msgspec.structs.replace(request, predicted_tokens=predicted), tokens))
    return found


def waits_s(queue: AdmissionQueue, requests: Sequence[tuple[Request, int]], guards: Guards) -> npt.NDArray[np.float64]:
    """Serve one request after the other, and return the waiting of all of each phase."""
    waits = np.zeros(PHASES)
    pending = list(reversed(requests))
    lengths = {request.request_id: tokens for request, tokens in requests}
    now = 0.0
    while pending or len(queue):
        if not len(queue):
            now = max(now, pending[-1][0].arrival_s)
        while pending and pending[-1][0].arrival_s <= now:
            request, _ = pending.pop()
            queue.add(request, now)
        policy = queue.admit(now)
        request = next(policy).request
        with suppress(StopIteration):
            policy.send(None)
        policy.close()
        waited_s = now - request.arrival_s
        waits[min(PHASES - 1, int(request.arrival_s / PHASE_S))] += waited_s
        guards.waited(waited_s, now)
        now += TOKEN_S * lengths[request.request_id]
        queue.answered(request, lengths[request.request_id], now)
        queue.ended(request, now)
    return waits


@pytest.mark.parametrize("seed", [1])
def test_wrong_predictions_cost_at_most_five_percent(seed: int) -> None:
    requests = workload(seed)
    guards = Guards(enabled=True)
    guarded = waits_s(BoundedShortestFirst(Decoding(guards)), requests, guards)
    always = waits_s(BoundedShortestFirst(Decoding(Guards())), requests, Guards())
    never = waits_s(Fifo(Decoding(Guards())), requests, Guards())
    assert guarded.sum() <= 1.05 * np.minimum(always, never).sum()
    assert min(always.sum(), never.sum()) > 1.2 * np.minimum(always, never).sum(), "neither alone comes near"


def test_pairs_and_costs_of_requests_that_are_gone_are_forgotten() -> None:
    guards = Guards(enabled=True)
    shadow = OrderShadow(guards)
    older, younger = RequestId("older"), RequestId("younger")
    shadow.passes([older], younger, [2.0], 1.0, 0.0)
    shadow.admitted(younger, 0.0, 1.0, 0.0, 10, 0.0)
    shadow.ended(younger, 10)
    shadow.forget(older)
    assert not shadow._pairs
    assert not shadow._costs
    assert guards.stats()[GuardedPart.ORDER].off_s == 1.0
