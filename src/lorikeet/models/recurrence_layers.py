"""Computes layers with a recurrence, kernel by kernel, and finds their states in the arena."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lorikeet.core.states import StateShape
from lorikeet.kernels.extra_weights import ExtraWeights
from lorikeet.kernels.interface import Batch, Kernels, RecurrenceShape, RecurrenceStates, RecurrenceWeights
from lorikeet.kernels.lora import LoraBatch
from lorikeet.kernels.states import StateSequences
from lorikeet.models.layer_ops import DecoderLayer
from lorikeet.models.recurrence import CONV, RECURRENT, Recurrence
from lorikeet.models.state_arena import StateArena


class RecurrenceArena:
    """The states of layers with a recurrence in the arena.

    Args:
        shapes: the states (``ModelGeometry.states``).
        arena: the arena, ``[blocks, elements]``.
    """

    def __init__(self, shapes: Sequence[StateShape], arena: Tensor) -> None:
        self._arena = StateArena(shapes, arena)
        self._conv, self._recurrent = (
            [index for index, shape in enumerate(shapes) if shape.name == name] for name in (CONV, RECURRENT)
        )

    def of(self, batch: Batch) -> RecurrenceStates:
        """Return the states of a batch."""
        table = batch.states
        assert table is not None, "a model with states got no blocks for them"
        host = None if batch.host is None else batch.host.row_starts
        return RecurrenceStates(
            self._arena.flat,
            self._arena.all_offsets(table, self._conv),
            self._arena.all_offsets(table, self._recurrent),
            StateSequences(batch.row_starts, table.resumed, host),
        )


class RecurrenceMixer:
    """Mixes rows by a recurrence.

    Args:
        kernels: the kernel backend.
        shape: sizes of the rank's share.
        rule: sizes of the whole model.
        rank, ranks: the tensor-parallel rank, and the number of ranks.
    """

    def __init__(self, kernels: Kernels, shape: RecurrenceShape, rule: Recurrence, rank: int, ranks: int) -> None:
        self._kernels = kernels
        self._shape = shape
        self._rule = rule
        self._rank = rank
        self._ranks = ranks

    def mix(self, projected: Tensor, layer: DecoderLayer, states: RecurrenceStates, lora: LoraBatch | None) -> Tensor:
        """Return the input of a layer's output projection, ``[T, value_heads * value_dim]``.

        Rows of an adapter with weights of its own for the layer are computed in a separate call.

        Args:
            projected: the product of the layer's input, ``[T, columns]`` (see ``RecurrenceShape``).
            layer: the layer.
            states: the states of the batch, changed.
            lora: the rows' adapters.
        """
        weights = layer.recurrence
        assert weights is not None
        own: list[tuple[slice, RecurrenceWeights]] = []
        if lora is not None and lora.has_extras and self._rule.vectors():
            for start, stop, extras in lora.segments_with("vector"):
                replaced = self._replaced(weights, extras, layer.number)
                if replaced is not weights:
                    own.append((slice(start, stop), replaced))
        if not own:
            return self._mix(projected, weights, states, layer.place)
        found = []
        done = 0
        for rows, replaced in [*own, (slice(len(projected), len(projected)), weights)]:
            for part, chosen in ((slice(done, rows.start), weights), (rows, replaced)):
                if part.start < part.stop:
                    found.append(self._mix(projected[part], chosen, _states_of_rows(states, part), layer.place))
            done = rows.stop
        return torch.cat(found)

    def _mix(self, projected: Tensor, weights: RecurrenceWeights, states: RecurrenceStates, place: int) -> Tensor:
        kernels = self._kernels
        shape = self._shape
        heads = shape.value_heads
        keys, _, values, *_ = shape.widths
        channels = 2 * keys + values
        mixed, gate, b, a = projected.split((channels, values, shape.widths[4], heads), dim=1)
        by_rule = shape.is_delta
        decay, beta = kernels.recurrence_gates(b if by_rule else None, a, weights.rates, weights.bias, shape.limits)
        mixed = kernels.causal_conv(
            mixed, weights.conv, weights.conv_bias, states.flat, states.conv[place], states.sequences, has_silu=True
        )
        q, k, v = mixed.split((keys, keys, values), dim=1)
        out = kernels.recurrence(
            q.unflatten(1, (-1, shape.key_dim)),
            k.unflatten(1, (-1, shape.key_dim)),
            v.unflatten(1, (-1, shape.value_dim)),
            decay,
            beta,
            states.flat,
            states.recurrent[place],
            states.sequences,
            weights.skip,
            is_delta=by_rule,
        )
        return kernels.gated_norm(
            out.flatten(1), gate, weights.norm, shape.eps, shape.norm_group, is_norm_first=by_rule
        )

    def _replaced(self, weights: RecurrenceWeights, extras: ExtraWeights, layer: int) -> RecurrenceWeights:
        """Return the weights of a layer with those that an adapter replaces."""
        conv, logarithms, bias, norm = (extras.vector("vector", layer, path) for path in self._rule.vectors())
        if conv is not None:
            taps = conv.view(self._rule.channels, -1).split([each.features for each in self._rule.conv_sections()])
            conv = torch.cat([self._share(each) for each in taps]).T.to(weights.conv.dtype).contiguous()
            weights = weights._replace(conv=conv)
        if logarithms is not None:
            weights = weights._replace(rates=-self._share(logarithms).float().exp())
        if bias is not None:
            weights = weights._replace(bias=self._share(bias).float())
        if norm is not None:
            weights = weights._replace(norm=norm)
        return weights

    def _share(self, values: Tensor) -> Tensor:
        """Return the rank's share of rows that are divided by heads."""
        return values.tensor_split(self._ranks)[self._rank]


def _states_of_rows(states: RecurrenceStates, rows: slice) -> RecurrenceStates:
    """Return the states of the sequences that have some of the rows."""
    numbers = []
    starts = [0]
    resumed = []
    sequences = states.sequences
    bounds = (sequences.row_starts if sequences.host is None else sequences.host).tolist()
    for number, ((start, stop), was) in enumerate(zip(pairwise(bounds), sequences.resumed.tolist(), strict=True)):
        first = max(start, rows.start)
        last = min(stop, rows.stop)
        if first < last:
            numbers.append(number)
            starts.append(last - rows.start)
            resumed.append(1 if first > start else was)
    part = StateSequences.of(torch.tensor(starts), torch.tensor(resumed), states.flat.device)
    return RecurrenceStates(states.flat, states.conv[:, numbers], states.recurrent[:, numbers], part)


def split_gates(qkv: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the queries, keys and values of a product, and the gates, ``[T, heads * head_dim]``.

    In the product the queries of each head are followed by their gates.
    """
    both, kv = qkv.tensor_split((2 * heads * head_dim,), dim=1)
    queries, gates = both.unflatten(1, (heads, 2, head_dim)).unbind(2)
    return torch.cat([queries.flatten(1), kv], dim=1), gates.flatten(1)
