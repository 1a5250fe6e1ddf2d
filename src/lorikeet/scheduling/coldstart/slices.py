"""Rows of cold prefills, cut over host workers (TOPPINGS, section 4.2: parallelism by profile).

A worker is one process on one core. So many tokens are given to it as it computes in the time that loading the layer
would take; more requests than workers, or a long prompt, make the slices longer.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

WORKER_TOKENS = 16
"""Tokens of a worker where nothing was measured, or nothing fits: the paper's figures use 16 for 256 tokens."""


class Slice(NamedTuple):
    """Neighbouring rows of one request.

    Attributes:
        request: index of the request.
        first_row: among the rows of that request.
        rows: how many, at least 1.
    """

    request: int
    first_row: int
    rows: int


def slice_rows(tokens: Sequence[int], worker_tokens: int, workers: int) -> tuple[tuple[Slice, ...], ...]:
    """Cut the rows of requests over workers.

    Each request gets workers of its own, as many as it needs for at most ``worker_tokens`` rows each, and they share
    its rows evenly. If there are fewer workers, all rows stand in one line, which is cut evenly over all of them: a
    worker may then have the end of one request and the beginning of the next.

    Args:
        tokens: rows of each request; may be 0.
        worker_tokens: most rows of one worker while there are enough, at least 1.
        workers: how many are free, at least 1.

    Returns:
        For each worker that is used its slices; every row is in one of them.
    """
    shares = [_even(rows, -(-rows // worker_tokens)) for rows in tokens]
    if sum(map(len, shares)) <= workers:
        return tuple(
            (Slice(request, first, stop - first),) for request, bounds in enumerate(shares) for first, stop in bounds
        )
    return tuple(_cut_line(tokens, first, stop) for first, stop in _even(sum(tokens), workers))


def largest_share(tokens: int, worker_tokens: int, workers: int) -> int:
    """Return the most rows that :func:`slice_rows` gives a worker of one request alone."""
    used = min(workers, -(-tokens // worker_tokens))
    return -(-tokens // used) if used else 0


def tokens_in(budget_s: float, measured: Iterable[tuple[int, float]]) -> int:
    """Return how many tokens a worker may take: the most that it was measured to compute within ``budget_s``.

    A layer on the host costs no more than loading it if the budget is the time of the q, k, v product, which hides it,
    plus the load of the layer.

    Args:
        budget_s: seconds.
        measured: (tokens, seconds) of one worker.

    Returns:
        The largest count within the budget, or ``WORKER_TOKENS`` if there is none.
    """
    return max((tokens for tokens, seconds in measured if seconds <= budget_s), default=WORKER_TOKENS)


def _even(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``presets`` into ``parts`` (at most as many) half-open runs whose lengths differ by one at most."""
    bounds = [rows * part // parts for part in range(parts + 1)] if parts else []
    return list(pairwise(bounds))


def _cut_line(tokens: Sequence[int], first: int, stop: int) -> tuple[Slice, ...]:
    """Return the rows from ``first`` to ``stop`` of all requests one after the other."""
    slices = []
    begin = 0
    for request, rows in enumerate(tokens):
        low, high = max(first, begin), min(stop, begin + rows)
        if low < high:
            slices.append(Slice(request, low - begin, high - low))
        begin += rows
    return tuple(slices)
