"""Images in the bodies of all APIs, up to the request that the engine gets."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from aiohttp import web

from lorikeet.core.images import PromptImage
from tests.chat.image_models import write_model
from tests.chat.images import data_url, image_file, jpeg_of_scans, png_of_zeros, png_with_text
from tests.support.api_server import Running, Start

pytest.importorskip("PIL", reason="needs Pillow")

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL: four pixels are a side of a patch, 2 x 2 patches are a token."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2_5_vl")


@pytest.fixture
async def server(start: Start, image_model: Path) -> AsyncIterator[Running]:
    async with start(image_model=image_model, max_model_len=2048) as running:
        running.service.catalog.register("formal", str(running.sources / "formal"))
        yield running


def picture(seed: int = 0, size: tuple[int, int] = (24, 16)) -> str:
    return data_url(image_file(seed=seed, size=size))


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": list(parts)}], **fields}


def last_images(server: Running) -> tuple[PromptImage, ...]:
    return server.engine.submitted[-1].images


def check_places(server: Running) -> None:
    """Check that the images of the last request stand exactly where its prompt has placeholders."""
    request = server.engine.submitted[-1]
    pad = server.service.text_processor.tokenizer.token_to_id("<|image_pad|>")
    wanted = [at for at, token in enumerate(request.prompt_token_ids) if token == pad]
    assert [at for each in request.images for at in range(each.offset, each.offset + each.length)] == wanted
    for each in request.images:
        assert each.tensors["pixel_values"].shape[0] == 4 * each.length  # merge_size 2


async def test_images_of_a_chat_reach_the_engine(server: Running) -> None:
    body = chat(text("Compare"), part(picture()), text("with"), part(picture(1, (48, 32))), n=2)
    answer = (await server.http.post(CHAT, json=body)).raise_for_status().json()
    request = server.engine.submitted[-1]
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    assert [each.length for each in request.images] == [6, 24]
    assert server.engine.submitted[-2].images == request.images
    check_places(server)
    grid = request.images[0].tensors["image_grid_thw"]
    assert np.frombuffer(grid.data, grid.dtype).tolist() == [1, 4, 6]
    assert server.service.text_processor.decode(request.prompt_token_ids).startswith(
        "<|im_start|>user\nCompare<|vision_start|><|image_pad|>"
    )
    # The same picture in another file is the same image; another picture is not.
    await server.http.post(CHAT, json=chat(part(data_url(image_file("WEBP", lossless=True))), part(picture(2))))
    again, other = last_images(server)
    assert again.digest == request.images[0].digest != other.digest
    # An adapter gets images as the base does.
    (await server.http.post(CHAT, json=chat(part(picture()), model="formal"))).raise_for_status()
    assert last_images(server)[0].digest == again.digest
    page = (await server.http.get("/metrics")).text
    assert 'lorikeet:images_total{engine="0",model_name="base"} 5.0' in page
    assert "lorikeet:image_read_seconds_total" in page


async def test_large_bodies_bring_images_too(server: Running) -> None:
    url = data_url(image_file(size=(300, 200)))
    assert len(url) > 2**16
    (await server.http.post(CHAT, json=chat(text("Look"), part(url)))).raise_for_status()
    check_places(server)
    small = (await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": [part(url)]}]})).json()
    (await server.http.post(CHAT, json=chat(part(url)))).raise_for_status()
    assert small["tokens"] == server.engine.submitted[-1].prompt_token_ids
    counted = {"messages": [{"role": "user", "content": [anthropic(url)]}]}
    tokens = (await server.http.post("/v1/messages/count_tokens", json=counted)).raise_for_status().json()
    assert tokens == {"input_tokens": small["count"]}
    (await server.http.post("/v1/responses", json={"input": [input_image(url)]})).raise_for_status()
    check_places(server)
    bad = await server.http.post(CHAT, json=chat(part(url), part(url[:-4000])))
    assert bad.status_code == 400
    assert bad.json()["error"]["message"].startswith("messages.0.content.1.image_url: the image cannot be decoded")
    cut = await server.http.post(CHAT, json=chat(part(url), truncate_prompt_tokens=5))
    assert "cannot be truncated" in cut.json()["error"]["message"]


def anthropic(url: str) -> dict[str, Any]:
    head, _, data = url.partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}}


def input_image(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}


async def test_every_api_takes_images_in_its_form(server: Running) -> None:
    url = picture()
    # Anthropic's, also in the result of a tool.
    content = [anthropic(url), text("What is it?")]
    body: dict[str, Any] = {"model": "base", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    answer = (await server.http.post("/v1/messages", json=body)).raise_for_status().json()
    assert answer["usage"]["input_tokens"] == len(server.engine.submitted[-1].prompt_token_ids)
    check_places(server)
    digest = last_images(server)[0].digest
    counted = {key: body[key] for key in ("model", "messages")}
    tokens = (await server.http.post("/v1/messages/count_tokens", json=counted)).raise_for_status().json()
    assert tokens == {"input_tokens": answer["usage"]["input_tokens"]}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [anthropic(url)]}
    turns = [("user", "Look"), ("assistant", [call]), ("user", [result])]
    messages = [{"role": role, "content": said} for role, said in turns]
    (await server.http.post("/v1/messages", json=body | {"messages": messages})).raise_for_status()
    check_places(server)
    # OpenAI's responses, and their continuation.
    first = {"model": "base", "input": [input_image(url)]}
    response = (await server.http.post("/v1/responses", json=first)).raise_for_status().json()
    assert last_images(server)[0].digest == digest
    more = {"model": "base", "input": "And now?", "previous_response_id": response["id"]}
    (await server.http.post("/v1/responses", json=more)).raise_for_status()
    assert [each.digest for each in last_images(server)] == [digest]
    # Ollama's field, and vLLM's batch of conversations.
    ollama = {"role": "user", "content": "What?", "images": [url.partition(",")[2]]}
    (await server.http.post(CHAT, json={"model": "base", "messages": [ollama]})).raise_for_status()
    assert [each.digest for each in last_images(server)] == [digest]
    batch = {"model": "base", "messages": [[{"role": "user", "content": [part(url)]}]] * 2}
    (await server.http.post(f"{CHAT}/batch", json=batch)).raise_for_status()
    assert [each.digest for each in last_images(server)] == [digest]
    rendered = await server.http.post(f"{CHAT}/render", json=chat(part(url)))
    assert rendered.status_code == 501


async def test_lines_of_a_batch_may_have_images(server: Running) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": chat(part(picture()))}
    upload = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = (await server.http.post("/v1/files", files=upload, data={"purpose": "batch"})).raise_for_status().json()
    job = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await server.http.post("/v1/batches", json=job)).raise_for_status().json()
    async with asyncio.timeout(60):
        while batch["status"] not in ("completed", "failed", "expired"):
            await asyncio.sleep(0.01)
            batch = (await server.http.get(f"/v1/batches/{batch['id']}")).json()
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    check_places(server)


async def test_openai_client_sends_images(server: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": [text("What?"), part(picture())]}],  # type: ignore[list-item,misc]
            stream=True,
        )
        words = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(words) == "hello world"
        response = await client.responses.create(model="base", input=[input_image(picture())])  # type: ignore[list-item]
        assert response.output_text == "hello world"
    check_places(server)


async def test_faults_name_the_part_of_the_body(server: Running) -> None:
    async def refusal(body: dict[str, Any], path: str = CHAT) -> str:
        answer = await server.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    good = picture()
    place = "messages.0.content.1.image_url: "
    assert await refusal(chat(part(good), {"type": "image_url"})) == (
        "messages.0.content.1: a part of type 'image_url' needs image_url with a url."
    )
    assert await refusal(chat(part(good), part("data:image/png;base64,@@@"))) == (
        place + "the data is not base64: Only base64 data is allowed."
    )
    assert (await refusal(chat(part(good), part("data:image/png,abc")))).startswith(place + "a data: URL must have")
    assert await refusal(chat(part(good), part("data:image/png;base64,"))) == place + "the image is empty."
    assert await refusal(chat(part(good), part(data_url(b"no image")))) == (
        place + "the image is not an image in one of the formats PNG, JPEG, WEBP, GIF."
    )
    assert (await refusal(chat(part(good), part("https://example.org/a.png")))).startswith(
        place + "the URL is not fetched from example.org: send a data: URL"
    )
    assert (await refusal(chat(*[part(good)] * 17))).startswith(
        "messages.0.content.16.image_url: a request may have 16"
    )
    assert await refusal(chat(part(good), text("<|image_pad|>"))) == (
        "messages: the text contains '<|image_pad|>', which stands for an image."
    )
    assert await refusal(chat(part(good), {"type": "video_url", "video_url": {"url": good}})) == (
        "messages.0: only text and images are supported, not content of type 'video_url'."
    )
    broken = anthropic(data_url(b"x"))
    said = {"max_tokens": 4, "system": "Look.", "messages": [{"role": "user", "content": [text("a"), broken]}]}
    assert (await refusal(said, "/v1/messages")).startswith("messages.0.content.1.source: the image is not an image")
    said["messages"] = [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]
    assert (await refusal(said, "/v1/messages")).startswith("messages.0.content.0: an image needs a source")
    asked: dict[str, Any] = {"instructions": "Look.", "input": [input_image(data_url(b"x"))]}
    assert (await refusal(asked, "/v1/responses")).startswith("input.0.content.0.image_url: the image is not an image")
    asked["input"][0]["content"] = [{"type": "input_image", "file_id": "file-1"}]
    assert await refusal(asked, "/v1/responses") == ("input.0.content.0: a file_id cannot be read; send image_url.")
    long = chat(*[part(picture(seed, (64, 64))) for seed in range(3)], text("word " * 3000))
    assert "context" in await refusal(long) or "tokens" in await refusal(long)
    assert not server.engine.submitted


async def test_hostile_images_are_refused_quickly_in_bounded_memory(server: Running) -> None:
    hostile = [
        png_of_zeros(60_000, 60_000, rows=1),
        png_of_zeros(10_000, 1),
        png_with_text(2**27),
        jpeg_of_scans(100),
        image_file("JPEG", (300, 300))[:2000],
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        image_file("TIFF"),
    ]
    (await server.http.post(CHAT, json=chat(part(picture())))).raise_for_status()
    (pid,) = server.service.images.pids
    before = psutil.Process(pid).memory_info().rss
    for data in hostile:
        answer = await server.http.post(CHAT, json=chat(part(data_url(data))))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("messages.0.content.0.image_url: the image ")
    assert server.service.images.pids == [pid]
    assert psutil.Process(pid).memory_info().rss < before + 2**26
    (await server.http.post(CHAT, json=chat(part(picture())))).raise_for_status()
    assert (
        'lorikeet:image_rejections_total{engine="0",model_name="base"} 7.0' in (await server.http.get("/metrics")).text
    )


async def test_urls_are_fetched_from_allowed_places(start: Start, image_model: Path) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=image_file())

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    root = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with start(image_model=image_model, allowed_media_domains=(f"{root}/open/",)) as server:
            (await server.http.post(CHAT, json=chat(part(f"{root}/open/a.png")))).raise_for_status()
            check_places(server)
            block = {"type": "image", "source": {"type": "url", "url": f"{root}/other/a.png"}}
            body = {"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
            refused = await server.http.post("/v1/messages", json=body)
            assert refused.status_code == 400
            assert "messages.0.content.0.source: the URL is not fetched from 127.0.0.1" in refused.text
    finally:
        await runner.cleanup()


async def test_a_model_of_text_refuses_images_as_before(start: Start) -> None:
    block = anthropic(picture())
    async with start() as server:
        for kind, body, path in (
            ("image_url", chat(part(picture())), CHAT),
            ("images", {"messages": [{"role": "user", "content": "a", "images": ["aaaa"]}]}, CHAT),
            ("image", {"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}, "/v1/messages"),
            ("input_image", {"input": [input_image(picture())]}, "/v1/responses"),
        ):
            answer = await server.http.post(path, json=body)
            assert answer.status_code == 400
            assert f"only text is supported, not content of type '{kind}'" in answer.text
        assert not server.service.images.pids


async def test_a_folder_whose_processor_cannot_run_takes_no_images(start: Start, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "broken", "qwen2_5_vl")
    (folder / "processor_config.json").write_text('{"processor_class": "Llama4Processor"}')
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Llama4ImageProcessor"}')
    async with start(image_model=folder) as server:
        assert server.service.limits.image_tokens is None
        answer = await server.http.post(CHAT, json=chat(part(picture())))
        assert answer.status_code == 400
