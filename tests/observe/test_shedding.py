"""When the first token of a new request would come, as predicted from the queue and its pace."""

from itertools import count

import pytest

from lorikeet.core.events import RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams, Slo
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.shedding import TtftForecast

SERVICE_S = 0.1
"""The engine of these tests admits one request after the other, each time after so long."""
START_S = 0.25
"""From admission to first token."""


class Line:
    """A forecast, and an engine that admits whom it is told to."""

    def __init__(self, admission: str = "fifo") -> None:
        self.now_s = 100.0
        self.forecast = TtftForecast(admission, lambda: self.now_s)
        self._names = count()

    def request(self, **more: object) -> Request:
        params = SamplingParams(max_tokens=int(str(more.pop("tokens", 8))))
        return Request(RequestId(str(next(self._names))), [1], params, self.now_s, **more)  # type: ignore[arg-type]

    def arrive(self, requests: int = 1, **more: object) -> list[tuple[Request, RequestTimings]]:
        arrived = []
        for _ in range(requests):
            request = self.request(**more)
            timings = RequestTimings(request.arrival_s)
            self.forecast.on_submitted(request, timings)
            arrived.append((request, timings))
        return arrived

    def admit(self, requests: list[tuple[Request, RequestTimings]]) -> None:
        for _, timings in requests:
            self.now_s += SERVICE_S
            timings.admitted_s = self.now_s
            timings.first_token_s = self.now_s + START_S
            self.forecast.on_first_token(timings)

    def predict(self, **more: object) -> float:
        return self.forecast.ttft_s(self.request(**more))


def test_empty_queue_predicts_no_wait_however_slow_the_engine_was() -> None:
    line = Line()
    arrived = line.arrive(20)
    line.now_s += 1000.0
    line.admit(arrived)
    assert line.predict() == 0.0


def test_first_burst_sheds_no_request() -> None:
    line = Line()
    line.arrive(500)
    assert line.predict() == 0.0
    line.now_s += 0.001
    line.arrive(500)
    assert line.predict() < 1.1


def test_the_prediction_is_the_queue_at_its_pace_and_the_usual_start() -> None:
    line = Line()
    line.admit(line.arrive(100)[:80])
    assert line.predict() == pytest.approx(20 * SERVICE_S + START_S, rel=0.05)
    line.arrive(20)
    assert line.predict() == pytest.approx(40 * SERVICE_S + START_S, rel=0.05)


def test_pace_of_short_queues_does_not_count_for_long_ones() -> None:
    line = Line()
    for _ in range(50):
        line.admit(line.arrive(1))  # one at a time: ten a second, though a step may have room for many
    line.arrive(100)
    assert line.predict() < START_S + 0.01


def test_while_nothing_moves_the_prediction_grows() -> None:
    line = Line()
    line.arrive(10)
    line.now_s += 1.0
    assert line.predict() == pytest.approx(10.0, rel=0.05)
    line.now_s += 1.0
    assert line.predict() == pytest.approx(20.0, rel=0.05)


def test_old_times_are_forgotten() -> None:
    line = Line()
    line.admit(line.arrive(100)[:90])
    slow = line.arrive(90)
    line.forecast.update()
    for _ in range(20):
        line.now_s += 10.0  # a hundred times slower
        line.admit([slow.pop(0)])
    assert line.predict() == pytest.approx(len(slow) * 10.1, rel=0.35)


def test_skipped_requests_do_not_count_as_a_queue() -> None:
    line = Line()
    line.arrive()
    for _ in range(10):
        line.now_s += 1.0
        line.admit(line.arrive())
    assert line.predict() == 0.0


def test_request_with_a_slow_prompt_skips_no_other() -> None:
    line = Line()
    slow = line.request()
    timings = RequestTimings(line.now_s)
    line.now_s += 1.0
    line.arrive(30)
    line.forecast.on_submitted(slow, timings)
    line.admit([(slow, timings)])
    assert line.predict() > 0.0, "thirty wait"


def test_of_several_that_come_together_the_last_one_counts() -> None:
    line = Line()
    line.admit(line.arrive(100)[:80])
    last_s = line.forecast.ttft_s(line.request(), 20)
    assert last_s == pytest.approx(40 * SERVICE_S + START_S, rel=0.05)


def test_skipped_request_stays_ahead_of_lower_priorities() -> None:
    line = Line("priority")
    line.arrive(priority=5)
    for _ in range(10):
        line.admit(line.arrive())
    assert line.predict(priority=5) > 0.0


def test_time_after_the_last_admission_counts_for_no_queue() -> None:
    line = Line()
    arrived = line.arrive(4)
    for _, timings in arrived:
        line.now_s += SERVICE_S
        timings.admitted_s = line.now_s
        timings.first_token_s = line.now_s + 50.0
    line.now_s += 50.0
    line.forecast.on_first_token(arrived[-1][1])
    line.arrive(4)
    assert line.predict() == pytest.approx(4 * SERVICE_S * 4 / 5 + 50.0, rel=0.05)


def test_requests_that_end_no_longer_count_as_ahead() -> None:
    line = Line()
    arrived = line.arrive(10)
    line.now_s += 1.0
    for request, timings in arrived:
        line.forecast.on_ended(EndedRequest(request, timings, 1, "stop", line.now_s))
    assert line.predict() == 0.0


def test_time_that_passed_since_the_arrival_counts() -> None:
    line = Line()
    line.admit(line.arrive(100)[:80])
    request = line.request()
    line.now_s += 3.0
    assert line.forecast.ttft_s(request) - line.predict() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("admission", "waiting", "new", "ahead"),
    [
        ("fifo", {"priority": 9}, {"priority": 0}, 10),
        ("size-aware", {"tokens": 9}, {"tokens": 8}, 10),
        ("priority", {"priority": 1}, {"priority": 0}, 0),
        ("priority", {"priority": 1}, {"priority": 1}, 10),
        ("deadline", {"slo": Slo(ttft_s=9.0)}, {"slo": Slo(ttft_s=1.0)}, 0),
        ("deadline", {"slo": Slo(ttft_s=9.0)}, {"slo": Slo(ttft_s=11.0)}, 10),
        ("deadline", {}, {"slo": Slo(ttft_s=11.0)}, 0),
        ("sjf", {"tokens": 9}, {"tokens": 8}, 0),
        ("sjf", {"tokens": 9, "predicted_tokens": 5}, {"tokens": 8}, 10),
        ("sjf(gamma=10)", {"tokens": 9}, {"tokens": 8}, 10),
        ("sjf(gamma=10)", {"tokens": 100}, {"tokens": 8}, 0),
        ("fair", {"tenant": "blue"}, {"tenant": "red"}, 1),
        ("fair", {"tenant": "blue"}, {"tenant": "blue"}, 10),
        ("fair(by=adapter)", {"tenant": "blue"}, {"tenant": "red"}, 10),
    ],
)
def test_only_requests_that_the_policy_admits_first_are_ahead(
    admission: str, waiting: dict[str, object], new: dict[str, object], ahead: int
) -> None:
    line = Line(admission)
    line.arrive(10, **waiting)
    line.now_s += 1.0
    assert line.predict(**new) == pytest.approx(ahead * 1.0, rel=0.1)


def test_owners_take_turns_under_fair_shares() -> None:
    line = Line("fair")
    line.arrive(10, tenant="blue")
    line.arrive(2, tenant="green")
    line.arrive(3, tenant="red")
    line.now_s += 1.0
    # Four turns, the new one's included: three more of its own, four of blue and all two of green.
    assert line.predict(tenant="red") == pytest.approx(3 + 4 + 2, rel=0.1)
