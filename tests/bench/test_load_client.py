from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from lorikeet.bench.load_client import LoadTarget, drive
from lorikeet.bench.load_report import LoadFigures, RequestResult, summarise
from lorikeet.bench.load_run import LoadRunner
from lorikeet.core.request import Slo
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.workload import OptionError, Range, WorkloadRequest
from tests.bench.fake_server import FakeServer, running

PROMPTS = Prompts(0, ids=Range(20, 90))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


def request(adapter: str | None = None, arrival_s: float = 0.0, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(arrival_s, adapter, 5, 3, **more)


def send(server: FakeServer, *requests: WorkloadRequest, **target: Any) -> list[RequestResult]:
    return drive(requests, LoadTarget(server.url, "base", **target), PROMPTS).exchanges


def test_a_request_is_sent_as_the_workload_says_and_its_answer_timed(server: FakeServer) -> None:
    (exchange,) = send(server, request("a", priority=2))
    assert server.bodies == [
        {
            "model": "a",
            "prompt": PROMPTS.token_ids(0, request()),
            "max_tokens": 3,
            "temperature": 0.0,
            "ignore_eos": True,
            "priority": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert exchange.error is None
    assert (exchange.input_tokens, exchange.output_tokens, len(exchange.token_times_s)) == (5, 3, 3)
    assert 0 <= exchange.sent_s <= exchange.token_times_s[0] <= exchange.token_times_s[-1] <= exchange.ended_s


def test_the_target_says_how_adapters_are_named_and_prompts_are_sent(server: FakeServer) -> None:
    send(server, request("a"), adapter_as="{base}:{adapter}", text=True, ignore_eos=False, usage_per_event=True)
    send(server, request(), endpoint="chat", api_key="k")
    first, second = server.bodies
    assert first["model"] == "base:a"
    assert len(first["prompt"].split()) == 5
    assert "ignore_eos" not in first
    assert first["stream_options"]["continuous_usage_stats"]
    assert second["model"] == "base"
    assert len(second["messages"][0]["content"].split()) == 5
    assert server.keys == [None, "Bearer k"]


def test_tenants_are_sent_where_a_header_is_named_for_them(server: FakeServer) -> None:
    send(server, request(tenant="blue"), tenant_header="X-Tenant")
    send(server, request(), tenant_header="X-Tenant")
    send(server, request(tenant="blue"))
    assert server.tenants == ["blue", None, None]


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("busy", "HTTP 429", "come back later"),
        ("broken", "error in the stream", "out of luck"),
        ("cut", "cut off", "the stream ended without an end mark"),
        ("silent", "timeout", "no whole answer within 0.05 s"),
    ],
)
def test_every_failure_has_its_kind_and_the_servers_words(
    server: FakeServer, model: str, kind: str, message: str
) -> None:
    (exchange,) = send(server, request(model), timeout_s=0.05 if model == "silent" else 60)
    assert (exchange.error, exchange.message) == (kind, message)


def test_a_server_that_is_not_there_is_an_error_of_every_request() -> None:
    drive_of = drive([request(), request()], LoadTarget("http://127.0.0.1:1", "base"), PROMPTS)
    assert [exchange.error for exchange in drive_of.exchanges] == ["ConnectError"] * 2


def test_arrivals_do_not_wait_for_answers() -> None:
    """No answer begins before all requests are there: a client that waited would wait for ever."""
    with running(FakeServer(wait_for=8)) as server:
        exchanges = send(server, *(request(arrival_s=number / 1000) for number in range(8)), timeout_s=60)
    assert [exchange.error for exchange in exchanges] == [None] * 8
    assert all(exchange.sent_s >= exchange.due_s for exchange in exchanges)


def test_a_limit_holds_requests_back_and_says_so(server: FakeServer) -> None:
    ended: list[RequestResult] = []
    run = drive([request()] * 6, LoadTarget(server.url, "base"), PROMPTS, concurrency=2, on_end=ended.append)
    assert server.most_at_once <= 2
    assert sum(exchange.held_s > 0 for exchange in run.exchanges) >= 4
    assert len(ended) == 6
    assert run.cpu_share > 0


def test_requests_are_sent_in_the_order_of_their_arrival(server: FakeServer) -> None:
    exchanges = send(server, request("b", 0.02), request("a", 0.0))
    assert [exchange.adapter for exchange in exchanges] == ["a", "b"]


def test_every_run_sends_new_prompts_and_a_failed_warm_up_is_returned(server: FakeServer) -> None:
    runner = LoadRunner(LoadTarget(server.url, "base"), Recipe(prompt_tokens=Range(6, 6)), Slo())
    assert runner.warm_up(0) is None
    assert runner.warm_up(1) is None
    runner.run(2, None)
    runner.run(2, None)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 5
    failed = LoadRunner(LoadTarget(server.url, "busy"), Recipe(), Slo()).warm_up(1)
    assert failed is not None
    assert failed.error == "HTTP 429"


def test_a_search_probes_over_http_until_the_target_is_missed(server: FakeServer) -> None:
    """Every second request fails, whatever the rate."""
    plan = Recipe(adapters=("a", "busy"), adapter_choice="round-robin", arrivals="uniform")
    runner = LoadRunner(LoadTarget(server.url, "base"), plan, Slo(ttft_s=60))
    peak, runs = runner.find_peak(0.9, start=500.0, probe_s=1 / 200)
    assert (peak.rate, peak.missed_rate) == (None, 250.0)
    assert [run.figures.slo_attainment for run in runs] == [0.5, 0.5]
    assert [run.figures.requests for run in runs] == [10, 10]


def test_a_search_tries_no_rate_at_which_a_workload_is_too_short_for_a_probe(server: FakeServer) -> None:
    """50 requests last a tenth of a second at 500/s, and no longer."""
    plan = Recipe(trace=tuple(request(arrival_s=0.1 * number) for number in range(50)))
    runner = LoadRunner(LoadTarget(server.url, "base"), plan, Slo(ttft_s=60))
    peak, runs = runner.find_peak(0.9, start=200.0, probe_s=0.1)
    assert (peak.rate, peak.missed_rate) == (400.0, None)
    assert [run.figures.requests for run in runs] == [20, 40]
    with pytest.raises(OptionError, match=r"at 600 requests/s needs 60 requests, and the workload has 50"):
        runner.find_peak(0.9, start=600.0, probe_s=0.1)
    with pytest.raises(OptionError, match=r"needs 10 requests, and the workload has 5"):
        LoadRunner(LoadTarget(server.url, "base"), Recipe(trace=plan.trace[:5]), Slo(ttft_s=60)).find_peak(
            0.9, 1.0, 0.1
        )


@pytest.mark.parametrize("start", [5.0, float("inf")])
def test_a_search_begins_where_a_probe_has_a_request(server: FakeServer, start: float) -> None:
    runner = LoadRunner(LoadTarget(server.url, "base"), Recipe(), Slo(ttft_s=60))
    with pytest.raises(OptionError, match="a search must start at a rate of at least 10"):
        runner.find_peak(0.9, start=start, probe_s=0.1)


@pytest.mark.slow
def test_limits_that_no_overload_breaks_end_a_search(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come as quickly as ever, however many answers are asked for, and answers at most 50 times a second."""

    def summarised(exchanges: Sequence[RequestResult], slo: Slo) -> LoadFigures:
        return msgspec.structs.replace(summarise(exchanges, slo), request_rate=50.0, duration_s=31.0)

    monkeypatch.setattr("lorikeet.bench.load_run.summarise", summarised)
    runner = LoadRunner(LoadTarget(server.url, "base"), Recipe(output_tokens=Range(2, 2)), Slo(tpot_s=60))
    with pytest.raises(OptionError, match=r"at 160 requests/s the server answers 50 and meets the SLO"):
        runner.find_peak(0.9, start=40.0, probe_s=0.5)


def test_probes_are_long_beside_the_longest_limit() -> None:
    def min_probe_s(slo: Slo, *own: Slo) -> float:
        trace = tuple(WorkloadRequest(0.0, None, 1, 1, slo=each) for each in own)
        return LoadRunner(LoadTarget("http://nowhere", "base"), Recipe(trace=trace), slo).min_probe_s

    assert min_probe_s(Slo(tpot_s=0.1)) == min_probe_s(Slo(ttft_s=2.0)) == 30.0
    assert min_probe_s(Slo(ttft_s=5.0)) == min_probe_s(Slo(), Slo(ttft_s=1.0), Slo(e2e_s=5.0)) == 50.0


def test_a_tenant_may_have_any_name_and_answers_come_as_they_are(server: FakeServer) -> None:
    (exchange,) = send(server, request("a", tenant="Müller"), tenant_header="X-Tenant")
    assert exchange.error is None
    assert [(each or "").encode("latin-1").decode() for each in server.tenants] == ["Müller"]
    assert server.encodings == ["identity"]


def test_a_search_without_limits_is_refused(server: FakeServer) -> None:
    with pytest.raises(OptionError, match="no SLO to meet"):
        LoadRunner(LoadTarget(server.url, "base"), Recipe(), Slo()).find_peak(0.9, start=1000.0, probe_s=0.001)
