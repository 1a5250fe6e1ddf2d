"""Chooses host or device for the LoRA delta of each layer of an adapter that is being loaded.

Rank 0 chooses; the other ranks follow its choices.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.messages import AssistCounters
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.kernels.lora import LoraBatch, LoraSegment
from lorikeet.presets import HostLayers
from lorikeet.worker.host_lora.pool import TIMEOUT_S, HostPool, HostRows, RowAssignment, y_of
from lorikeet.worker.host_lora.ring import POLLS, Backoff, Ring, short_sleep
from lorikeet.worker.host_lora.worker import HostAdapter, ProductWidths
from lorikeet.worker.transfer.state import PartialAdapter


class HostLoraSide(Protocol):
    """One rank's interface to host LoRA.

    For each layer the rank calls the methods in the order listed here.

    All ranks make the same calls, except that ``assign`` is called once per distinct choice of a step.
    """

    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> AbstractContextManager["AssistedStep"]:
        """Return the context of a step with adapters that are being loaded.

        Args:
            lora: all adapters of the batch.
            arrivals: the adapters that are being loaded. A segment of ``lora`` has the ``weights`` of each.
        """
        ...

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return the indices of the adapters whose delta the host computes on a layer.

        ``tokens`` has each adapter's tokens.
        """
        ...

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Assign rows to host workers."""
        ...

    def submit(self, product: str, layer: int, x: Tensor, assignment: RowAssignment | None) -> None:
        """Start the host workers on rows of ``x [rows, in]``.

        None if the workers have nothing to compute on this layer.
        """
        ...

    def add_to(self, out: Tensor) -> None:
        """Wait for the submitted rows, and add the delta to ``out [rows, out]``."""
        ...


class _Shares(NamedTuple):
    """The division of a layer's LoRA into adapters for the device and rows for the host. None if a side has none."""

    device: LoraBatch | None
    host: RowAssignment | None


class _Rows:
    """The adapters of a step's rows, or of only its sampling rows, and their latest division."""

    def __init__(self, lora: LoraBatch, numbers: dict[int, int]) -> None:
        self.segments: list[tuple[LoraSegment, int | None]] = [
            (segment, numbers.get(id(segment.weights))) for segment in lora.segments
        ]
        self.form = lora.form
        self.shares: dict[frozenset[int], _Shares] = {frozenset(): _Shares(lora, None)}


