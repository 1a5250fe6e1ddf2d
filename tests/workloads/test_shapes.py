from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from lorikeet.workloads.function_trace import Invocation
from lorikeet.workloads.shapes import SHAPES, Dialogues, LengthRange, Translation

CALLS = [Invocation(float(number), number % 3) for number in range(300)]
NAMES = ("a", "b", None)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_translation_is_one_sentence_behind_its_pairs_instruction() -> None:
    requests = Translation(instruction_blocks=2).requests(CALLS, NAMES, 32, generator())
    assert [(each.arrival_s, each.adapter) for each in requests] == [(at_s, NAMES[place]) for at_s, place in CALLS]
    assert {(each.adapter, each.prefix_blocks) for each in requests} == {("a", (0, 1)), ("b", (2, 3)), (None, (4, 5))}
    sentences = [each.input_tokens - 64 for each in requests]
    assert np.median(sentences) == pytest.approx(24, rel=0.1)
    ratios = [each.output_tokens / tokens for each, tokens in zip(requests, sentences, strict=True)]
    assert np.median(ratios) == pytest.approx(1, rel=0.1)


def test_an_agents_turn_repeats_the_dialogue_so_far() -> None:
    requests = Dialogues().requests(CALLS, NAMES, 32, generator())
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    dialogues = defaultdict(list)
    for each in requests:
        dialogues[each.conversation].append(each)
    assert len(dialogues) == len(CALLS)
    assert len(requests) / len(dialogues) == pytest.approx(11.5, rel=0.05)
    for turns in dialogues.values():
        assert len({each.adapter for each in turns}) == 1
        for one, after in pairwise(turns):
            assert after.input_tokens > one.input_tokens + one.output_tokens
            assert after.prefix_blocks[: len(one.prefix_blocks)] == one.prefix_blocks


def test_every_token_of_an_agents_prompt_lies_in_a_block_of_its_dialogue() -> None:
    requests = Dialogues(scene_blocks=3).requests(CALLS, NAMES, 16, generator())
    assert all(len(each.prefix_blocks) == -(-each.input_tokens // 16) for each in requests)
    owners = defaultdict(set)
    for each in requests:
        for block in each.prefix_blocks[3:]:
            owners[block].add(each.conversation)
        assert set(each.prefix_blocks[:3]) <= set(range(9))
    assert min(owners) == 9
    assert all(len(conversations) == 1 for conversations in owners.values())


def test_conversations_have_at_least_three_turns_and_own_answer_lengths() -> None:
    shape = SHAPES["conversations"]
    assert isinstance(shape, Dialogues)
    requests = shape.requests(CALLS, NAMES, 32, generator())
    turns = Counter(each.conversation for each in requests)
    assert min(turns.values()) == 3
    assert len(requests) / len(turns) == pytest.approx(5, rel=0.1)
    assert np.median([each.output_tokens for each in requests]) == pytest.approx(24, rel=0.1)


def test_lengths_have_their_median_and_their_limit() -> None:
    drawn = LengthRange(20, 1.0, 100).draw(10_000, generator())
    assert np.median(drawn) == pytest.approx(20, abs=1)
    assert (min(drawn) >= 1, max(drawn)) == (True, 100)
