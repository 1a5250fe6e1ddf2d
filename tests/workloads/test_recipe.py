from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.bench.load_run import growth, parse_counters
from lorikeet.core.request import Slo
from lorikeet.workloads.arrivals import Rates
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.workload import OptionError, Range, WorkloadRequest, parse_slo, read_any

DATA = Path(__file__).parent / "data"
WORKLOAD = (
    WorkloadRequest(10.0, "a", 100, 10),
    WorkloadRequest(11.0, None, 200, 20, priority=1),
    WorkloadRequest(14.0, None, 300, 30),
)


def make(rate: float | None = None, **parts: Any) -> list[WorkloadRequest]:
    rates = None if rate is None else Rates.constant(rate)
    return Recipe(rates=rates, **parts).requests()


def request(input_tokens: int, *prefix_blocks: int) -> WorkloadRequest:
    return WorkloadRequest(0.0, None, input_tokens, 1, prefix_blocks)


def test_requests_by_rule_have_the_lengths_adapters_and_arrivals_of_the_rules() -> None:
    requests = make(
        2.0,
        count=4,
        adapters=("a", None),
        adapter_choice="round-robin",
        arrivals="uniform",
        prompt_tokens=Range(5, 6),
        output_tokens=Range(7, 7),
    )
    assert [each.arrival_s for each in requests] == [0.5, 1.0, 1.5, 2.0]
    assert [each.adapter for each in requests] == ["a", None, "a", None]
    assert all(each.input_tokens in (5, 6) and each.output_tokens == 7 for each in requests)


def test_generated_requests_may_take_joint_prompt_and_answer_lengths() -> None:
    requests = make(2.0, count=60, lengths=WORKLOAD, length_scale=0.1, adapters=("a", "b"))
    assert {(each.input_tokens, each.output_tokens) for each in requests} == {(10, 1), (20, 2), (30, 3)}
    assert {each.adapter for each in requests} == {"a", "b"}
    assert [each.arrival_s for each in requests] == [each.arrival_s for each in make(2.0, count=60)]


def test_without_a_rate_all_arrive_at_once_and_without_adapters_use_the_base() -> None:
    assert {(each.arrival_s, each.adapter) for each in make(count=3)} == {(0.0, None)}


def test_each_run_draws_other_requests_and_each_seed_the_same() -> None:
    assert make(1.0, run=1) == make(1.0, run=1)
    assert make(1.0, run=1) != make(1.0, run=2)
    assert make(1.0, seed=1) != make(1.0, seed=2)


def test_another_rate_leaves_adapters_and_lengths_as_they_are() -> None:
    slow, fast = (make(rate, adapters=("a", "b", "c"), prompt_tokens=Range(1, 99)) for rate in (1.0, 9.0))
    assert [(each.adapter, each.input_tokens) for each in slow] == [(each.adapter, each.input_tokens) for each in fast]


def test_workload_keeps_its_times_and_adapters_and_gets_missing_adapters() -> None:
    requests = make(trace=WORKLOAD, adapters=("x",), count=9)
    assert [(each.arrival_s, each.adapter) for each in requests] == [(10, "a"), (11, "x"), (14, "x")]
    assert [each.adapter for each in make(trace=WORKLOAD)] == ["a", None, None]


def test_a_workload_can_be_cut_shortened_and_given_a_rate() -> None:
    requests = make(4.0, trace=WORKLOAD, length_scale=0.1, count=2)
    assert requests == [WorkloadRequest(0.0, "a", 10, 1), WorkloadRequest(0.25, None, 20, 2, priority=1)]
    assert [each.arrival_s for each in make(trace=WORKLOAD, duration_s=14.0)] == [10, 11]
    assert [each.arrival_s for each in make(trace=WORKLOAD, most_tokens=220)] == [10, 11]


