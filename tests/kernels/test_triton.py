"""The Triton kernels, interpreted or on a GPU, against fp64, by the error that torch makes in the same dtype."""

import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.interface import Batch, HostMetadata
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.kernels.sampling import SamplingTensors, choose, gumbel_noise
from lorikeet.kernels.triton import attention as triton_attention
from lorikeet.kernels.triton import attention_launch
from lorikeet.kernels.triton import kernels as triton_backend
from lorikeet.kernels.triton import lora as triton_lora
from lorikeet.kernels.triton import sampling as triton_sampling
from lorikeet.kernels.triton.kernels import _parts
from lorikeet.kernels.triton.launch import INTERPRETED
from tests.kernels import attention_cases as attention
from tests.kernels import lora_cases as lora
from tests.kernels import quantized_cases as quantized
from tests.kernels.choices import check_chosen
from tests.kernels.elementwise_cases import REFERENCE, ExactNorms, Heads, head_norms, kinds_of_pairs, random
from tests.kernels.exactness import check_error
from tests.kernels.sampling_cases import parameters
from tests.kernels.triton_cases import FEW, lengths, shapes
from tests.support.interpreter import round_to_nearest, spare_needless_work
from tests.support.on_gpu import triton_kernels

round_to_nearest()
spare_needless_work()
TRITON = triton_kernels()
DTYPES = (torch.bfloat16, torch.float32)
dtypes = st.sampled_from(DTYPES)
rows = st.integers(1, 9)


@FEW
@given(rows, st.one_of(st.integers(1, 70), st.just(576)), st.booleans(), st.sampled_from([0.0, 1.0]), dtypes)
def test_add_norm(rows: int, hidden: int, added: bool, offset: float, dtype: torch.dtype) -> None:
    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x = random(rows, hidden, dtype=dtype, seed=3 * seed)
        weight = random(hidden, dtype=dtype, seed=3 * seed + 1)
        delta = random(rows, hidden, dtype=dtype, seed=3 * seed + 2) if added else None
        own = x.clone()
        by_torch = x.clone()
        found, torchs = (
            backend.add_norm(each, delta, weight, 1e-5, offset)
            for backend, each in ((TRITON, own), (REFERENCE, by_torch))
        )
        assert torch.equal(own, by_torch)
        wide = by_torch.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return found, torchs, normed * (weight.double() + offset)

    check_error("triton add_norm", draw)


@pytest.mark.slow
@FEW
@given(rows, st.one_of(st.integers(1, 70), st.just(1536)), st.sampled_from(["silu_mul", "gelu_mul"]), dtypes)
def test_gates(rows: int, columns: int, gate: str, dtype: torch.dtype) -> None:
    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        gate_up = random(rows, 2 * columns, dtype=dtype, seed=seed) * 4
        by_torch = getattr(REFERENCE, gate)
        return getattr(TRITON, gate)(gate_up), by_torch(gate_up), by_torch(gate_up.double())

    check_error(f"triton {gate}", draw)


@FEW
@given(quantized.weights(), st.sampled_from([1, 5, 16, 17, 65]), st.booleans(), dtypes)
def test_a_product_with_a_quantised_weight(
    weight: QuantizedWeight, rows: int, biased: bool, dtype: torch.dtype
) -> None:
    outputs, inputs = weight.shape
    plain = weight.dequantized(dtype)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x = random(rows, inputs, dtype=dtype, seed=2 * seed)
        bias = random(outputs, dtype=dtype, seed=2 * seed + 1) if biased else None
        exact = F.linear(x.double(), plain.double(), None if bias is None else bias.double())
        return TRITON.linear(x, weight, bias), F.linear(x, plain, bias), exact

    check_error("triton quantised linear", draw)


