"""What the decoder asks about adapters that are still on their way: who computes what they add, layer by layer.

TOPPINGS, section 4.1: the device computes on layers that have arrived, the host on the others. For each request, layer
and module exactly one of them does.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from lorikeet.engine.arrival import Arrival
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.host_lora.pool import Deal, HostPool, HostRows
from lorikeet.engine.host_lora.worker import HostAdapter
from lorikeet.kernels.base import LoraBatch, LoraSegment
from lorikeet.rows import HostLayers
from lorikeet.scheduling.coldstart.costs import ASSISTED_MODULES, AssistCosts


class AssistCounters(NamedTuple):
    """What has happened in assisted steps.

    Attributes:
        host_layers, device_layers: layers of adapters on their way, by who has computed what they add.
        host_layers_after_arrival: of the former, those that had arrived when it was decided.
        rescued_slices: of host layers, slices that the rank has computed itself.
        lost_workers: workers that have ended unasked.
    """

    host_layers: int
    device_layers: int
    host_layers_after_arrival: int
    rescued_slices: int
    lost_workers: int


class HostLora:
    """Runs the host's share of assisted steps.

    Args:
        pool: the workers; owned by this object from now on.
        layers: on which layers the host computes.
        costs: say what is worth waiting for.
    """

    def __init__(self, pool: HostPool, layers: HostLayers, costs: AssistCosts) -> None:
        self.pool = pool
        self._costs = costs
        self.host_layers = 0
        self.device_layers = 0
        self.host_layers_after_arrival = 0
        self._layers = layers

    @property
    def counters(self) -> AssistCounters:
        """So far."""
        return AssistCounters(
            self.host_layers,
            self.device_layers,
            self.host_layers_after_arrival,
            self.pool.rescued_slices,
            self.pool.lost_workers,
        )

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[Arrival]) -> Iterator["AssistedStep"]:
        """Begin a step under adapters that are on their way, and end it.

        Args:
            lora: all adapters of the batch.
            arrivals: of those that are on their way; each has its ``weights`` in a segment of ``lora``.

        Raises:
            ExecutorError: one of them changes modules that the host does not compute.
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

    def is_for_host(self, arrival: Arrival, layer: int, tokens: int) -> bool:
        """Decide who computes what an adapter adds to a layer for so many tokens, when its turn comes."""
        if self._layers is not HostLayers.STATIC and arrival.has(layer):
            return False
        if self._layers is HostLayers.DYNAMIC:
            return True
        if self._layers is HostLayers.PATIENT:
            costs = self._costs
            spare_s = costs.host_layer_s(tokens, costs.rank(arrival.ref)) - costs.device_layer_s(tokens)
            is_near = spare_s > 0 and arrival.due_s(layer) - time.monotonic() < spare_s
            return not (is_near and arrival.wait_for(layer, spare_s))
        return arrival.comes_last(layer) or not arrival.wait_for(layer)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


class _Shares(NamedTuple):
    """Who adds what on a layer: adapters for the device, rows for the host; None for none."""

    device: LoraBatch | None
    host: Deal | None


class AssistedStep:
    """See ``kernels.base.Assist``. Made by :meth:`HostLora.assisting`."""

    def __init__(self, host: HostLora, lora: LoraBatch, arrivals: Sequence[Arrival]) -> None:
        self._host = host
        self._arrivals = arrivals
        numbers = {id(arrival.weights): number for number, arrival in enumerate(arrivals)}
        self._segments: list[tuple[LoraSegment, int | None]] = [
            (segment, numbers.get(id(segment.weights))) for segment in lora.segments
        ]
        self._tokens = Counter[int | None]()
        for segment, number in self._segments:
            self._tokens[number] += segment.stop - segment.start
        self._form = lora.form
        self._shares: dict[frozenset[int], _Shares] = {frozenset(): _Shares(lora, None)}
        self._on_host: frozenset[int] = frozenset()
        self._share = self._shares[self._on_host]
        self._decided_s = 0.0
        self._layer = 0

    def begin(self, layer: int, x: Tensor) -> LoraBatch | None:
        """Give the host its rows, and return the adapters that the device adds to q, k and v; None for none."""
        host = self._host
        self._layer, self._decided_s = layer, time.monotonic()
        self._on_host = frozenset(
            number
            for number, arrival in enumerate(self._arrivals)
            if host.is_for_host(arrival, layer, self._tokens[number])
        )
        host.host_layers += len(self._on_host)
        host.device_layers += len(self._arrivals) - len(self._on_host)
        if self._on_host not in self._shares:
            self._shares[self._on_host] = self._shared_out()
        self._share = self._shares[self._on_host]
        if self._share.host is not None:
            host.pool.submit(layer, x, self._share.host)
        return self._share.device

    def finish(self, qkv: Tensor) -> None:
        """Add to ``qkv`` what the host has computed."""
        if self._share.host is None:
            return
        host = self._host
        host.pool.add_to(qkv)
        host.host_layers_after_arrival += sum(
            self._arrivals[number].arrived_s(self._layer) < self._decided_s for number in self._on_host
        )

    def _shared_out(self) -> _Shares:
        """Deal out the segments, those of the adapters that are the host's to the host."""
        on_host, on_device = [], []
        for segment, number in self._segments:
            if number is not None and number in self._on_host:
                on_host.append(HostRows(number, segment.start, segment.stop))
            else:
                on_device.append(segment)
        device = LoraBatch(on_device, self._form) if on_device else None
        return _Shares(device, self._host.pool.deal(on_host))
