"""The interface of kernel backends, and the values that they take.

Every backend computes the same functions. Tests compare all backends with the reference backend, which is plain torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.core.geometry import KV_SCALE_BYTES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.activation import Activation
from lorikeet.kernels.devices import to_device
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraTargets
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.states import ANY_STEP, StateSequences

LONG_TOKENS = 8192
"""Longer contexts are split among more programs. Graphs for longer contexts are captured separately."""


class BatchPart(NamedTuple):
    """Some sequences of a batch, for which attention is launched together.

    Attributes:
        numbers: indices of the sequences in the batch, int64 on the device. None for all sequences.
        sequences: number of sequences.
        most_rows: maximum number of rows of a sequence.
        longest: longest context in tokens. None if only the device has the contexts.
    """

    numbers: Tensor | None
    sequences: int
    most_rows: int
    longest: int | None


def split_batch(row_starts: Tensor, contexts: Tensor, device: torch.device) -> tuple[BatchPart, ...]:
    """Split a batch into decodes (one row) and prefills (more rows).

    Args:
        row_starts: see ``Batch``, on the host.
        contexts: see ``Batch``, on the host.
        device: device of the indices. The call does not wait until they are copied.
    """
    rows = row_starts.diff()
    ones = int((rows == 1).sum())
    if not len(rows):
        return ()
    if ones in (0, len(rows)):
        return (BatchPart(None, len(rows), int(rows.amax()), int(contexts.amax())),)
    order = (rows != 1).argsort(stable=True)
    numbers = to_device(order, device)
    ordered = contexts[order]
    return (
        BatchPart(numbers[:ones], ones, 1, int(ordered[:ones].amax())),
        BatchPart(numbers[ones:], len(rows) - ones, int(rows.amax()), int(ordered[ones:].amax())),
    )


class Assist(Protocol):
    """Host LoRA for adapters that are not yet on the device with all layers."""

    def begin(self, product: str, layer: int, x: Tensor, lora: LoraBatch | None) -> LoraBatch | None:
        """Start host LoRA for some adapters, and return the adapters for the device; None if there are none.

        Args:
            product: a key of ``core.geometry.PRODUCTS``. Calls are in the order of these keys.
            layer: index of the layer. Calls are in the order of layers.
            x: ``[rows, in]``, the input of the product.
            lora: all adapters of the rows, which is ``lora`` or ``sample_lora`` of the batch.
        """
        ...

    def finish(self, out: Tensor) -> None:
        """Add the host's delta to the product of the last :meth:`begin`, ``[rows, out]``, in place."""
        ...


class HostMetadata(NamedTuple):
    """Host copies of fields of ``Batch``, so that the fields need not be read from the device.

    ``adapter_starts``, int64 ``[n]``, has the first position on which each sequence's adapter acts (aLoRA).
    None if all adapters act from the first token on.
    """

    row_starts: Tensor
    contexts: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    adapter_starts: Tensor | None = None


