"""Models whose attention cannot be replaced run by transformers' own, over keys and values of the arena."""

from pathlib import Path

import pytest
import torch

from lorikeet.core.geometry import KvShape
from lorikeet.engine.build import build_replica
from lorikeet.kernels.lora import LoraBatch, LoraSegment, LoraWeights
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.transformers_attention import UnsupportedAttention, layer_views
from lorikeet.models.transformers_decoder import TransformersDecoder, _check_batch, load_model
from lorikeet.models.transformers_gathered import (
    GatheredPass,
    Piece,
    StoredTokens,
    Way,
    lora_of_keys,
    lora_of_rows,
    passes_of,
    pieces_of,
)
from lorikeet.models.transformers_whole import logits_of_rows
from tests.models.library_bases import make_base
from tests.models.library_runs import settings_of

CPU = torch.device("cpu")


def decoder(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **overrides: object) -> TransformersDecoder:
    make_base(folder, kind, **overrides)
    return TransformersDecoder(load_model(folder, dtype, CPU), ReferenceKernels(), 128)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("llama", Way.KERNELS),
        ("stablelm", Way.PACKED),
        ("deepseek_v32", Way.PACKED),
        ("minimax_m3_vl_text", Way.SINGLY),  # chooses blocks of tokens, counted from the first token
        ("roberta", Way.SINGLY),  # counts positions from the number of its padding token
        ("openai-gpt", Way.ANEW),
        ("prophetnet", Way.WHOLE),  # predicts by further rows of its own
    ],
)
def test_the_first_way_that_agrees_is_chosen(tmp_path: Path, kind: str, way: Way) -> None:
    """Each way is compared with transformers' own pass when the model is loaded."""
    assert decoder(tmp_path, kind).way is way


def test_the_start_says_which_way_it_is(tmp_path: Path) -> None:
    make_base(tmp_path, "stablelm")
    replica = build_replica(settings_of(tmp_path, memory_bytes=2**25))
    replica.engine.close()
    how = "transformers 5.23.0 and its own attention over gathered keys (slower)"
    assert replica.notes[0] == f"StableLmForCausalLM runs by {how}, in float32"


def test_keys_of_an_index_are_stored_beside_keys_and_values(tmp_path: Path) -> None:
    """DeepSeek 3.2 caches latent keys and values of one head, and the keys that choose tokens."""
    geometry = decoder(tmp_path, "deepseek_v32").geometry
    assert geometry.kv_layers == (KvShape(1, 16, 8), KvShape(1, 8, 0)) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_stored_where_there_is_no_cache(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = StoredTokens.shape(6)
    (view,) = layer_views(torch.full((8, 4 * shape.elements), torch.nan, dtype=dtype), [shape], 4)
    tokens = StoredTokens(view)
    ids = torch.tensor([7, 1, 2**31 - 1, 65_536, 3, 9])
    batch = _check_batch(ids, [(0, 6, [5, 1]), (2, 3, [2])], 4)
    tokens.store(batch)
    assert tokens.read(batch, Piece(0, 0, 6, 6)).tolist() == ids.tolist()
    assert tokens.read(batch, Piece(0, 0, 3, 3)).tolist() == ids[:3].tolist()


@pytest.mark.parametrize(("kind", "chosen"), [("deepseek_v32", "index_topk"), ("doge", "keep_window_size")])
def test_tokens_are_chosen_as_by_transformers(tmp_path: Path, kind: str, chosen: str) -> None:
    """In chunks, beside a longer sequence. All tokens differ, since Doge's choice among equal ones is left open."""
    base = make_base(tmp_path, kind, **{chosen: 8})
    served = TransformersDecoder(load_model(tmp_path, torch.float32, CPU), ReferenceKernels(), 128)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(1)) + 3
    with torch.inference_mode():
        expected = base(input_ids=ids[None], use_cache=False).logits[0]
    arena = torch.zeros(24, served.geometry.block_elements(4))
    one = list(range(1, 11))
    other = list(range(11, 21))
    for first, start, stop in ((0, 0, 13), (13, 13, 14), (14, 14, 40)):
        found = served.forward(_check_batch(ids, [(first, stop, other), (start, stop, one)], 4), arena)
        assert torch.allclose(found[stop - first :], expected[start:stop], atol=1e-4)


def test_models_whose_tokens_see_later_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAttention, match="not causal"):
        decoder(tmp_path / "fp32", "bert", is_decoder=False)
    with pytest.raises(UnsupportedAttention, match="not causal"):
        decoder(tmp_path / "bf16", "roformer", torch.bfloat16, is_decoder=False)


