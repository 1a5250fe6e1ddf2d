"""Assisted steps: the choice of host or device for the LoRA delta of each layer of an adapter in flight.

Rank 0 chooses; the other ranks follow its choices.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from lorikeet.core.assist_costs import ASSISTED_MODULES, AssistCosts
from lorikeet.core.executor import ExecutorError
from lorikeet.core.messages import AssistCounters
from lorikeet.kernels.base import LoraBatch, LoraSegment
from lorikeet.presets import HostLayers
from lorikeet.worker.host_lora.pool import TIMEOUT_S, HostPool, HostRows, RowAssignment, y_of
from lorikeet.worker.host_lora.ring import POLLS, Backoff, Ring, short_sleep
from lorikeet.worker.host_lora.worker import HostAdapter
from lorikeet.worker.transfer.state import PartialAdapter


class HostLoraSide(Protocol):
    """A rank's side of host LoRA. For each layer the methods are called in the order in which they are listed here.

    All ranks make the same calls, except that ``assign`` is called once per distinct choice of a step.
    """

    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> AbstractContextManager["AssistedStep"]:
        """Return the context of a step with adapters in flight.

        Args:
            lora: all adapters of the batch.
            arrivals: the adapters in flight; each one's ``weights`` are in a segment of ``lora``.
        """
        ...

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return the indices of the adapters, with so many tokens each, whose delta the host computes on a layer."""
        ...

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Assign rows to host workers."""
        ...

    def submit(self, layer: int, x: Tensor, assignment: RowAssignment | None) -> None:
        """Start the host workers on rows of ``x [T, in]``; None if they have nothing to compute on this layer."""
        ...

    def add_to(self, qkv: Tensor) -> None:
        """Wait for the submitted rows, and add their delta to ``qkv [T, out]``."""
        ...


class _Shares(NamedTuple):
    """The division of a layer's LoRA: adapters for the device and rows for the host; None for none."""

    device: LoraBatch | None
    host: RowAssignment | None


