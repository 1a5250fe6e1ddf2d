import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.workloads.prompts import combine, prompt_token_ids
from lorikeet.workloads.workload import WorkloadRequest

IDS = np.arange(2, 999)


def request(input_tokens: int, *prefix_blocks: int) -> WorkloadRequest:
    return WorkloadRequest(0.0, None, input_tokens, 1, prefix_blocks)


def slow_prompt(asked: WorkloadRequest, index: int, seed: int, block_size: int, ids: np.ndarray) -> list[int]:
    """The same tokens one by one, in Python's integers; ``combine`` of one number is one step of SplitMix64."""
    tokens = []
    for position in range(asked.input_tokens):
        block, offset = divmod(position, block_size)
        shared = block < len(asked.prefix_blocks)
        key = combine(seed, 1, asked.prefix_blocks[block]) if shared else combine(seed, 0, index)
        step = offset if shared else position - block_size * len(asked.prefix_blocks)
        draw = combine(key + (step - 1) * 0x9E3779B97F4A7C15)
        tokens.append(int(ids[((draw >> 32) * len(ids)) >> 32]))
    return tokens


def test_splitmix64_is_the_published_one() -> None:
    """First value of the generator with seed 0, as in the reference implementation by Vigna."""
    assert combine(0) == 0xE220A8397B1DCDAF


@pytest.mark.slow
@given(
    st.integers(0, 70), st.lists(st.integers(0, 2**40), max_size=9), st.integers(0, 9), st.integers(), st.integers(1, 9)
)
def test_tokens_are_those_of_the_slow_way(tokens: int, blocks: list[int], index: int, seed: int, size: int) -> None:
    asked = request(tokens, *blocks)
    assert prompt_token_ids(asked, index, seed, size, IDS) == slow_prompt(asked, index, seed, size, IDS)


def test_equal_blocks_are_equal_tokens_wherever_they_stand_and_all_else_differs() -> None:
    first, second, third = (
        prompt_token_ids(request(*asked), index, 0, 16, IDS)
        for index, asked in enumerate([(40, 5, 6), (40, 5, 6), (40, 6, 7)])
    )
    assert first[:32] == second[:32]
    assert first[16:32] == third[:16]
    parts = {tuple(part) for each in (first, second, third) for part in (each[:16], each[16:32], each[32:])}
    assert len(parts) == 3 + 3  # blocks 5, 6 and 7, and an end of its own for each


def test_a_block_cut_short_is_the_start_of_the_whole_one() -> None:
    assert prompt_token_ids(request(20, 5, 6), 0, 0, 16, IDS) == prompt_token_ids(request(32, 5, 6), 1, 0, 16, IDS)[:20]


def test_another_seed_makes_other_prompts() -> None:
    assert len({tuple(prompt_token_ids(request(16, 1), 0, seed, 8, IDS)) for seed in range(50)}) == 50


def test_only_allowed_ids_come_and_all_of_them_equally_often() -> None:
    ids = np.setdiff1d(np.arange(12), [0, 3])
    found = np.bincount(prompt_token_ids(request(50_000), 0, 0, 16, ids), minlength=12) / 50_000
    assert found[[0, 3]].tolist() == [0, 0]
    assert found[ids] == pytest.approx([0.1] * 10, abs=0.005)
