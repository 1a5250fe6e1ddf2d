from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.workloads.conversations import first_complete, flatten, group_conversations, sample_complete
from lorikeet.workloads.workload import WorkloadRequest, read_any

DATA = Path(__file__).parent / "data"


def turn(at_s: float, *blocks: int) -> WorkloadRequest:
    return WorkloadRequest(at_s, None, len(blocks) * 512, 1, blocks)


TURNS = [turn(0, 0, 1), turn(1, 0, 2), turn(2, 0, 1, 3), turn(3, 0), turn(4, 0, 1, 4), turn(5, 0)]


def test_turns_sharing_more_than_the_common_prefix_are_one_conversation() -> None:
    groups = group_conversations(TURNS)
    assert [[each.arrival_s for each in group] for group in groups] == [[0, 2, 4], [1], [3], [5]]
    assert [{each.conversation for each in group} for group in groups] == [
        {f"conversation-{number:05d}"} for number in range(4)
    ]


def test_without_a_common_start_the_first_block_tells() -> None:
    groups = group_conversations([turn(0, 1), turn(1, 2), turn(2, 1, 3)])
    assert [len(group) for group in groups] == [2, 1]
    assert len(group_conversations([turn(0, 1, 2)])) == 1


@given(st.integers(0, 8), st.integers(0, 9))
def test_conversations_are_taken_whole_until_there_are_enough(count: int, seed: int) -> None:
    groups = group_conversations(TURNS)
    taken = sample_complete(groups, np.random.default_rng(seed), count)
    assert all(group in groups for group in taken)
    assert sum(map(len, taken)) >= min(count, len(TURNS))
    assert sum(map(len, taken)) - max(map(len, taken), default=0) < max(count, 1)
    assert [group[0].arrival_s for group in taken] == sorted(group[0].arrival_s for group in taken)


def test_a_conversation_with_a_request_that_is_too_long_is_left_out() -> None:
    taken = sample_complete(group_conversations(TURNS), np.random.default_rng(0), most_tokens=2 * 512 + 1)
    assert [group[0].arrival_s for group in taken] == [1, 3, 5]


def test_conversations_of_few_turns_can_be_left_out() -> None:
    taken = sample_complete(group_conversations(TURNS), np.random.default_rng(0), least_turns=2)
    assert [[each.arrival_s for each in group] for group in taken] == [[0, 2, 4]]


def test_the_first_conversations_are_taken_whole_until_there_are_enough() -> None:
    grouped = flatten(group_conversations(TURNS))
    assert [each.arrival_s for each in first_complete(grouped, 1)] == [0, 2, 4]
    assert [each.arrival_s for each in first_complete(grouped, 4)] == [0, 1, 2, 4]
    assert first_complete(grouped, 99) == grouped
    assert [each.arrival_s for each in first_complete(TURNS, 2)] == [0, 1]


def test_all_requests_come_back_in_the_order_of_arrival() -> None:
    assert [each.arrival_s for each in flatten(group_conversations(TURNS))] == [0, 1, 2, 3, 4, 5]


def test_an_excerpt_of_mooncakes_trace_has_conversations() -> None:
    requests = read_any(DATA / "mooncake_conversation_excerpt.jsonl")
    groups = group_conversations(requests)
    assert sum(map(len, groups)) == len(requests)
    assert len({group[0].prefix_blocks[1] for group in groups}) == len(groups)
