"""Images over HTTP to a real engine: a tiny model that sees answers as transformers does."""

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.chat.images import data_url, image_file, picture
from tests.support.served import Server, serving
from tests.support.vision_model import make_vision_model

pytest.importorskip("PIL", reason="needs Pillow")

from lorikeet.chat.image_processor import ImageProcessor

TOKENS = 6
IMAGE_TOKENS = 8
"""Tokens of a picture in a prompt: one for 8 x 8 pixels, and two marks around them."""


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


async def test_openai_and_anthropic_clients_send_images(tmp_path: Path) -> None:
    make_vision_model(tmp_path / "tiny", positions=512)
    flags = ("--dtype", "float32", "--max-model-len", "256", "--block-size", "4")
    async with serving(tmp_path / "tiny", tmp_path / "home", *flags) as server:
        await _openai_sends_images(server)
        await _anthropic_sends_images(server)


async def _openai_sends_images(server: Server) -> None:
    def chat(*seeds: int) -> dict[str, Any]:
        messages = body("Look at this ", *seeds)["messages"]
        return {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "temperature": 0}

    url = f"{server.http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        without = await client.chat.completions.create(**chat())
        for seeds in ((1,), (1, 2, 3)):
            answer = await client.chat.completions.create(**chat(*seeds))
            assert answer.usage.prompt_tokens == without.usage.prompt_tokens + IMAGE_TOKENS * len(seeds)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [chunk async for chunk in await client.chat.completions.create(**chat(*seeds), **options)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == answer.choices[0].message.content
            assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
        parts = [
            {"type": "input_image", "detail": "auto", "image_url": data_url(image_file(seed=seed))} for seed in (1, 2)
        ]
        asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": TOKENS, "temperature": 0}
        asked["input"] = [{"role": "user", "content": [{"type": "input_text", "text": "Look at this "}, *parts]}]
        response = await client.responses.create(**asked)
        assert response.usage.input_tokens == without.usage.prompt_tokens + IMAGE_TOKENS * 2
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        final = events[-1].response
        assert final.incomplete_details.reason == "max_output_tokens"
        assert (final.output_text, final.usage.input_tokens) == (response.output_text, response.usage.input_tokens)
        with pytest.raises(
            openai.BadRequestError, match=r"messages\.0\.content\.1\.image_url: the image is not an image"
        ):
            await client.chat.completions.create(**chat() | {"messages": broken_messages()})


def broken_messages() -> list[Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(b"<svg/>", "image/svg+xml")}}
    return [{"role": "user", "content": [{"type": "text", "text": "Look"}, part]}]


async def _anthropic_sends_images(server: Server) -> None:
    try:
        import anthropic
    except ImportError:
        return  # It is no dependency; `python -m benchmarks.vllm_tests` installs it.

    def message(*seeds: int) -> list[Any]:
        blocks = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}}
            for data in (data_url(image_file(seed=seed)) for seed in seeds)
        ]
        return [{"role": "user", "content": [{"type": "text", "text": "Look at this "}, *blocks]}]

    url = str(server.http.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        without = await client.messages.count_tokens(model="tiny", messages=message())
        for seeds in ((1,), (1, 2, 3)):
            asked: dict[str, Any] = {
                "model": "tiny",
                "max_tokens": TOKENS,
                "temperature": 0,
                "messages": message(*seeds),
            }
            answer = await client.messages.create(**asked)
            counted = await client.messages.count_tokens(model="tiny", messages=message(*seeds))
            assert counted.input_tokens == without.input_tokens + IMAGE_TOKENS * len(seeds)
            assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
            async with client.messages.stream(**asked) as stream:
                final = await stream.get_final_message()
            assert final.content[0].text == answer.content[0].text
        for source, reason in (
            ({"type": "url", "url": "http://169.254.169.254/latest/meta-data/"}, "the URL is not fetched from 169"),
            ({"type": "base64", "media_type": "image/png", "data": "aaaa"}, "the image is not an image"),
        ):
            content = [{"type": "image", "source": source}]
            with pytest.raises(anthropic.BadRequestError, match=rf"messages\.0\.content\.0\.source: {reason}"):
                await client.messages.create(
                    model="tiny", max_tokens=4, messages=[{"role": "user", "content": content}]
                )
