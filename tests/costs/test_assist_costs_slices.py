"""Rows of cold prefills cut over host workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.costs.assist_costs import WORKER_TOKENS, RowSlice, largest_share, slice_rows, tokens_within_budget


def _rows(shares: tuple[tuple[RowSlice, ...], ...]) -> list[int]:
    return [sum(part.rows for part in share) for share in shares]


def test_256_tokens_at_16_tokens_take_16_workers() -> None:
    shares = slice_rows([256], 16, 16)
    assert _rows(shares) == [16] * 16
    assert shares[3] == (RowSlice(0, 48, 16),)


def test_256_tokens_at_64_tokens_take_4_of_16_workers() -> None:
    assert _rows(slice_rows([256], 64, 16)) == [64] * 4


def test_one_worker_takes_everything() -> None:
    assert slice_rows([256], 16, 1) == ((RowSlice(0, 0, 256),),)
    assert slice_rows([40, 0, 24], 16, 1) == ((RowSlice(0, 0, 40), RowSlice(2, 0, 24)),)


def test_each_request_has_its_own_workers_while_there_are_enough() -> None:
    assert slice_rows([20, 5, 33], 16, 16) == (
        (RowSlice(0, 0, 10),),
        (RowSlice(0, 10, 10),),
        (RowSlice(1, 0, 5),),
        (RowSlice(2, 0, 11),),
        (RowSlice(2, 11, 11),),
        (RowSlice(2, 22, 11),),
    )


def test_requests_share_workers_that_run_short() -> None:
    """58 rows would take 6 workers at 16 each; 3 take 19 or 20, across the borders of requests."""
    assert slice_rows([20, 5, 33], 16, 3) == (
        (RowSlice(0, 0, 19),),
        (RowSlice(0, 19, 1), RowSlice(1, 0, 5), RowSlice(2, 0, 13)),
        (RowSlice(2, 13, 20),),
    )


def test_a_prompt_of_2000_tokens_takes_125_on_each_of_16_workers() -> None:
    assert _rows(slice_rows([2000], 16, 16)) == [125] * 16
    assert largest_share(2000, 16, 16) == 125


def test_nothing_takes_no_worker() -> None:
    assert slice_rows([], 16, 4) == slice_rows([0, 0], 16, 4) == ()
    assert largest_share(0, 16, 4) == 0


def test_a_worker_takes_what_it_computes_within_the_budget() -> None:
    measured = [(1, 0.2), (2, 0.3), (4, 0.5), (8, 0.9), (16, 1.7)]
    assert tokens_within_budget(0.9, measured) == 8
    assert tokens_within_budget(5.0, measured) == 16
    assert tokens_within_budget(0.1, measured) == tokens_within_budget(0.1, []) == WORKER_TOKENS == 16


_REQUESTS = st.lists(st.integers(0, 300), max_size=6)


@given(_REQUESTS, st.integers(1, 64), st.integers(1, 20))
def test_every_row_is_in_one_slice_and_no_worker_has_more_than_it_must(
    tokens: list[int], worker_tokens: int, workers: int
) -> None:
    shares = slice_rows(tokens, worker_tokens, workers)
    rows = [(part.request, part.first_row + row) for share in shares for part in share for row in range(part.rows)]
    assert sorted(rows) == [(request, row) for request, count in enumerate(tokens) for row in range(count)]
    needed = sum(-(-count // worker_tokens) for count in tokens)
    assert len(shares) == min(workers, needed)
    assert all(share and min(part.rows for part in share) > 0 for share in shares)
    most = worker_tokens if needed <= workers else -(-sum(tokens) // workers)
    assert max(_rows(shares), default=0) <= most


@given(st.integers(0, 3000), st.integers(1, 64), st.integers(1, 20))
def test_the_largest_share_is_that_of_the_slices(tokens: int, worker_tokens: int, workers: int) -> None:
    shares = _rows(slice_rows([tokens], worker_tokens, workers))
    assert largest_share(tokens, worker_tokens, workers) == max(shares, default=0)


@pytest.mark.parametrize("chunk", [1, 4])
def test_more_tokens_for_a_worker_take_fewer_workers(chunk: int) -> None:
    assert len(slice_rows([256], 16 * chunk, 64)) == 16 // chunk
