"""Implements the usage-dependency tree: adapters below the root, and below each adapter its KV (ELORA §V-A).

KV is useful only with the adapter version that computed it, so the KV is in the subtree of that version. A KV node is
one block. The node's key is a hash chained from the adapter's digest and the request's salt over all tokens up to the
end of the block. So the key matches only the same tokens with the same version and salt. The base model counts as an
adapter without weights.

A node records where its bytes are: on the device, on the host, on both, or in flight. ``Tiers`` updates it. The fields
of nodes are numpy arrays indexed by node, so that policies can score a hundred thousand nodes in one call. The arrays
are replaced when the tree grows, so always read them through the tree.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, BlockId

NO_BLOCK = -1
NO_NODE = -1
BASE = 0
"""Node of the base model. It has no weights, and counts as on the device."""

KEY_BYTES = 16
"""Bytes of the key of a block of KV."""
_FIRST_NODES = 1024
_NUMBERS: list[int] = []
"""Node indices as shared objects, one for each index in all trees of a process, because simulated clusters have
millions of nodes."""

Nodes = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]


class NodeKind:
    """Names the kinds of nodes. The kinds are plain integers, because hot loops and array operations compare them."""

    UNUSED: Final = 0
    """A free index without a node."""
    BASE: Final = 1
    ADAPTER: Final = 2
    KV: Final = 3


class NodeTransfer:
    """Names the transfers of which a node can be a part."""

    NO: Final = 0
    IN: Final = 1
    """The node is being loaded to the device. Its device blocks are leased and not filled yet."""
    OUT: Final = 2
    """The node is moving from the device to the host. Its device copy can still be read."""
    READ: Final = 3
    """The node is being read from its source into the host tier."""
    COPY: Final = 4
    """The node is being copied from the device to the host. Its device copy stays."""


@dataclass(slots=True)
class AdapterNode:
    """Holds the fields that only adapters have.

    Attributes:
        ref: the adapter version.
        host_size: number of blocks of its packed weights.
        device_blocks: blocks of the adapter on the device, in packing order. If slots are padded, their number is
            larger than ``host_size``. If the last blocks were evicted, only the first ones (``DependencyTree.kept``).
        host_blocks: blocks of the adapter on the host, in packing order.
        retired: whether the adapter will be freed, and must not be prefetched.
    """

    ref: AdapterRef
    host_size: int
    device_blocks: tuple[BlockId, ...] = ()
    host_blocks: tuple[BlockId, ...] = ()
    retired: bool = False


class DependencyTree:
    """Holds the nodes of the base model, of adapters and of KV blocks, with their fields as arrays.

    Attributes:
        kind: :class:`NodeKind` of each node.
        parent: node of the previous block, or node of the adapter for its first block; ``NO_NODE`` for base and
            adapters.
        top: node of the adapter or base that computed the KV. The top of an adapter or of the base is the node itself.
        depth: 0 for adapters, 1 for their first blocks.
        size: number of device blocks that the node takes: 1 for KV.
        kept: number of blocks that stayed on the device when the last blocks of an adapter were evicted; otherwise 0.
            Such an adapter is not ``on_device``, and loading it copies only the missing blocks.
        device, host: block of KV on either tier, ``NO_BLOCK`` if it has none.
        device_generation, host_generation: generations of these blocks (see ``BlockPool``).
        on_device, on_host: whether the node's bytes can be read on the tier.
        moving: :class:`NodeTransfer` of the node.
        pins: number of leases and transfers that need the node on its tier.
        children: number of the node's children.
        children_on_device: number of the node's children on the device, or in flight to it.
        last_use_s: time at which a request last matched or used the node; transfers do not count (ELORA spec, R19).
        visits: number of requests that matched the node on arrival; 1 for a new node.
        score: last score of the eviction policy.
        touched: counter that rises with each change of the node, so that outdated heap entries can be recognised.
        is_snapshot: whether the node is a block of a state instead of KV (see ``memory/snapshots.py``).
        adapters: adapter fields by node.
        has_mixed_branches: whether KV may have been added below KV of another adapter or the base.
    """

    _FIELDS = (
        ("kind", np.int8, NodeKind.UNUSED),
        ("parent", np.int32, NO_NODE),
        ("top", np.int32, NO_NODE),
        ("depth", np.int32, 0),
        ("size", np.int32, 0),
        ("kept", np.int32, 0),
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
        ("is_snapshot", np.bool_, False),
    )

    kind: npt.NDArray[np.int8]
    parent: npt.NDArray[np.int32]
    top: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    size: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int32]
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
    is_snapshot: npt.NDArray[np.bool_]

    def __init__(self) -> None:
        for name, dtype, empty in self._FIELDS:
            setattr(self, name, np.full(_FIRST_NODES, empty, dtype))
        self.adapters: dict[int, AdapterNode] = {}
        self.has_mixed_branches = False
        self._tops: Nodes | None = None
        self._by_digest: dict[AdapterDigest | None, int] = {None: BASE}
        self._by_key: dict[bytes, int] = {}
        self._keys: list[bytes] = [b""] * _FIRST_NODES
        self._free = array("i", range(_FIRST_NODES - 1, BASE, -1))
        self.kind[BASE] = NodeKind.BASE
        self.top[BASE] = BASE
        self.on_device[BASE] = True
        self._end = BASE + 1
        _NUMBERS.extend(range(len(_NUMBERS), _FIRST_NODES))

    # --- queries -------------------------------------------------------------------------------------

    def adapter(self, digest: AdapterDigest | None) -> int | None:
        """Return the node of a version (None for the base); None if the tree does not contain it."""
        return self._by_digest.get(digest)

    @property
    def tops(self) -> Nodes:
        """Nodes of the base and of all adapters."""
        if self._tops is None:
            self._tops = np.array([BASE, *self.adapters], np.int64)
        return self._tops

    def digest(self, node: int) -> AdapterDigest | None:
        """Return the digest of a node's adapter version; None for the base."""
        top = int(self.top[node])
        return None if top == BASE else self.adapters[top].ref.digest

    def adapters_on_device(self) -> list[int]:
        """Return the adapters whose weights are on the device."""
        return np.flatnonzero(self.on_device[: self._end] & (self.kind[: self._end] == NodeKind.ADAPTER)).tolist()

    def adapters_on_host(self) -> list[int]:
        """Return the adapters whose weights are in the host tier."""
        return np.flatnonzero(self.on_host[: self._end] & (self.kind[: self._end] == NodeKind.ADAPTER)).tolist()

    def device_size(self, node: int) -> int:
        """Return the number of a node's device blocks, without blocks in flight."""
        return int(self.size[node] if self.on_device[node] else self.kept[node])

    def missing_blocks(self, adapter: int) -> int:
        """Return the number of device blocks that an adapter needs in addition to its kept blocks."""
        return int(self.size[adapter] - self.kept[adapter])

    def find(self, key: bytes) -> int | None:
        """Return the KV node with this key, or None. The node's bytes need not be on a tier."""
        return self._by_key.get(key)

    def key_of(self, node: int) -> bytes:
        """Return the key that identifies a node's content. A node's index does not, because indices are reused."""
        entry = self.adapters.get(node)
        return self._keys[node] if entry is None else entry.ref.digest.encode()

    def keys_of_kv(self, nodes: Nodes) -> list[bytes]:
        """Return the keys of KV."""
        return list(map(self._keys.__getitem__, nodes.tolist()))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the nodes of the longest prefix of ``keys`` whose KV is on a tier or in flight to the device."""
        path: list[int] = []
        find = self._by_key.get
        for key in keys:
            node = find(key)
            if node is None:
                break
            path.append(node)
        if path:
            at = np.asarray(path)
            has_bytes = self.on_device[at] | self.on_host[at] | (self.moving[at] == NodeTransfer.IN)
            if not has_bytes.all():
                del path[int(np.argmin(has_bytes)) :]
        return path

    @property
    def end(self) -> int:
        """Largest node index in use so far, plus one."""
        return self._end

    def __len__(self) -> int:
        """Return the number of nodes without the base."""
        return len(self._by_key) + len(self.adapters)

    def below(self, node: int) -> Iterator[int]:
        """Yield all KV of an adapter or the base, parents before children."""
        kv = np.flatnonzero((self.top[: self._end] == node) & (self.kind[: self._end] == NodeKind.KV))
        yield from kv[np.argsort(self.depth[kv], kind="stable")].tolist()

    # --- changes -------------------------------------------------------------------------------------

    def add_adapter(self, ref: AdapterRef, device_size: int, host_size: int) -> int:
        """Add an adapter version that is on no tier yet, and return its node. Sizes are in blocks."""
        (node,) = self._new(1)
        touched = self.touched[node]
        for name, _, empty in self._FIELDS:
            getattr(self, name)[node] = empty
        self.touched[node] = touched
        self.kind[node] = NodeKind.ADAPTER
        self.top[node] = node
        self.size[node] = device_size
        self.adapters[node] = AdapterNode(ref, host_size)
        self._tops = None
        self._by_digest[ref.digest] = node
        return node

    def descendants(self, node: int) -> Iterator[int]:
        """Yield all KV below a node of KV, parents before children, including KV of other adapters."""
        end = self._end
        found = {node}
        kv = np.flatnonzero((self.kind[:end] == NodeKind.KV) & (self.depth[:end] > self.depth[node]))
        for each in kv[np.argsort(self.depth[kv], kind="stable")].tolist():
            if int(self.parent[each]) in found:
                found.add(each)
                yield each

    def add_kv(
        self,
        above: Sequence[int],
        keys: Sequence[Sequence[bytes]],
        now: float,
        tops: Sequence[int] | Nodes | None = None,
    ) -> list[list[int]]:
        """Add chains of KV blocks that are on no tier yet.

        Args:
            above: parent of the first block of each chain.
            keys: keys of each chain, at least one. Each block is the parent of the next.
            now: the time.
            tops: node of the adapter or base that computed each block, of all chains in turn; None for the top of
                ``above``.

        Returns:
            The nodes of each chain.
        """
        flat = list(chain.from_iterable(keys))
        nodes = self._new(len(flat))
        self._by_key.update(zip(flat, nodes, strict=True))
        node_keys = self._keys
        for node, key in zip(nodes, flat, strict=True):
            node_keys[node] = key
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        at = np.array(nodes, np.int64)
        heads = np.asarray(above, np.int64)
        parents = np.empty_like(at)
        parents[1:] = at[:-1]
        parents[starts] = heads
        self.kind[at] = NodeKind.KV
        self.size[at] = 1
        self.visits[at] = 1.0
        self.last_use_s[at] = now
        self.score[at] = 0.0
        self.parent[at] = parents
        self.depth[at] = np.repeat(self.depth[heads] + 1 - starts, lengths) + np.arange(len(at))
        if tops is None:
            self.top[at] = np.repeat(self.top[heads], lengths)
        else:
            self.top[at] = tops
            self.has_mixed_branches = True
        self.children[at] = 1
        self.is_snapshot[at] = np.repeat([len(each[0]) > KEY_BYTES for each in keys], lengths)
        self.children[at[ends - 1]] = 0
        np.add.at(self.children, heads, np.int32(1))
        return [nodes[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def remove_adapter(self, node: int) -> None:
        """Remove an adapter that has no children and is on no tier."""
        del self._by_digest[self.adapters.pop(node).ref.digest]
        self._tops = None
        self.kind[node] = NodeKind.UNUSED
        self.touched[node] += 1  # marks heap entries of the removed node as outdated
        self._free.append(node)

    def remove_kv(self, nodes: Sequence[int]) -> None:
        """Remove KV nodes that are on no tier. All their children must be among ``nodes``."""
        at = np.asarray(nodes, np.int64)
        self.kind[at] = NodeKind.UNUSED
        self.touched[at] += 1  # marks heap entries of the removed nodes as outdated
        self.children[at] = 0
        # The other fields are empty, as the KV is on no tier, or are set when the index is used again.
        above = self.parent[at]
        for parent in above[self.kind[above] != NodeKind.UNUSED].tolist():
            self.children[parent] -= 1
        keys = self._keys
        by_key = self._by_key
        for node in nodes:
            del by_key[keys[node]]
            keys[node] = b""
        self._free.extend(nodes)

    def count_on_device(self, nodes: Nodes, change: int) -> None:
        """Add ``change`` to the number of children on the device of the parents of KV."""
        # NumPy's fast path needs indices and numbers of exactly these types.
        np.add.at(self.children_on_device, self.parent[nodes].astype(np.intp), np.int32(change))

    def _new(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._grow()
        at = len(self._free) - count
        nodes = [_NUMBERS[node] for node in self._free[at:]]
        del self._free[at:]
        nodes.reverse()
        self._end = max(self._end, max(nodes) + 1)
        return nodes

    def _grow(self) -> None:
        old = len(self.kind)
        for name, dtype, empty in self._FIELDS:
            grown = np.full(2 * old, empty, dtype)
            grown[:old] = getattr(self, name)
            setattr(self, name, grown)
        self._keys += [b""] * old
        self._free = array("i", range(2 * old - 1, old - 1, -1)) + self._free
        _NUMBERS.extend(range(len(_NUMBERS), 2 * old))

    def metadata_bytes(self) -> int:
        """Return the size in bytes of the tree's data: arrays, keys, and the key table (estimated per entry)."""
        arrays: int = sum(getattr(self, name).nbytes for name, _, _ in self._FIELDS)
        keys = len(self._by_key) * (KEY_BYTES + 33)
        return arrays + keys + self._by_key.__sizeof__() + len(self._keys) * 8 + len(self._by_key) * 28


