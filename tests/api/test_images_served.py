"""Images over HTTP to a real engine: a tiny model that sees answers as transformers does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.chat.images import data_url, image_file, picture
from tests.support.served import serving
from tests.support.vision_model import make_vision_model

pytest.importorskip("PIL", reason="needs Pillow")

from lorikeet.chat.image_processor import ImageProcessor

TOKENS = 6


def expected(model: Any, folder: Path, prompt: list[int], seeds: list[int]) -> list[int]:
    """Return the greedy answer of transformers to a prompt with pictures of noise."""
    processor = ImageProcessor(folder)
    read = [processor.process(picture(seed=seed)) for seed in seeds]
    given = {
        name: torch.cat(
            [
                torch.from_numpy(np.frombuffer(each.tensors[name].data, each.tensors[name].dtype).copy()).view(
                    each.tensors[name].shape
                )
                for each in read
            ]
        )
        for name in read[0].tensors
    }
    ids = list(prompt)
    for _ in range(TOKENS):
        tokens = torch.tensor([ids])
        model.model.rope_deltas = None
        marks = (tokens == model.config.image_token_id).int()
        with torch.inference_mode():
            logits = model(input_ids=tokens, mm_token_type_ids=marks, use_cache=False, **given).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def body(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(image_file(seed=part))}}
        if isinstance(part, int)
        else {"type": "text", "text": part}
        for part in parts
    ]
    fields = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **fields}


async def test_answers_about_images_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model = make_vision_model(folder)
    flags = ("--dtype", "float32", "--max-model-len", "128", "--block-size", "4")
    async with serving(folder, tmp_path / "home", *flags) as server:

        async def ask(*parts: Any) -> dict[str, Any]:
            answer = await server.http.post("/v1/chat/completions", json=body(*parts))
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        first = await ask("Compare ", 1, " with ", 2)
        prompt = first["prompt_token_ids"]
        assert first["choices"][0]["token_ids"] == expected(model, folder, prompt, [1, 2])
        # The same images are found in the cache; another one with the same placeholders is not.
        again = await ask("Compare ", 1, " with ", 2)
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 5
        other = await ask("Compare ", 1, " with ", 3)
        assert other["prompt_token_ids"] == prompt
        assert other["choices"][0]["token_ids"] == expected(model, folder, prompt, [1, 3])
        cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < again["usage"]["prompt_tokens_details"]["cached_tokens"]
