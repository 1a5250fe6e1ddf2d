"""KV that goes from one engine to another: it leaves from the host tier, and comes to the host tier.

What a sequence has computed is in the tree once its lease was given back (``Memory.suspend``). Here it is held where it
is until the host has all of it; at its new engine it hangs in the tree as if it had been displaced from the device
there, so that the sequence finds it by its keys like any other.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lorikeet.core.ids import BlockId
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import NodeTransfer


class KvMigration:
    """See the module.

    Args:
        tiers: where everything is.
        room: finds room on the host.
        leases: of the memory.
    """

    def __init__(self, tiers: Tiers, room: Evictor, leases: set[SequenceLease]) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = room
        self._leases = leases
        self._exporting: dict[int, list[SequenceLease]] = {}

    def begin_export(self, adapter: int, keys: Sequence[bytes], now: float) -> SequenceLease:
        """Hold the KV that is found for a sequence, and begin to copy to the host what is not there.

        The lease has no block table. When it is ready :meth:`exported_blocks` says what can be read; ``Memory.release``
        gives it back.

        Args:
            adapter: node of the version.
            keys: of the whole blocks of the sequence.
            now: the time.
        """
        lease = SequenceLease(adapter, path=self._tree.match(keys), keys=list(keys))
        self._leases.add(lease)
        self._tiers.pin([adapter, *lease.path])
        away = [node for node in lease.path if not self._tree.on_host[node]]
        self._evictor.copy_to_host([node for node in away if node not in self._tiers.transfer_of], now)
        for node in away:
            inflight = self._tiers.transfer_of.get(node)
            if inflight is None:
                break
            lease.kv_transfers.add(inflight.transfer.transfer_id)
        for transfer_id in lease.kv_transfers:
            self._exporting.setdefault(transfer_id, []).append(lease)
        return lease

    def transfer_ended(self, transfer_id: int) -> None:
        """A transfer has ended."""
        for lease in self._exporting.pop(transfer_id, ()):
            lease.kv_transfers.discard(transfer_id)

    def exported_blocks(self, lease: SequenceLease) -> list[BlockId]:
        """Return the host blocks of what has been gathered: of a sequence's first blocks, up to one that has failed."""
        there = takewhile(lambda node: self._tree.on_host[node], lease.path)
        return self._tiers.host_blocks(list(there))

    def import_kv(self, adapter: int, keys: Sequence[bytes], now: float) -> list[tuple[int, BlockId]]:
        """Find room on the host for KV that comes from elsewhere; whoever calls writes it before anything else happens.

        What is known here stays as it is, and what lies behind the first block that finds no room is left out.

        Args:
            adapter: node of the version.
            keys: of the first blocks of a sequence.
            now: the time.

        Returns:
            Which of ``keys`` to write, and where.
        """
        tree, room = self._tree, self._evictor
        path, places = [adapter, *tree.match(keys)], []
        self._tiers.pin(path)
        for index in range(len(path) - 1, len(keys)):
            node = tree.find(keys[index])
            if node is None:
                ((node,),) = tree.add_kv([path[-1]], [[keys[index]]], now)
            is_known = tree.on_host[node] or tree.on_device[node] or tree.moving[node] != NodeTransfer.NO
            self._tiers.pin([node])  # or it would be forgotten with what is below it when that makes room
            if not is_known:  # what is, lies behind a block that was lost
                if not room.make_host_room_for_kv():
                    self._tiers.unpin([node])
                    room.forget_if_empty([node])
                    break
                block = self._tiers.host.lease(1)[0]
                self._tiers.adopt_on_host(node, block)
                places.append((index, block))
            path.append(node)
        self._tiers.unpin(path)
        room.rescore(np.asarray(path), now)
        return places