def block_keys(
    digest: AdapterDigest | None,
    token_ids: Sequence[int],
    block_size: int,
    known: Sequence[bytes] = (),
    *,
    salt: str = "",
    start: int = 0,
) -> list[bytes]:
    """Return the keys of all whole blocks of ``token_ids``.

    Args:
        digest: digest of the adapter version; None for the base.
        token_ids: tokens of one sequence.
        block_size: tokens in a block.
        known: keys of the sequence's first blocks, which are not computed again.
        salt: salt of the keys. Other salts give other keys.
        start: position of the first token on which the adapter acts. Blocks before this position have the base's keys.
    """
    of_base = start // block_size if digest is not None else 0
    keys = list(known)
    if len(keys) < of_base:
        keys = block_keys(None, token_ids[: of_base * block_size], block_size, keys, salt=salt)
        if len(keys) < of_base:
            return keys
    before = keys[-1] if keys else (digest or "").encode()
    if salt and not keys:  # the hash ensures that no salt looks like a digest
        before = blake2b(before + b"\0" + salt.encode(), digest_size=KEY_BYTES).digest()
    if start and digest is not None and len(keys) == of_base:
        before = blake2b(before + f"\0{digest}@{start}".encode(), digest_size=KEY_BYTES).digest()
    data = array("i", token_ids[len(keys) * block_size :]).tobytes()
    step = 4 * block_size
    for begin in range(0, len(data) - step + 1, step):
        before = blake2b(before + data[begin : begin + step], digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys
