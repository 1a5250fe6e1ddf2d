"""What a rank knows of the adapters in its device arena."""

import threading

from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.executor import ExecutorError
from lorikeet.kernels.base import LoraWeights


class LoadedAdapters:
    """Where weights lie. The end of a transfer counts only if no eviction and no newer transfer came after it began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[AdapterDigest, int] = {}
        self._weights: dict[AdapterDigest, LoraWeights] = {}

    def expect(self, digest: AdapterDigest, transfer_id: int) -> None:
        """Note that a transfer brings an adapter; what an earlier one brought is forgotten."""
        with self._lock:
            self._expected[digest] = transfer_id
            self._weights.pop(digest, None)

    def arrived(self, digest: AdapterDigest, transfer_id: int, weights: LoraWeights) -> None:
        """Note what a transfer has brought, if it is still the one that is expected."""
        with self._lock:
            if self._expected.get(digest) == transfer_id:
                del self._expected[digest]
                self._weights[digest] = weights

    def failed(self, digest: AdapterDigest, transfer_id: int) -> None:
        """Note that a transfer will bring nothing."""
        with self._lock:
            if self._expected.get(digest) == transfer_id:
                del self._expected[digest]

    def evict(self, digest: AdapterDigest) -> None:
        """Forget an adapter, and whatever is on its way."""
        with self._lock:
            self._expected.pop(digest, None)
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