@pytest.mark.slow
@FEW
@given(
    rows, st.integers(1, 4), st.integers(1, 3), st.one_of(st.integers(1, 20), st.sampled_from([32, 64])), head_norms,
    kinds_of_pairs, dtypes,
)  # fmt: skip
def test_rotary_store(
    rows: int, group: int, kv_heads: int, half: int, norms: str, pairs: str, dtype: torch.dtype
) -> None:
    @cache  # of both parts
    def run(seed: int) -> list[tuple[Tensor, Tensor]]:
        heads = Heads(rows, group * kv_heads, kv_heads, 2 * half, norms, pairs, dtype, seed)
        found = heads.run(TRITON, dtype)  # type: ignore[arg-type]
        return [found, heads.run(REFERENCE, dtype), heads.run(ExactNorms(), torch.float64)]

    def draw(seed: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        found, by_torch, exact = (each[part] for each in run(seed))
        return found, by_torch, exact

    for part, name in enumerate(("rotary", "store_kv")):
        check_error(f"triton {name}", partial(draw, part=part))


class Paged(attention.Case):
    """A call of the attention kernel; its KV is a layer of an arena, so that it is strided."""

    def batch(self, *, of_a_graph: bool) -> Batch:
        none = torch.zeros(0, dtype=torch.int64)
        rows = torch.zeros(len(self.q), dtype=torch.int64)
        tables = torch.where(self.tables < len(self.kv), self.tables, 0)
        host = None if of_a_graph else HostMetadata(self.row_starts, self.contexts, tables, none)
        return Batch(rows, none, none, none, self.row_starts, self.contexts, tables, none, host=host)

    def by_triton(self, *, of_a_graph: bool = False) -> Tensor:
        shape = self.shape
        arena = torch.stack((torch.full_like(self.kv, torch.nan), self.kv), dim=1)
        qkv = torch.cat((self.q, self.q[:, : (2 * shape.kv_heads - 2) * shape.head_dim]), dim=1)
        batch = self.batch(of_a_graph=of_a_graph)
        scale = shape.head_dim**-0.5
        window = shape.window or None
        return TRITON.attention(qkv, arena[:, 1], batch, scale, window, shape.softcap)


def check_attention(name: str, shape: attention.Shape, dtype: torch.dtype, *, of_a_graph: bool = False) -> None:
    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Paged(shape, dtype, seed)
        return case.by_triton(of_a_graph=of_a_graph), case.by_torch(dtype), case.by_torch(torch.float64)

    check_error(f"triton {name}", draw)


@pytest.fixture
def nan_where_nothing_is_written() -> Iterator[None]:
    """New memory is NaN, so that it shows where a kernel leaves its results out, or reads what none has written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@FEW
@given(shapes(), dtypes, st.booleans())
def test_attention(shape: attention.Shape, dtype: torch.dtype, of_a_graph: bool) -> None:
    check_attention("attention", shape, dtype, of_a_graph=of_a_graph)


@st.composite
def mixed(draw: st.DrawFn) -> attention.Shape:
    """Decodes and prefills in any order."""
    decodes = [(1, draw(st.sampled_from([1, 17, 64, 65, 200, 300]))) for _ in range(draw(st.integers(1, 3)))]
    prefills = [
        (rows, rows + draw(st.sampled_from([0, 1, 70])))
        for rows in draw(st.lists(lengths.filter(lambda rows: rows > 1), min_size=1, max_size=2))
    ]
    return attention.Shape(
        draw(st.permutations([*decodes, *prefills])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3, 4])),
        head_dim=draw(st.sampled_from([16, 80])),
        block_size=draw(st.sampled_from([5, 16])),
        window=draw(st.sampled_from([0, 0, 1, 100])),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("nan_where_nothing_is_written")
@settings(FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mixed(), dtypes, st.sampled_from([1, 264]))
def test_attention_of_decodes_and_prefills_in_one_step(
    shape: attention.Shape, dtype: torch.dtype, programs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_launch, "PROGRAMS", programs)
        check_attention("mixed attention", shape, dtype)


class Launches:
    """A kernel that remembers its grids, and with what it was last launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.grids: list[tuple[int, ...]] = []
        self.arguments: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.arguments = arguments
            self.kernel[grid](*arguments, **options)

        self.grids.append(grid)
        return launch


class AttentionLaunches(NamedTuple):
    """Those of the kernel, and of that which joins splits."""

    attention: Launches
    joins: Launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> AttentionLaunches:
    made = AttentionLaunches(Launches(triton_attention.attention), Launches(triton_attention.join_splits))
    monkeypatch.setattr(triton_attention, "attention", made.attention)
    monkeypatch.setattr(triton_attention, "join_splits", made.joins)
    return made


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.usefixtures("nan_where_nothing_is_written")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts", [(1,), (700,), (64, 65, 1), (300, 1024)])
@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_few_decodes_is_split(
    contexts: tuple[int, ...], window: int, dtype: torch.dtype, launches: AttentionLaunches
) -> None:
    shape = attention.Shape([(1, context) for context in contexts], kv_heads=2, group=3, head_dim=80, window=window)
    check_attention("split attention", shape, dtype, of_a_graph=True)
    assert launches.joins.grids


@pytest.mark.slow
@pytest.mark.usefixtures("nan_where_nothing_is_written")
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_with_prefills_are_split_without_empty_programs(
    dtype: torch.dtype, launches: AttentionLaunches
) -> None:
    shape = attention.Shape([(200, 200), (1, 1200), (30, 50), (1, 3)], kv_heads=2, group=4, head_dim=64)
    check_attention("mixed attention", shape, dtype)
    tiles = -(-200 * 4 // (32 if dtype == torch.float32 else 128))
    assert set(launches.attention.grids) == {(2, 2, 16), (2, 2, tiles)}
    assert set(launches.joins.grids) == {(2, 8)}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.usefixtures("nan_where_nothing_is_written")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("usual", [1, 2])
@pytest.mark.parametrize("window", [0, 300])
def test_a_long_context_among_short_ones_is_split_in_a_graph(
    usual: int, window: int, dtype: torch.dtype, launches: AttentionLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_launch, "PROGRAMS", usual * 4 * 2)
    for name, less in (("LONG_TOKENS", 256), ("_LONG_SPLIT", 128), ("_LEAST_SPLIT", 64)):
        monkeypatch.setattr(attention_launch, name, less)
    shape = attention.Shape([(1, 1000), (1, 1), (1, 64), (1, 200)], kv_heads=2, group=3, head_dim=80, window=window)
    check_attention("attention of a graph", shape, dtype, of_a_graph=True)
    assert set(launches.attention.grids) == {(4, 2, 3 if window else 8)}
    if (usual, window) == (1, 0):
        shares = launches.joins.arguments[1][:, :, 0, 0]  # by splits and sequences
        assert (~shares.isnan()).sum(dim=0).tolist() == [8, 1, 1, 4], "as many as are needed, and others write nothing"


@pytest.mark.usefixtures("nan_where_nothing_is_written")
@pytest.mark.parametrize("programs", [1, 264])
def test_rows_that_only_fill_a_graph_are_0(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "PROGRAMS", programs)
    case = Paged(attention.Shape([(1, 40), (1, 7)]), torch.float32)
    right = case.by_torch(torch.float32)
    case.contexts[1] = 0
    found = case.by_triton(of_a_graph=True)
    torch.testing.assert_close(found[0], right[0])
    assert not found[1].any()


def test_decodes_are_split_as_their_number_and_their_contexts_ask_for() -> None:
    assert [attention_launch.splits_of(programs, 4096) for programs in (1, 8, 32, 160, 1024, 4096)] == [
        (16, 16),
        (16, 16),
        (8, 8),
        (1, 1),
        (1, 1),
        (1, 1),
    ], "of a short context as many as keep the device busy"
    assert [attention_launch.splits_of(256, longest) for longest in (8192, 8193, 32768, 1 << 17, 1 << 20)] == [
        (1, 1),
        (1, 3),
        (1, 8),
        (1, 16),
        (1, 16),
    ], "of a long one more, however many sequences there are"
    assert [attention_launch.splits_of(programs, 1 << 17) for programs in (64, 512, 1024, 1 << 15)] == [
        (4, 16),
        (1, 8),
        (1, 4),
        (1, 4),
    ], "but few where most of very many would end at once"


def test_a_batch_has_parts_of_one_row_and_of_more() -> None:
    def parts(*sequences: tuple[int, int]) -> list[tuple[list[int] | None, int, int, int | None]]:
        found = Paged(attention.Shape(list(sequences)), torch.float32).batch(of_a_graph=False).parts
        return [(None if numbers is None else numbers.tolist(), *rest) for numbers, *rest in found]

    assert parts((1, 5), (1, 9)) == [(None, 2, 1, 9)]
    assert parts((3, 5), (2, 9)) == [(None, 2, 3, 9)]
    assert parts((3, 50), (1, 9), (2, 8), (1, 10)) == [([1, 3], 2, 1, 10), ([0, 2], 2, 3, 50)]


def test_a_nan_that_is_seen_is_not_hidden() -> None:
    case = Paged(attention.Shape([(3, 40)]), torch.float32)
    case.kv[case.tables[0, 0], 0, 3] = torch.nan
    assert case.by_triton().isnan().all()
    case = Paged(attention.Shape([(1, 400)]), torch.float32)
    case.kv[case.tables[0, 0], 0, 3] = torch.nan
    assert case.by_triton().isnan().all(), "nor in one of several splits"


def adapted(case: lora.Case, form: KernelForm = KernelForm.UNPADDED, layer: int = lora.LAYER) -> Tensor:
    batch = LoraBatch([LoraSegment(*segment) for segment in case.segments], form)
    return TRITON.linear(case.x, case.weight, None, LoraDelta(batch, layer, LoraTargets(*case.targets)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(st.data())
def test_lora(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(lora.cases(dtype))
    found = torch.empty(0)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal found
        again = lora.redrawn(case, seed)
        found = adapted(again)
        return found, lora.dense(again, dtype), lora.dense(again, torch.float64)

    check_error("triton linear_lora", draw)
    if case.segments:
        assert torch.equal(found, adapted(case, KernelForm.PADDED)), "padding changes no bit"


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("inputs", [1024, 1100])
def test_lora_of_few_rows_is_split(inputs: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "shrink_row" if rows == 1 else "shrink"
    shrinks = Launches(getattr(triton_lora, kernel))
    monkeypatch.setattr(triton_lora, kernel, shrinks)
    targets = (LoraTarget("q", 0, 140), LoraTarget("v", 150, 64))
    adapters = [lora.weights(inputs, targets, {"q": pieces, "v": [3]}, dtype, 7) for pieces in ([5, 30], [64, 8])]
    weight = random(214, inputs, dtype=dtype, seed=1) / 30
    x = random(2 * rows, inputs, dtype=dtype, seed=2)
    case = lora.Case(targets, [(0, rows, adapters[0]), (rows, 2 * rows, adapters[1])], x, weight)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        again = lora.redrawn(case, seed)
        return adapted(again), lora.dense(again, dtype), lora.dense(again, torch.float64)

    check_error("triton split lora", draw)
    assert torch.equal(adapted(case), adapted(case, KernelForm.PADDED))
    assert all(programs > len(targets) for _, _, programs in shrinks.grids), "for each target there are several parts"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_of_a_prompt_with_decodes_launches_no_empty_programs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expands = Launches(triton_lora.expand)
    monkeypatch.setattr(triton_lora, "expand", expands)
    targets = (LoraTarget("q", 0, 140),)
    adapters = [lora.weights(96, targets, {"q": [rank]}, dtype, rank) for rank in (5, 30, 64)]
    weight = random(140, 96, dtype=dtype, seed=1) / 30
    x = random(265, 96, dtype=dtype, seed=2)
    segments = [(0, 1, adapters[0]), (1, 200, adapters[1]), (200, 201, adapters[2]), (201, 265, adapters[0])]
    case = lora.Case(targets, segments, x, weight)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        again = lora.redrawn(case, seed)
        return adapted(again), lora.dense(again, dtype), lora.dense(again, torch.float64)

    check_error("triton linear_lora", draw)
    assert {(segments, tiles) for segments, tiles, _ in expands.grids} == {(7, 1)}


def test_weights_tell_whether_all_lie_at_multiples_of_16_bytes() -> None:
    memory = torch.zeros(64)  # itself at such a multiple
    first, second = (
        LoraWeights({(0, "q"): ((memory[:8].view(1, 8), memory[at : at + 8].view(1, 8)),)}, 1) for at in (12, 13)
    )
    assert [LoraBatch([LoraSegment(0, 1, each)]).is_aligned for each in (first, second)] == [True, False]
    assert not LoraBatch([LoraSegment(0, 1, first), LoraSegment(1, 2, second)]).is_aligned
    assert LoraWeights({}, 1).is_aligned


def test_inputs_are_split_by_whole_tiles() -> None:
    assert [_parts(wanted, 4096, 128) for wanted in (0, 1, 2, 7, 100)] == [
        (1, 4096),
        (1, 4096),
        (2, 2048),
        (4, 1024),
        (8, 512),
    ]
    assert [_parts(8, inputs, 128) for inputs in (1, 129, 1100)] == [(1, 128), (2, 128), (5, 256)]
    assert _parts(100, 4096, 128, most=20) == (16, 256)


LOGITS = (*DTYPES, torch.float16)
TILE = triton_backend._DRAWN
BORDERS = [0, 1, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, 3 * TILE + 6]
VOCAB = BORDERS[-1] + 1
"""Four tiles, the last of which is nearly empty."""


@pytest.fixture(params=[1, 2, 264])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many programs a row at most: vocabularies are whole, halved, or have one for each tile."""
    monkeypatch.setattr(triton_backend, "_parts", lambda wanted, *sizes: _parts(request.param, *sizes))
    return int(request.param)


def assert_as_reference(logits: Tensor, asked: SamplingTensors) -> None:
    assert TRITON.choose(logits, asked).tolist() == choose(logits, asked).tolist()


def test_vocabularies_of_few_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {name: Launches(getattr(triton_sampling, name)) for name in ("largest", "draw")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(triton_sampling, name, kernel)
    monkeypatch.setattr(triton_backend, "PROGRAMS", 8)
    for rows in (0, 1, 3, 4, 9):
        assert TRITON.choose(torch.zeros(rows, VOCAB), parameters(rows, 0.0)).tolist() == [0] * rows
    for kernel in kernels.values():
        assert kernel.grids == [(0, 4), (1, 4), (3, 2), (4, 2), (9, 1)]


@pytest.mark.slow
def test_the_best_token_is_found_wherever_parts_meet(programs: int) -> None:
    logits = torch.zeros(len(BORDERS), VOCAB, dtype=torch.bfloat16)
    logits[range(len(BORDERS)), BORDERS] = 90  # noise is never as much
    assert TRITON.choose(logits, parameters(len(BORDERS), 0.0)).tolist() == BORDERS
    few = [1, 3, 6]
    assert TRITON.choose(logits[few], parameters(len(few))).tolist() == [BORDERS[row] for row in few]


def test_of_equal_logits_the_first_is_the_most_likely(programs: int) -> None:
    ties = [[5, *BORDERS[2:]], [TILE - 1, TILE], [TILE, TILE + 1, 2 * TILE], [2 * TILE + 900, VOCAB - 1]]
    logits = torch.full((len(ties), VOCAB), -1.0)
    for row, tokens in enumerate(ties):
        logits[row, tokens] = 0.0
        logits[row, tokens[0]] = -0.0
    assert TRITON.choose(logits, parameters(len(ties), 0.0)).tolist() == [tokens[0] for tokens in ties]


@pytest.mark.slow
def test_noise_alone_decides_between_equal_logits(programs: int) -> None:
    asked = parameters(3, temperature=[1.0, 0.3, torch.inf], seed=3)
    drawn = [
        int(gumbel_noise(seed, position, np.arange(VOCAB)).argmax())
        for seed, position in zip(asked.seed.tolist(), asked.position.tolist(), strict=True)
    ]
    assert TRITON.choose(torch.full((3, VOCAB), -2.5), asked).tolist() == drawn


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_has_no_token(programs: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(14, VOCAB, dtype=dtype)
    for row, bad in enumerate((torch.nan, -torch.nan, torch.inf)):
        for at, place in enumerate((3, TILE, VOCAB - 1, slice(None))):
            logits[4 * row + at, place] = bad
    logits[12] = -torch.inf
    for asked in (parameters(14, 0.0), parameters(14), parameters(14, top_k=3, top_p=0.5, min_p=0.1)):
        assert [token < 0 for token in TRITON.choose(logits, asked).tolist()] == [True] * 13 + [False]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0, torch.inf])
def test_a_row_with_one_token_has_that_one(programs: int, temperature: float) -> None:
    logits = torch.full((len(BORDERS), VOCAB), -torch.inf)
    logits[range(len(BORDERS)), BORDERS] = -3.0
    top_k = [0, 2, 0, 2, 2, 0, 0]
    top_p = [1.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.0]
    assert TRITON.choose(logits, parameters(len(BORDERS), temperature, top_k, top_p)).tolist() == BORDERS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOGITS)
def test_equal_logits_at_a_boundary_stay_together(dtype: torch.dtype) -> None:
    """All that are kept are drawn sooner or later, and no other: of six tokens, three are equal."""
    filters = [(1, 1.0, 1), (2, 1.0, 4), (4, 1.0, 4), (5, 1.0, 5), (0, 0.35, 4), (4, 0.2, 1), (0, 0.0, 1)]
    order = [3, 2, 4, 0, 5, 1]
    draws = 7
    logits = torch.tensor([1.0, -0.5, 1.0, 1.25, 1.0, 0.75], dtype=dtype).repeat(draws * len(filters), 1)
    top_k, top_p, kept = zip(*filters, strict=True)
    asked = parameters(len(logits), 3.0, top_k * draws, top_p * draws, seed=19)
    found = TRITON.choose(logits, asked)
    assert torch.equal(found, choose(logits, asked))
    assert [set(found[row :: len(filters)].tolist()) for row in range(len(filters))] == [set(order[:n]) for n in kept]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", LOGITS)
@pytest.mark.parametrize("shift", [-100.0, 0.0, 100.0])
def test_filters_find_their_boundary_among_numbers_of_any_size(shift: float, dtype: torch.dtype) -> None:
    """Of either sign, subnormal, zeros of both signs, and such that are equal when the largest is subtracted."""
    sizes = torch.tensor([0.0, 1e-45, 1e-40, 6e-8, 1e-6, 1e-3, 0.1, 1.0, 1.5, 30.0])
    numbers = (torch.cat((-sizes, sizes)) + shift).to(dtype)
    logits = numbers.repeat(19, 1)[:, torch.randperm(20, generator=torch.Generator().manual_seed(1))].contiguous()
    top_k = list(range(1, 20))
    assert_as_reference(logits, parameters(19, 50.0, top_k))
    assert_as_reference(logits, parameters(19, 50.0, top_k, top_p=0.7, min_p=0.01))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", LOGITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_filters_tell_numbers_apart_between_which_there_is_none(sign: int, dtype: torch.dtype) -> None:
    """A boundary that is one off shows in a token more or less that can be drawn."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    count = 9
    draws = 6
    following = torch.ones((), dtype=dtype).view(bits) + torch.arange(count, dtype=bits)
    logits = (following.view(dtype) * sign).repeat(draws * (count - 1), 1)
    asked = parameters(len(logits), 1.0, list(range(1, count)) * draws, seed=5)
    assert_as_reference(logits, asked)


@pytest.mark.slow
def test_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = random(5, VOCAB, dtype=torch.bfloat16, seed=4) * 3
    asked = parameters(
        5, temperature=[1.0, 0.7, 1.0, 0.0, 2.0], top_p=[1.0, 0.9, 0.5, 1.0, 0.99], top_k=[0, 0, 40, 9, 0]
    )
    alone = [TRITON.choose(logits[i : i + 1], SamplingTensors(*(each[i : i + 1] for each in asked))) for i in range(5)]
    assert TRITON.choose(logits, asked).tolist() == torch.cat(alone).tolist()
    wide = torch.cat((logits, torch.full((5, 9), torch.nan, dtype=logits.dtype)), dim=1)[:, :VOCAB]
    assert TRITON.choose(wide, asked).tolist() == torch.cat(alone).tolist()


def assert_equal(found: Tensor, right: Tensor) -> None:
    """To the bit, where both are computed by the same library."""
    exact = {"rtol": 0.0, "atol": 0.0} if INTERPRETED else {}
    torch.testing.assert_close(found, right, **exact)


def test_einsum_is_the_references() -> None:
    targets = (LoraTarget("q", 0, 20), LoraTarget("v", 20, 12))
    adapters = [lora.weights(16, targets, {"q": [rank], "v": [3]}, torch.float32, rank) for rank in (4, 9)]
    case = lora.Case(targets, [(0, 3, adapters[0]), (4, 6, adapters[1])], torch.randn(7, 16), torch.randn(32, 16))
    batch = LoraBatch([LoraSegment(*segment) for segment in case.segments], KernelForm.EINSUM)
    delta = LoraDelta(batch, lora.LAYER, LoraTargets(*targets))
    assert_equal(adapted(case, KernelForm.EINSUM), REFERENCE.linear(case.x, case.weight, None, delta))
    assert_equal(adapted(case, layer=0), case.x @ case.weight.T)  # the adapters leave layer 0 alone


@pytest.mark.slow
@FEW
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 2, 7, 63, 64, 65, 1023, 1024, 1025, 4099]),
    scale=st.sampled_from([0.01, 0.5, 3.0, 100.0]),
    masked=st.sampled_from([0.0, 0.3, 0.99]),
    dtype=st.sampled_from(LOGITS),
    asked=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 50.0]),
            st.sampled_from([0, 1, 7, 300]),
            st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
            st.sampled_from([0.0, 0.05, 1.0]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_chosen_tokens_are_the_references(
    seed: int, vocab: int, scale: float, masked: float, dtype: torch.dtype, asked: list[tuple[float, int, float, float]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), vocab, generator=generator) * scale
    hidden = torch.rand(logits.shape, generator=generator) < masked
    hidden[:, 0] = False
    logits = logits.masked_fill(hidden, -torch.inf).to(dtype)
    temperature, top_k, top_p, min_p = zip(*asked, strict=True)
    made: SamplingTensors = parameters(len(asked), temperature, top_k, top_p, min_p, seed)
    check_chosen(TRITON.choose(logits, made), logits, made)


def test_plain_products_are_the_librarys() -> None:
    x = torch.randn(5, 8)
    weight = torch.randn(6, 8)
    bias = torch.randn(6)
    packed = TRITON.pack(weight)
    assert_equal(TRITON.linear(x, packed, bias), ReferenceKernels().linear(x, weight, bias))
    TRITON.repack(weight * 2, packed)
    assert_equal(TRITON.linear(x, packed, None), x @ weight.T)


def test_a_gpu_without_a_c_compiler_gets_the_reference_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    gpu = torch.device("cuda")
    assert "neither gcc nor clang" in choose_kernels("auto", torch.bfloat16, gpu).name
    with pytest.raises(ValueError, match="neither gcc nor clang"):
        choose_kernels("triton", torch.bfloat16, gpu)
    monkeypatch.setenv("CC", "cc")
    assert choose_kernels("auto", torch.bfloat16, gpu).name == "triton"


def test_a_gpu_without_python_headers_gets_the_reference_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "cc")
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match=rf"{tmp_path}/Python\.h is missing .*python3-dev"):
        choose_kernels("triton", torch.bfloat16, gpu)
    monkeypatch.setenv("CPATH", "/elsewhere")
    assert choose_kernels("triton", torch.bfloat16, gpu).name == "triton"
