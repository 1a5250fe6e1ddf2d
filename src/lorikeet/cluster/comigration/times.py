"""What the problem must know of time: what it takes to move a request."""

from collections.abc import Callable
from typing import NamedTuple

TOKEN_ID_BYTES = 4


def rebuild_s(known_tokens: int, prefill_s: Callable[[int], float], link_bytes_per_s: float) -> float:
    """Return what moving a request takes: its token ids travel, and the target computes their KV.

    Args:
        known_tokens: of prompt and answer so far.
        prefill_s: how long a prefill of so many tokens takes at a replica.
        link_bytes_per_s: between replicas.
    """
    return sent_s(known_tokens, link_bytes_per_s) + prefill_s(known_tokens)


def sent_s(known_tokens: int, link_bytes_per_s: float) -> float:
    """Return what moving a request takes that has no KV yet: its token ids travel."""
    return known_tokens * TOKEN_ID_BYTES / link_bytes_per_s


class MoveTimes(NamedTuple):
    """How long requests take to move if each does what takes less time.

    Attributes:
        prefill_s, link_bytes_per_s: see :func:`rebuild_s`.
        kv_token_bytes: of KV.
        kv_bytes_per_s: how fast KV travels from device to device at present; None if it cannot.
    """

    prefill_s: Callable[[int], float]
    link_bytes_per_s: float
    kv_token_bytes: float
    kv_bytes_per_s: Callable[[], float] | None

    def rebuilt_s(self, known_tokens: int) -> float:
        """Return it with the KV computed anew."""
        return rebuild_s(known_tokens, self.prefill_s, self.link_bytes_per_s)

    def carried_s(self, known_tokens: int) -> float:
        """Return it with the KV taken along, but that of the last token; infinity if that cannot be."""
        if self.kv_bytes_per_s is None:
            return float("inf")
        return known_tokens * self.kv_token_bytes / self.kv_bytes_per_s() + self.prefill_s(1)

    def carries(self, known_tokens: int) -> bool:
        """Whether KV is better taken along."""
        return self.carried_s(known_tokens) < self.rebuilt_s(known_tokens)

    def move_s(self, known_tokens: int) -> float:
        """Return what the move of a request with so many tokens, prompt and answer so far, takes."""
        return min(self.carried_s(known_tokens), self.rebuilt_s(known_tokens))