class StateTable(NamedTuple):
    """The states of a batch's sequences; see ``core.states``.

    Attributes:
        blocks: int64 ``[n, N]``, blocks of the arena that hold the state of each sequence. The step updates the state
            in place.
        resumed: int64 ``[n]``, 1 if the state holds the tokens before the step, and 0 if the sequence starts from
            zeros; the blocks then have any content.
        host_resumed: a copy on the host; None in a graph.
    """

    blocks: Tensor
    resumed: Tensor
    host_resumed: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """The metadata of one step, built once per step.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``.
        slot_blocks: int64 ``[T]``, block that receives the row's KV; -1 for padding rows of graphs, which store none.
        slot_offsets: int64 ``[T]``, token index inside that block.
        row_starts: int64 ``[n + 1]``; sequence i computes rows ``row_starts[i]`` to ``row_starts[i + 1]``.
        contexts: int64 ``[n]``, number of tokens in a sequence's KV, the step's included. The sequence's last row is at
            ``contexts[i] - 1``.
        block_tables: int64 ``[n, N]``, padded with block 0.
        sample_rows: int64 ``[S]``, rows that need logits, each once. They are in row order if all rows do.
        lora: the adapters; None if no row has an adapter.
        assist: host LoRA, if adapters of ``lora`` are being loaded; None if all are loaded.
        embeds: rows, int64 ``[E]``, and the embeddings ``[E, hidden]`` that replace the embeddings of the rows' tokens.
            None without such rows.
        host: copies on the host; None in a graph.
        states: states of the sequences; None if no layer has a state.
        layer_embeds: ``[E, hidden]`` each, added to the outputs of the first layers for the rows of ``embeds``.
        axes: int64 ``[axes, T]``, positions for rotary embeddings of several axes. None if ``positions`` serve.
        seen: int64 ``[T]``, number of tokens of its sequence that a row may see. None if each sees those up to its own.
    """

    token_ids: Tensor
    positions: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    row_starts: Tensor
    contexts: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    lora: LoraBatch | None = None
    assist: Assist | None = None
    embeds: tuple[Tensor, Tensor] | None = None
    host: HostMetadata | None = None
    states: StateTable | None = None
    layer_embeds: tuple[Tensor, ...] = ()
    axes: Tensor | None = None
    seen: Tensor | None = None

    def only(self, sequence: int) -> "Batch":
        """Return the batch of one sequence, for attention alone."""
        assert self.host is not None
        start, stop = self.host.row_starts[sequence : sequence + 2].tolist()
        one = slice(sequence, sequence + 1)
        starts = torch.tensor([0, stop - start])
        none = torch.zeros(0, dtype=torch.int64)
        device = self.contexts.device
        host = HostMetadata(starts, self.host.contexts[one], self.host.block_tables[one], none)
        return Batch(
            self.token_ids[start:stop],
            self.positions[start:stop],
            self.slot_blocks[start:stop],
            self.slot_offsets[start:stop],
            to_device(starts, device),
            self.contexts[one],
            self.block_tables[one],
            to_device(none, device),
            host=host,
        )

    @cached_property
    def parts(self) -> tuple[BatchPart, ...]:
        """The batch's decodes and prefills. In a graph, where the host has no metadata, one part has all sequences."""
        if self.host is None:
            return (BatchPart(None, len(self.contexts), len(self.token_ids) - len(self.contexts) + 1, None),)
        return split_batch(self.host.row_starts, self.host.contexts, self.contexts.device)

    @cached_property
    def sample_lora(self) -> LoraBatch | None:
        """The adapters of the sample rows only."""
        if self.lora is None or len(self.sample_rows) == len(self.token_ids):
            return self.lora
        rows = self.sample_rows if self.host is None else self.host.sample_rows
        return self.lora.select_rows(rows.tolist())

    @property
    def head_lora(self) -> LoraBatch | None:
        """The adapters of the sample rows, if any adapter has more than A and B."""
        lora = self.sample_lora
        return lora if lora is not None and lora.has_extras else None


class PackedWeight(Protocol):
    """A linear weight that is quantised or in a backend's own layout."""

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the weight."""
        ...


Weight = Tensor | PackedWeight
"""A linear weight as returned by ``Kernels.pack``."""


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys.

    Attributes:
        q, k: weights. Norms of single heads (Qwen3) have ``[head_dim]`` each. Norms of all heads of a token together
            (OLMo 2) have ``[heads * head_dim]`` and ``[kv_heads * head_dim]``.
        eps: number added to the mean square.
        offset: number added to the weights, in fp32.
        is_whole: whether all heads of a token are normalised together.
    """

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0
    is_whole: bool = False


class RotaryPairs(NamedTuple):
    """The elements of a head that a rotary embedding rotates.

    Attributes:
        dims: number of elements that are rotated, at the beginning of a head. The other elements stay unchanged.
        are_neighbours: whether element 2i is rotated with 2i + 1 (GLM), instead of i with ``dims / 2 + i``.
    """

    dims: int
    are_neighbours: bool = False


