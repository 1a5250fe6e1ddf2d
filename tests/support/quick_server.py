"""Uvicorn that ends as soon as it is told to; its own looks ten times a second, and rests before it ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from tests.support.waiting import until


class QuickServer(uvicorn.Server):
    """Serves until :meth:`stop`, in any thread's event loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self, *, break_off: bool = False) -> None:
        """Take no more requests and end after the last answer, or at once; may be called in any thread."""
        self.should_exit, self.force_exit = True, break_off
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        """Wait until told to stop."""
        await self.on_tick(0)
        await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what listens and what is idle; wait for the rest, or cancel it."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = set(self.server_state.tasks)
        if self.force_exit:
            for task in tasks:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.config.timeout_graceful_shutdown)
            for task in late:
                task.cancel()
        await until(lambda: self.force_exit or not self.server_state.connections, "the last connection is closed")


@asynccontextmanager
async def serving(config: uvicorn.Config, *, break_off: bool = False) -> AsyncIterator[str]:
    """Serve on a free port in this event loop and yield the address; end as ``QuickServer.stop``."""
    config.timeout_keep_alive = 600  # after the usual 5 s a client of a test that stalls meets a closed connection
    server = QuickServer(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # uvicorn._serve leaves the process's signal handlers alone, which pytest needs.
        running = asyncio.create_task(server._serve([listener]))
        try:
            await server.is_up.wait()
            yield url
        finally:
            server.stop(break_off=break_off)
            await running
