"""Loads the vision tower of a model whose language model our decoder runs."""

from pathlib import Path
from typing import Any

import torch

from lorikeet.models.towers import Tower
from lorikeet.models.transformers_decoder import decoder_of, load_model
from lorikeet.models.transformers_gathered import register_masks


def load_tower(folder: Path, dtype: torch.dtype, device: torch.device, *, load_format: str = "auto") -> Tower:
    """Load the tower of a model whose language model our decoder runs.

    The language model is built with one layer, and freed again.

    Args:
        folder: folder of the checkpoint.
        dtype, device: dtype and device of the tower.
        load_format: see ``loading.load_weights``.

    Raises:
        TowerError: the model takes no images.
        ModelConfigError: transformers cannot build the model.
        WeightError: weights of the tower are missing or broken.
    """

    def shorten(config: Any) -> None:
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = 1
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]

    register_masks()
    model = load_model(folder, dtype, device, load_format=load_format, change=shorten)
    tower = Tower.of(model, decoder_of(model))
    tower.free_embedding()
    tower.select_attention()
    return tower
