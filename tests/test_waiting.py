"""Polling that ends."""

import pytest

from tests.support.waiting import until, wait_until


async def test_until_returns_what_the_condition_found() -> None:
    answers = [0, "", "there"]
    assert await until(lambda: answers.pop(0), "something is there") == "there"


async def test_until_awaits_a_coroutine_function() -> None:
    answers = [0, 3]

    async def ask() -> int:
        return answers.pop(0)

    assert await until(ask, "an answer is there") == 3


async def test_until_fails_with_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.01 s in vain until pigs fly; the condition is still \[\]"):
        await until(lambda: [], "pigs fly", timeout_s=0.01)
    with pytest.raises(AssertionError, match="until pigs fly"):
        wait_until(lambda: False, "pigs fly", timeout_s=0.01)


def test_wait_until_returns_what_the_condition_found() -> None:
    answers = [None, 7]
    assert wait_until(lambda: answers.pop(0), "a number is there") == 7
