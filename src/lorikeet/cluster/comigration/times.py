"""What the problem must know of time: how long requests of an adapter take, and what it takes to move one."""

from collections.abc import Callable

from lorikeet.core.ids import AdapterDigest

TOKEN_ID_BYTES = 4


class AdapterTimes:
    """Mean execution times of finished requests, by adapter.

    Args:
        remaining: expect of a request that has run for some time what is left of the mean, instead of the mean.
    """

    def __init__(self, remaining: bool = False) -> None:
        self._remaining = remaining
        self._sums: dict[AdapterDigest | None, tuple[int, float]] = {}
        self._all = (0, 0.0)

    def note(self, adapter: AdapterDigest | None, execution_s: float) -> None:
        """Take a finished request in; None: of the base model."""
        count, total_s = self._sums.get(adapter, (0, 0.0))
        self._sums[adapter] = count + 1, total_s + execution_s
        self._all = self._all[0] + 1, self._all[1] + execution_s

    def forget(self, adapter: AdapterDigest) -> None:
        """Drop an adapter that is gone; what its requests took still counts for adapters of which none has ended."""
        self._sums.pop(adapter, None)

    def expected_s(self, adapter: AdapterDigest | None, executed_s: float) -> float:
        """Return how long a request is expected to take: as others of its adapter, else as any others, else 0.

        Args:
            adapter: which it needs.
            executed_s: how long it has run.
        """
        count, total_s = self._sums.get(adapter, self._all)
        mean_s = total_s / count if count else 0.0
        return max(mean_s - executed_s, 0.0) if self._remaining else mean_s


def rebuild_s(known_tokens: int, prefill_s: Callable[[int], float], link_bytes_per_s: float) -> float:
    """Return what moving a request takes: its token ids travel, and the target computes their KV.

    Args:
        known_tokens: of prompt and answer so far.
        prefill_s: how long a prefill of so many tokens takes at a replica.
        link_bytes_per_s: between replicas.
    """
    return known_tokens * TOKEN_ID_BYTES / link_bytes_per_s + prefill_s(known_tokens)
