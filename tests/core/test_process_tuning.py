"""Python's search for cycles passes by what was there before, and by nothing else."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lorikeet.core.process_tuning import collect_no_garbage, frozen_gc, rare_gc


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    """Undo what tests/conftest.py freezes, since these tests freeze and unfreeze themselves."""
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    """Refers to itself, so that only a search finds it."""

    def __init__(self) -> None:
        self.itself = self


def made() -> weakref.ref[Node]:
    return weakref.ref(Node())


@pytest.mark.slow
def test_what_is_alive_is_not_searched_until_the_end() -> None:
    before, old = made(), Node()
    seen = weakref.ref(old)
    with frozen_gc():
        assert before() is None, "what is dead already does not stay"
        del old
        gc.collect()
        assert seen() is not None
        young = made()
        gc.collect()
        assert young() is None
    gc.collect()
    assert seen() is None


@pytest.mark.slow
def test_within_another_it_ends_with_the_other() -> None:
    old = Node()
    seen = weakref.ref(old)
    with frozen_gc():
        with frozen_gc():
            pass
        del old
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_a_start_without_searches_ends_where_objects_are_excluded_from_them() -> None:
    try:
        collect_no_garbage()
        assert not gc.isenabled()
        with frozen_gc():
            assert gc.isenabled()
        assert gc.isenabled()
    finally:
        gc.enable()


def test_searches_are_rare_until_the_end_even_if_it_is_an_error() -> None:
    before = gc.get_threshold()

    @rare_gc()
    def fail() -> None:
        assert gc.get_threshold()[0] > 10 * before[0]
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.get_threshold() == before
