"""Work that would hold up the event loop, and work that blocks and may hang, in threads."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import to_thread

THREAD_LENGTH = 4096
"""Characters or tokens from which on a request is worked on off the event loop, so that it delays no stream."""

_T = TypeVar("_T")


async def off_the_loop(work: Callable[[], _T], length: int) -> _T:
    """Run ``work`` on that many characters or tokens, in a thread if it may take long."""
    return work() if length < THREAD_LENGTH else await to_thread.run_sync(work)


async def in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns, or raise what it raises. Who is cancelled leaves it to itself.

    Nothing waits for these threads when the process ends.

    Workers of anyio and of asyncio are waited for when Python ends, however long what they read takes to come.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        if not done.done():  # else whoever waited was cancelled
            settle(outcome)

    def run() -> None:
        settle: Callable[[Any], None] = done.set_result
        outcome: object
        try:
            outcome = work()
        except BaseException as error:
            settle, outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(tell, settle, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="may hang", daemon=True).start()
    return await done
