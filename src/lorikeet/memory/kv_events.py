"""Finds changes of the cached KV, as events in vLLM's format, for routers that score replicas by the prompt's blocks.

Events are found by comparing the tree with the state at the last call, so that no part of the memory must report
changes. Comparing two arrays takes microseconds, and only changed nodes are examined one by one.

Format: https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.core.ids import AdapterDigest, AdapterName, number_of
from lorikeet.core.image_keys import hashed_token_ids
from lorikeet.core.request import Request
from lorikeet.memory.snapshots import is_snapshot_key
from lorikeet.memory.tree import DependencyTree, NodeKind, block_keys

_MEDIA = (("GPU", 1), ("CPU", 2))
"""vLLM's names of device and host memory, and the bit of a node's state."""


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Reports a chain of blocks that can be found now: each is the parent of the next.

    Attributes:
        block_hashes: one hash for each block, unique for the tokens, the adapter's name and the cache salt.
        parent_block_hash: hash of the block before the chain; None at the start of a prompt.
        token_ids: tokens of all blocks.
        block_size: tokens in a block.
        lora_id: number of the adapter's version; None for the base model.
        medium: ``GPU`` for the device, ``CPU`` for the host tier.
        lora_name: the adapter's name; None for the base model.
        extra_keys: for each block the adapter's name, and for the first block of a prompt the cache salt; None for a
            block without both.
        group_idx, kv_cache_spec_kind: always one group of full attention.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Reports blocks that cannot be found any more: they were evicted, or the adapter's name got new weights."""

    block_hashes: list[int]
    medium: str
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """Reports that an engine has just started, without any block."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvChange(NamedTuple):
    """A change of the cached KV, from which another thread makes events.

    Attributes:
        is_stored: whether the blocks can be found now; False if they no longer can.
        medium: ``GPU`` for the device, ``CPU`` for the host tier.
        names: the names under which the blocks are reported; None for the base model.
        blocks: the blocks, parents first; none for the change that clears all.
    """

    is_stored: bool
    medium: str
    names: Sequence[AdapterName | None]
    blocks: "Sequence[_Block]"

    def events(self, block_size: int) -> list[KvEvent]:
        """Return the events of the change, for blocks of ``block_size`` tokens."""
        if not self.blocks:
            return [AllBlocksCleared()]
        if self.is_stored:
            chains = _chains(self.blocks)
            return [_stored(chain, name, self.medium, block_size) for name in self.names for chain in chains]
        return [BlockRemoved([block_hash(each.key, name) for each in self.blocks], self.medium) for name in self.names]


_CLEARED = KvChange(is_stored=False, medium="", names=(), blocks=())


class BlockTokens:
    """Keeps the tokens of the blocks in the tree, which stores only keys.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tokens: dict[bytes, tuple[Sequence[int], str]] = {}
        self._new: list[bytes] = []

    def note(self, keys: Sequence[bytes], token_ids: Sequence[int], first: int, salt: str) -> None:
        """Keep the tokens of blocks.

        Args:
            keys: keys of consecutive blocks.
            token_ids: tokens of the whole sequence.
            first: number of blocks before the first key.
            salt: cache salt of the sequence.
        """
        for index, key in enumerate(keys, first):
            begin = index * self.block_size
            self._tokens[key] = token_ids[begin : begin + self.block_size], salt
            self._new.append(key)

    def get(self, key: bytes) -> tuple[Sequence[int], str] | None:
        """Return a block's tokens and salt; None if they are unknown."""
        return self._tokens.get(key)

    def forget(self, key: bytes) -> None:
        """Remove a block that has left the tree."""
        self._tokens.pop(key, None)

    def forget_lost(self, tree: DependencyTree) -> None:
        """Remove the blocks that were noted since the last call and that the tree does not contain."""
        for key in self._new:
            if tree.find(key) is None:
                self.forget(key)
        self._new.clear()


@dataclass(slots=True, eq=False)
class _Block:
    """Describes a block that was reported, or that would be reported if its version had a name.

    Attributes:
        key: the node's key.
        digest: digest of the adapter version; None for the base model.
        parent: previous block; None at the start of a prompt.
        token_ids: tokens of the block.
        salt: the cache salt of the first block of a prompt; empty for the others.
        media: bits of the media that hold the block.
        is_stale: whether a reset of the prefix cache keeps requests from the block, which is then not reported.
    """

    key: bytes
    digest: AdapterDigest | None
    parent: "_Block | None"
    token_ids: Sequence[int]
    salt: str
    media: int = 0
    is_stale: bool = False


