"""A tiny random Qwen2.5-VL with tokenizer, image processor and chat template, as a server needs them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.chat.image_models import write_model
from tests.models.library_bases import make_base
from tests.models.vision_bases import KINDS

KIND = "qwen2_5_vl"


def make_vision_model(folder: Path, positions: int = 0) -> Any:
    """Write the model, and return transformers' model of it.

    Args:
        folder: the model's folder.
        positions: longest sequence in tokens; 0 for that of all small bases.
    """
    write_model(folder, KIND)
    token_id = json.loads((folder / "config.json").read_text())["image_token_id"]
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()

    def change(config: Any) -> None:
        for part in ("vision_config", "text_config"):
            for key, value in KINDS[KIND].config[part].items():
                setattr(getattr(config, part), key, value)
        config.image_token_id = token_id
        config.text_config.vocab_size = vocabulary
        if positions:
            config.text_config.max_position_embeddings = positions

    return make_base(folder, KIND, change=change)
