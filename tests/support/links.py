"""Machines whose connection to the API process can be cut without a word."""

import asyncio
from contextlib import suppress

import pytest

from lorikeet.client import supervisor
from tests.support.fake_engines import FakeEngine, FakeHost


def notice_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which a cut connection counts as lost."""
    for name, seconds in (
        ("LINK_PING_EVERY_S", 0.1),
        ("LINK_TIMEOUT_S", 0.3),
        ("CHECK_EVERY_S", 0.05),
        ("_EXIT_REPORT_S", 0.05),
        ("DRAIN_TIMEOUT_S", 0.01),
        ("_SHUTDOWN_TIMEOUT_S", 0.1),
        ("_KILL_TIMEOUT_S", 0.1),
    ):
        monkeypatch.setattr(supervisor, name, seconds)
    monkeypatch.setattr(FakeEngine, "kill", lambda self: None)  # nothing reaches it


class Link:
    """A TCP connection through which an engine reaches its API process, and that can be cut without a word."""

    def __init__(self) -> None:
        self.is_cut = False
        self._port = 0

    async def open(self, address: str) -> str:
        """Return the address of the near end of a link to ``address``."""
        self._port = int(address.rpartition(":")[2])
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(asyncio.CancelledError):  # at the end of the test
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            if not self.is_cut:
                writer.write(piece)


class LinkedHost(FakeHost):
    """A machine behind a link."""

    address = "10.0.0.2"

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []

    async def start(self, address: str, settings: bytes) -> FakeEngine:
        self.links.append(Link())
        return await super().start(await self.links[-1].open(address), settings)
