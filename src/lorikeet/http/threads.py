"""Runs work in threads that would block the event loop or may hang."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import to_thread

THREAD_LENGTH = 4096
"""Characters or tokens above which a request leaves the event loop, so that it delays no stream."""

_T = TypeVar("_T")


async def off_the_loop(work: Callable[[], _T], length: int) -> _T:
    """Run ``work`` on ``length`` characters or tokens, in a thread if it may take long."""
    return work() if length < THREAD_LENGTH else await to_thread.run_sync(work)


async def in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a daemon thread and return its result, or raise its exception.

    The thread continues if the caller is cancelled. The process does not wait for these threads when it ends, unlike
    for workers of anyio and asyncio, however long their reads take.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def report(settle: Callable[[Any], None], outcome: object) -> None:
        if not done.done():  # A cancelled caller needs no result.
            settle(outcome)

    def run() -> None:
        settle: Callable[[Any], None] = done.set_result
        outcome: object
        try:
            outcome = work()
        except BaseException as error:
            settle = done.set_exception
            outcome = error
        with contextlib.suppress(RuntimeError):  # Nothing waits for the result once the loop is closed.
            loop.call_soon_threadsafe(report, settle, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="may hang", daemon=True).start()
    return await done
