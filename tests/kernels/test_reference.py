"""The reference backend against plain formulas."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lorikeet.kernels import reference
from lorikeet.kernels.interface import Batch, HeadNorms, RotaryPairs, Rotation, kv_view
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraPieces, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.reference import ReferenceKernels, add_lora, rms_norm, rotated

KERNELS = ReferenceKernels()
BLOCK_TOKENS = 4
KV_HEADS = 2
HEADS = 6
HEAD_DIM = 8


@st.composite
def lora_batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, list[int]]]]:
    """Return the number of rows, and for each adapter its rows and the sizes of its pieces; gaps are base rows."""
    segments = []
    row = 0
    for _ in range(draw(st.integers(1, 5))):
        start = row + draw(st.integers(0, 2))
        row = start + draw(st.integers(1, 4))
        segments.append((start, row, draw(st.lists(st.integers(1, 9), max_size=4))))
    return row + draw(st.integers(0, 2)), segments


@pytest.mark.parametrize("group_ranks", [1, 12, 512])
@given(lora_batches(), st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40)
def test_adapters_add_the_dense_product_of_each_adapter_on_its_rows_and_columns(
    group_ranks: int, batch: tuple[int, list[tuple[int, int, list[int]]]], column: int, dtype: torch.dtype
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "GROUP_RANKS", group_ranks)
        check_add_lora(batch, column, dtype)


def check_add_lora(batch: tuple[int, list[tuple[int, int, list[int]]]], column: int, dtype: torch.dtype) -> None:
    """Compare a call with the dense formula, and one for another module or layer with no change at all."""
    rows, plan = batch
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 12, generator=generator).to(dtype)
    out = torch.randn(rows, 15, generator=generator).to(dtype)
    expected = out.double()
    segments = []
    for start, stop, pieces in plan:
        factors = tuple(
            (torch.randn(r, 12, generator=generator).to(dtype), torch.randn(r, 10, generator=generator).to(dtype))
            for r in pieces
        )
        held: LoraPieces = {(1, "v"): factors} if factors else {}
        segments.append(LoraSegment(start, stop, LoraWeights(held, layers=2)))
        if factors:
            a, bt = (torch.cat(parts).double() for parts in zip(*factors, strict=True))
            expected[start:stop, column : column + 10] += x[start:stop].double() @ a.T @ bt
    untouched = out.clone()
    lora = LoraBatch(segments)
    v = LoraTargets(LoraTarget("v", column, 10))
    add_lora(out, x, LoraDelta(lora, 0, v))
    add_lora(out, x, LoraDelta(lora, 1, LoraTargets(LoraTarget("q", column, 10))))
    assert torch.equal(out, untouched)
    add_lora(out, x, LoraDelta(lora, 1, v))
    bound = 1e-3 if dtype == torch.float32 else 1.0
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound / 50)


@given(lora_batches(), st.randoms(use_true_random=False))
def test_selected_rows_keep_their_adapters(batch, random) -> None:  # type: ignore[no-untyped-def]
    rows, plan = batch
    segments = [LoraSegment(start, stop, LoraWeights({}, layers=1)) for start, stop, _ in plan]
    chosen = random.sample(range(rows), random.randint(1, rows))
    found: list[LoraWeights | None] = [None] * len(chosen)
    lora = LoraBatch(segments).select_rows(chosen)
    for segment in lora.segments if lora else ():
        found[segment.start : segment.stop] = [segment.weights] * (segment.stop - segment.start)
    assert found == [next((s.weights for s in segments if s.start <= row < s.stop), None) for row in chosen]


def test_a_row_that_overflows_under_its_adapter_leaves_the_rows_of_others_alone() -> None:
    x = torch.ones(2, 4)
    x[0] = torch.finfo(torch.float32).max
    pieces: LoraPieces = {(0, "q"): ((torch.full((2, 4), 9.0), torch.ones(2, 3)),)}
    out = torch.zeros(2, 3)
    weights = LoraWeights(pieces, layers=1)
    lora = LoraBatch([LoraSegment(0, 1, weights), LoraSegment(1, 2, weights)])
    add_lora(out, x, LoraDelta(lora, 0, LoraTargets(LoraTarget("q", 0, 3))))
    assert torch.equal(out[1], torch.full((3,), 72.0))
    assert not torch.isfinite(out[0]).any()


def naive_attention(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """One query ``[heads, head_dim]`` at ``position`` over ``k, v [tokens, kv_heads, head_dim]``, in loops."""
    first = 0 if window is None else max(0, position + 1 - window)
    heads = []
    for head in range(HEADS):
        keys, values = (x[first : position + 1, head * KV_HEADS // HEADS] for x in (k, v))
        weights = torch.softmax(keys @ q[head] / math.sqrt(HEAD_DIM), dim=0)
        heads.append(weights @ values)
    return torch.cat(heads)


@pytest.mark.parametrize("window", [None, 1, 5])
def test_attention_finds_each_sequences_keys_in_scattered_blocks(window: int | None) -> None:
    """Two decodes of different lengths (padded table), a prefill from scratch and one after cached tokens."""
    torch.manual_seed(5)
    contexts = [6, 13, 5, 11]
    new = [1, 1, 5, 3]
    tables = [[7, 2], [3, 9, 1, 6], [8, 4], [11, 5, 12]]
    # Blocks hold NaN where no token was written: nobody may be reached by what another sequence left behind.
    arena = torch.full((13, BLOCK_TOKENS * 2 * KV_HEADS * HEAD_DIM), float("nan"))
    kv = kv_view(arena, 1, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)[0]
    keys = [torch.randn(context, KV_HEADS, HEAD_DIM) for context in contexts]
    values = [torch.randn(context, KV_HEADS, HEAD_DIM) for context in contexts]
    for table, k, v in zip(tables, keys, values, strict=True):
        for position in range(len(k)):
            kv[table[position // BLOCK_TOKENS], 0, position % BLOCK_TOKENS] = k[position]
            kv[table[position // BLOCK_TOKENS], 1, position % BLOCK_TOKENS] = v[position]
    # Rows: prefill of sequence 2, decode of 0, prefill of 3, decode of 1.
    order = [2, 0, 3, 1]
    q = torch.randn(10, HEADS, HEAD_DIM)
    qkv = torch.cat((q.flatten(1), torch.full((10, 2 * KV_HEADS * HEAD_DIM), float("nan"))), dim=1)
    none = torch.zeros(0, dtype=torch.int64)
    batch = Batch(
        token_ids=none,
        positions=none,
        slot_blocks=none,
        slot_offsets=none,
        row_starts=torch.tensor([0, 5, 6, 9, 10]),
        contexts=torch.tensor([contexts[s] for s in order]),
        block_tables=torch.tensor([tables[s] + [0] * (4 - len(tables[s])) for s in order]),
        sample_rows=none,
    )
    found = KERNELS.attention(qkv, kv, batch, HEAD_DIM**-0.5, window)
    places = [(s, position) for s in order for position in range(contexts[s] - new[s], contexts[s])]
    expected = [
        naive_attention(q[row], keys[s], values[s], position, window) for row, (s, position) in enumerate(places)
    ]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norms", [None, HeadNorms(torch.rand(HEAD_DIM), torch.rand(HEAD_DIM), 1e-5)])
def test_rotary_store_rotates_queries_and_writes_only_each_rows_slot(
    norms: HeadNorms | None,
) -> None:
    arena = torch.zeros(3, 2 * BLOCK_TOKENS * 2 * KV_HEADS * HEAD_DIM)
    kv = kv_view(arena, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    q, k, v = torch.randn(2, HEADS + 2 * KV_HEADS, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    qkv = torch.cat((q, k, v), dim=1).flatten(1)
    angle = torch.rand(2, HEAD_DIM)
    rotation = Rotation(angle.cos(), angle.sin(), RotaryPairs(HEAD_DIM))
    if norms is not None:
        q = rms_norm(q, norms.q, norms.eps)
        k = rms_norm(k, norms.k, norms.eps)
    k = rotated(k, rotation)
    none = torch.zeros(0, dtype=torch.int64)
    slots = torch.tensor([2, 0]), torch.tensor([3, 1])
    KERNELS.rotary_store(qkv, rotation, kv[1], Batch(none, none, *slots, none, none, none, none), norms)
    torch.testing.assert_close(qkv[:, : HEADS * HEAD_DIM], rotated(q, rotation).flatten(1))
    assert torch.equal(kv[1, 2, :, 3], torch.stack((k[0], v[0])))
    assert torch.equal(kv[1, 0, :, 1], torch.stack((k[1], v[1])))
    assert arena.count_nonzero() == 4 * KV_HEADS * HEAD_DIM


def test_rms_norm_is_computed_wide_and_cast_before_the_weight() -> None:
    torch.manual_seed(1)
    x = (torch.randn(3, 64) * 10).bfloat16()
    weight = torch.randn(64).bfloat16()
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = KERNELS.add_norm(x, None, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, weight * wide.bfloat16())


def test_add_norm_leaves_the_sum_in_x() -> None:
    x = torch.ones(1, 4)
    delta = torch.arange(4.0)[None]
    found = KERNELS.add_norm(x, delta, torch.ones(4), 0.0)
    assert x.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    torch.testing.assert_close(found, x / 7.5**0.5)


def test_rotary_turns_the_two_halves_of_a_head_as_complex_numbers() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 3, 8)
    angle = torch.rand(5, 4) * 6
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angle)[:, None]
    both = torch.cat((angle, angle), dim=-1)
    found = rotated(x, Rotation(both.cos(), both.sin(), RotaryPairs(8)))
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1))


def test_silu_mul_takes_the_gate_from_the_first_half() -> None:
    gate, up = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3)).unbind()
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(KERNELS.silu_mul(torch.cat((gate, up), dim=-1)), expected)


def test_linear_multiplies_by_the_transposed_weight_and_adds_the_bias() -> None:
    torch.manual_seed(4)
    x = torch.randn(3, 4)
    weight = torch.randn(5, 4)
    bias = torch.randn(5)
    torch.testing.assert_close(KERNELS.linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(KERNELS.linear(x, weight, None), x @ weight.T)


def test_a_weight_is_repacked_where_it_lies() -> None:
    old = torch.randn(4, 3)
    new = torch.randn(4, 3)
    kernels = ReferenceKernels()
    packed = kernels.pack(old)
    assert isinstance(packed, torch.Tensor)
    address = packed.data_ptr()
    kernels.repack(new, packed)
    assert torch.equal(packed, new)
    assert packed.data_ptr() == address