class Rotation(NamedTuple):
    """The rotary embedding of a step's rows on a layer.

    Attributes:
        cos, sin: ``[T, head_dim]``, with one value for each pair. From ``head_dim / 2`` on the values repeat.
        pairs: the elements of a head that are rotated.
    """

    cos: Tensor
    sin: Tensor
    pairs: RotaryPairs


class GroupProduct(NamedTuple):
    """The product of one of several groups of rows, such as the rows of an expert. All weights have one shape.

    Attributes:
        weight: the packed weight, ``[out, in]``.
        bias: ``[out]``; None without a bias.
        targets: the product's modules; None if no adapter can change it.
    """

    weight: Weight
    bias: Tensor | None
    targets: LoraTargets | None


class GroupedRows(NamedTuple):
    """Rows of a step, sorted by group.

    Attributes:
        groups: int64 ``[G]``, the groups that have rows, ascending.
        rows: int64 ``[G]``, the number of rows of each.
        segments: int64 ``[n, 4]``, the adapters of each group's rows in turn: first row and row after the last, counted
            from the group's first row, address of the adapter's piece table, address of its piece index.
        counts: int64 ``[G]``, the number of segments of each group.
        padded_rank: the rank to which all adapters are padded; 0 if none is.
        bits: see ``LoraWeights``.
    """

    groups: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    padded_rank: int = 0
    bits: int = 0


class GroupedProducts(Protocol):
    """Computes the products of groups of rows."""

    def __call__(self, x: Tensor, rows: GroupedRows) -> Tensor:
        """Return the products ``[R, out]`` of rows ``[R, in]`` that are sorted by group, with their adapters' LoRA."""
        ...


