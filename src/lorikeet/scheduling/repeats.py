"""For how many identical decode steps one plan may hold."""

from collections.abc import Iterable

from lorikeet.memory.memory import Memory
from lorikeet.scheduling.sequence import Sequence


def lease_ahead(sequences: Iterable[Sequence], steps: int, memory: Memory, now: float) -> bool:
    """Lease the blocks that so many decode steps need, where single steps would lease them one by one.

    Returns:
        False if there is no room; nothing is leased then.
    """
    wanted = [(sequence.lease, len(sequence.token_ids) + steps - 1) for sequence in sequences]
    blocks = sum(max(0, memory.blocks_for(tokens) - len(lease.blocks)) for lease, tokens in wanted if lease)
    if not memory.room.make(blocks, 0, now):
        return False
    for lease, tokens in wanted:
        assert lease is not None
        memory.try_grow(lease, tokens, now)
    return True
