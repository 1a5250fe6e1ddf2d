"""The host's part of assisted steps on rank 0, which decides which layers the host computes.

On a layer that has not arrived with every rank the host does; ``HostLayers`` has other rules, too.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lorikeet.core.messages import AssistCounters
from lorikeet.engine.arrival import Arrival
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.host_lora.assisted_step import AssistedStep
from lorikeet.engine.host_lora.polling import nap
from lorikeet.engine.host_lora.pool import TIMEOUT_S, Deal, HostPool, HostRows
from lorikeet.engine.host_lora.worker import HostAdapter
from lorikeet.kernels.base import LoraBatch
from lorikeet.presets import HostLayers
from lorikeet.scheduling.coldstart.costs import ASSISTED_MODULES, AssistCosts


class HostLora:
    """See the module, and ``assisted_step.HostSide``.

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
        self._on_host: list[tuple[Arrival, bool]] = []
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
    def assisting(self, lora: LoraBatch, arrivals: Sequence[Arrival]) -> Iterator[AssistedStep]:
        """See ``HostSide``.

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

    def choose(self, arrivals: Sequence[Arrival], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """See ``HostSide``."""
        self._turn += 1
        self._layer, self._decided_s = layer, time.monotonic()
        there = [self._others_have(arrival, layer) for arrival in arrivals]
        counts = list(zip(arrivals, tokens, strict=True))
        chosen = [number for number, each in enumerate(counts) if self.is_for_host(each[0], layer, each[1])]
        self._on_host = [(arrivals[number], there[number]) for number in chosen]
        self._host_layers += len(chosen)
        self._device_layers += len(arrivals) - len(chosen)
        return frozenset(chosen)

    def is_for_host(self, arrival: Arrival, layer: int, tokens: int) -> bool:
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

    def deal(self, parts: Sequence[HostRows]) -> Deal:
        """See ``HostSide``."""
        return self.pool.deal(parts)

    def submit(self, layer: int, x: Tensor, deal: Deal | None) -> None:
        """See ``HostSide``."""
        if deal is not None:
            self.pool.submit(layer, x, deal)
        self.pool.ring.signal_turn(self._turn, 0 if deal is None else self.pool.ticket)

    def add_to(self, qkv: Tensor) -> None:
        """See ``HostSide``."""
        self.pool.add_to(qkv)
        self._host_layers_after_arrival += sum(
            others_had_it and arrival.arrived_s(self._layer) < self._decided_s
            for arrival, others_had_it in self._on_host
        )

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    # --- a layer is there when every rank has it -----------------------------------------------------

    def _has(self, arrival: Arrival, layer: int) -> bool:
        return arrival.has(layer) and self._others_have(arrival, layer)

    def _others_have(self, arrival: Arrival, layer: int) -> bool:
        needed = arrival.needed[layer]
        return all(blocks >= needed for blocks in self._others(arrival)) if needed else True

    def _others(self, arrival: Arrival) -> Iterator[int]:
        """Yield how many blocks of a transfer have arrived with each of the other ranks; -1: no more will."""
        ring = self.pool.ring
        return (ring.arrived(rank, arrival.transfer_id) for rank in range(1, ring.shape.ranks))

    def _wait_for(self, arrival: Arrival, layer: int, timeout_s: float | None = None) -> bool:
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