class Kernels(Protocol):
    """A kernel backend. A method changes an argument only if the method's docstring states it."""

    name: str
    threads: int
    """Number of threads of each call. The owner may change it between calls."""
    fits_graphs: bool
    """Whether calls can be captured in a CUDA graph: no call waits for the device, except LoRA by einsum."""
    reads_codes: bool
    """Whether adapters may be kept as codes (``LoraWeights.bits``), and keys and values (:func:`kv_view`)."""

    def pin_threads(self, cores: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which each thread is pinned to one of ``cores``, which has a core for each thread."""
        ...

    def pack(self, weight: "Tensor | QuantizedWeight", dtype: torch.dtype | None = None) -> Weight:
        """Return ``weight [out, in]`` in the layout of :meth:`linear`.

        A plain layout returns the weight itself.

        Args:
            weight: a plain or quantised weight.
            dtype: dtype to which a quantised weight is dequantised for products. A plain weight needs no dtype.
        """
        ...

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Overwrite ``packed``, which must not be quantised, with ``weight`` of the same shape and dtype."""
        ...

    def layers_in_one_call(self, weights: Sequence["LayerWeights"], shape: "LayersShape") -> "Layers | None":
        """Return a function that computes all layers in one call, with the same bits as single kernels.

        None if there is none.
        """
        ...

    def products_in_one_call(self, products: Sequence["GroupProduct"], layer: int) -> "GroupedProducts | None":
        """Return a function that computes products of groups of rows in one call, with the same bits as one by one.

        None if there is none.
        """
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Return ``x [T, in] @ weight [out, in]ᵀ + bias [out]``.

        Rows of ``x`` must be contiguous.

        With a ``delta``, ``x[rows] @ Aᵀ @ Bᵀ`` is added in columns ``[column, column + outputs)`` for each segment and
        target. Segments whose adapter does not change (layer, module) are skipped. Ranks may differ.
        """
        ...

    def scale_and_shift(self, out: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> None:
        """Multiply outputs of a product by the factors of adapters, and add the adapters' summands, in place.

        ``out [T, out]`` is the result of :meth:`linear`, with the LoRA delta. Sums are computed in fp32 and rounded
        once.
        """
        ...

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the logits ``x [S, hidden] @ weight [vocab, hidden]ᵀ``, ``[S, vocab]``.

        They are fp32 if this costs no more than the weights' dtype. bfloat16 has steps of 0.125 between 16 and 32, the
        range of many models' best logits, so different tokens would tie.
        """
        ...

    def row_norms(self, weight: Weight) -> Tensor:
        """Return the norm of each row of ``weight [out, in]``, fp32 ``[out]``."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Add ``delta`` to ``x`` in place, if given, and return the RMS norm of the sum times ``weight + offset``.

        ``x`` and ``delta`` are ``[T, hidden]``. The norm and ``weight + offset`` are computed in fp32.
        """
        ...

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Rotate the queries in ``qkv`` in place, and write rotated keys and values to the batch's slots in ``kv``.

        Args:
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``, changed in place. Its keys are undefined afterwards.
            rotation: the rotation of queries and keys.
            kv: this layer's view of the arena, ``[blocks, 2, block_size, kv_heads, head_dim]`` or codes (see
                :func:`kv_view`). It is changed in place.
            batch: the step.
            norms: RMS norms of queries and keys before the rotation, or None.
        """
        ...

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Return the causal attention of the queries in ``qkv`` over the paged ``kv``, with grouped heads.

        A token sees only the ``window`` latest positions, its own included. With a ``softcap`` the scaled scores are
        ``softcap * tanh(score / softcap)``. Returns ``[T, heads * head_dim]``.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``, ``[T, n]``, for ``gate_up [T, 2 * n]``."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``gelu(gate) * up``, ``[T, n]``, with the approximation of GELU by tanh."""
        ...

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Return a causal convolution over the rows of each sequence, channel by channel, ``[T, channels]``.

        Sums are computed in fp32 and rounded once.

        Args:
            x: ``[T, channels]``. Rows must be contiguous.
            weight: ``[taps, channels]``, in the dtype of ``x``; the last tap is the row itself.
            bias: ``[channels]`` or None.
            tails: fp32 ``[elements]``, changed in place. It contains the rows before each sequence's first row, which
                become its last rows. A part is ``[taps - 1, channels / parts]``.
            offsets: int64 ``[sequences, parts]``, the first element of each part. A sequence whose first offset is
                negative is padding: its outputs are undefined.
            sequences: the sequences of the rows.
            has_silu: whether the result is ``silu(sum)``.
        """
        ...

    def recurrence(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        skip: Tensor | None = None,
        *,
        is_delta: bool,
    ) -> Tensor:
        """Update each sequence's state row by row, and return its outputs ``[T, heads, value_dim]``.

        For a row and a head, with the state ``S [key_dim, value_dim]``: ``S = exp(decay) * S``, then ``S += k ⊗
        added``, then the output is ``qᵀ S + skip * v``.
        ``added`` is ``beta * v`` (Mamba-2, where q is C, k is B and beta is dt), or ``beta * (v - kᵀ S)`` by the gated
        delta rule, which first normalises q and k, and scales q by ``key_dim ** -0.5``.

        Args:
            queries, keys: ``[T, key_heads, key_dim]``. Each serves ``heads / key_heads`` neighbouring heads. Rows may
                be strided.
            values: ``[T, heads, value_dim]``. Rows may be strided.
            decay: fp32 ``[T, heads]``, the logarithm of the factor of the state.
            beta: fp32 ``[T, heads]``.
            states: fp32 ``[elements]``, changed in place. It contains each state ``S`` of a sequence and a head.
            offsets: int64 ``[sequences, heads]``, the first element of each ``S``. A sequence whose first offset is
                negative is padding: its outputs are undefined.
            sequences: the sequences of the rows.
            skip: fp32 ``[heads]``; None for none.
            is_delta: whether the gated delta rule is computed.
        """
        ...

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool
    ) -> Tensor:
        """Return ``norm(x) * weight * silu(gate)``, or ``norm(x * silu(gate)) * weight``, with an RMS norm per group.

        Args:
            x, gate: ``[T, n]``. Rows must be contiguous.
            weight: ``[n]``, or ``[group]`` for all groups.
            eps: number added to the mean square.
            group: number of neighbouring columns that are normalised together.
            is_norm_first: whether the norm comes before the gate.
        """
        ...

    def recurrence_gates(
        self, b: Tensor | None, a: Tensor, rates: Tensor, bias: Tensor, limits: tuple[float, float] = ANY_STEP
    ) -> tuple[Tensor, Tensor]:
        """Return ``decay`` and ``beta`` of :meth:`recurrence`, fp32 ``[T, heads]``.

        With ``step = softplus(a + bias)``, clamped to the limits, they are ``rates * step`` and ``sigmoid(b)``, or
        ``step`` without ``b``.

        Args:
            b: ``[T, heads]`` for the gated delta rule, None for a state space. Rows may be strided.
            a: ``[T, heads]``. Rows may be strided.
            rates: fp32 ``[heads]``, negative.
            bias: fp32 ``[heads]``.
            limits: the least and the largest step.
        """
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``x * sigmoid(gate)``, ``[T, n]``, for contiguous tensors."""
        ...

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Sample one token per row of ``logits [S, vocab]``, as ``kernels.sampling.choose``."""
        ...


def kv_head_dim(kv: Tensor) -> int:
    """Return the number of elements of a head in a layer's view from :func:`kv_view`."""
    return kv.shape[-1] - (KV_SCALE_BYTES if kv.dtype == torch.int8 else 0)


