"""Polling with a limit: a test that waits in vain fails with what it waited for."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

TIMEOUT_S = 120.0
"""Far more than anything takes here; below pytest's own limit, whose message is a stack."""


async def until(
    condition: Callable[[], T | Awaitable[T]], what: str, timeout_s: float = TIMEOUT_S, every_s: float = 0.002
) -> T:
    """Poll ``condition`` until what it returns is true, and return that.

    Args:
        condition: a function, or a coroutine function.
        what: a clause that says what holds then, for the message.
        timeout_s: seconds to wait at most.
        every_s: seconds between two calls, in which the event loop runs other tasks.

    Raises:
        AssertionError: after ``timeout_s``.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        _check(end_s, timeout_s, what, found)
        await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S, every_s: float = 0.002) -> T:
    """Poll as ``until`` does, outside an event loop."""
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        _check(end_s, timeout_s, what, found)
        time.sleep(every_s)
    return found


def _check(end_s: float, timeout_s: float, what: str, found: object) -> None:
    if time.monotonic() > end_s:
        raise AssertionError(f"waited {timeout_s:g} s in vain until {what}; the condition is still {found!r}")
