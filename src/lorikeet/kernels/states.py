"""Layers whose state passes from token to token: the values of their kernels, and the kernels in torch.

States are fp32, in one flat tensor, and are updated in place. The parts of a state, such as heads, may lie apart from
each other; each has an offset.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.kernels.devices import to_device

ANY_STEP = (0.0, math.inf)
"""No limits of ``Kernels.recurrence_gates``."""
CHUNK_ROWS = 64
"""Rows of a prefill that are computed together."""
_NORM_EPS = 1e-6
"""Number added to the squared norm of queries and keys of the delta rule."""


class StateSequences(NamedTuple):
    """The sequences of a step.

    Attributes:
        row_starts: int64 ``[n + 1]``; sequence i has rows ``row_starts[i]`` to ``row_starts[i + 1]``.
        resumed: int64 ``[n]``, 1 if the sequence continues from its state, and 0 if it starts from zeros.
        host: ``row_starts`` on the host; None in a graph.
    """

    row_starts: Tensor
    resumed: Tensor
    host: Tensor | None

    @classmethod
    def of(cls, row_starts: Tensor, resumed: Tensor, device: torch.device) -> "StateSequences":
        """Copy tensors of the host to a device, without waiting."""
        return cls(to_device(row_starts, device), to_device(resumed, device), row_starts)

    def each(self, offsets: Tensor) -> Iterator[tuple[int, int, int, bool]]:
        """Yield each sequence's number, its first row, the row after its last, and whether it is resumed.

        Sequences without rows and padding, which has negative offsets, are left out.
        """
        firsts = offsets[:, 0].tolist()
        starts = (self.row_starts if self.host is None else self.host).tolist()
        for number, ((start, stop), resumed) in enumerate(zip(pairwise(starts), self.resumed.tolist(), strict=True)):
            if stop > start and firsts[number] >= 0:
                yield number, start, stop, bool(resumed)


def _places(offsets: Tensor, elements: int) -> Tensor:
    """Return the index of each element of parts, int64 ``[..., parts, elements]``."""
    return offsets[..., None] + torch.arange(elements, device=offsets.device)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    offsets: Tensor,
    sequences: StateSequences,
    *,
    has_silu: bool,
) -> Tensor:
    """Compute ``Kernels.causal_conv`` in fp32, sequence by sequence."""
    out = x.new_zeros(x.shape)
    channels = x.shape[1]
    parts = offsets.shape[1]
    history = len(weight) - 1
    places = _places(offsets, history * channels // parts)
    for number, start, stop, resumed in sequences.each(offsets):
        place = places[number].view(parts, history, -1).transpose(0, 1).reshape(history, channels)
        before = tails[place] if resumed else torch.zeros_like(place, dtype=tails.dtype)
        rows = torch.cat([before, x[start:stop].to(tails.dtype)])
        tails[place] = rows[len(rows) - history :]
        found = torch.zeros_like(rows[history:])
        for tap in range(history + 1):
            found += rows[tap : tap + stop - start] * weight[tap].to(rows.dtype)
        if bias is not None:
            found += bias.to(rows.dtype)
        out[start:stop] = F.silu(found) if has_silu else found
    return out


def recurrence(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    offsets: Tensor,
    sequences: StateSequences,
    skip: Tensor | None,
    *,
    is_delta: bool,
) -> Tensor:
    """Compute ``Kernels.recurrence`` in fp32, in chunks of ``CHUNK_ROWS`` rows.

    Within a chunk, the values that each token adds to the state solve a triangular system (Yang et al., "Gated Delta
    Networks", 2024). Sequences of one row are computed together.
    """
    out = values.new_zeros(values.shape, dtype=states.dtype)
    shape = (keys.shape[2], values.shape[2])
    places = _places(offsets, shape[0] * shape[1]).unflatten(-1, shape)
    wide = _Rows.of(queries, keys, values, decay, beta, states.dtype, is_delta=is_delta)
    ones: list[tuple[int, int, bool]] = []
    for number, start, stop, resumed in sequences.each(offsets):
        if stop - start == 1:
            ones.append((start, number, resumed))
            continue
        state = states[places[number]] if resumed else torch.zeros_like(places[number], dtype=states.dtype)
        for first in range(start, stop, CHUNK_ROWS):
            last = min(stop, first + CHUNK_ROWS)
            out[first:last], state = _chunk(wide.rows(slice(first, last)), state, is_delta=is_delta)
        states[places[number]] = state
    if ones:
        starts, numbers, resumed_ones = (torch.tensor(each, device=states.device) for each in zip(*ones, strict=True))
        state = states[places[numbers]].masked_fill(~resumed_ones[:, None, None, None], 0)
        out[starts], states[places[numbers]] = _steps(wide.rows(starts), state, is_delta=is_delta)
    if skip is not None:
        out += wide.v * skip[:, None]
    return out.to(values.dtype)


class _Rows(NamedTuple):
    """Rows of all heads: queries, keys ``[T, heads, key_dim]``, values ``[T, heads, value_dim]``, gates."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, dtype: torch.dtype, *, is_delta: bool
    ) -> "_Rows":
        q, k, v, decay, beta = (each.to(dtype) for each in (q, k, v, decay, beta))
        if is_delta:
            q = q * (q.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt() * q.shape[-1] ** -0.5
            k = k * (k.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()
        q, k = (each.repeat_interleave(v.shape[1] // each.shape[1], dim=1) for each in (q, k))
        return cls(q, k, v, decay, beta)

    def rows(self, rows: slice | Tensor) -> "_Rows":
        return _Rows(*(each[rows] for each in self))


def _chunk(rows: _Rows, state: Tensor, *, is_delta: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[C, heads, value_dim]`` of consecutive rows, and the state after them."""
    q, k, v = (each.transpose(0, 1) for each in rows[:3])
    faded = rows.decay.T.cumsum(-1)  # The logarithm of how much is left of the state, [heads, C].
    beta = rows.beta.T[..., None]
    left = (faded[:, :, None] - faded[:, None, :]).tril().exp().tril()
    added = beta * v
    if is_delta:
        added = added - beta * faded.exp()[..., None] * (k @ state)
        system = (beta * (k @ k.transpose(1, 2)) * left).tril(-1)
        added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    out = faded.exp()[..., None] * (q @ state) + (q @ k.transpose(1, 2) * left) @ added
    remaining = (faded[:, -1:] - faded).exp()[..., None]
    state = faded[:, -1].exp()[:, None, None] * state + (k * remaining).transpose(1, 2) @ added
    return out.transpose(0, 1), state


def _steps(rows: _Rows, state: Tensor, *, is_delta: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs of one row of each sequence, and the states ``[n, heads, key_dim, value_dim]`` after it."""
    state = rows.decay.exp()[..., None, None] * state
    added = rows.v
    if is_delta:
        added = added - (rows.k[:, :, None] @ state)[:, :, 0]
    added = rows.beta[..., None] * added
    state = state + rows.k[..., None] * added[:, :, None]
    return (rows.q[:, :, None] @ state)[:, :, 0], state


def recurrence_gates(
    b: Tensor | None, a: Tensor, rates: Tensor, bias: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Compute ``Kernels.recurrence_gates`` in the dtype of ``rates``."""
    step = F.softplus(a.to(rates.dtype) + bias).clamp(*limits)
    return rates * step, step if b is None else b.to(rates.dtype).sigmoid()


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Compute ``Kernels.sigmoid_mul`` in fp32, or in fp64 for fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * gate.to(wide.dtype).sigmoid()).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool) -> Tensor:
    """Compute ``Kernels.gated_norm`` in fp32, or in fp64 for fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gates = F.silu(gate.to(wide.dtype))
    groups = (wide if is_norm_first else wide * gates).unflatten(-1, (-1, group))
    normed = groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (normed * weight.to(wide.dtype).view(-1, group)).flatten(-2)
    return (normed * gates if is_norm_first else normed).to(x.dtype)
