"""What the problem must know of time: what it takes to move a request."""

from collections.abc import Callable

TOKEN_ID_BYTES = 4


def rebuild_s(known_tokens: int, prefill_s: Callable[[int], float], link_bytes_per_s: float) -> float:
    """Return what moving a request takes: its token ids travel, and the target computes their KV.

    Args:
        known_tokens: of prompt and answer so far.
        prefill_s: how long a prefill of so many tokens takes at a replica.
        link_bytes_per_s: between replicas.
    """
    return known_tokens * TOKEN_ID_BYTES / link_bytes_per_s + prefill_s(known_tokens)