def test_conversations_of_a_trace_keep_one_adapter_and_their_blocks() -> None:
    trace = tuple(read_any(DATA / "mooncake_conversation_excerpt.jsonl"))
    requests = make(trace=trace, shape="chat", length_scale=1 / 16, adapters=("a", "b"))
    assert len(requests) == len(trace)
    adapters = {each.conversation: each.adapter for each in requests}
    assert all(each.adapter == adapters[each.conversation] for each in requests)
    assert set(adapters.values()) == {"a", "b"}
    assert all(len(each.prefix_blocks) == -(-each.input_tokens // 32) for each in requests)


def test_turns_of_a_conversation_ask_for_one_adapter_also_where_it_names_none() -> None:
    turns = [WorkloadRequest(0.1 * at, None, 10 + at, 1, (), None if at % 5 == 4 else f"c{at % 4}") for at in range(40)]
    requests = make(trace=tuple(turns), adapters=("a", "b", "c"))
    adapters = {each.conversation: each.adapter for each in requests if each.conversation}
    assert all(each.adapter == adapters[each.conversation] for each in requests if each.conversation)
    assert len({each.adapter for each in requests if each.conversation is None}) > 1


def test_a_thousand_requests_are_made_by_default() -> None:
    assert [len(make(2.0, shape=shape)) for shape in ("plain", "agent", "chatbot", "conversations")] == [1000] * 4
    assert len(make(2.0, shape="agent", duration_s=2000.0)) > 2000


@pytest.mark.slow
def test_dialogues_of_agents_arrive_at_the_rate_of_requests() -> None:
    requests = make(10.0, shape="agent", adapters=("a", "b"), count=20_000, block_size=32)
    assert len(requests) == 20_000
    # The first dialogues have nobody beside them: look behind them.
    times_s = np.array([each.arrival_s for each in requests[5000:]])
    assert len(times_s) / (times_s[-1] - times_s[0]) == pytest.approx(10, rel=0.05)
    assert len(make(shape="agent", count=1000)) == pytest.approx(1000, rel=0.1)


def test_functions_give_arrivals_and_adapters() -> None:
    requests = make(5.0, arrivals="functions", adapters=tuple("abcd"), duration_s=2000.0, variation=2.0)
    assert len(requests) == pytest.approx(10_000, rel=0.2)
    shares = [sum(each.adapter == name for each in requests) / len(requests) for name in "abcd"]
    assert shares[0] > 0.4 > shares[1] > shares[3] > 0.05


def test_functions_of_a_trace_keep_their_minutes_or_are_stretched_to_a_rate() -> None:
    minutes = np.array([[60, 0, 0], [0, 30, 30]])
    native = make(arrivals="functions", function_minutes=minutes, adapters=("a", "b"))
    assert [sum(60 * minute <= each.arrival_s < 60 * (minute + 1) for each in native) for minute in range(3)] == [
        60,
        30,
        30,
    ]
    faster = make(120 / 18, arrivals="functions", function_minutes=minutes, adapters=("a", "b"))
    assert [each.arrival_s * 10 for each in faster] == pytest.approx([each.arrival_s for each in native])


@pytest.mark.slow
@given(
    st.sampled_from(["plain", "translation", "agent"]), st.sampled_from(["poisson", "functions"]), st.integers(1, 40)
)
def test_a_made_workload_has_its_count_in_order_and_is_the_same_for_a_seed(
    shape: str, arrivals: str, count: int
) -> None:
    requests = make(2.0, shape=shape, arrivals=arrivals, adapters=("a", "b"), count=count)
    assert len(requests) == count
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    assert requests == make(2.0, shape=shape, arrivals=arrivals, adapters=("a", "b"), count=count)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"shape": "round"}, "shape 'round'"),
        ({"shape": "chat"}, "needs a trace"),
        ({"shape": "agent", "trace": WORKLOAD}, "takes no trace"),
        ({"count": 1, "duration_s": 1.0}, "exclude each other"),
        ({"arrivals": "functions"}, "need a rate"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**parts)


def test_limits_are_read_in_seconds() -> None:
    assert parse_slo("") == Slo()
    assert parse_slo("ttft=0.5, e2e=10") == Slo(ttft_s=0.5, e2e_s=10)


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "itl=1", "ttft=-1", "ttft=nan"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"ttft=0\.5"):
        parse_slo(text)


@pytest.mark.slow
@given(st.integers(0, 60), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 5))
def test_a_prompt_has_its_length_whatever_its_prefix(tokens: int, blocks: list[int], index: int) -> None:
    prompts = Prompts(0, ids=Range(20, 90), block_size=8)
    ids = prompts.token_ids(index, request(tokens, *blocks))
    assert len(ids) == tokens
    assert all(20 <= token <= 90 for token in ids)
    assert len(prompts.words(index, request(tokens, *blocks)).split()) == tokens


def test_equal_blocks_are_equal_content_and_the_rest_is_each_requests_own() -> None:
    prompts = Prompts(0, block_size=8)
    first, second = prompts.token_ids(0, request(20, 5, 6)), prompts.token_ids(1, request(20, 5, 6))
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]
    assert prompts.token_ids(2, request(20, 7, 6))[8:16] == first[8:16]


def test_other_seeds_and_other_runs_make_other_prompts() -> None:
    made = [Prompts(*key).token_ids(0, request(16, 1)) for key in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(each) for each in made}) == 3


def test_every_kind_of_workload_is_known_by_its_look(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('\n{"arrival_s": 1, "adapter": "a", "input_tokens": 2, "output_tokens": 3}\n')
    assert read_any(tmp_path / "w.jsonl") == [WorkloadRequest(1.0, "a", 2, 3)]
    assert read_any(DATA / "azure_conv_2023_excerpt.csv")[0].input_tokens == 374
    assert read_any(DATA / "mooncake_conversation_excerpt.jsonl")[0].prefix_blocks


def test_the_servers_counters_are_told_by_their_growth() -> None:
    page = """
# TYPE vllm:lora_adapter_load_seconds histogram
vllm:lora_adapter_load_seconds_bucket{{engine="0",le="+Inf"}} {count}
vllm:lora_adapter_load_seconds_count{{engine="0"}} {count}
vllm:lora_adapter_load_seconds_sum{{engine="0"}} {sum}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} 1.0
vllm:num_preemptions_total{{engine="1"}} 2.0
# TYPE lorikeet:predictor_cpu_seconds counter
lorikeet:predictor_cpu_seconds_total {sum}
"""
    before, after = (parse_counters(page.format(count=count, sum=total)) for count, total in ((1, 0.5), (3, 0.9)))
    assert growth(before, after, 10.0) == {
        "adapter loads": 2.0,
        "preemptions": 0.0,
        "mean adapter load, s": pytest.approx(0.2),
        "length predictor, share of a core": pytest.approx(0.04),
    }
    assert growth({}, after, 10.0)["preemptions"] == 3.0
    assert growth({}, {}, 10.0) == {}