class KvEvents:
    """Compares the tree with its state at the last call, and returns the changes, from which events are made.

    A version with several names is reported under each name, because routers look blocks up by the name in a request.
    Each name has different hashes. A version without a name is not reported.

    Args:
        tree: the memory's tree.
        tokens: tokens of the blocks in the tree.
    """

    def __init__(self, tree: DependencyTree, tokens: BlockTokens) -> None:
        self._tree = tree
        self._tokens = tokens
        self._states = np.zeros(0, np.int8)
        self._touched = np.zeros(0, np.int32)
        self._blocks: dict[int, _Block] = {}
        self._unknown: set[int] = set()
        self._names: dict[AdapterDigest, frozenset[AdapterName]] = {}
        self._changes: list[KvChange] = [_CLEARED]
        self._epoch = ""

    def set_names(self, names: Mapping[AdapterName, AdapterDigest], epoch: str = "") -> None:
        """Set the names of all adapter versions, and report KV whose version has lost or gained a name.

        Args:
            names: all names with their versions.
            epoch: text with which salts begin since the last reset of the prefix cache; empty before the first. A new
                epoch clears all blocks, since later requests do not find them.
        """
        self._compare()
        if epoch != self._epoch:
            self._epoch = epoch
            self._changes.append(_CLEARED)
            for block in self._blocks.values():
                block.is_stale = True
        new: dict[AdapterDigest, frozenset[AdapterName]] = {}
        for name, digest in names.items():
            new[digest] = new.get(digest, frozenset()) | {name}
        old = self._names
        self._names = new
        changed = {digest for digest in old.keys() | new.keys() if old.get(digest) != new.get(digest)}
        if not changed:
            return
        blocks = [
            block for block in self._blocks.values() if block.digest in changed and block.media and not block.is_stale
        ]
        for digest in changed:
            before = old.get(digest, frozenset())
            now = new.get(digest, frozenset())
            its = [block for block in blocks if block.digest == digest]
            for medium, bit in _MEDIA:
                there = [block for block in its if block.media & bit]
                self._remove(there, sorted(before - now), medium)
                self._store(there, sorted(now - before), medium)

    def learn(self, request: Request) -> None:
        """Record the tokens of a request whose KV came from another engine."""
        if self._unknown:
            token_ids = hashed_token_ids(request.prompt_token_ids + request.output_token_ids, request.images)
            keys = block_keys(
                request.digest,
                token_ids,
                self._tokens.block_size,
                salt=request.kv_salt,
                start=request.adapter_start,
            )
            self._tokens.note(keys, token_ids, 0, request.kv_salt)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._tokens.block_size

    def take(self) -> list[KvChange]:
        """Return the changes since the last call. They are the same later, so that another thread may read them."""
        self._compare()
        changes = self._changes
        self._changes = []
        return changes

    def _compare(self) -> None:
        tree = self._tree
        size = len(tree.kind)
        if len(self._states) < size:
            self._states = np.concatenate([self._states, np.zeros(size - len(self._states), np.int8)])
            self._touched = np.concatenate([self._touched, np.zeros(size - len(self._touched), np.int32)])
        end = tree.end
        states = tree.on_host[:end].view(np.int8) << 1
        states |= tree.on_device[:end].view(np.int8)
        states *= (tree.kind[:end] == NodeKind.KV).view(np.int8)
        changed = (states != self._states[:end]) | (tree.touched[:end] != self._touched[:end])
        self._states[:end] = states
        self._touched[:end] = tree.touched[:end]
        at = np.flatnonzero(changed)
        # A parent is reported before its children, so that routers know the parent.
        nodes = at[np.argsort(tree.depth[at], kind="stable")].tolist()
        self._apply(nodes, states)
        self._tokens.forget_lost(tree)

    def _apply(self, nodes: list[int], states: npt.NDArray[np.int8]) -> None:
        """Report the changes of nodes, parents before children."""
        tree = self._tree
        nodes = [*self._unknown, *nodes]
        self._unknown.clear()
        removed: dict[tuple[AdapterDigest | None, str], list[_Block]] = {}
        stored: dict[tuple[AdapterDigest | None, str], list[_Block]] = {}
        kinds = tree.kind[nodes].tolist()
        for node, kind, state in zip(nodes, kinds, states[nodes].tolist(), strict=True):
            key = tree.key_of(node) if kind == NodeKind.KV else b""
            if is_snapshot_key(key):  # the tokens of a snapshot are those of the block above it
                state = 0
                key = b""
            block = self._blocks.get(node)
            if block is not None and block.key != key:
                for medium, bit in _MEDIA:
                    if block.media & bit and not block.is_stale:
                        removed.setdefault((block.digest, medium), []).append(block)
                self._tokens.forget(block.key)
                del self._blocks[node]
                block = None
            if block is None:
                if not state:
                    continue
                block = self._new(node, key)
                if block is None:
                    self._unknown.add(node)
                    continue
            if block.media != state:
                for medium, bit in () if block.is_stale else _MEDIA:
                    if state & bit and not block.media & bit:
                        stored.setdefault((block.digest, medium), []).append(block)
                    elif block.media & bit and not state & bit:
                        removed.setdefault((block.digest, medium), []).append(block)
                block.media = state
        for (digest, medium), blocks in removed.items():
            self._remove(blocks, self._names_of(digest), medium)
        for (digest, medium), blocks in stored.items():
            self._store(blocks, self._names_of(digest), medium)

    def _new(self, node: int, key: bytes) -> _Block | None:
        """Return a new block for a node; None if its tokens or its parent are unknown."""
        known = self._tokens.get(key)
        if known is None:
            return None
        tree = self._tree
        above = int(tree.parent[node])
        is_first = tree.kind[above] != NodeKind.KV
        parent = None if is_first else self._blocks.get(above)
        if parent is None and not is_first:
            return None
        token_ids, salt = known
        is_stale = not salt.startswith(self._epoch)
        shown = salt.removeprefix(f"{self._epoch}\0" if self._epoch else "").removeprefix("\0") if is_first else ""
        block = _Block(key, tree.digest(int(tree.top[node])), parent, token_ids, shown, is_stale=is_stale)
        self._blocks[node] = block
        return block

    def _names_of(self, digest: AdapterDigest | None) -> list[AdapterName | None]:
        """Return the names of a version in alphabetical order; the base model's is None."""
        return [None] if digest is None else [*sorted(self._names.get(digest, ()))]

    def _remove(self, blocks: Sequence[_Block], names: Sequence[AdapterName | None], medium: str) -> None:
        if blocks and names:
            self._changes.append(KvChange(False, medium, names, blocks))

    def _store(self, blocks: Sequence[_Block], names: Sequence[AdapterName | None], medium: str) -> None:
        if blocks and names:
            self._changes.append(KvChange(True, medium, names, blocks))