def test_a_prompt_whose_tokens_see_each_other_is_computed_for_each_row(tmp_path: Path) -> None:
    """XLNet predicts from a placeholder after the tokens; what follows a row must not change its prediction."""
    base = make_base(tmp_path, "xlnet")
    served = TransformersDecoder(load_model(tmp_path, torch.float32, CPU), ReferenceKernels(), 128)
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(1)) + 3
    arena = torch.zeros(12, served.geometry.block_elements(4))
    parts = ((0, 13), (13, 20))
    found = [served.forward(_check_batch(ids, [(*part, [1, 2, 3, 4, 5])], 4), arena) for part in parts]
    with torch.inference_mode():
        expected = logits_of_rows(base, ids)
        assert not torch.allclose(base(input_ids=ids[None]).logits[0], expected, atol=1e-2)
    assert torch.allclose(torch.cat(found), expected, atol=1e-4)


def test_a_step_is_computed_in_passes_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.models.transformers_gathered._MOST_SCORE_BYTES", 4 * 2 * 100)
    pieces = [Piece(0, 0, 1, 20), Piece(1, 1, 2, 20), Piece(2, 2, 3, 20), Piece(3, 3, 13, 30)]

    def shown(way: Way) -> list[list[tuple[int, int, int, int]]]:
        return [[tuple(piece) for piece in each] for each in passes_of(pieces, way, heads=2)]

    parts = [(3, 3, 6, 23), (3, 6, 9, 26), (3, 9, 12, 29), (3, 12, 13, 30)]
    assert shown(Way.PACKED) == [[tuple(each) for each in pieces[:2]], [tuple(pieces[2])], *([each] for each in parts)]
    assert shown(Way.SINGLY) == [*([tuple(each)] for each in pieces[:3]), *([each] for each in parts)]
    assert shown(Way.ANEW) == [[tuple(each)] for each in pieces]


def test_a_row_sees_the_keys_of_its_sequence_by_the_function_of_positions() -> None:
    shapes = [KvShape(1, 2, 2)]
    arena = torch.zeros(8, 4 * 4)
    batch = _check_batch(torch.arange(12), [(3, 5, [5, 1]), (0, 2, [2])], 4)
    one = GatheredPass(layer_views(arena, shapes, 4), batch, pieces_of(batch))
    seen = one.mask(lambda b, h, q, k: (k <= q) & (k > q - 3), {"dtype": torch.float32})[0, 0] == 0
    assert seen.tolist() == [
        [False, True, True, True, False, False, False],
        [False, False, True, True, True, False, False],
        [False, False, False, False, False, True, False],
        [False, False, False, False, False, True, True],
    ]


def test_keys_are_gathered_from_blocks_in_the_order_of_positions() -> None:
    arena = torch.zeros(8, 4 * 3)
    views = layer_views(arena, [KvShape(1, 2, 1)], 4)
    rows = torch.arange(7.0)
    for start, stop in ((0, 5), (5, 7)):
        batch = _check_batch(torch.arange(12), [(start, stop, [5, 1])], 4)
        one = GatheredPass(views, batch, pieces_of(batch))
        keys = rows[start:stop].view(1, 1, -1, 1).expand(-1, -1, -1, 2)
        found, values = one.store(0, keys, -keys[..., :1])
    assert (one.past, one.rows, one.keys) == (5, 2, 7)
    assert found[0, 0, :, 1].tolist() == rows.tolist()
    assert values[0, 0, :, 0].tolist() == (-rows).tolist()


def test_adapters_of_rows_and_of_all_tokens_of_sequences() -> None:
    one, other = (LoraWeights({}, 0) for _ in range(2))
    lora = LoraBatch([LoraSegment(0, 3, one), LoraSegment(5, 9, other)])
    pieces = [Piece(0, 1, 3, 10), Piece(1, 3, 5, 4), Piece(2, 5, 6, 2)]
    rows = lora_of_rows(lora, 1, 6)
    keys = lora_of_keys(lora, pieces)
    assert rows is not None
    assert keys is not None
    assert rows.segments == (LoraSegment(0, 2, one), LoraSegment(4, 5, other))
    assert keys.segments == (LoraSegment(0, 10, one), LoraSegment(14, 16, other))
    assert lora_of_rows(lora, 3, 5) is None
    activated = LoraBatch([LoraSegment(2, 3, one), LoraSegment(5, 9, other)])
    keys = lora_of_keys(activated, pieces, torch.tensor([9, 0, 1]))
    assert keys is not None
    assert keys.segments == (LoraSegment(9, 10, one), LoraSegment(15, 16, other))
