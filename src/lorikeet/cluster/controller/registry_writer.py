"""Writes the replicas and their adapter copies to the registry, so that other programs can read them there."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.registry import ClusterRegistry, Copies, RegistryUnavailable, ReplicaRow
from lorikeet.core.ids import ReplicaId

UP = "up"
DOWN = "down"
"""States of a replica. A replica is down while its engine is being restarted."""

_PAUSE_S = 1.0

log = structlog.get_logger("lorikeet")


class RegistryWriter:
    """Writes the replicas and their adapter copies to the registry. The controller does not read them.

    Only changes are written, on another thread. If the registry is unavailable, that is logged once, and everything is
    written when the registry is back. At shutdown the replicas are removed. The replicas of a killed process stay in
    the registry until the process is restarted.

    Args:
        client: client of the cluster.
        registry: no other process may write there under this identity.
        pause_s: seconds from the end of a write to the next.
    """

    def __init__(self, client: ClusterClient, registry: ClusterRegistry, pause_s: float = _PAUSE_S) -> None:
        self._client = client
        self._registry = registry
        self._pause_s = pause_s
        self._joined_at: dict[tuple[ReplicaId, int], float] = {}
        self._written: tuple[Sequence[ReplicaRow], Copies] | None = None  # contents of the registry; None if unknown
        self._is_unavailable = False

    async def run(self) -> None:
        """Write every change, until cancelled."""
        writing: asyncio.Future[None] | None = None
        try:
            while True:
                writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._rows(), self._client.copies()))
                await asyncio.shield(writing)
                await asyncio.sleep(self._pause_s)
        finally:
            if writing is not None:
                await asyncio.wait({writing})
            if not self._is_unavailable:
                await asyncio.to_thread(self._write, [], set())

    def _rows(self) -> list[ReplicaRow]:
        rows = []
        for replica, view in self._client.views.items():
            epoch = view.restarts + 1
            joined_at = self._joined_at.setdefault((replica, epoch), time.time())
            state = UP if view.alive else DOWN
            rows.append(ReplicaRow(replica, epoch, view.address, view.process_id or 0, state, joined_at))
        return rows

    def _write(self, rows: Sequence[ReplicaRow], copies: Copies) -> None:
        """Update the registry, if it answers."""
        try:
            if self._written is None:
                self._registry.set_replicas(rows)
                self._registry.set_copies(copies)
            else:
                rows_there, copies_there = self._written
                if rows != rows_there:
                    self._registry.set_replicas(rows)
                if copies is not copies_there and copies != copies_there:
                    self._registry.change_copies(copies - copies_there, copies_there - copies)
        except RegistryUnavailable as error:
            if not self._is_unavailable:
                log.warning("registry unavailable: replicas and copies are written when it is back", reason=str(error))
            self._written = None
            self._is_unavailable = True
        else:
            if self._is_unavailable:
                log.info("registry is back: replicas and copies are written")
            self._written = (rows, copies)
            self._is_unavailable = False