def _chains(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Return blocks of one version, parents first, as chains that each become one event."""
    chains: list[list[_Block]] = []
    ends: dict[_Block, list[_Block]] = {}
    for block in blocks:
        chain = None if block.parent is None else ends.pop(block.parent, None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(block)
        ends[block] = chain
    return chains


def _stored(chain: Sequence[_Block], name: AdapterName | None, medium: str, block_size: int) -> BlockStored:
    first = chain[0]
    parent = None
    if first.parent is not None:
        # The part of a prompt before an activated adapter begins belongs to the base model.
        parent = block_hash(first.parent.key, None if first.parent.digest is None else name)
    extra: list[list[str] | None] | None = None
    if name is not None:
        extra = [[name] for _ in chain]
    if first.salt:
        extra = extra or [None for _ in chain]
        extra[0] = [*(extra[0] or ()), first.salt]
    return BlockStored(
        [block_hash(each.key, name) for each in chain],
        parent,
        [token for each in chain for token in each.token_ids],
        block_size,
        None if first.digest is None else number_of(first.digest),
        medium,
        name,
        extra,
    )


def block_hash(key: bytes, name: AdapterName | None) -> int:
    """Return the hash of a block under a name, as 64 bits."""
    return int.from_bytes(key[-8:] if name is None else blake2b(key + name.encode(), digest_size=8).digest(), "big")
