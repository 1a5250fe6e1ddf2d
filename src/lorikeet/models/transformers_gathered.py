"""Runs models by transformers' own eager attention, over keys and values gathered from the arena.

These are models whose attention cannot be replaced, or whose layers edit their masks. Their modules see a cache of
transformers, which stores the new keys in blocks of the arena and returns all keys of the pass.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import eager_mask

from lorikeet.core.geometry import KvShape
from lorikeet.kernels.devices import to_device
from lorikeet.kernels.interface import Batch
from lorikeet.kernels.lora import LoraBatch, LoraSegment
from lorikeet.models.transformers_attention import Heads, LayerKv, UnsupportedAttention, running_pass

EAGER = "eager"
"""Name of transformers' own attention."""
_MOST_SCORE_BYTES = 256 * 2**20
"""Bytes of the fp32 scores of a layer in one forward pass. More rows and keys are computed in several passes."""


_HIDDEN_STATES = 8
"""Hidden states for which a token without a cache takes the space."""


class Way(Enum):
    """A way to compute the attention of a model of transformers. The value names it after the name of the library.

    Attributes:
        KERNELS: our kernels replace the attention.
        PACKED: transformers' attention, with all sequences of a step in one row.
        SINGLY: transformers' attention, one sequence after the other, with positions that the model counts itself.
        ANEW: transformers' attention without a cache. Each step computes its sequences from their first token.
        WHOLE: the whole model, for each row from the first token on (see ``transformers_whole``).
    """

    KERNELS = ""
    PACKED = " and its own attention over gathered keys (slower)"
    SINGLY = " and its own attention, one sequence after the other (slow)"
    ANEW = " without a cache, each token from the first one on (very slow)"
    WHOLE = ", the whole model for each token from the first one on (very slow)"


class Piece(NamedTuple):
    """Neighbouring rows of one sequence of a step.

    Attributes:
        sequence: number of the sequence in the batch.
        start, stop: the rows, half-open.
        context: number of tokens of the sequence up to the last row.
    """

    sequence: int
    start: int
    stop: int
    context: int


def pieces_of(batch: Batch) -> list[Piece]:
    """Return the rows of each sequence of a step."""
    there = batch if batch.host is None else batch.host
    bounds = pairwise(there.row_starts.tolist())
    contexts = there.contexts.tolist()
    return [Piece(i, start, stop, contexts[i]) for i, (start, stop) in enumerate(bounds) if start < stop]


