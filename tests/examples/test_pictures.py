"""The example that reads pictures: its pictures, answers and training, and with ``--all`` what it learns, over HTTP."""

import asyncio
import base64
import io
from pathlib import Path

import httpx
import pytest
import torch
from pictures import (
    ANSWERS,
    QUESTION,
    TARGETS,
    Scene,
    batch_of,
    make,
    new_model,
    picture,
    scenes,
    targets,
    train,
    words,
)

from tests.support.served import serving

ASKED = 40
"""Pictures that each adapter is asked about."""


def test_a_picture_shows_its_scene() -> None:
    scene = Scene(3, "red", "square", "left", (0, 0), 1)
    others = [
        scene._replace(digit=8), scene._replace(colour="blue"), scene._replace(frame="circle"),
        scene._replace(side="right"), scene._replace(shift=(1, 2)),
    ]  # fmt: skip
    assert picture(scene).tobytes() == picture(scene).tobytes()
    assert len({picture(each).tobytes() for each in [scene, *others]}) == 6
    assert picture(scene).getpixel((0, 0)) != picture(others[1]._replace(frame="none")).getpixel((0, 0))


def test_each_adapter_has_an_answer_of_its_own_in_known_words() -> None:
    scene = Scene(9, "green", "none", "right", (0, 0), 1)
    answers = {name: answer(scene) for name, answer in ANSWERS.items()}
    assert answers == {
        "base": "green nine none right",
        "german": "grün neun",
        "next": "green zero",
        "frame": "none green",
        "side": "right nine",
    }
    assert set(" ".join(answers.values()).split()) <= set(words())
    assert TARGETS.keys() == ANSWERS.keys() - {"base"}


def test_only_the_answer_is_learned() -> None:
    batch = batch_of(scenes(3, 1), ANSWERS["side"])
    assert batch.pixels.shape == (3, 3, 32, 32)
    assert ((batch.labels == -100).sum(1) == batch.ids.shape[1] - 3).all()
    assert (batch.ids[:, -1] == words().index("</s>")).all()


def test_training_changes_the_named_parts_alone() -> None:
    torch.manual_seed(0)
    model = new_model()
    names = targets(model, ["vision_tower"])
    assert names
    assert all("vision_tower" in name for name in names)
    before = {name: each.clone() for name, each in model.named_parameters()}
    model.requires_grad_(False)
    for name in names:
        model.get_submodule(name).requires_grad_(True)
    train(model, ANSWERS["base"], steps=1, rate=1e-3, seed=1, size=2)
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed
    assert {name.rpartition(".")[0] for name in changed} <= set(names)


def url_of(scene: Scene) -> str:
    file = io.BytesIO()
    picture(scene).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def answered(http: httpx.AsyncClient, model: str, scene: Scene) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url_of(scene)}}, {"type": "text", "text": QUESTION}]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8}
    answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"]).strip()


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_base_and_adapters_read_pictures_in_one_batch(tmp_path: Path) -> None:
    await asyncio.to_thread(make, tmp_path)
    flags = [f"{name}={tmp_path / name}" for name in TARGETS]
    asked = [(name, scene) for scene in scenes(ASKED, -2) for name in ANSWERS]
    async with serving(
        tmp_path / "base", tmp_path / "home", "--served-model-name", "base", "--lora-modules", *flags
    ) as server:
        found = await asyncio.gather(*(answered(server.http, name, scene) for name, scene in asked))
    right = dict.fromkeys(ANSWERS, 0)
    for (name, scene), answer in zip(asked, found, strict=True):
        right[name] += answer == ANSWERS[name](scene)
    assert min(right.values()) >= 0.9 * ASKED, right
