"""Writes the replicas and their adapter copies to the registry, so that other programs can read them there."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.registry import ClusterRegistry, Copies, RegistryUnavailable, ReplicaRow
from lorikeet.core.ids import ReplicaId

UP, DOWN = "up", "down"
"""States of replicas: the engine of one that is down is being started again."""

_PAUSE_S = 1.0

log = structlog.get_logger("lorikeet")


class RegistryWriter:
    """See the module: others read there which replicas there are, and who holds what; the head needs none of it.

    Written is what has changed, on another thread. A registry that is gone is told of once, and gets everything when it
    is back. At the end of the head its replicas are gone from there; those of a head that was killed stay until it is
    back.

    Args:
        client: of the cluster.
        registry: where to. No other head writes there under this identity.
        pause_s: time from the end of a write to the next.
    """

    def __init__(self, client: ClusterClient, registry: ClusterRegistry, pause_s: float = _PAUSE_S) -> None:
        self._client = client
        self._registry = registry
        self._pause_s = pause_s
        self._joined_at: dict[tuple[ReplicaId, int], float] = {}
        self._written: tuple[Sequence[ReplicaRow], Copies] | None = None  # what is there; None: unknown
        self._is_gone = False

    async def run(self) -> None:
        """Write for ever."""
        writing: asyncio.Future[None] | None = None
        try:
            while True:
                writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._rows(), self._client.copies()))
                await asyncio.shield(writing)
                await asyncio.sleep(self._pause_s)
        finally:
            if writing is not None:
                await asyncio.wait({writing})
            if not self._is_gone:
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
        """Bring the registry to this, if it answers."""
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
            if not self._is_gone:
                log.warning("replicas and copies are not noted until the registry is back", reason=str(error))
            self._written, self._is_gone = None, True
        else:
            if self._is_gone:
                log.info("the registry is back, and replicas and copies are noted")
            self._written, self._is_gone = (rows, copies), False
