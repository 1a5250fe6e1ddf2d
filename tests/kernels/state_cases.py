"""Cases of layers with a state, and their oracle: one token after the other, in fp64."""

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.kernels.interface import Kernels
from lorikeet.kernels.states import StateSequences
from tests.kernels.elementwise_cases import random

CPU = torch.device("cpu")
GAP = 3
FILLED = 7.0
"""What lies between parts of states, which must not change."""
lengths = st.one_of(st.integers(1, 3), st.sampled_from([15, 16, 17, 64, 65, 130]))


@dataclass(frozen=True)
class Sequences:
    """The sequences of a step.

    Attributes:
        rows: number of rows of each.
        resumed: whether each continues from a state.
        is_padded: whether a sequence in no slot is the last.
    """

    rows: tuple[int, ...]
    resumed: tuple[bool, ...]
    is_padded: bool = False

    @property
    def slots(self) -> int:
        """Number of slots: one more than sequences, which is not used."""
        return len(self.rows) + 1

    @property
    def total(self) -> int:
        """Number of rows."""
        return sum(self.rows) + self.is_padded

    def on(self, device: torch.device) -> StateSequences:
        rows = torch.tensor([0, *self.rows, *[1] * self.is_padded])
        resumed = torch.tensor([*self.resumed, *[0] * self.is_padded], dtype=torch.int64)
        return StateSequences.of(rows.cumsum(0), resumed, device)

    def place(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``[slots, parts, ...]`` as a flat tensor with gaps, and the offsets of the sequences' parts.

        Parts of a state are not neighbours. The first sequence has the last slot.
        """
        places = _places(states)
        parts = places.shape[1]
        slots = len(places)
        flat = torch.full((slots * parts, states[0, 0].numel() + GAP), FILLED)
        flat[places, :-GAP] = states.flatten(2)
        offsets = torch.full((len(self.rows) + self.is_padded, parts), -1)
        offsets[: len(self.rows)] = places[1:].flip(0) * flat.shape[1]
        return flat.view(-1), offsets


def _places(states: Tensor) -> Tensor:
    """Return the place of each part, ``[slots, parts]``."""
    slots, parts = states.shape[:2]
    return torch.randperm(slots * parts, generator=torch.Generator().manual_seed(1)).view(slots, parts)


def gathered(flat: Tensor, states: Tensor) -> Tensor:
    """Return the parts of a flat tensor of :meth:`Sequences.place` in the shape of ``states``."""
    rows = flat.view(states.shape[0] * states.shape[1], -1)
    assert bool((rows[:, -GAP:] == FILLED).all())
    return rows[_places(states), :-GAP].view(states.shape)


@st.composite
def sequences(draw: st.DrawFn, rows: st.SearchStrategy[int] = lengths, most: int = 4) -> Sequences:
    chosen = draw(st.lists(st.tuples(rows, st.booleans()), min_size=1, max_size=most))
    counts, resumed = zip(*chosen, strict=True)
    return Sequences(counts, resumed, draw(st.booleans()))


@dataclass(frozen=True)
class Heads:
    """Sizes of a recurrence."""

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    is_delta: bool
    has_skip: bool = False


heads = st.builds(
    Heads,
    st.integers(1, 2),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([3, 16, 32, 128]),
    st.sampled_from([1, 7, 16, 40, 64, 130]),
    st.booleans(),
    st.booleans(),
)


class Recurrence:
    """Random rows of a recurrence, as strided parts of one tensor, and states."""

    def __init__(self, shape: Heads, sequences: Sequences, dtype: torch.dtype, seed: int) -> None:
        keys = shape.key_heads * shape.key_dim
        count = shape.key_heads * shape.group
        rows = sequences.total
        self.shape = shape
        self.sequences = sequences
        self.mixed = random(rows, 2 * keys + count * shape.value_dim + 5, dtype=dtype, seed=5 * seed)
        self.decay = -random(rows, count, dtype=torch.float32, seed=5 * seed + 1).exp() * 0.3
        self.beta = random(rows, count, dtype=torch.float32, seed=5 * seed + 2).sigmoid()
        size = (sequences.slots, count, shape.key_dim, shape.value_dim)
        self.states = random(*size, dtype=torch.float32, seed=5 * seed + 3) / 4
        for slot, resumed in zip(range(len(sequences.rows), 0, -1), sequences.resumed, strict=True):
            if not resumed:
                self.states[slot] = torch.nan  # What a slot holds of another sequence must not matter.
        self.skip = random(count, dtype=torch.float32, seed=5 * seed + 4) if shape.has_skip else None

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as views."""
        shape = self.shape
        keys = shape.key_heads * shape.key_dim
        values = shape.key_heads * shape.group * shape.value_dim
        q, k, v, _ = mixed.split([keys, keys, values, 5], dim=1)
        return (*(each.unflatten(1, (-1, shape.key_dim)) for each in (q, k)), v.unflatten(1, (-1, shape.value_dim)))

    def run(self, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Return a backend's outputs of all rows but padding, and all states."""
        states, offsets = self.sequences.place(self.states)
        out = kernels.recurrence(
            *self.parts(self.mixed),
            self.decay,
            self.beta,
            states,
            offsets,
            self.sequences.on(CPU),
            self.skip,
            is_delta=self.shape.is_delta,
        )
        return out[: sum(self.sequences.rows)], gathered(states, self.states)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return outputs and states, token by token in fp64."""
        q, k, v = (each.double() for each in self.parts(self.mixed))
        if self.shape.is_delta:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
            q = q * self.shape.key_dim**-0.5
        q, k = (each.repeat_interleave(self.shape.group, dim=1) for each in (q, k))
        states = self.states.double()
        out = torch.zeros(sum(self.sequences.rows), *v.shape[1:], dtype=torch.float64)
        row = 0
        for slot, count, resumed in zip(
            range(len(self.sequences.rows), 0, -1), self.sequences.rows, self.sequences.resumed, strict=True
        ):
            state = states[slot] if resumed else torch.zeros_like(states[slot])
            for _ in range(count):
                state = state * self.decay[row].double().exp()[:, None, None]
                added = v[row]
                if self.shape.is_delta:
                    added = added - torch.einsum("hk,hkv->hv", k[row], state)
                state = state + torch.einsum("hk,hv->hkv", k[row], added * self.beta[row].double()[:, None])
                out[row] = torch.einsum("hk,hkv->hv", q[row], state)
                row += 1
            states[slot] = state
        if self.skip is not None:
            out += v[: len(out)] * self.skip.double()[:, None]
        return out, states


class Convolution:
    """Random rows of a convolution, and tails."""

    def __init__(
        self, channels: int, taps: int, sequences: Sequences, dtype: torch.dtype, seed: int, *, has_bias: bool
    ) -> None:
        self.sequences = sequences
        self.parts = 3 if channels % 3 == 0 else 1
        self.x = random(sequences.total, channels + 3, dtype=dtype, seed=4 * seed)[:, :channels]
        self.weight = random(taps, channels, dtype=dtype, seed=4 * seed + 1)
        self.bias = random(channels, dtype=dtype, seed=4 * seed + 2) if has_bias else None
        tails = random(sequences.slots, taps - 1, channels, dtype=torch.float32, seed=4 * seed + 3)
        self.tails = tails.to(dtype).float()  # Tails are rows of earlier steps.
        for slot, resumed in zip(range(len(sequences.rows), 0, -1), sequences.resumed, strict=True):
            if not resumed:
                self.tails[slot] = torch.nan

    def run(self, kernels: Kernels, *, has_silu: bool) -> tuple[Tensor, Tensor]:
        """Return a backend's outputs of all rows but padding, and all tails."""
        parts = self.tails.unflatten(2, (self.parts, -1)).transpose(1, 2)
        tails, offsets = self.sequences.place(parts)
        sequences = self.sequences.on(CPU)
        out = kernels.causal_conv(self.x, self.weight, self.bias, tails, offsets, sequences, has_silu=has_silu)
        return out[: sum(self.sequences.rows)], gathered(tails, parts).transpose(1, 2).reshape(self.tails.shape)

    def exact(self, *, has_silu: bool) -> tuple[Tensor, Tensor]:
        """Return outputs in fp64, and the tails."""
        tails = self.tails.clone()
        out = []
        row = 0
        for slot, count, resumed in zip(
            range(len(self.sequences.rows), 0, -1), self.sequences.rows, self.sequences.resumed, strict=True
        ):
            before = tails[slot] if resumed else torch.zeros_like(tails[slot])
            rows = torch.cat([before, self.x[row : row + count].float()]).double()
            bias = None if self.bias is None else self.bias.double()
            found = F.conv1d(rows.T[None], self.weight.double().T[:, None], bias, groups=rows.shape[1])[0].T
            out.append(F.silu(found) if has_silu else found)
            tails[slot] = rows[len(rows) - len(before) :].float()
            row += count
        return torch.cat(out), tails
