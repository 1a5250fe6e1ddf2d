"""Runs an orchestrator whose state survives a crash.

The registry holds the state, and the controller sends everything else.
"""

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

SAVE_TIMEOUT_S = 0.5
"""Most seconds for which a call waits until its outcome is saved."""

_RETRY_S = 1.0

log = structlog.get_logger("lorikeet")


class StateSaver:
    """Saves the newest state to the registry on its own thread, so that a slow or lost registry delays no placement.

    If the registry is unavailable, that is logged once, and the state is written when the registry is back. If another
    orchestrator has written its state, this orchestrator stops writing. The saved state names its writer, because a
    write whose response was lost may have succeeded.

    Args:
        registry: registry for the saved state; this object owns it.
        retry_s: time between two attempts while the registry is unavailable.
    """

    def __init__(self, registry: ClusterRegistry, retry_s: float = _RETRY_S) -> None:
        self._registry = registry
        self._retry_s = retry_s
        self._writer = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._newest: OrchestratorState | None = None
        self._epoch: int | None = None  # epoch of the saved state, if known
        self._is_unavailable = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="state-saver", daemon=True)
        self._thread.start()

    def load(self) -> OrchestratorState | None:
        """Return the saved state; None if there is no readable state. Call this method before the first :meth:`save`.

        Raises:
            RegistryUnavailable: the registry does not answer.
        """
        stored = self._registry.load_state()
        self._epoch = 0 if stored is None else stored.epoch
        return None if stored is None else _read(stored.content)

    def save(self, state: OrchestratorState) -> None:
        """Schedule a state to replace the saved state, and return immediately."""
        with self._changed:
            self._newest = state
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the newest state is written. Return False after a timeout or if the registry is unavailable."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is None or self._is_unavailable or self._is_closed, timeout_s)
            return self._newest is None

    def close(self) -> None:
        """Stop writing. A state that is not yet written is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._registry.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_closed)
                state = self._newest
                if state is None or self._is_closed:
                    return
            try:
                self._write(msgspec.json.encode(msgspec.structs.replace(state, writer=self._writer)).decode())
            except RegistryUnavailable as error:
                self._on_unavailable(error)
            except EpochConflict as error:
                log.error(
                    "another orchestrator writes to the registry: this one stops saving its state", reason=str(error)
                )
                with self._changed:
                    self._is_closed = True
                    self._changed.notify_all()
            else:
                self._on_saved(state)

    def _write(self, content: str) -> None:
        if self._epoch is None:
            self.load()
        assert self._epoch is not None
        try:
            self._epoch = self._registry.save_state(content, self._epoch)
        except EpochConflict:
            stored = self._registry.load_state()
            if stored is None:
                epoch = 0  # The registry came back without its data.
            elif (state := _read(stored.content)) is not None and state.writer == self._writer:
                epoch = stored.epoch
            else:
                raise
            self._epoch = self._registry.save_state(content, epoch)

    def _on_unavailable(self, error: RegistryUnavailable) -> None:
        with self._changed:
            if not self._is_unavailable:
                log.warning("registry unavailable: the placement is saved when it is back", reason=str(error))
            self._is_unavailable = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed, self._retry_s)

    def _on_saved(self, state: OrchestratorState) -> None:
        with self._changed:
            if self._is_unavailable:
                log.info("registry is back: the placement is saved")
            self._is_unavailable = False
            if self._newest is state:
                self._newest = None
            self._changed.notify_all()


def _read(content: str) -> OrchestratorState | None:
    """Decode a saved state. Return None if it cannot be read, for example because another version wrote it."""
    try:
        return msgspec.json.decode(content, type=OrchestratorState)
    except msgspec.MsgspecError as error:
        log.warning("saved placement cannot be read and is replaced", reason=str(error))
        return None


class PersistentOrchestrator:
    """Saves the state of an orchestrator after every call. Every call returns the current routing table.

    Args:
        orchestrator: a new orchestrator, which continues from the saved state.
        saver: saver of the state; owned by this object.
        clock: measures the periods.
    """

    def __init__(self, orchestrator: Orchestrator, saver: StateSaver, clock: Clock) -> None:
        self._orchestrator = orchestrator
        self._saver = saver
        self._clock = clock
        try:
            state = saver.load()
        except RegistryUnavailable as error:
            log.warning("registry unavailable: placement starts without its saved state", reason=str(error))
        else:
            if state is not None:
                orchestrator.resume(state, clock.now())

    @property
    def table(self) -> RoutingTable:
        """Current routing table."""
        return self._orchestrator.table

    def begin(
        self,
        adapters: Iterable[AdapterInfo] | None,
        replicas: Sequence[ReplicaId] | None,
        table: RoutingTable | None,
    ) -> RoutingTable:
        """Take over a controller's table and adapters, which override the saved state.

        Args:
            adapters: all adapters; adapters that are missing are dropped. None if the controller has not sent any yet.
            replicas: all replicas; None if the controller has not sent any yet.
            table: the routing table in use; None if there is none.
        """
        state = self._orchestrator.state()
        demand = state.demand
        epoch = state.epoch
        shares = state.shares
        if adapters is not None:
            known = {
                each.adapter: demand.adapters.get(each.adapter) or AdapterCounts(each.rank, each.size_bytes)
                for each in adapters
            }
            demand = DemandState(known, demand.outputs, demand.output_tokens)
        if table is not None and table.epoch > epoch:
            epoch = table.epoch
            shares = {adapter: tuple(of_one) for adapter, of_one in table.shares.items()}
        state = OrchestratorState(epoch, shares, demand, state.policy)
        self._orchestrator.resume(state, self._clock.now(), replicas)
        return self._saved()

    def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """Place new adapters."""
        self._orchestrator.register(adapters, self._clock.now())
        return self._saved()

    def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Remove an adapter."""
        self._orchestrator.drop(adapter, self._clock.now())
        return self._saved()

    def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Replace the list of replicas, and place adapters again."""
        self._orchestrator.set_replicas(replicas, self._clock.now())
        return self._saved()

    def period(self, report: DemandReport) -> RoutingTable:
        """Count a controller's demand report, and place again."""
        self._orchestrator.period(report, self._clock.now())
        return self._saved()

    def load(self) -> float | None:
        """Return the number of replicas that the demand fills; see ``Orchestrator``."""
        return self._orchestrator.load(self._clock.now())

    def state(self) -> OrchestratorState:
        """Return the state that is saved."""
        return self._orchestrator.state()

    def close(self) -> None:
        """Stop saving."""
        self._saver.close()

    def _saved(self) -> RoutingTable:
        """Save the state, then return the table.

        The order ensures that a restarted orchestrator knows every table that a controller uses.
        """
        self._saver.save(self._orchestrator.state())
        self._saver.wait(SAVE_TIMEOUT_S)
        return self._orchestrator.table
