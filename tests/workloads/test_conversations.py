from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.workloads.conversations import (
    Turns,
    first_complete,
    flatten,
    group_conversations,
    sample_complete,
    scale_conversation,
    turns_before,
)
from lorikeet.workloads.prompts import Prompts
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


# --- turns ----------------------------------------------------------------------------------------

BLOCK = 4


def talk(
    at_s: float, tokens: int, answer: int, *blocks: int, conversation: str | None = "c", adapter: str | None = "a"
) -> WorkloadRequest:
    return WorkloadRequest(at_s, adapter, tokens, answer, blocks, conversation)


TALK = [talk(0, 6, 3, 1, 2), talk(1, 12, 2, 1, 3, 4), talk(2, 20, 1, 1, 3, 4, 5, 6)]


def test_turn_continues_the_last_one_with_its_full_blocks_as_prefix() -> None:
    assert turns_before(TALK, BLOCK) == [None, 0, 1]


def test_a_turn_that_went_another_way_goes_on_from_where_they_parted() -> None:
    other = talk(3, 12, 2, 1, 7, 8)
    assert turns_before([*TALK, other], BLOCK) == [None, 0, 1, 0]


def test_a_turn_too_short_for_the_answer_before_it_goes_on_from_nothing() -> None:
    assert turns_before([TALK[0], talk(1, 9, 2, 1, 3, 4)], BLOCK) == [None, None]
    assert turns_before([TALK[0], talk(1, 10, 2, 1, 3, 4)], BLOCK) == [None, 0]


def test_other_conversations_and_other_adapters_are_not_gone_on_from() -> None:
    later = (1, 12, 2, 1, 3, 4)
    assert turns_before([TALK[0], talk(*later, conversation="d")], BLOCK) == [None, None]
    assert turns_before([TALK[0], talk(*later, adapter="b")], BLOCK) == [None, None]
    assert turns_before([talk(0, 6, 3, conversation=None), talk(*later, conversation=None)], BLOCK) == [None, None]


def test_prompt_contains_the_previous_turn_and_keeps_its_length() -> None:
    prompts = Prompts(0, block_size=BLOCK)
    turns = Turns(TALK, prompts)
    assert list(turns.first()) == [0]
    first = turns.prompt(0)
    assert first == prompts.token_ids(0, TALK[0])
    assert turns.answered(0, [77, 78, 79]) == [1]
    second = turns.prompt(1)
    assert second[:9] == [*first, 77, 78, 79]
    assert second[9:] == prompts.token_ids(1, TALK[1])[9:]
    assert turns.answered(1, [80, 81]) == [2]
    third = turns.prompt(2)
    assert (third[:14], len(third)) == ([*second, 80, 81], 20)
    assert turns.answered(2, [82]) == []


def test_an_answer_that_ended_early_is_made_up_for_with_other_tokens() -> None:
    turns = Turns(TALK, Prompts(0, block_size=BLOCK))
    first = turns.prompt(0)
    turns.answered(0, [77])
    second = turns.prompt(1)
    assert second[:7] == [*first, 77]
    assert len(second) == 12


def test_two_that_go_on_from_one_turn_both_hold_its_answer() -> None:
    both = [TALK[0], talk(1, 12, 2, 1, 3, 4), talk(2, 14, 2, 1, 7, 8)]
    turns = Turns(both, Prompts(0, block_size=BLOCK))
    said = [*turns.prompt(0), 77, 78, 79]
    assert turns.answered(0, [77, 78, 79]) == [1, 2]
    assert turns.prompt(1)[:9] == turns.prompt(2)[:9] == said


def test_a_turn_that_adds_a_few_words_still_adds_one_when_shortened() -> None:
    turns = [talk(0, 6, 3, 1), talk(1, 10, 2, 1), talk(2, 40, 2, 1, 2, 3)]
    shortened = scale_conversation(turns, 1 / 2, 16)
    assert [(each.input_tokens, each.output_tokens) for each in shortened] == [(3, 2), (6, 1), (20, 1)]
    assert turns_before(shortened, 8) == [None, 0, 1]


def test_answers_can_be_shortened_less_than_prompts_and_stay_in_them() -> None:
    turns = [talk(0, 32, 16, 1, 2), talk(1, 60, 16, 1, 2, 3, 4)]
    shortened = scale_conversation(turns, 1 / 4, 16, answer_factor=1)
    assert [(each.input_tokens, each.output_tokens) for each in shortened] == [(8, 16), (25, 16)]