def passes_of(pieces: Sequence[Piece], way: Way, heads: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each forward pass of a step.

    Args:
        pieces: the rows of each sequence.
        way: the way in which the model computes attention. With ``ANEW`` no piece is cut.
        heads: number of query heads. It limits the scores of a pass.
    """
    most = max(_MOST_SCORE_BYTES // (4 * heads), 1)
    group: list[Piece] = []
    rows = 0
    keys = 0
    for whole in pieces:
        for piece in (whole,) if way is Way.ANEW else _cut(whole, most):
            more = piece.stop - piece.start
            is_full = way is not Way.PACKED or (rows + more) * (keys + piece.context) > most
            if group and is_full:
                yield group
                group = []
                rows = 0
                keys = 0
            group.append(piece)
            rows += more
            keys += piece.context
    if group:
        yield group


def _cut(piece: Piece, most: int) -> Iterator[Piece]:
    """Cut a piece so that the rows of each part times its keys are at most ``most``, or one row remains."""
    rows = max(most // piece.context, 1)
    for start in range(piece.start, piece.stop, rows):
        stop = min(start + rows, piece.stop)
        yield Piece(piece.sequence, start, stop, piece.context - (piece.stop - stop))


def lora_of_rows(lora: LoraBatch | None, start: int, stop: int) -> LoraBatch | None:
    """Return the adapters of rows ``start`` to ``stop`` of a step, with rows counted from ``start``."""
    if lora is None:
        return None
    inside = [
        LoraSegment(max(each.start, start) - start, min(each.stop, stop) - start, each.weights)
        for each in lora.segments
        if each.start < stop and each.stop > start
    ]
    return LoraBatch(inside, lora.form) if inside else None


def lora_of_keys(lora: LoraBatch | None, pieces: Sequence[Piece], starts: Tensor | None = None) -> LoraBatch | None:
    """Return the adapters of all tokens of the sequences of a pass, side by side.

    Args:
        lora: the adapters of a step's rows.
        pieces: the rows of the pass.
        starts: see ``HostMetadata.adapter_starts``.
    """
    if lora is None:
        return None
    found = []
    first = 0
    for piece in pieces:
        stop = first + piece.context
        begin = first if starts is None else first + int(starts[piece.sequence])
        last = piece.stop - 1  # An adapter that acts on any of the rows acts on the last one.
        found += [LoraSegment(begin, stop, each.weights) for each in lora.segments if each.start <= last < each.stop]
        first = stop
    return LoraBatch(found, lora.form) if found else None


class _KeepsKeys(Protocol):
    """What the layers of :class:`GatheredCache` write to and read from.

    Attributes:
        past: number of tokens of the cache before the pass.
        rows: number of tokens of the pass.
        has_blocks: whether layers choose blocks of tokens, which must start at multiples of a size.
    """

    past: int
    rows: int
    has_blocks: bool

    def store(self, layer: int, keys: Tensor, values: Tensor) -> Heads:
        """Store the keys and values of the pass's tokens ``[1, heads, T, dim]``, and return those of all tokens."""
        ...


class _CacheLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of :class:`GatheredCache`."""

    def __init__(self, kept: _KeepsKeys, number: int) -> None:
        super().__init__()
        self._kept = kept
        self._number = number

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Heads:
        """Store keys and values, and return those of all tokens."""
        return self._kept.store(self._number, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the keys ``[1, T, dim]`` that choose the tokens to attend to, and return those of all tokens."""
        return self._store_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, keys: Tensor) -> Tensor:
        """Store the keys ``[1, heads, T, dim]`` that choose blocks of tokens, and return those of all tokens."""
        self._kept.has_blocks = True
        return self._store_index(keys)

    def _store_index(self, keys: Tensor) -> Tensor:
        return self._kept.store(self._number, keys, keys[..., :0])[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of a mask, and the first."""
        return self._kept.past + self._kept.rows, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache before the pass."""
        return self._kept.past


class GatheredCache(Cache):  # type: ignore[misc]
    """A cache of transformers whose keys and values are in the arena.

    Args:
        kept: where keys are stored.
        layers: number of layers.
    """

    def __init__(self, kept: _KeepsKeys, layers: int) -> None:
        super().__init__(layers=[_CacheLayer(kept, number) for number in range(layers)])


class _OwnAttention:
    """A pass in which transformers computes attention."""

    def rotate(self, original: Callable[..., Heads], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        """Rotate as transformers does."""
        return original(q, k, cos, sin)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        """Refuse: our attention is not selected."""
        raise AssertionError("a model with its own attention calls ours")


class NotCausal(UnsupportedAttention):
    """Raised when tokens see later tokens."""


class CacheProbe(_OwnAttention):
    """Records what a model caches in a forward pass of ``rows`` tokens.

    Attributes:
        shapes: the keys and values of one token, for each call in order.
        layers: the layer of each call.
        hidden_size: elements of a hidden state; 0 before the pass.
        past, rows, has_blocks: see :class:`_KeepsKeys`.
    """

    def __init__(self, rows: int) -> None:
        self.past = 0
        self.rows = rows
        self.has_blocks = False
        self.shapes: list[KvShape] = []
        self.layers: list[int] = []
        self.hidden_size = 0
        self._see_later: list[bool] = []

    def store(self, layer: int, keys: Tensor, values: Tensor) -> Heads:
        """Record the shape, and return the given keys and values."""
        are_usual = keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3]
        if not are_usual or len(keys) != 1 or keys.shape[2] != self.rows:
            raise UnsupportedAttention("its cache keeps something else than keys and values of each token")
        self.shapes.append(KvShape(keys.shape[1], keys.shape[3], values.shape[3]))
        self.layers.append(layer)
        return keys, values

    def mask(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return the mask of eager attention."""
        found: Tensor | None = eager_mask(mask_function=function, **arguments)
        later = torch.ones(self.rows, self.rows, dtype=torch.bool).triu(1)
        sees_later = found is None or bool((found[0, 0][later.to(found.device)] == 0).any())
        self._see_later.append(sees_later)
        return found

    @property
    def way(self) -> Way:
        """The first way that may be right."""
        return Way.SINGLY if self.has_blocks else Way.PACKED

    def check(self) -> None:
        """Check that the pass cached keys and values, and that a mask was causal, if there was any.

        Models with an encoder also make masks for its tokens, which they do not use here.

        Raises:
            UnsupportedAttention: there was no such thing.
        """
        if self._see_later and all(self._see_later):
            raise NotCausal("its mask is not causal: tokens see later tokens")
        if not self.shapes:
            raise UnsupportedAttention("it has no cache of keys and values")


class GatheredPass(_OwnAttention):
    """One forward pass: stores its keys and values in the arena, and gathers those of its sequences.

    The keys of a sequence are neighbours, in the order of positions.

    Args:
        layers: views of the arena, one for each call of the cache.
        batch: the step.
        pieces: the rows of the pass, each sequence once.

    Attributes:
        start, stop: the rows of the step that the pass computes.
        keys: number of tokens of its sequences.
        past, rows, has_blocks: see :class:`_KeepsKeys`.
        positions: position of each row, int64 ``[T]``.
    """

    def __init__(self, layers: Sequence[LayerKv], batch: Batch, pieces: Sequence[Piece]) -> None:
        assert batch.host is not None
        device = batch.token_ids.device
        block_size = layers[0].keys.shape[1]
        self._calls = iter(layers)
        self.start = pieces[0].start
        self.stop = pieces[-1].stop
        self.rows = self.stop - self.start
        self.keys = sum(piece.context for piece in pieces)
        self.past = self.keys - self.rows
        self.has_blocks = False
        rows = slice(self.start, self.stop)
        self.positions = batch.positions[rows]
        self._slots = batch.slot_blocks[rows], batch.slot_offsets[rows]
        at = torch.cat([torch.arange(piece.context) for piece in pieces])
        tables = [
            batch.host.block_tables[piece.sequence].repeat_interleave(block_size)[: piece.context] for piece in pieces
        ]
        self._gathered = to_device(torch.cat(tables), device), to_device(at % block_size, device)
        self._sequences = len(pieces)
        self._key_positions = to_device(at, device)
        numbers = torch.arange(len(pieces))
        contexts = torch.tensor([piece.context for piece in pieces])
        lengths = torch.tensor([piece.stop - piece.start for piece in pieces])
        self._of_key = to_device(numbers.repeat_interleave(contexts), device)
        self._of_row = to_device(numbers.repeat_interleave(lengths), device)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> Heads:
        """Store the keys and values of the rows, and return those of all tokens."""
        view = next(self._calls)
        found = []
        for given, kept in ((keys, view.keys), (values, view.values)):
            assert given.shape[1::2] == kept.shape[2:], "the keys and values of a forward pass have changed"
            kept[self._slots] = given[0].transpose(0, 1).to(kept.dtype)
            found.append(kept[self._gathered].transpose(0, 1)[None].to(given.dtype))
        return found[0], found[1]

    def mask(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return the mask ``[1, 1, T, keys]`` of a function of positions: 0 where a row sees a key."""
        if self._sequences == 1:
            return eager_mask(mask_function=function, **arguments)
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.positions.device)
        seen = function(zero, zero, self.positions[:, None], self._key_positions)
        seen = torch.as_tensor(seen) & (self._of_row[:, None] == self._of_key)
        given = arguments.get("attention_mask")
        if given is not None:
            seen = seen & given.bool()
        dtype = arguments.get("dtype", torch.float32)
        shape = (1, 1, self.rows, self.keys)
        return torch.where(seen.expand(shape), torch.zeros((), dtype=dtype, device=seen.device), torch.finfo(dtype).min)


def _mask(*_: Any, mask_function: Callable[..., Any] | None = None, **arguments: Any) -> Any:
    """Return the mask of eager attention. While a pass runs, it is that of the pass."""
    running = running_pass()
    if isinstance(running, CacheProbe | GatheredPass) and mask_function is not None:
        return running.mask(mask_function, arguments)
    return eager_mask(**arguments) if mask_function is None else eager_mask(mask_function=mask_function, **arguments)


def register_masks() -> None:
    """Make transformers take the masks of eager attention from the running pass."""
    AttentionMaskInterface.register(EAGER, _mask)


class StoredTokens:
    """The tokens of sequences in the arena, for models without a cache.

    Args:
        view: the only view of the arena. Its keys hold the bytes of a token.
    """

    def __init__(self, view: LayerKv) -> None:
        self._view = view.keys

    @staticmethod
    def shape(hidden_size: int) -> KvShape:
        """Return the space of one token, which is that of some hidden states, so that rows of adapters fit a block."""
        return KvShape(1, _HIDDEN_STATES * hidden_size, 0)

    def store(self, batch: Batch) -> None:
        """Store the tokens of a step."""
        parts = batch.token_ids.to(torch.int32).view(-1, 1).view(self._view.dtype)
        self._view[batch.slot_blocks, batch.slot_offsets, 0, : parts.shape[1]] = parts

    def read(self, batch: Batch, piece: Piece) -> Tensor:
        """Return the tokens of a sequence, int64 ``[context]``."""
        assert batch.host is not None
        block_size = self._view.shape[1]
        parts = 4 // self._view.dtype.itemsize
        table = to_device(batch.host.block_tables[piece.sequence], self._view.device)
        kept = self._view[table[: -(-piece.context // block_size)], :, 0, :parts]
        return kept.flatten(0, 1)[: piece.context].contiguous().view(torch.int32).view(-1).to(torch.int64)
