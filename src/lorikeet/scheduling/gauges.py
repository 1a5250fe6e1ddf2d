"""How many requests of an engine are in which state."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from lorikeet.scheduling.sequence import Sequence


class Gauges(NamedTuple):
    """Of one moment.

    Attributes:
        running: sequences that hold blocks and can run.
        waiting: all other requests.
        waiting_for_adapter: sequences that hold blocks and wait for their adapter.
        waiting_for_kv: those that hold blocks and wait for nothing but KV.
        ahead_of_adapter: those that wait for their adapter, and whose prefill is done all the same.
    """

    running: int
    waiting: int
    waiting_for_adapter: int
    waiting_for_kv: int
    ahead_of_adapter: int

    @classmethod
    def of(cls, admitted: Seq[Sequence], requests: int) -> "Gauges":
        """Count them.

        Args:
            admitted: sequences that hold blocks.
            requests: in all.
        """
        running = sum(s.can_run for s in admitted)
        leases = [(s, s.lease) for s in admitted if s.lease is not None]
        return cls(
            running=running,
            waiting=requests - running,
            waiting_for_adapter=sum(bool(lease.adapter_transfers) and not s.is_cold for s, lease in leases),
            waiting_for_kv=sum(bool(lease.kv_transfers) and not lease.adapter_transfers for _, lease in leases),
            ahead_of_adapter=sum(s.is_ahead for s in admitted),
        )