def kv_view(arena: Tensor, layers: int, block_size: int, kv_heads: int, head_dim: int, *, bits: int = 0) -> Tensor:
    """View ``arena [blocks, elements]`` as ``[layers, blocks, 2, block_size, kv_heads, head_dim]``, without a copy.

    Blocks may be longer than their keys and values. With 8 ``bits`` the view is int8 ``[…, head_dim + 2]``: the codes
    of a head, and the codes' scale in bfloat16.
    """
    if bits:
        arena = arena.view(torch.int8)
        head_dim = head_dim + KV_SCALE_BYTES
    shape = (layers, 2, block_size, kv_heads, head_dim)
    return arena[:, : prod(shape)].unflatten(1, shape).transpose(0, 1)


class RecurrenceWeights(NamedTuple):
    """The weights of a layer with a recurrence, besides its projections.

    Attributes:
        conv, conv_bias: ``[taps, channels]`` and ``[channels]``, of the convolution over queries, keys and values; the
            bias is None if there is none.
        rates, bias: see ``Kernels.recurrence_gates``.
        skip: see ``Kernels.recurrence``.
        norm: of the output, see ``Kernels.gated_norm``.
    """

    conv: Tensor
    conv_bias: Tensor | None
    rates: Tensor
    bias: Tensor
    skip: Tensor | None
    norm: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer.

    A field is None if the model has no such tensor.

    Linear weights are ``[out, in]``, as loaded or packed by ``Kernels.pack``.

    Attributes:
        input_norm, post_norm: ``[hidden]``, before attention and before the MLP.
        attention_norm, mlp_norm: ``[hidden]``, for the outputs of attention and MLP before they are added.
        qkv, qkv_bias: queries, keys and values, stacked.
        q_norm, k_norm: see ``HeadNorms``.
            With a recurrence: all projections of the layer's input, stacked. With gated attention, the rows of a
            head's queries are followed by those of its gate.
        o, o_bias: output projection, split by input over ranks. Only rank 0 has the bias, since partial products are
            summed.
        gate_up, gate_up_bias: gate and up, stacked.
        down, down_bias: split like ``o``.
        recurrence: further weights of a recurrence, which replaces attention; None with attention.
    """

    input_norm: Tensor | None
    post_norm: Tensor | None
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    recurrence: RecurrenceWeights | None = None


class RecurrenceShape(NamedTuple):
    """Parameters of layers with a recurrence.

    A row of the input's product has the queries, keys and values, which the convolution processes, then z, which gates
    the output, then b, which only the gated delta rule has, and a (see ``Kernels.recurrence_gates``). Of a state space
    C, B and x are called queries, keys and values.

    Attributes:
        is_delta: whether it is the gated delta rule; else a state space (Mamba-2). By the rule the norm of the output
            comes before its gate, by a state space after it.
        key_heads, value_heads, key_dim, value_dim: see ``Kernels.recurrence``.
        norm_group, eps: ``group`` and ``eps`` of the output's norm, see ``Kernels.gated_norm``.
        limits: see ``Kernels.recurrence_gates``.
        targets: LoRA targets of the layer's four products: input, output, gate_up, down.
    """

    is_delta: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    norm_group: int
    eps: float
    limits: tuple[float, float]
    targets: tuple[LoraTargets, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of columns of q, k, v, z, b and a; 0 of b in a state space."""
        keys = self.key_heads * self.key_dim
        values = self.value_heads * self.value_dim
        return keys, keys, values, values, self.value_heads if self.is_delta else 0, self.value_heads


