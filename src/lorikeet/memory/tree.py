"""The usage-dependency tree: adapters below the root, their KV below them (ELORA §V-A), with all it knows in arrays.

KV is useful only with the adapter version that made it, so it hangs below that version's node. A node of KV is one
block; its key is a hash chained from the adapter's digest over all tokens up to its end, so it can be found neither
under another adapter or version nor behind other tokens. The base model counts as an adapter without weights.

A node says where its bytes are (device, host, both, on their way); whoever moves them writes it down here. Numbers lie
in arrays by node, so that policies can score a hundred thousand nodes at once. Arrays are replaced when they grow: read
them through the tree.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, BlockId

NO_BLOCK = -1
NO_NODE = -1
BASE = 0
"""The base model's node. It has no weights, and counts as being on the device."""

_KEY_BYTES = 16
_FIRST_NODES = 1024

Nodes = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]


class NodeKind:
    """What a node stands for. Plain numbers, as they are compared with arrays and one by one, very often."""

    UNUSED: Final = 0
    """Nothing: the place is free."""
    BASE: Final = 1
    ADAPTER: Final = 2
    KV: Final = 3


class NodeTransfer:
    """Which transfer a node is part of."""

    NO: Final = 0
    IN: Final = 1
    """To the device; it has device blocks, which hold nothing yet."""
    OUT: Final = 2
    """From the device to the host; the device copy can still be read."""
    READ: Final = 3
    """From the source to the host."""


@dataclass(slots=True)
class AdapterNode:
    """What only adapters have.

    Attributes:
        ref: the version.
        host_size: blocks of its weights, in packing order.
        device_blocks: those leased for it on the device; more than ``host_size`` where slots are padded.
        host_blocks: those on the host.
        retired: it is to be freed; nothing may bring it back.
    """

    ref: AdapterRef
    host_size: int
    device_blocks: tuple[BlockId, ...] = ()
    host_blocks: tuple[BlockId, ...] = ()
    retired: bool = False


