"""Runs background tasks of asyncio and logs their failures."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger("lorikeet")


class BackgroundTasks:
    """Runs tasks that are not awaited, and logs their failures."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        """Return the number of running tasks."""
        return len(self._running)

    async def close(self) -> None:
        """Cancel all running tasks, and wait until they have ended."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task of the cluster failed", exc_info=error)
