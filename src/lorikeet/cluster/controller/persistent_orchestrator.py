"""An orchestrator that can be killed at any time: the registry holds its state, the controller sends the rest."""

import threading
import uuid
from collections.abc import Iterable, Sequence

import msgspec
import structlog

from lorikeet.cluster.controller.registry import ClusterRegistry, EpochConflict, RegistryUnavailable
from lorikeet.cluster.placement.demand import AdapterCounts, DemandState
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator, OrchestratorState
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.clock import Clock
from lorikeet.core.ids import AdapterDigest, ReplicaId

SAVED_WITHIN_S = 0.5
"""So long a call waits until its outcome is saved; then the answer goes first."""

_TRY_AGAIN_S = 1.0

log = structlog.get_logger("lorikeet")


class StateSaver:
    """Writes the newest state to the registry, on a thread of its own: a slow or lost registry delays no placement.

    A registry that is gone is told of once, and written to when it is back. Where another orchestrator has written,
    this one writes no more. What is stored says who wrote it: a write of which nobody heard may have come through.

    Args:
        registry: where to; owned from now on.
        try_again_s: time between two attempts to write to a registry that is gone.
    """

    def __init__(self, registry: ClusterRegistry, try_again_s: float = _TRY_AGAIN_S) -> None:
        self._registry = registry
        self._try_again_s = try_again_s
        self._writer = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._newest: OrchestratorState | None = None
        self._epoch: int | None = None  # of what is stored, if known
        self._is_gone = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="state-saver", daemon=True)
        self._thread.start()

    def load(self) -> OrchestratorState | None:
        """Return what was saved last, None if that is nothing of ours. To be called before the first :meth:`save`.

        Raises:
            RegistryUnavailable: the registry does not answer.
        """
        stored = self._registry.load_state()
        self._epoch = 0 if stored is None else stored.epoch
        return None if stored is None else _read(stored.content)

    def save(self, state: OrchestratorState) -> None:
        """Have a state written in place of what is stored. Returns at once."""
        with self._changed:
            self._newest = state
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the newest state is written; False if it is not, for want of time or of a registry."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is None or self._is_gone or self._is_over, timeout_s)
            return self._newest is None

    def close(self) -> None:
        """Write no more; what is not written yet is lost."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()
        self._registry.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_over)
                state = self._newest
                if state is None or self._is_over:
                    return
            try:
                self._write(msgspec.json.encode(msgspec.structs.replace(state, writer=self._writer)).decode())
            except RegistryUnavailable as error:
                self._note_gone(error)
            except EpochConflict as error:
                log.error(
                    "another orchestrator writes to the registry; this one's state is not kept", reason=str(error)
                )
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
            else:
                self._note_written(state)

    def _write(self, content: str) -> None:
        if self._epoch is None:
            self.load()
        assert self._epoch is not None
        try:
            self._epoch = self._registry.save_state(content, self._epoch)
        except EpochConflict:
            stored = self._registry.load_state()
            if stored is None:
                epoch = 0  # the registry came back empty
            elif (state := _read(stored.content)) is not None and state.writer == self._writer:
                epoch = stored.epoch
            else:
                raise
            self._epoch = self._registry.save_state(content, epoch)

    def _note_gone(self, error: RegistryUnavailable) -> None:
        with self._changed:
            if not self._is_gone:
                log.warning("the placement cannot be saved; it will be when the registry is back", reason=str(error))
            self._is_gone = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over, self._try_again_s)

    def _note_written(self, state: OrchestratorState) -> None:
        with self._changed:
            if self._is_gone:
                log.info("the registry is back, and the placement is saved")
            self._is_gone = False
            if self._newest is state:
                self._newest = None
            self._changed.notify_all()


def _read(content: str) -> OrchestratorState | None:
    """Return a stored state; None if another version of this program, say, wrote it."""
    try:
        return msgspec.json.decode(content, type=OrchestratorState)
    except msgspec.MsgspecError as error:
        log.warning("the placement that the registry has cannot be read, and is replaced", reason=str(error))
        return None


class PersistentOrchestrator:
    """See the module. Every call returns the table that counts after it.

    Args:
        orchestrator: a new one, which goes on from what is stored.
        saver: keeps its state; owned from now on.
        clock: what periods are measured by.
    """

    def __init__(self, orchestrator: Orchestrator, saver: StateSaver, clock: Clock) -> None:
        self._orchestrator = orchestrator
        self._saver = saver
        self._clock = clock
        try:
            state = saver.load()
        except RegistryUnavailable as error:
            log.warning("placement begins without what the registry knows", reason=str(error))
        else:
            if state is not None:
                orchestrator.resume(state, clock.now())

    @property
    def table(self) -> RoutingTable:
        """The placement that counts."""
        return self._orchestrator.table

    def begin(
        self,
        adapters: Iterable[AdapterInfo] | None,
        replicas: Sequence[ReplicaId] | None,
        table: RoutingTable | None,
    ) -> RoutingTable:
        """Take what a head knows that was there before this orchestrator; it counts before what was stored.

        Args:
            adapters: all that there are, others are forgotten; None if the head has not said yet.
            replicas: all that there are; None likewise.
            table: that the head goes by; None if it has none.
        """
        state = self._orchestrator.state()
        demand, epoch, shares = state.demand, state.epoch, state.shares
        if adapters is not None:
            known = {
                each.adapter: demand.adapters.get(each.adapter) or AdapterCounts(each.rank, each.size_bytes)
                for each in adapters
            }
            demand = DemandState(known, demand.outputs, demand.output_tokens)
        if table is not None and table.epoch > epoch:
            epoch, shares = table.epoch, {adapter: tuple(of_one) for adapter, of_one in table.shares.items()}
        state = OrchestratorState(epoch, shares, demand, state.policy)
        self._orchestrator.resume(state, self._clock.now(), replicas)
        return self._kept()

    def know(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """Place adapters that are new."""
        self._orchestrator.know(adapters, self._clock.now())
        return self._kept()

    def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Forget an adapter."""
        self._orchestrator.drop(adapter, self._clock.now())
        return self._kept()

    def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Take the replicas that there are from now on."""
        self._orchestrator.set_replicas(replicas, self._clock.now())
        return self._kept()

    def period(self, seen: DemandReport) -> RoutingTable:
        """Count what a head has seen in a period, and place anew."""
        self._orchestrator.period(seen, self._clock.now())
        return self._kept()

    def load(self) -> float | None:
        """Return how many replicas the demand fills, see ``Orchestrator``."""
        return self._orchestrator.load(self._clock.now())

    def state(self) -> OrchestratorState:
        """Return all that it goes on from."""
        return self._orchestrator.state()

    def close(self) -> None:
        """Save no more."""
        self._saver.close()

    def _kept(self) -> RoutingTable:
        """Save, before a head goes by a table that a successor would not know."""
        self._saver.save(self._orchestrator.state())
        self._saver.wait(SAVED_WITHIN_S)
        return self._orchestrator.table
