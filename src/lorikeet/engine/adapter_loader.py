"""Transfers of adapters into arena blocks, beside the steps."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.weights import load_weights
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import AdapterLoad, AdapterLoadDone
from lorikeet.engine.cores import compute_alone
from lorikeet.engine.executor import ExecutorError
from lorikeet.kernels.base import LoraWeights
from lorikeet.memory.adapter_blocks import weights_in_place, write_pieces
from lorikeet.memory.packing import pack

_LOG = logging.getLogger(__name__)


class AdapterLoader:
    """Reads adapters on threads of its own and knows which are in the arena of this rank.

    The blocks of a load belong to it until it is reported, so writing them needs no lock; nobody is told of its
    weights before.

    Args:
        arena: ``[blocks, elements]``.
        geometry: sizes of this rank's share of the model.
        rank, size: which share of how many.
        threads: loads that run at once.
        on_done: called on a loader thread with every load that has ended, well or not.
    """

    def __init__(
        self,
        arena: Tensor,
        geometry: ModelGeometry,
        rank: int,
        size: int,
        threads: int,
        on_done: Callable[[AdapterLoadDone], None],
    ) -> None:
        self._arena = arena
        self._geometry = geometry
        self._rank = rank
        self._size = size
        self._on_done = on_done
        self._threads = ThreadPoolExecutor(threads, "adapter-load", initializer=compute_alone)
        self._lock = threading.Lock()
        self._generations: dict[AdapterDigest, int] = {}
        self._weights: dict[AdapterDigest, LoraWeights] = {}

    def start(self, load: AdapterLoad) -> None:
        """Start a transfer; a newer one of the same adapter takes the place of an older."""
        with self._lock:
            self._generations[load.adapter.digest] = load.generation
            self._weights.pop(load.adapter.digest, None)
        self._threads.submit(self._run, load)

    def evict(self, digest: AdapterDigest) -> None:
        """Forget an adapter; a transfer of it that still runs will be reported, and not be used."""
        with self._lock:
            self._generations.pop(digest, None)
            self._weights.pop(digest, None)

    def weights(self, digest: AdapterDigest) -> LoraWeights:
        """Return where an adapter's weights lie.

        Raises:
            ExecutorError: it is not in the arena.
        """
        with self._lock:
            if digest not in self._weights:
                raise ExecutorError(f"adapter {digest} is used, but is not loaded")
            return self._weights[digest]

    def close(self) -> None:
        """Wait for the transfer that runs, abandon those that have not begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, load: AdapterLoad) -> None:
        ref, error = load.adapter, None
        started_s = time.monotonic()
        try:
            weights = self._transfer(load)
            with self._lock:
                if self._generations.get(ref.digest) == load.generation:
                    self._weights[ref.digest] = weights
        except Exception as problem:  # whatever is wrong with one adapter must not end the engine
            expected = isinstance(problem, AdapterError)
            _LOG.warning("adapter %s was not loaded: %s", ref.name, problem, exc_info=not expected)
            error = str(problem) or type(problem).__name__
            with self._lock:
                if self._generations.get(ref.digest) == load.generation:
                    del self._generations[ref.digest]
        self._on_done(AdapterLoadDone(ref.digest, load.generation, error, time.monotonic() - started_s))

    def _transfer(self, load: AdapterLoad) -> LoraWeights:
        packing = pack(load.adapter.ranks, self._geometry, self._arena.shape[1])
        if packing.blocks != len(load.blocks):
            raise ValueError(f"adapter {load.adapter.name!r} takes {packing.blocks} blocks, not {len(load.blocks)}")
        weights = load_weights(load.adapter, self._geometry, self._arena.dtype, self._rank, self._size)
        write_pieces(weights, packing, load.blocks, self._arena)
        return weights_in_place(packing, load.blocks, self._arena, self._geometry)