class AssistedStep:
    """Host LoRA for one step.

    Implements ``kernels.interface.Assist``. :meth:`HostLoraSide.assisting` creates it. The choice between host and
    device is made once for each layer, since an adapter arrives layer by layer. Each product that the adapter changes
    is handed over separately.
    """

    def __init__(self, host: HostLoraSide, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> None:
        self._host = host
        self._lora = lora
        self._arrivals = arrivals
        self._numbers = {id(arrival.weights): number for number, arrival in enumerate(arrivals)}
        self._all = _Rows(lora, self._numbers)
        self._sampled: _Rows | None = None
        tokens = Counter[int | None]()
        for segment, number in self._all.segments:
            tokens[number] += segment.stop - segment.start
        self._tokens = [tokens[number] for number in range(len(arrivals))]
        changed = frozenset().union(*(arrival.weights.modules for arrival in arrivals))
        self._products = [name for name, modules in PRODUCTS.items() if not changed.isdisjoint(modules)]
        self._on_host = frozenset[int]()
        self._submitted: RowAssignment | None = None

    def begin(self, product: str, layer: int, x: Tensor, lora: LoraBatch | None) -> LoraBatch | None:
        """Send a product's rows to the host, and return the adapters for the device; None for none."""
        self._submitted = None
        if product not in self._products:
            return lora
        if product == self._products[0]:
            self._on_host = self._host.choose(self._arrivals, layer, self._tokens)
        share = _Shares(None, None) if lora is None else self._share(self._rows_of(lora))
        self._submitted = share.host
        self._host.submit(product, layer, x, share.host)
        return share.device

    def finish(self, out: Tensor) -> None:
        """Add the host's delta to the product."""
        if self._submitted is not None:
            self._host.add_to(out)

    def _rows_of(self, lora: LoraBatch) -> _Rows:
        """Return the rows of a batch: all rows of a step, or after the last attention only the sampling rows."""
        if lora is self._lora:
            return self._all
        if self._sampled is None:
            self._sampled = _Rows(lora, self._numbers)
        return self._sampled

    def _share(self, rows: _Rows) -> _Shares:
        if self._on_host not in rows.shares:
            rows.shares[self._on_host] = self._divide(rows)
        return rows.shares[self._on_host]

    def _divide(self, rows: _Rows) -> _Shares:
        """Divide the segments. The host gets the chosen adapters' segments, and the device gets the rest."""
        on_host = []
        on_device = []
        for segment, number in rows.segments:
            if number is not None and number in self._on_host:
                on_host.append(HostRows(number, segment.start, segment.stop))
            else:
                on_device.append(segment)
        device = LoraBatch(on_device, rows.form) if on_device else None
        return _Shares(device, self._host.assign(on_host) if on_host else None)


class HostLoraLeader:
    """Rank 0's side: chooses between host and device.

    Implements ``HostLoraSide``.

    Args:
        pool: the workers. This object owns the pool.
        layers: rule for the layers on which the host computes.
        costs: the costs that decide whether to wait for a layer (``HostLayers.PATIENT``).
    """

    def __init__(self, pool: HostPool, layers: HostLayers, costs: AssistCosts) -> None:
        self.pool = pool
        self._costs = costs
        self._layers = layers
        self._turn = 0
        self._decided_s = 0.0
        self._on_host: list[tuple[PartialAdapter, bool]] = []
        self._layer = 0
        self._awaits_ticket = False
        self._host_layers = self._device_layers = self._host_layers_after_arrival = 0

    @property
    def counters(self) -> AssistCounters:
        """Counters since the start."""
        return AssistCounters(
            self._host_layers,
            self._device_layers,
            self._host_layers_after_arrival,
            self.pool.rescued_slices,
            self.pool.lost_workers,
        )

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> Iterator[AssistedStep]:
        """Begin a step in the pool, and end it with the context.

        Raises:
            ExecutorError: an adapter that is being loaded changes modules that the host does not compute.
        """
        for arrival in arrivals:
            if other := arrival.weights.modules.difference(self._costs.row_bytes):
                raise ExecutorError(
                    f"adapter {arrival.ref.name} changes {', '.join(sorted(other))}, which host workers do not compute"
                )
        self.pool.begin([HostAdapter(arrival.ref.ranks, arrival.host_blocks) for arrival in arrivals])
        try:
            yield AssistedStep(self, lora, arrivals)
        finally:
            self.pool.end()

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return the indices of the adapters whose delta the host computes on a layer."""
        self._turn += 1
        self._awaits_ticket = True
        self._layer = layer
        self._decided_s = time.monotonic()
        others_have = [self._others_have(arrival, layer) for arrival in arrivals]
        counts = list(zip(arrivals, tokens, strict=True))
        chosen = [number for number, each in enumerate(counts) if self.is_for_host(each[0], layer, each[1])]
        self._on_host = [(arrivals[number], others_have[number]) for number in chosen]
        self._host_layers += len(chosen)
        self._device_layers += len(arrivals) - len(chosen)
        return frozenset(chosen)

    def is_for_host(self, arrival: PartialAdapter, layer: int, tokens: int) -> bool:
        """Return whether the host computes an adapter's delta on a layer that starts now."""
        if self._layers is HostLayers.STATIC:
            return layer in arrival.left_to_host or not self._wait_for(arrival, layer)
        if self._has(arrival, layer):
            return False
        if self._layers is HostLayers.DYNAMIC:
            return True
        costs = self._costs
        times = costs.times(tokens, costs.rank(arrival.ref), costs.handovers(arrival.ref))
        spare_s = times.host_s - times.device_s
        is_near = spare_s > 0 and arrival.due_s(layer) - time.monotonic() < spare_s
        return not (is_near and self._wait_for(arrival, layer, spare_s))

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Assign rows to the workers of this step."""
        return self.pool.assign(parts)

    def submit(self, product: str, layer: int, x: Tensor, assignment: RowAssignment | None) -> None:
        """Send rows of x to the workers, and publish the layer's first ticket to the other ranks."""
        if assignment is not None:
            self.pool.submit(product, layer, x, assignment)
        if self._awaits_ticket:
            self._awaits_ticket = False
            self.pool.ring.signal_turn(self._turn, 0 if assignment is None else self.pool.ticket)

    def add_to(self, out: Tensor) -> None:
        """Wait for the workers, and add their delta to ``out [rows, out]``."""
        self.pool.add_to(out)
        on_host = self._on_host
        self._on_host = []
        self._host_layers_after_arrival += sum(
            others_had and arrival.arrived_s(self._layer) < self._decided_s for arrival, others_had in on_host
        )

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()

    # --- a layer has arrived when every rank has it --------------------------------------------------

    def _has(self, arrival: PartialAdapter, layer: int) -> bool:
        return arrival.has(layer) and self._others_have(arrival, layer)

    def _others_have(self, arrival: PartialAdapter, layer: int) -> bool:
        needed = arrival.needed[layer]
        return all(blocks >= needed for blocks in self._others(arrival)) if needed else True

    def _others(self, arrival: PartialAdapter) -> Iterator[int]:
        """Yield the number of a transfer's blocks that each other rank has, or -1 if the transfer failed there."""
        ring = self.pool.ring
        return (ring.arrived(rank, arrival.transfer_id) for rank in range(1, ring.shape.ranks))

    def _wait_for(self, arrival: PartialAdapter, layer: int, timeout_s: float | None = None) -> bool:
        """Block until a layer has arrived on all ranks; return False after a failure or the timeout.

        The wait for other ranks is limited to ``TIMEOUT_S``, since a dead rank publishes nothing. The next collective
        operation reports the death.
        """
        began_s = time.monotonic()
        if not arrival.wait_for(layer, timeout_s):
            return False
        until_s = time.monotonic() + TIMEOUT_S if timeout_s is None else began_s + timeout_s
        while not self._others_have(arrival, layer):
            if time.monotonic() >= until_s or min(self._others(arrival)) < 0:
                return False
            short_sleep()
        return True


_T = TypeVar("_T")


class HostLoraFollower:
    """The side of ranks above 0: follows rank 0's choices.

    Implements ``HostLoraSide``.

    The follower waits without a timeout, since its process ends when rank 0 does.

    Args:
        ring: rank 0's ring. This object owns the mapping.
        rank: number of this rank, which reads its own columns of y.
        geometry: sizes of a rank's share of the model.
    """

    def __init__(self, ring: Ring, rank: int, geometry: ModelGeometry) -> None:
        self._ring = ring
        self._y = y_of(ring, rank, ProductWidths(geometry).outputs)
        self._turn = 0
        self._ticket = 0
        self._product = ""
        self._is_first = False
        self._submitted: RowAssignment | None = None

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> Iterator[AssistedStep]:
        """Return the context of a step with adapters that are being loaded."""
        yield AssistedStep(self, lora, arrivals)

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Wait for rank 0's choice and return it."""
        self._turn += 1
        self._is_first = True
        self._ticket = _wait(lambda: self._ring.turn(self._turn))
        if not self._ticket:
            return frozenset()
        description = self._ring.description(self._ticket)
        assert description is not None, "rank 0 waits for this rank before it goes on"
        slices = self._ring.cut(description[1])
        assert slices is not None
        return frozenset(part.adapter for part in slices)

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Return where the ring holds this rank's results for the rows."""
        return RowAssignment(parts, 0, [], {}, self._y)

    def submit(self, product: str, layer: int, x: Tensor, assignment: RowAssignment | None) -> None:
        """Send nothing, since rank 0 sends the same x. The tickets of a layer have consecutive numbers."""
        self._ticket += assignment is not None and not self._is_first
        self._is_first = False
        self._product = product
        self._submitted = assignment

    def add_to(self, out: Tensor) -> None:
        """Wait for the workers, and add their delta to ``out [rows, out]``."""
        assert self._submitted is not None
        _wait(lambda: self._ring.has_all(self._ticket) or None)
        their_y = self._submitted.y(self._product, self._ring.slot(self._ticket))
        for part, y in zip(self._submitted.parts, their_y, strict=True):
            out[part.start : part.stop].add_(y)

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()


def _wait(look: Callable[[], _T | None]) -> _T:
    """Poll ``look`` until it returns a value, and return the value."""
    backoff = Backoff()
    while True:
        for _ in range(POLLS):
            if (found := look()) is not None:
                return found
        backoff.pause()
