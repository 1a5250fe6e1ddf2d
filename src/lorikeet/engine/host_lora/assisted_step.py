"""What the decoder asks about adapters that are still on their way: who computes what they add, layer by layer.

TOPPINGS, section 4.1: the device computes on layers that have arrived, the host on the others. For each request, layer
and module exactly one of them does. Under tensor parallelism rank 0 decides, and the others do as it does.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor

from lorikeet.engine.arrival import Arrival
from lorikeet.engine.host_lora.pool import Deal, HostRows
from lorikeet.kernels.base import LoraBatch, LoraSegment


class HostSide(Protocol):
    """The host's part of assisted steps, as one rank sees it. Calls for a layer come in the order that they have here.

    All ranks make the same calls but for ``deal``, which is made once for each choice in a step.
    """

    def assisting(self, lora: LoraBatch, arrivals: Sequence[Arrival]) -> AbstractContextManager["AssistedStep"]:
        """Begin a step under adapters that are on their way, and end it.

        Args:
            lora: all adapters of the batch.
            arrivals: of those that are on their way; each has its ``weights`` in a segment of ``lora``.
        """
        ...

    def choose(self, arrivals: Sequence[Arrival], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return for which of the adapters, with so many tokens each, the host computes a layer."""
        ...

    def deal(self, parts: Sequence[HostRows]) -> Deal:
        """Prepare what the host is to compute."""
        ...

    def submit(self, layer: int, x: Tensor, deal: Deal | None) -> None:
        """Let it begin with rows of ``x [T, in]``; None: there is nothing on this layer."""
        ...

    def add_to(self, qkv: Tensor) -> None:
        """Wait for what was submitted, and add it to its rows of ``qkv [T, out]``."""
        ...


class _Shares(NamedTuple):
    """Who adds what on a layer: adapters for the device, rows for the host; None for none."""

    device: LoraBatch | None
    host: Deal | None


class AssistedStep:
    """See ``kernels.base.Assist``. Made by :meth:`HostSide.assisting`."""

    def __init__(self, host: HostSide, lora: LoraBatch, arrivals: Sequence[Arrival]) -> None:
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
