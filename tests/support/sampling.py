"""A sample of a large matrix of cases that still has every value of every parameter (``--all`` runs all of it)."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

runs_all = False
"""Whether pytest was told ``--all``; set before tests are collected."""

SAMPLED = "sampled"
"""The marker of tests whose parameters make a large matrix: ``@pytest.mark.sampled(least)``."""

LONG = "long"
"""The marker of tests that run only with ``--all``: quicker tests of the same mechanism run always."""


def sample(cases: Sequence[T], features: Sequence[Iterable[Hashable]], least: int = 0) -> list[T]:
    """Return few of the cases, in their order, that together have every feature of all of them.

    The choice is the same in every process: it starts with the case that has most features, then takes that which
    adds most (the first of several), and fills up evenly.

    Args:
        cases: to choose from.
        features: of each case, e.g. its parameters with their values.
        least: how many to take at least, if there are as many.
    """
    wanted = [frozenset(each) for each in features]
    missing = frozenset[Hashable]().union(*wanted)
    taken = set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(wanted[i] & missing), -i))
        taken.add(best)
        missing -= wanted[best]
    for number in sorted(taken):  # the first ones may have become needless
        others = frozenset[Hashable]().union(*(wanted[i] for i in taken if i != number))
        if wanted[number] <= others:
            taken.remove(number)
    rest = [i for i in range(len(cases)) if i not in taken]
    more = max(0, min(least - len(taken), len(rest)))
    taken.update(rest[i * len(rest) // more] for i in range(more))
    return [cases[i] for i in sorted(taken)]


def sample_items(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split collected tests into those to run, and those that marked matrices and the marker ``long`` leave out."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(SAMPLED) is not None and hasattr(item, "callspec"):
            matrices.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out = {item.nodeid for item in items if item.get_closest_marker(LONG) is not None}
    for matrix in matrices.values():
        mark = matrix[0].get_closest_marker(SAMPLED)
        assert mark is not None
        parameters = [item.callspec.params for item in matrix]  # type: ignore[attr-defined]
        kept = sample(
            matrix, [[(name, repr(value)) for name, value in each.items()] for each in parameters], *mark.args
        )
        left_out |= {item.nodeid for item in matrix} - {item.nodeid for item in kept}
    return (
        [item for item in items if item.nodeid not in left_out],
        [item for item in items if item.nodeid in left_out],
    )


def put_longest_files_first(items: list[pytest.Item]) -> None:
    """Sort files by their number of slow tests, so that the processes of pytest-xdist end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])


def summary(left_out: Sequence[str]) -> list[str]:
    """Return a line for each test that was left out, wholly or in part, from the ids of the cases left out."""
    return [f"{test}: {count} cases" for test, count in sorted(Counter(i.split("[")[0] for i in left_out).items())]
