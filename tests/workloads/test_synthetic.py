from pathlib import Path

import pytest

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.models.config import read_model_config
from lorikeet.profiling.model_shapes import write_model_shape
from lorikeet.workloads.synthetic import PAPER_RANKS, adapter_names, parse_ranks, spread, synthetic_adapters

HIDDEN, LAYERS = 4096, 32
LLAMA_2_7B = ModelGeometry(
    layers=LAYERS,
    kv_heads=32,
    head_dim=128,
    modules={
        **dict.fromkeys(("q", "k", "v", "o"), ModuleShape(HIDDEN, HIDDEN)),
        **dict.fromkeys(("gate", "up"), ModuleShape(HIDDEN, 11008)),
        "down": ModuleShape(11008, HIDDEN),
    },
    dtype_bytes=2,
)


def test_an_adapter_of_llama_2_7b_has_2_mib_per_rank_on_attention() -> None:
    """As Chameleon's and LoRAServe's memory figures have it: 16 MiB at rank 8, 256 MiB at rank 128."""
    adapters = synthetic_adapters(5, PAPER_RANKS, LLAMA_2_7B)
    assert [each.max_rank for each in adapters] == [8, 16, 32, 64, 128]
    assert [each.weight_bytes / 2**20 for each in adapters] == [16, 32, 64, 128, 256]
    assert adapters[0].ranks == dict.fromkeys(("q", "k", "v", "o"), (8,) * LAYERS)


def test_on_all_modules_it_has_38_mib_at_rank_8() -> None:
    """38.1 MiB, the value for all seven linear modules in dLoRA's setting."""
    (adapter,) = synthetic_adapters(1, (8,), LLAMA_2_7B, modules=LORA_MODULES)
    assert adapter.weight_bytes / 2**20 == pytest.approx(38.1, abs=0.05)


def test_each_rank_has_as_many_adapters() -> None:
    assert spread(PAPER_RANKS, 100).count(64) == 20
    assert spread((8, 16), 3) == [8, 16, 8]


def test_names_and_digests_are_distinct_and_the_same_every_time() -> None:
    adapters = synthetic_adapters(200, PAPER_RANKS, LLAMA_2_7B)
    assert adapters == synthetic_adapters(200, PAPER_RANKS, LLAMA_2_7B)
    assert [each.name for each in adapters] == adapter_names(200)
    assert len({each.digest for each in adapters}) == 200
    others = synthetic_adapters(200, PAPER_RANKS, LLAMA_2_7B, seed=1)
    assert not {each.digest for each in adapters} & {each.digest for each in others}


@pytest.mark.parametrize(
    ("text", "ranks"), [("32", (32,)), ("8,64, 16", (8, 64, 16)), ("8-128", PAPER_RANKS), ("8-100", (8, 16, 32, 64))]
)
def test_ranks_are_one_a_list_or_all_doublings(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "x", "8,", "0", "-8", "16-8", "0-4"])
def test_what_is_no_rank_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rank"):
        parse_ranks(text)


# --- Shapes of published models -----------------------------------------------------------------


def test_the_shapes_are_those_of_the_models_they_are_named_after(tmp_path: Path) -> None:
    billions = {"llama-2-7b": 6.74, "llama-3-8b": 8.03, "qwen3-8b": 8.19}
    for name, parameters in billions.items():
        config = read_model_config(write_model_shape(tmp_path / name, name))
        layer = sum(shape.in_features * shape.out_features for shape in config.module_shapes().values())
        total = config.layers * layer + 2 * config.vocab_size * config.hidden_size
        assert total / 1e9 == pytest.approx(parameters, rel=0.002)
    with pytest.raises(ValueError, match="'gpt' is not one of llama-2-7b"):
        write_model_shape(tmp_path, "gpt")
