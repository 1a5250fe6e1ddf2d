"""Samples of matrices of cases."""

from itertools import product

import pytest

from tests.support.sampling import sample

MATRIX = list(product("abc", (1, 2), (True, False)))


def features(cases: list[tuple[object, ...]]) -> list[list[tuple[int, object]]]:
    return [list(enumerate(case)) for case in cases]


def test_a_sample_has_every_value_of_every_parameter() -> None:
    found = sample(MATRIX, features(MATRIX))
    assert {each for case in features(found) for each in case} == {each for case in features(MATRIX) for each in case}
    assert len(found) == 3


@pytest.mark.parametrize("least", [0, 3, 5, 12, 100])
def test_a_sample_is_filled_up_in_order_and_without_repeats(least: int) -> None:
    found = sample(MATRIX, features(MATRIX), least)
    assert found == [case for case in MATRIX if case in found]
    assert len(found) == max(3, min(least, len(MATRIX)))


def test_a_sample_is_the_same_every_time() -> None:
    assert sample(MATRIX, features(MATRIX), 5) == sample(MATRIX, features(MATRIX), 5)


def test_a_sample_of_no_cases_is_empty() -> None:
    assert sample([], []) == []


@pytest.mark.slow
def test_long_tests_and_matrices_run_in_full_with_all(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import *")
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
        "markers =\n  sampled: x\n  slow: x\n  long: x\n  gpu: x\n"
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.sampled(4)
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize("b", range(3))
        def test_one(a, b): pass

        @pytest.mark.parametrize("a", range(3))
        def test_other(a): pass

        @pytest.mark.long
        def test_long(): pass
        """
    )
    few = pytester.runpytest("-p", "no:xdist")
    few.assert_outcomes(passed=4 + 3, deselected=6)
    few.stdout.fnmatch_lines(["*left out*--all*", "*::test_long: 1 cases", "*::test_one: 5 cases"])
    pytester.runpytest("-p", "no:xdist", "--all").assert_outcomes(passed=9 + 3 + 1)
