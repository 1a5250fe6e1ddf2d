"""How loaded replicas are: one array per counter, so that a policy looks at all replicas at once."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


class Ranks:
    """Ranks of a changing set of requests: how many have one, the largest, the sum. Requests without one are ignored.

    The largest is looked for only when the last request of that rank leaves, and only among distinct ranks.
    """

    __slots__ = ("_counts", "largest", "rows", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.rows = 0
        self.largest = 0
        self.total = 0

    def add(self, rank: int) -> None:
        """Count one more request of that rank."""
        if rank:
            self._counts[rank] = self._counts.get(rank, 0) + 1
            self.rows += 1
            self.total += rank
            self.largest = max(self.largest, rank)

    def remove(self, rank: int) -> None:
        """Count one less."""
        if rank:
            self._counts[rank] -= 1
            self.rows -= 1
            self.total -= rank
            if not self._counts[rank]:
                del self._counts[rank]
                if rank == self.largest:
                    self.largest = max(self._counts, default=0)


class Loads:
    """Counters by replica, in the fleet's order. Arrays are replaced when a replica joins or leaves.

    Attributes:
        requests: all that are there: running, queued and others.
        running, queued: those known one by one.
        others: those that a replica counts and nobody here has sent; nothing else is known of them.
        rows, largest_rank, total_rank: of running and queued requests that have an adapter.
        queued_rows, queued_largest_rank, queued_total_rank: of queued ones.
        prefill_tokens: of requests that have not yielded a token since they were queued.
        decode_tokens: that are expected and not yet generated.
        queued_s: execution time of the queued requests, one after another, as expected when they were sent.
        held_tokens: of running requests.
        queued_tokens: of queued ones, which hold no room yet.
        room_tokens: what running requests could hold altogether; all of it while there are none, since whatever fills
            it then is nobody's.
        total_tokens: room of an empty replica.
        max_batch: most requests in a step.
        kv_token_bytes: of a token of KV, 0 if unknown.
        tokens_per_byte: one over it, 0 if unknown.
    """

    _FIELDS = (
        "requests",
        "running",
        "queued",
        "others",
        "rows",
        "largest_rank",
        "total_rank",
        "queued_rows",
        "queued_largest_rank",
        "queued_total_rank",
        "prefill_tokens",
        "decode_tokens",
        "queued_s",
        "held_tokens",
        "queued_tokens",
        "room_tokens",
        "total_tokens",
        "max_batch",
        "kv_token_bytes",
        "tokens_per_byte",
    )

    requests: Numbers
    running: Numbers
    queued: Numbers
    others: Numbers
    rows: Numbers
    largest_rank: Numbers
    total_rank: Numbers
    queued_rows: Numbers
    queued_largest_rank: Numbers
    queued_total_rank: Numbers
    prefill_tokens: Numbers
    decode_tokens: Numbers
    queued_s: Numbers
    held_tokens: Numbers
    queued_tokens: Numbers
    room_tokens: Numbers
    total_tokens: Numbers
    max_batch: Numbers
    kv_token_bytes: Numbers
    tokens_per_byte: Numbers

    def __init__(self) -> None:
        self._replace(lambda _: np.zeros(0))

    def append(self, total_tokens: float, max_batch: int, kv_token_bytes: float) -> None:
        """Add an empty replica behind the others."""
        self._replace(lambda counter: np.append(counter, 0.0))
        self.room_tokens[-1] = self.total_tokens[-1] = total_tokens
        self.max_batch[-1], self.kv_token_bytes[-1] = max_batch, kv_token_bytes
        self.tokens_per_byte[-1] = 1 / kv_token_bytes if kv_token_bytes else 0.0

    def delete(self, index: int) -> None:
        """Take a replica out; those behind it move up."""
        self._replace(lambda counter: np.delete(counter, index))

    def _replace(self, change: Callable[[Numbers], Numbers]) -> None:
        for field in self._FIELDS:
            setattr(self, field, change(getattr(self, field, np.zeros(0))))

    @property
    def free_tokens(self) -> Numbers:
        """Room that neither running requests hold nor queued ones will take for the tokens that they have."""
        return self.room_tokens - self.held_tokens - self.queued_tokens

    @property
    def pending_tokens(self) -> Numbers:
        """Tokens to prefill and tokens to generate."""
        return self.prefill_tokens + self.decode_tokens

    def set_ranks(self, index: int, ranks: Ranks) -> None:
        """Write down the ranks of all requests of a replica."""
        self.rows[index], self.largest_rank[index], self.total_rank[index] = ranks.rows, ranks.largest, ranks.total

    def set_queued_ranks(self, index: int, ranks: Ranks) -> None:
        """Write down the ranks of the queued ones."""
        self.queued_rows[index] = ranks.rows
        self.queued_largest_rank[index], self.queued_total_rank[index] = ranks.largest, ranks.total
