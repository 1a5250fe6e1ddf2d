"""Shapes of published models."""

from pathlib import Path

import pytest

from lorikeet.bench.model_shapes import write_model_shape
from lorikeet.models.config import read_model_config


def test_the_shapes_are_those_of_the_models_they_are_named_after(tmp_path: Path) -> None:
    billions = {"llama-2-7b": 6.74, "llama-3-8b": 8.03, "qwen3-8b": 8.19}
    for name, parameters in billions.items():
        config = read_model_config(write_model_shape(tmp_path / name, name))
        layer = sum(shape.in_features * shape.out_features for shape in config.module_shapes().values())
        total = config.layers * layer + 2 * config.vocab_size * config.hidden_size
        assert total / 1e9 == pytest.approx(parameters, rel=0.002)
    with pytest.raises(ValueError, match="'gpt' is not one of llama-2-7b"):
        write_model_shape(tmp_path, "gpt")
