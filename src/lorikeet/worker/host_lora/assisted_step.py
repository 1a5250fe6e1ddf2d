"""Assisted steps: whether host or device computes each layer of an adapter in flight.

Rank 0 decides, other ranks follow.
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
from lorikeet.worker.host_lora.ring import LOOKS, Backoff, Ring, nap
from lorikeet.worker.host_lora.worker import HostAdapter
from lorikeet.worker.transfer.state import PartialAdapter


class HostLoraSide(Protocol):
    """The host's part of assisted steps, as one rank sees it. Calls for a layer come in the order that they have here.

    All ranks make the same calls but for ``deal``, which is made once for each choice in a step.
    """

    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> AbstractContextManager["AssistedStep"]:
        """Begin a step under adapters that are on their way, and end it.

        Args:
            lora: all adapters of the batch.
            arrivals: of those that are on their way; each has its ``weights`` in a segment of ``lora``.
        """
        ...

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return for which of the adapters, with so many tokens each, the host computes a layer."""
        ...

    def deal(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Prepare what the host is to compute."""
        ...

    def submit(self, layer: int, x: Tensor, deal: RowAssignment | None) -> None:
        """Let it begin with rows of ``x [T, in]``; None: there is nothing on this layer."""
        ...

    def add_to(self, qkv: Tensor) -> None:
        """Wait for what was submitted, and add it to its rows of ``qkv [T, out]``."""
        ...


class _Shares(NamedTuple):
    """Who adds what on a layer: adapters for the device, rows for the host; None for none."""

    device: LoraBatch | None
    host: RowAssignment | None


class AssistedStep:
    """See ``kernels.base.Assist``. Made by :meth:`HostLoraSide.assisting`."""

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
        """Give the host its rows, and return the adapters that the device adds to q, k and v; None for none."""
        on_host = self._host.choose(self._arrivals, layer, self._tokens)
        if on_host not in self._shares:
            self._shares[on_host] = self._shared_out(on_host)
        self._share = self._shares[on_host]
        self._host.submit(layer, x, self._share.host)
        return self._share.device

    def finish(self, qkv: Tensor) -> None:
        """Add to ``qkv`` what the host has computed."""
        if self._share.host is not None:
            self._host.add_to(qkv)

    def _shared_out(self, chosen: frozenset[int]) -> _Shares:
        """Deal out the segments, those of the chosen adapters to the host."""
        on_host, on_device = [], []
        for segment, number in self._segments:
            if number is not None and number in chosen:
                on_host.append(HostRows(number, segment.start, segment.stop))
            else:
                on_device.append(segment)
        device = LoraBatch(on_device, self._form) if on_device else None
        return _Shares(device, self._host.deal(on_host))


class HostLoraLeader:
    """See the module, and ``assisted_step.HostLoraSide``.

    Args:
        pool: the workers; owned by this object from now on.
        layers: on which layers the host computes.
        costs: say what is worth waiting for.
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
        """So far."""
        return AssistCounters(
            self._host_layers,
            self._device_layers,
            self._host_layers_after_arrival,
            self.pool.rescued_slices,
            self.pool.lost_workers,
        )

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> Iterator[AssistedStep]:
        """See ``HostLoraSide``.

        Raises:
            ExecutorError: an adapter that is on its way changes modules that the host does not compute.
        """
        for arrival in arrivals:
            if other := arrival.weights.modules.difference(ASSISTED_MODULES):
                raise ExecutorError(
                    f"adapter {arrival.ref.name} changes {', '.join(sorted(other))}: it must be waited for"
                )
        self.pool.begin([HostAdapter(arrival.ref.ranks, arrival.host_blocks) for arrival in arrivals])
        try:
            yield AssistedStep(self, lora, arrivals)
        finally:
            self.pool.end()

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """See ``HostLoraSide``."""
        self._turn += 1
        self._layer, self._decided_s = layer, time.monotonic()
        there = [self._others_have(arrival, layer) for arrival in arrivals]
        counts = list(zip(arrivals, tokens, strict=True))
        chosen = [number for number, each in enumerate(counts) if self.is_for_host(each[0], layer, each[1])]
        self._on_host = [(arrivals[number], there[number]) for number in chosen]
        self._host_layers += len(chosen)
        self._device_layers += len(arrivals) - len(chosen)
        return frozenset(chosen)

    def is_for_host(self, arrival: PartialAdapter, layer: int, tokens: int) -> bool:
        """Decide who computes what an adapter adds to a layer for so many tokens, when its turn comes."""
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

    def deal(self, parts: Sequence[HostRows]) -> RowAssignment:
        """See ``HostLoraSide``."""
        return self.pool.deal(parts)

    def submit(self, layer: int, x: Tensor, deal: RowAssignment | None) -> None:
        """See ``HostLoraSide``."""
        if deal is not None:
            self.pool.submit(layer, x, deal)
        self.pool.ring.signal_turn(self._turn, 0 if deal is None else self.pool.ticket)

    def add_to(self, qkv: Tensor) -> None:
        """See ``HostLoraSide``."""
        self.pool.add_to(qkv)
        self._host_layers_after_arrival += sum(
            others_had_it and arrival.arrived_s(self._layer) < self._decided_s
            for arrival, others_had_it in self._on_host
        )

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    # --- a layer is there when every rank has it -----------------------------------------------------

    def _has(self, arrival: PartialAdapter, layer: int) -> bool:
        return arrival.has(layer) and self._others_have(arrival, layer)

    def _others_have(self, arrival: PartialAdapter, layer: int) -> bool:
        needed = arrival.needed[layer]
        return all(blocks >= needed for blocks in self._others(arrival)) if needed else True

    def _others(self, arrival: PartialAdapter) -> Iterator[int]:
        """Yield how many blocks of a transfer have arrived with each of the other ranks; -1: no more will."""
        ring = self.pool.ring
        return (ring.arrived(rank, arrival.transfer_id) for rank in range(1, ring.shape.ranks))

    def _wait_for(self, arrival: PartialAdapter, layer: int, timeout_s: float | None = None) -> bool:
        """Block until a layer has arrived everywhere; False if it never will, or has not in time.

        Others are waited for no longer than workers are: one that has died tells nothing, and the next sum finds out.
        """
        began_s = time.monotonic()
        if not arrival.wait_for(layer, timeout_s):
            return False
        until_s = time.monotonic() + TIMEOUT_S if timeout_s is None else began_s + timeout_s
        while not self._others_have(arrival, layer):
            if time.monotonic() >= until_s or min(self._others(arrival)) < 0:
                return False
            nap()
        return True


_T = TypeVar("_T")


class HostLoraFollower:
    """Like ``HostLoraLeader``, on the other ranks: follows what rank 0 decided.

    It cannot wait for ever: this process ends with that of rank 0.

    Args:
        ring: of rank 0; owned by this object from now on.
        rank: whose columns of y are read.
    """

    def __init__(self, ring: Ring, rank: int) -> None:
        self._ring = ring
        self._y = y_of(ring, rank)
        self._turn = 0
        self._ticket = 0
        self._submitted: RowAssignment | None = None

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[PartialAdapter]) -> Iterator[AssistedStep]:
        """See ``HostLoraSide``."""
        yield AssistedStep(self, lora, arrivals)

    def choose(self, arrivals: Sequence[PartialAdapter], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return what rank 0 has chosen, once it has."""
        self._turn += 1
        self._ticket = _wait(lambda: self._ring.turn(self._turn))
        if not self._ticket:
            return frozenset()
        description = self._ring.description(self._ticket)
        assert description is not None, "rank 0 waits for this rank before it goes on"
        slices = self._ring.cut(description[1])
        assert slices is not None
        return frozenset(part.adapter for part in slices)

    def deal(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Return where this rank finds what workers make of these rows."""
        return RowAssignment(parts, 0, [], 0, self._y)

    def submit(self, layer: int, x: Tensor, deal: RowAssignment | None) -> None:
        """Do nothing: rank 0 has the same x, and submits it."""
        self._submitted = deal

    def add_to(self, qkv: Tensor) -> None:
        """See ``HostLoraSide``."""
        assert self._submitted is not None
        _wait(lambda: self._ring.has_all(self._ticket) or None)
        for part, y in zip(self._submitted.parts, self._submitted.y[self._ring.slot(self._ticket)], strict=True):
            qkv[part.start : part.stop].add_(y)

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()


def _wait(look: Callable[[], _T | None]) -> _T:
    """Return what is seen as soon as there is something."""
    rests = Backoff()
    while True:
        for _ in range(LOOKS):
            if (seen := look()) is not None:
                return seen
        rests.rest()
