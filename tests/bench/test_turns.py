from lorikeet.workloads.conversations import Turns, scale_conversation, turns_before
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.workload import WorkloadRequest

BLOCK = 4


def turn(
    at_s: float, tokens: int, answer: int, *blocks: int, conversation: str | None = "c", adapter: str | None = "a"
) -> WorkloadRequest:
    return WorkloadRequest(at_s, adapter, tokens, answer, blocks, conversation)


TALK = [turn(0, 6, 3, 1, 2), turn(1, 12, 2, 1, 3, 4), turn(2, 20, 1, 1, 3, 4, 5, 6)]


def test_turn_continues_the_last_one_with_its_full_blocks_as_prefix() -> None:
    assert turns_before(TALK, BLOCK) == [None, 0, 1]


def test_a_turn_that_went_another_way_goes_on_from_where_they_parted() -> None:
    other = turn(3, 12, 2, 1, 7, 8)
    assert turns_before([*TALK, other], BLOCK) == [None, 0, 1, 0]


def test_a_turn_too_short_for_the_answer_before_it_goes_on_from_nothing() -> None:
    assert turns_before([TALK[0], turn(1, 9, 2, 1, 3, 4)], BLOCK) == [None, None]
    assert turns_before([TALK[0], turn(1, 10, 2, 1, 3, 4)], BLOCK) == [None, 0]


def test_other_conversations_and_other_adapters_are_not_gone_on_from() -> None:
    later = (1, 12, 2, 1, 3, 4)
    assert turns_before([TALK[0], turn(*later, conversation="d")], BLOCK) == [None, None]
    assert turns_before([TALK[0], turn(*later, adapter="b")], BLOCK) == [None, None]
    assert turns_before([turn(0, 6, 3, conversation=None), turn(*later, conversation=None)], BLOCK) == [None, None]


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
    both = [TALK[0], turn(1, 12, 2, 1, 3, 4), turn(2, 14, 2, 1, 7, 8)]
    turns = Turns(both, Prompts(0, block_size=BLOCK))
    said = [*turns.prompt(0), 77, 78, 79]
    assert turns.answered(0, [77, 78, 79]) == [1, 2]
    assert turns.prompt(1)[:9] == turns.prompt(2)[:9] == said


def test_a_turn_that_adds_a_few_words_still_adds_one_when_shortened() -> None:
    talk = [turn(0, 6, 3, 1), turn(1, 10, 2, 1), turn(2, 40, 2, 1, 2, 3)]
    shortened = scale_conversation(talk, 1 / 2, 16)
    assert [(each.input_tokens, each.output_tokens) for each in shortened] == [(3, 2), (6, 1), (20, 1)]
    assert turns_before(shortened, 8) == [None, 0, 1]


def test_answers_can_be_shortened_less_than_prompts_and_stay_in_them() -> None:
    talk = [turn(0, 32, 16, 1, 2), turn(1, 60, 16, 1, 2, 3, 4)]
    shortened = scale_conversation(talk, 1 / 4, 16, answer_factor=1)
    assert [(each.input_tokens, each.output_tokens) for each in shortened] == [(8, 16), (25, 16)]