class AssistedStep:
    """Host LoRA of one step; implements ``kernels.base.Assist``. Made by :meth:`HostLoraSide.assisting`."""

    def __init__(self, host: HostLoraSide, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> None:
        self._host = host
        self._arrivals = arrivals
        numbers = {id(arrival.weights): number for number, arrival in enumerate(arrivals)}
        self._segments: list[tuple[LoraSegment, int | None]] = [
            (segment, numbers.get(id(segment.weights))) for segment in lora.segments
        ]
        tokens = Counter[int | None]()
        for segment, number in self._segments:
            tokens[number] += segment.stop - segment.start
        self._tokens = [tokens[number] for number in range(len(arrivals))]
        self._form = lora.form
        self._shares: dict[frozenset[int], _Shares] = {frozenset(): _Shares(lora, None)}
        self._share = self._shares[frozenset()]

    def begin(self, layer: int, x: Tensor) -> LoraBatch | None:
        """Send the host its rows of a layer; return the adapters that the device adds to q, k and v, None for none."""
        on_host = self._host.choose(self._arrivals, layer, self._tokens)
        if on_host not in self._shares:
            self._shares[on_host] = self._divide(on_host)
        self._share = self._shares[on_host]
        self._host.submit(layer, x, self._share.host)
        return self._share.device

    def finish(self, qkv: Tensor) -> None:
        """Add the host's delta to ``qkv``."""
        if self._share.host is not None:
            self._host.add_to(qkv)

    def _divide(self, chosen: frozenset[int]) -> _Shares:
        """Divide the segments: those of the chosen adapters to the host, the others to the device."""
        on_host, on_device = [], []
        for segment, number in self._segments:
            if number is not None and number in chosen:
                on_host.append(HostRows(number, segment.start, segment.stop))
            else:
                on_device.append(segment)
        device = LoraBatch(on_device, self._form) if on_device else None
        return _Shares(device, self._host.assign(on_host))


class HostLoraLeader:
    """Rank 0's side: chooses between host and device. Implements ``HostLoraSide``.

    Args:
        pool: the workers; owned by this object.
        layers: rule for the layers on which the host computes.
        costs: decide whether to wait for a layer (``HostLayers.PATIENT``).
    """

    def __init__(self, pool: HostPool, layers: HostLayers, costs: AssistCosts) -> None:
        self.pool = pool
        self._costs = costs
        self._layers = layers
        self._turn = 0
        self._decided_s = 0.0
        self._on_host: list[tuple[PartialAdapter, bool]] = []
        self._layer = 0
        self._host_layers = self._device_layers = self._host_layers_after_arrival = 0

    @property
    def counters(self) -> AssistCounters:
        """Counts since the start."""
        return AssistCounters(
            self._host_layers,
            self._device_layers,
            self._host_layers_after_arrival,
            self.pool.rescued_slices,
            self.pool.lost_workers,
        )

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> Iterator[AssistedStep]:
        """Begin a step in the pool, and end it.

        Raises:
            ExecutorError: an adapter in flight changes modules that the host does not compute.
        """
        for arrival in arrivals:
            if other := arrival.weights.modules.difference(ASSISTED_MODULES):
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
        self._layer, self._decided_s = layer, time.monotonic()
        others_have = [self._others_have(arrival, layer) for arrival in arrivals]
        counts = list(zip(arrivals, tokens, strict=True))
        chosen = [number for number, each in enumerate(counts) if self.is_for_host(each[0], layer, each[1])]
        self._on_host = [(arrivals[number], others_have[number]) for number in chosen]
        self._host_layers += len(chosen)
        self._device_layers += len(arrivals) - len(chosen)
        return frozenset(chosen)

    def is_for_host(self, arrival: PartialAdapter, layer: int, tokens: int) -> bool:
        """Return whether the host computes an adapter's delta on a layer for so many tokens, when the layer starts."""
        if self._layers is HostLayers.STATIC:
            return layer in arrival.left_to_host or not self._wait_for(arrival, layer)
        if self._has(arrival, layer):
            return False
        if self._layers is HostLayers.DYNAMIC:
            return True
        costs = self._costs
        spare_s = costs.host_layer_s(tokens, costs.rank(arrival.ref)) - costs.device_layer_s(tokens)
        is_near = spare_s > 0 and arrival.due_s(layer) - time.monotonic() < spare_s
        return not (is_near and self._wait_for(arrival, layer, spare_s))

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Assign rows to the workers of this step."""
        return self.pool.assign(parts)

    def submit(self, layer: int, x: Tensor, assignment: RowAssignment | None) -> None:
        """Send rows of x to the workers, and publish the ticket to the other ranks."""
        if assignment is not None:
            self.pool.submit(layer, x, assignment)
        self.pool.ring.signal_turn(self._turn, 0 if assignment is None else self.pool.ticket)

    def add_to(self, qkv: Tensor) -> None:
        """Wait for the workers, and add their delta to ``qkv [T, out]``."""
        self.pool.add_to(qkv)
        self._host_layers_after_arrival += sum(
            others_had and arrival.arrived_s(self._layer) < self._decided_s for arrival, others_had in self._on_host
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
        """Yield how many blocks of a transfer have arrived on each other rank; -1 if the transfer has failed there."""
        ring = self.pool.ring
        return (ring.arrived(rank, arrival.transfer_id) for rank in range(1, ring.shape.ranks))

    def _wait_for(self, arrival: PartialAdapter, layer: int, timeout_s: float | None = None) -> bool:
        """Block until a layer has arrived on all ranks; return False after a failure or the timeout.

        The wait for other ranks is limited to ``TIMEOUT_S``: a dead rank publishes nothing, and the next collective
        finds out.
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
    """The side of ranks above 0: follows rank 0's choices. Implements ``HostLoraSide``.

    Its waits have no timeout, since this process ends when rank 0 does.

    Args:
        ring: of rank 0; owned by this object.
        rank: this rank, whose columns of y are read.
    """

    def __init__(self, ring: Ring, rank: int) -> None:
        self._ring = ring
        self._y = y_of(ring, rank)
        self._turn = 0
        self._ticket = 0
        self._submitted: RowAssignment | None = None

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> Iterator[AssistedStep]:
        """Return the context of a step with adapters in flight."""
        yield AssistedStep(self, lora, arrivals)

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Wait for rank 0's choice and return it."""
        self._turn += 1
        self._ticket = _wait(lambda: self._ring.turn(self._turn))
        if not self._ticket:
            return frozenset()
        description = self._ring.description(self._ticket)
        assert description is not None, "rank 0 waits for this rank before it goes on"
        slices = self._ring.cut(description[1])
        assert slices is not None
        return frozenset(part.adapter for part in slices)

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Return the places of these rows' results for this rank."""
        return RowAssignment(parts, 0, [], 0, self._y)

    def submit(self, layer: int, x: Tensor, assignment: RowAssignment | None) -> None:
        """Send nothing: rank 0 has the same x, and sends it."""
        self._submitted = assignment

    def add_to(self, qkv: Tensor) -> None:
        """Wait for the workers, and add their delta to ``qkv [T, out]``."""
        assert self._submitted is not None
        _wait(lambda: self._ring.has_all(self._ticket) or None)
        for part, y in zip(self._submitted.parts, self._submitted.y[self._ring.slot(self._ticket)], strict=True):
            qkv[part.start : part.stop].add_(y)

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()


def _wait(look: Callable[[], _T | None]) -> _T:
    """Poll ``look`` until it returns a value; return that."""
    backoff = Backoff()
    while True:
        for _ in range(POLLS):
            if (found := look()) is not None:
                return found
        backoff.pause()