class RecurrenceStates(NamedTuple):
    """The states of a batch on all layers with a recurrence.

    Attributes:
        flat: fp32, all elements of the arena.
        conv, recurrent: int64 ``[layers, sequences, parts]``, the first element of each part; see ``causal_conv`` and
            ``recurrence`` of ``Kernels``.
        sequences: the sequences of the rows.
    """

    flat: Tensor
    conv: Tensor
    recurrent: Tensor
    sequences: StateSequences


class LayersShape(NamedTuple):
    """Parameters of layers besides their weights.

    Attributes:
        heads, kv_heads, head_dim: sizes of attention.
        eps: number added to the mean square in all norms.
        scale: factor of attention scores.
        windows: sliding window of each layer; None for full attention.
        targets: LoRA targets of the four fused products: qkv, o, gate_up, down.
        rotations: for each layer, the index of its rotary embedding in cos and sin.
        pairs: see :class:`Rotation`.
        norm_offset: number added to the weights of norms.
        has_whole_norms: whether all heads of a token are normalised together.
        softcap: soft cap of attention scores; 0 for none.
        activation: the function that gates the MLP.
        has_gated_attention: whether the sigmoid of a gate multiplies each element of the attention's output.
        recurrence: parameters of layers with a recurrence; None without such layers.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    windows: tuple[int | None, ...]
    targets: tuple[LoraTargets, ...]
    rotations: tuple[int, ...]
    pairs: RotaryPairs
    norm_offset: float = 0.0
    has_whole_norms: bool = False
    softcap: float = 0.0
    activation: Activation = Activation.SILU
    has_gated_attention: bool = False
    recurrence: RecurrenceShape | None = None


Layers = Callable[[Tensor, Tensor, Tensor, Tensor, Batch, RecurrenceStates | None], tuple[Tensor, Tensor]]
"""Computes all layers of a batch for which :func:`fits_one_call` holds.

Arguments are x ``[T, hidden]``, changed; cos and sin ``[rotations, T, head_dim]``; the arena as viewed by
:func:`kv_view`, changed; the batch; and the states of layers with a recurrence, changed. It returns, for the
sample rows, x before the last layer's MLP is added, and the MLP's output, both ``[S, hidden]``.
"""


def fits_one_call(batch: Batch) -> bool:
    """Return whether a batch needs only kernels: no host LoRA, einsums or whole weights of adapters."""
    lora = batch.lora
    if batch.assist is not None or (lora is not None and lora.form is KernelForm.EINSUM):
        return False
    return lora is None or not lora.has_extras or all(found.extras.fits_one_call for found in lora.layer_segments)
