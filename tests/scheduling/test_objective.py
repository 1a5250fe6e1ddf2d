"""What a delay counts, by the objective and by the limits of requests."""

import msgspec
import pytest

from lorikeet.core.objective import Objective
from lorikeet.core.request import Request, Slo
from lorikeet.costs.replica_estimates import ANSWER_SHARE
from lorikeet.scheduling.engine_load import EngineLoad
from lorikeet.scheduling.objective import THROUGHPUT_PRICE, DelayWeights
from lorikeet.scheduling.state import Sequence
from tests.support.scripted import request


def waiting(name: str, slo: Slo | None = None, arrival_s: float = 0.0) -> Sequence:
    made: Request = msgspec.structs.replace(request(name, [1, 2, 3], arrival_s), slo=slo)
    return Sequence(made, arrival_s, 64)


def answering(name: str, slo: Slo | None = None, tokens: int = 10) -> Sequence:
    sequence = waiting(name, slo)
    sequence.token_ids += [7] * tokens
    sequence.computed_tokens = len(sequence.token_ids) - 1
    assert sequence.is_decoding
    return sequence


def price(objective: Objective, *sequences: Sequence, now: float = 0.0, excluded: int = 0) -> float:
    load = EngineLoad(objective)
    for each in sequences:
        load.add(each)
        if each.is_decoding:
            load.running.append(each)
    load.note_busy(now, 0, 0.0)
    return load.delay_per_lost_second(excluded)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [(Objective.MIXED, 2 + ANSWER_SHARE), (Objective.LATENCY, 3.0), (Objective.THROUGHPUT, THROUGHPUT_PRICE)],
)
def test_a_request_without_limits_counts_by_the_objective(objective: Objective, expected: float) -> None:
    assert price(objective, waiting("a"), waiting("b"), answering("c")) == expected


def test_a_request_that_has_missed_its_limit_does_not_count() -> None:
    weights = DelayWeights(Objective.MIXED)
    slo = Slo(ttft_s=2.0, tpot_s=0.1)
    assert weights.sum([waiting("a", slo)], now=1.9) == 1.0
    assert weights.sum([waiting("a", slo)], now=2.1) == 0.0, "nothing meets its limit any more"
    assert weights.sum([answering("a", slo, tokens=10)], now=0.9) == ANSWER_SHARE
    assert weights.sum([answering("a", slo, tokens=10)], now=1.1) == 0.0
    assert weights.sum([answering("a", Slo(ttft_s=2.0))], now=1.1) == ANSWER_SHARE, "no limit for answers"


def test_limits_of_requests_count_whatever_the_objective() -> None:
    slo = Slo(ttft_s=2.0)
    for objective in Objective:
        assert price(objective, waiting("a", slo), waiting("late", slo, arrival_s=-5.0), now=1.0) == 1.0


def test_goodput_assumes_limits_where_requests_state_none() -> None:
    assert price(Objective.GOODPUT, waiting("a"), waiting("late", arrival_s=-5.0), now=1.0) == 1.0


def test_a_waiting_request_whose_delay_the_caller_counts_is_left_out() -> None:
    for objective in (Objective.MIXED, Objective.LATENCY):
        assert price(objective, waiting("a"), waiting("b"), excluded=1) == 1.0
    assert price(Objective.MIXED, waiting("a", Slo(ttft_s=2.0)), now=1.0, excluded=1) == 0.0
