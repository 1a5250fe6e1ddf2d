from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.bench.arrivals import ChoiceError, Range
from lorikeet.bench.load_plan import LoadPlan, parse_slo
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.server_report import growth, parse_counters
from lorikeet.bench.workload import Slo, WorkloadRequest, read_any

DATA = Path(__file__).parent / "data"
WORKLOAD = (
    WorkloadRequest(10.0, "a", 100, 10),
    WorkloadRequest(11.0, None, 200, 20, priority=1),
    WorkloadRequest(14.0, None, 300, 30),
)


def request(input_tokens: int, *prefix_blocks: int) -> WorkloadRequest:
    return WorkloadRequest(0.0, None, input_tokens, 1, prefix_blocks)


def test_requests_by_rule_have_the_lengths_adapters_and_arrivals_of_the_rules() -> None:
    plan = LoadPlan(
        adapters=("a", None),
        adapter_choice="round-robin",
        arrivals="uniform",
        prompt_tokens=Range(5, 6),
        output_tokens=Range(7, 7),
    )
    requests = plan.requests(4, 2.0)
    assert [each.arrival_s for each in requests] == [0.5, 1.0, 1.5, 2.0]
    assert [each.adapter for each in requests] == ["a", None, "a", None]
    assert all(each.input_tokens in (5, 6) and each.output_tokens == 7 for each in requests)


def test_without_a_rate_they_arrive_at_once_and_without_adapters_they_ask_the_base() -> None:
    assert {(each.arrival_s, each.adapter) for each in LoadPlan().requests(3, None)} == {(0.0, None)}


def test_a_run_draws_anew_and_again_the_same() -> None:
    plan = LoadPlan()
    assert plan.requests(5, 1.0, run=1) == plan.requests(5, 1.0, run=1)
    assert plan.requests(5, 1.0, run=1) != plan.requests(5, 1.0, run=2)


def test_a_workload_keeps_its_own_times_and_adapters_and_gets_adapters_where_it_has_none() -> None:
    plan = LoadPlan(workload=WORKLOAD, adapters=("x",))
    assert [(each.arrival_s, each.adapter) for each in plan.requests(9, None)] == [(10, "a"), (11, "x"), (14, "x")]
    assert [each.adapter for each in LoadPlan(workload=WORKLOAD).requests(9, None)] == ["a", None, None]


def test_a_workload_can_be_cut_shortened_and_given_a_rate() -> None:
    requests = LoadPlan(workload=WORKLOAD, length_scale=0.1).requests(2, 4.0)
    assert requests == [WorkloadRequest(0.0, "a", 10, 1), WorkloadRequest(0.25, None, 20, 2, priority=1)]


def test_limits_are_read_in_seconds() -> None:
    assert parse_slo("") == Slo()
    assert parse_slo("ttft=0.5, e2e=10") == Slo(ttft_s=0.5, e2e_s=10)


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "itl=1"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ChoiceError, match=r"ttft=0\.5"):
        parse_slo(text)


@given(st.integers(0, 60), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 5))
def test_a_prompt_has_its_length_whatever_its_prefix(tokens: int, blocks: list[int], index: int) -> None:
    prompts = Prompts(0, ids=Range(20, 90), block_tokens=8)
    ids = prompts.token_ids(index, request(tokens, *blocks))
    assert len(ids) == tokens
    assert all(20 <= token <= 90 for token in ids)
    assert len(prompts.words(index, request(tokens, *blocks)).split()) == tokens


def test_equal_blocks_are_equal_content_and_the_rest_is_each_requests_own() -> None:
    prompts = Prompts(0, block_tokens=8)
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
"""
    before, after = (parse_counters(page.format(count=count, sum=total)) for count, total in ((1, 0.5), (3, 0.9)))
    assert growth(before, after) == {
        "adapter loads": 2.0,
        "preemptions": 0.0,
        "mean adapter load, s": pytest.approx(0.2),
    }
    assert growth({}, after)["preemptions"] == 3.0
    assert growth({}, {}) == {}
