"""Exports KV to other engines and imports KV from them, from host tier to host tier.

The KV of a sequence is in the tree once its lease was released with ``Memory.suspend``. An export pins the KV and
copies missing KV to the host. The importing engine adds the KV to its tree on the host tier, as if it had been evicted
from the device, so that the sequence finds the KV by its keys.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lorikeet.core.ids import BlockId
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.snapshots import Snapshots
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import NodeTransfer


class KvMigration:
    """Exports and imports the KV of sequences.

    Args:
        tiers: holds blocks and transfers.
        evictor: frees host blocks.
        leases: the leases of the memory, changed in place.
        snapshots: finds the snapshot from which the importing engine continues, if layers have a state.
    """

    def __init__(self, tiers: Tiers, evictor: Evictor, leases: dict[SequenceLease, None], snapshots: Snapshots) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = evictor
        self._leases = leases
        self._snapshots = snapshots
        self._exporting: dict[int, list[SequenceLease]] = {}

    def begin_export(self, adapter: int, keys: Sequence[bytes], now: float) -> SequenceLease:
        """Pin the cached KV of a sequence, and begin to copy KV that is missing on the host.

        Args:
            adapter: node of the adapter version.
            keys: keys of the whole blocks of the sequence.
            now: the time.

        Returns:
            A lease without a block table. Once the lease is ready, :meth:`exported_blocks` returns the blocks to read.
            ``Memory.release`` releases the lease.
        """
        path, chain = self._snapshots.usable(self._tree.match(keys), keys)
        keys = [self._tree.key_of(node) for node in (*path, *chain)]
        lease = SequenceLease(adapter, path=[*path, *chain], keys=keys)
        self._leases[lease] = None
        self._tiers.pin([adapter, *lease.path])
        uncopied = [node for node in lease.path if not self._tree.on_host[node]]
        self._evictor.copy_to_host([node for node in uncopied if node not in self._tiers.transfer_of], now)
        for node in uncopied:
            inflight = self._tiers.transfer_of.get(node)
            if inflight is None:
                break
            lease.kv_transfers.add(inflight.transfer.transfer_id)
        for transfer_id in lease.kv_transfers:
            self._exporting.setdefault(transfer_id, []).append(lease)
        return lease

    def transfer_ended(self, transfer_id: int) -> None:
        """Record for the waiting exports that a transfer has ended."""
        for lease in self._exporting.pop(transfer_id, ()):
            lease.kv_transfers.discard(transfer_id)

    def exported_blocks(self, lease: SequenceLease) -> list[BlockId]:
        """Return the host blocks of an export, up to the first block whose copy has failed."""
        there = takewhile(lambda node: self._tree.on_host[node], lease.path)
        return self._tiers.host_blocks(list(there))

    def import_kv(self, adapter: int, keys: Sequence[bytes], now: float) -> list[tuple[int, BlockId]]:
        """Lease host blocks for KV that another engine has computed.

        The caller writes these blocks before anything else runs.

        Blocks that are already cached are not changed. If the host is full, the rest of the sequence is left out.

        Args:
            adapter: node of the adapter version.
            keys: keys of the leading blocks of a sequence.
            now: the time.

        Returns:
            Index in ``keys`` and host block of each block to write.
        """
        tree = self._tree
        evictor = self._evictor
        path = [adapter, *tree.match(keys)]
        places = []
        self._tiers.pin(path)
        for index in range(len(path) - 1, len(keys)):
            node = tree.find(keys[index])
            if node is None:
                ((node,),) = tree.add_kv([path[-1]], [[keys[index]]], now)
            is_known = tree.on_host[node] or tree.on_device[node] or tree.moving[node] != NodeTransfer.NO
            self._tiers.pin([node])  # keeps the KV in the tree while host blocks are freed
            if not is_known:  # a known block lies behind a block that was lost
                if not evictor.free_host_for_kv():
                    self._tiers.unpin([node])
                    evictor.remove_empty([node])
                    break
                block = self._tiers.host.lease(1)[0]
                self._tiers.adopt_on_host(node, block)
                places.append((index, block))
            path.append(node)
        self._tiers.unpin(path)
        evictor.rescore(np.asarray(path), now)
        return places