class DependencyTree:
    """See the module.

    Attributes:
        kind: :class:`NodeKind` of each node.
        parent: the node before it; ``NO_NODE`` for the base and adapters.
        top: the adapter (or the base) that it hangs below; of an adapter, itself.
        depth: 0 for adapters, 1 for their first blocks.
        size: blocks that it takes on the device: 1 for KV.
        device, host: block of KV on either tier, ``NO_BLOCK`` if it has none.
        device_generation, host_generation: of those blocks.
        on_device, on_host: whether what it stands for can be read there.
        moving: its :class:`NodeTransfer`.
        pins: sequences and transfers that need it where it is.
        children: nodes below it.
        children_on_device: those of them on the device, or on their way to it.
        last_use_s: when a request last matched or used it (moves do not count: ELORA spec, R19).
        visits: requests that matched it on arrival; a new node begins with 1.
        score: what the eviction policy last thought of it.
        touched: rises when something happens to it, so that older notes about it can be told.
        adapters: entries of adapters by node.
    """

    _FIELDS = (
        ("kind", np.int8, NodeKind.UNUSED),
        ("parent", np.int32, NO_NODE),
        ("top", np.int32, NO_NODE),
        ("depth", np.int32, 0),
        ("size", np.int32, 0),
        ("device", np.int32, NO_BLOCK),
        ("host", np.int32, NO_BLOCK),
        ("device_generation", np.int32, 0),
        ("host_generation", np.int32, 0),
        ("on_device", np.bool_, False),
        ("on_host", np.bool_, False),
        ("moving", np.int8, NodeTransfer.NO),
        ("pins", np.int32, 0),
        ("children", np.int32, 0),
        ("children_on_device", np.int32, 0),
        ("last_use_s", np.float64, 0.0),
        ("visits", np.float64, 0.0),
        ("score", np.float64, 0.0),
        ("touched", np.int32, 0),
    )

    kind: npt.NDArray[np.int8]
    parent: npt.NDArray[np.int32]
    top: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    size: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    host: npt.NDArray[np.int32]
    device_generation: npt.NDArray[np.int32]
    host_generation: npt.NDArray[np.int32]
    on_device: npt.NDArray[np.bool_]
    on_host: npt.NDArray[np.bool_]
    moving: npt.NDArray[np.int8]
    pins: npt.NDArray[np.int32]
    children: npt.NDArray[np.int32]
    children_on_device: npt.NDArray[np.int32]
    last_use_s: npt.NDArray[np.float64]
    visits: npt.NDArray[np.float64]
    score: npt.NDArray[np.float64]
    touched: npt.NDArray[np.int32]

    def __init__(self) -> None:
        for name, dtype, empty in self._FIELDS:
            setattr(self, name, np.full(_FIRST_NODES, empty, dtype))
        self.adapters: dict[int, AdapterNode] = {}
        self._by_digest: dict[AdapterDigest | None, int] = {None: BASE}
        self._by_key: dict[bytes, int] = {}
        self._keys: list[bytes] = [b""] * _FIRST_NODES
        self._free = array("i", range(_FIRST_NODES - 1, BASE, -1))
        self.kind[BASE], self.top[BASE], self.on_device[BASE] = NodeKind.BASE, BASE, True
        self._end = BASE + 1

    # --- looking -------------------------------------------------------------------------------------

    def adapter(self, digest: AdapterDigest | None) -> int | None:
        """Return the node of a version (None: the base), or None if it is not known."""
        return self._by_digest.get(digest)

    def digest(self, node: int) -> AdapterDigest | None:
        """Return the version that a node belongs to; None for the base."""
        top = int(self.top[node])
        return None if top == BASE else self.adapters[top].ref.digest

    def adapters_on_device(self) -> list[int]:
        """Return the adapters whose weights are on the device; few of all that are known."""
        return np.flatnonzero(self.on_device[: self._end] & (self.kind[: self._end] == NodeKind.ADAPTER)).tolist()

    def find(self, key: bytes) -> int | None:
        """Return the node of KV with this key, wherever its bytes are, if anywhere."""
        return self._by_key.get(key)

    def key_of(self, node: int) -> bytes:
        """Return what tells a node from others that had or will have its place."""
        entry = self.adapters.get(node)
        return self._keys[node] if entry is None else entry.ref.digest.encode()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the nodes of the longest prefix of ``keys`` whose KV is on a tier, or on its way to the device."""
        path: list[int] = []
        for key in keys:
            node = self._by_key.get(key)
            if node is None:
                break
            path.append(node)
        if path:
            there = self.on_device[path] | self.on_host[path] | (self.moving[path] == NodeTransfer.IN)
            if not there.all():
                del path[int(np.argmin(there)) :]
        return path

    @property
    def end(self) -> int:
        """No node has this index or a larger one."""
        return self._end

    def __len__(self) -> int:
        """Return the number of nodes, the base excluded."""
        return len(self._by_key) + len(self.adapters)

    def below(self, node: int) -> Iterator[int]:
        """Yield all nodes below an adapter or the base, parents before children."""
        mine = np.flatnonzero((self.top[: self._end] == node) & (self.kind[: self._end] == NodeKind.KV))
        yield from mine[np.argsort(self.depth[mine], kind="stable")].tolist()

    # --- growing and shrinking -----------------------------------------------------------------------

    def add_adapter(self, ref: AdapterRef, device_size: int, host_size: int) -> int:
        """Add a version that is on no tier yet."""
        (node,) = self._new(1)
        self.kind[node], self.top[node], self.size[node] = NodeKind.ADAPTER, node, device_size
        self.adapters[node] = AdapterNode(ref, host_size)
        self._by_digest[ref.digest] = node
        return node

    def add_kv(self, above: Sequence[int], keys: Sequence[Sequence[bytes]], now: float) -> list[list[int]]:
        """Add blocks of KV that are on no tier yet, in branches that do not fork.

        Args:
            above: what each branch begins below.
            keys: of each branch, one or more, each below the one before it.
            now: the time.

        Returns:
            The nodes of each branch.
        """
        flat = [key for mine in keys for key in mine]
        nodes = self._new(len(flat))
        self._by_key.update(zip(flat, nodes, strict=True))
        for node, key in zip(nodes, flat, strict=True):
            self._keys[node] = key
        counts = [len(mine) for mine in keys]
        ends = np.cumsum(counts)
        firsts, at = ends - counts, np.array(nodes, np.int64)
        parents = np.empty_like(at)
        parents[1:] = at[:-1]
        parents[firsts] = above
        self.kind[at], self.size[at], self.visits[at], self.last_use_s[at] = NodeKind.KV, 1, 1.0, now
        self.parent[at], self.top[at] = parents, np.repeat(self.top[above], counts)
        self.depth[at] = np.arange(1, len(at) + 1) + np.repeat(self.depth[above] - firsts, counts)
        np.add.at(self.children, parents, 1)
        return [nodes[first:end] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]

    def remove_adapter(self, node: int) -> None:
        """Take an adapter out that nothing is below and whose bytes are nowhere."""
        del self._by_digest[self.adapters.pop(node).ref.digest]
        self._unused([node])

    def remove_kv(self, nodes: Sequence[int]) -> None:
        """Take blocks of KV out whose bytes are nowhere; nothing is below them but what is taken out with them."""
        np.subtract.at(self.children, self.parent[np.asarray(nodes, np.int64)], 1)
        for node in nodes:
            del self._by_key[self._keys[node]]
            self._keys[node] = b""
        self._unused(nodes)

    def _new(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._grow()
        at = len(self._free) - count
        nodes = self._free[at:].tolist()
        del self._free[at:]
        nodes.reverse()
        self._end = max(self._end, max(nodes) + 1)
        return nodes

    def _unused(self, nodes: Sequence[int]) -> None:
        at = np.asarray(nodes, np.int64)
        touched = self.touched[at] + 1
        for name, _, empty in self._FIELDS:
            getattr(self, name)[at] = empty
        self.touched[at] = touched  # so that notes about what was there are told from those about what will be
        self._free.extend(nodes)

    def _grow(self) -> None:
        old = len(self.kind)
        for name, dtype, empty in self._FIELDS:
            grown = np.full(2 * old, empty, dtype)
            grown[:old] = getattr(self, name)
            setattr(self, name, grown)
        self._keys += [b""] * old
        self._free = array("i", range(2 * old - 1, old - 1, -1)) + self._free

    def metadata_bytes(self) -> int:
        """Return what the tree takes itself: arrays, keys and their table (estimated per entry)."""
        arrays: int = sum(getattr(self, name).nbytes for name, _, _ in self._FIELDS)
        keys = len(self._by_key) * (_KEY_BYTES + 33)
        return arrays + keys + self._by_key.__sizeof__() + len(self._keys) * 8 + len(self._by_key) * 28


def block_keys(
    digest: AdapterDigest | None, token_ids: Sequence[int], block_size: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the keys of all whole blocks of ``token_ids``, going on from those that are known.

    Args:
        digest: the adapter version, None for the base.
        token_ids: of one sequence.
        block_size: tokens in a block.
        known: keys of its first blocks.
    """
    keys = list(known)
    before = keys[-1] if keys else (digest or "").encode()
    data, step = array("i", token_ids[len(keys) * block_size :]).tobytes(), 4 * block_size
    for begin in range(0, len(data) - step + 1, step):
        before = blake2b(before + data[begin : begin + step], digest_size=_KEY_BYTES).digest()
        keys.append(before)
    return keys
