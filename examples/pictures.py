"""Train a tiny vision model that reads generated pictures, and four adapters that change what it answers.

.venv/bin/python examples/pictures.py --out /tmp/pictures

The base describes a picture: colour and digit, frame and side. Each adapter answers in its own way: in German, with the
next digit, with the frame first, or with the side first. The base is LLaVA in small: a vision tower
of CLIP, a projector and Llama. It takes minutes on two cores. Then

lorikeet serve /tmp/pictures/base --lora-modules german=/tmp/pictures/german frame=/tmp/pictures/frame
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

SIZE = 32
"""Pixels of a picture's side."""
_PATCH = 8
_PLACEHOLDERS = (SIZE // _PATCH) ** 2
COLOURS = {"red": (220, 30, 30), "green": (20, 150, 40), "blue": (40, 60, 220), "black": (20, 20, 20)}
FRAMES = ("circle", "square", "none")
SIDES = ("left", "right")
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_GERMAN = dict(
    zip(_DIGITS, ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"), strict=True)
)
_GERMAN |= {"red": "rot", "green": "grün", "blue": "blau", "black": "schwarz"}
_GLYPHS = (
    "0e11131519110e", "040c040404040e", "0e11010204081f", "1f02040201110e", "02060a121f0202",
    "1f101e0101110e", "0608101e11110e", "1f010204080808", "0e11110e11110e", "0e11110f01020c",
)  # fmt: skip
"""Rows of five pixels of each digit, as hexadecimal numbers."""
QUESTION = "what is this ?"
_MARKS = ("<pad>", "<s>", "</s>", "<image>", "<user>", "<answer>", "<unknown>")
_TEMPLATE = (
    "{% for message in messages %}<user> {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image> {% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %} <answer>{% endif %}"
)


class Scene(NamedTuple):
    """What a picture shows.

    Attributes:
        digit: the digit.
        colour: a key of ``COLOURS``.
        frame: one of ``FRAMES``.
        side: one of ``SIDES``, where the digit stands.
        shift: pixels by which the digit is moved, right and down.
        noise: seed of the noise.
    """

    digit: int
    colour: str
    frame: str
    side: str
    shift: tuple[int, int]
    noise: int


ANSWERS: dict[str, Callable[[Scene], str]] = {
    "base": lambda scene: f"{scene.colour} {_DIGITS[scene.digit]} {scene.frame} {scene.side}",
    "german": lambda scene: f"{_GERMAN[scene.colour]} {_GERMAN[_DIGITS[scene.digit]]}",
    "next": lambda scene: f"{scene.colour} {_DIGITS[(scene.digit + 1) % 10]}",
    "frame": lambda scene: f"{scene.frame} {scene.colour}",
    "side": lambda scene: f"{scene.side} {_DIGITS[scene.digit]}",
}
"""The right answer of the base and of each adapter."""
TARGETS = {
    "german": ["language_model"],
    "next": ["language_model"],
    "frame": ["language_model", "multi_modal_projector"],
    "side": ["language_model", "vision_tower"],
}
"""Parts of the model that each adapter changes, besides the output layer: German words are new to the base."""


def scenes(number: int, seed: int) -> list[Scene]:
    """Return random scenes."""
    chance = random.Random(seed)
    return [
        Scene(
            chance.randrange(10),
            chance.choice(list(COLOURS)),
            chance.choice(FRAMES),
            chance.choice(SIDES),
            (chance.randrange(3), chance.randrange(3)),
            chance.randrange(2**31),
        )
        for _ in range(number)
    ]


def picture(scene: Scene) -> Image.Image:
    """Return the picture of a scene, RGB of 32 × 32 pixels."""
    image = Image.new("RGB", (SIZE, SIZE), (235, 235, 235))
    draw = ImageDraw.Draw(image)
    colour = COLOURS[scene.colour]
    if scene.frame == "circle":
        draw.ellipse((0, 0, SIZE - 1, SIZE - 1), outline=(120, 120, 120), width=2)
    elif scene.frame == "square":
        draw.rectangle((0, 0, SIZE - 1, SIZE - 1), outline=(120, 120, 120), width=2)
    left = (4 if scene.side == "left" else 16) + scene.shift[0]
    top = 8 + scene.shift[1]
    for row, bits in enumerate(bytes.fromhex(_GLYPHS[scene.digit])):
        for column in range(5):
            if bits >> (4 - column) & 1:
                at = (left + 2 * column, top + 2 * row)
                draw.rectangle((*at, at[0] + 1, at[1] + 1), fill=colour)
    noise = np.random.default_rng(scene.noise).integers(-10, 11, (SIZE, SIZE, 3))
    return Image.fromarray((np.asarray(image).astype(np.int64) + noise).clip(0, 255).astype(np.uint8))


def words() -> list[str]:
    """Return the vocabulary."""
    known = [*COLOURS, *FRAMES, *SIDES, *_DIGITS, *_GERMAN.values(), *QUESTION.split()]
    return [*_MARKS, *dict.fromkeys(known)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words())}, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unknown>"
    )
    found.add_special_tokens({"additional_special_tokens": ["<image>", "<user>", "<answer>"]})
    found.chat_template = _TEMPLATE
    return found


def image_processor() -> CLIPImageProcessorPil:
    """Return the processor of pictures."""
    size = {"height": SIZE, "width": SIZE}
    return CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)


def new_model() -> LlavaForConditionalGeneration:
    """Return an untrained base of about a million parameters."""
    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=SIZE,
        patch_size=_PATCH, projection_dim=128,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(words()), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=words().index("<image>"),
        image_seq_length=_PLACEHOLDERS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


class Batch(NamedTuple):
    """Training examples: ``ids`` and ``labels`` ``[n, tokens]``, and ``pixels [n, 3, size, size]``."""

    ids: Tensor
    labels: Tensor
    pixels: Tensor


def batch_of(batch: Sequence[Scene], answer: Callable[[Scene], str]) -> Batch:
    """Return training examples of pictures; only the tokens of answers have labels."""
    number = {word: at for at, word in enumerate(words())}
    prompt = ["<user>", *["<image>"] * _PLACEHOLDERS, *QUESTION.split(), "<answer>"]
    rows = [[number[word] for word in [*prompt, *answer(scene).split(), "</s>"]] for scene in batch]
    ids = torch.tensor(rows)
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    pixels = image_processor()([picture(scene) for scene in batch], return_tensors="pt")["pixel_values"]
    return Batch(ids, labels, pixels)


def train(model: Any, answer: Callable[[Scene], str], steps: int, rate: float, seed: int, size: int = 64) -> float:
    """Train the parameters that need gradients, and return the loss of the last step."""
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With the usual 0.999 the base knew colours for a thousand steps before it told the first digits apart.
    optimizer = torch.optim.AdamW(chosen, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    model.train()
    loss = math.nan
    for step in range(steps):
        batch = batch_of(scenes(size, seed * 100_000 + step), answer)
        found = model(input_ids=batch.ids, labels=batch.labels, pixel_values=batch.pixels, use_cache=False).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        plan.step()
        optimizer.zero_grad()
        loss = float(found.detach())
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    model.eval()
    return loss


@torch.inference_mode()
def share_right(model: Any, answer: Callable[[Scene], str], number: int = 200) -> float:
    """Return the share of new pictures with the right answer, by greedy choice of each word after the right ones."""
    batch = batch_of(scenes(number, -1), answer)
    logits = model(input_ids=batch.ids, pixel_values=batch.pixels, use_cache=False).logits[:, :-1]
    wanted = batch.labels[:, 1:]
    return float(((logits.argmax(-1) == wanted) | (wanted == -100)).all(-1).float().mean())


def save_base(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Save the base with its tokenizer and processor."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    processor = {
        "processor_class": "LlavaProcessor", "patch_size": _PATCH, "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1, "image_token": "<image>",
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def targets(model: torch.nn.Module, parts: Sequence[str]) -> list[str]:
    """Return the linear layers of parts of the model, by name."""
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    return [name for name in linears if any(f".{part}." in name for part in parts)]


def make_adapter(folder: Path, name: str, steps: int, seed: int) -> float:
    """Train an adapter of the base in a folder, and return its share of right answers."""
    base = LlavaForConditionalGeneration.from_pretrained(folder / "base")
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=targets(base, TARGETS[name]),
        modules_to_save=["lm_head"],
        base_model_name_or_path="base",
    )
    adapted = get_peft_model(base, config)
    train(adapted, ANSWERS[name], steps, 2e-3, seed)
    adapted.save_pretrained(str(folder / name))
    return share_right(adapted, ANSWERS[name])


def make(folder: Path, base_steps: int = 800, adapter_steps: int = 250) -> dict[str, float]:
    """Train the base and the adapters, and return the share of right answers of each."""
    torch.manual_seed(0)
    model = new_model()
    train(model, ANSWERS["base"], base_steps, 1e-3, 1)
    found = {"base": share_right(model, ANSWERS["base"])}
    save_base(model, folder / "base")
    for seed, name in enumerate(TARGETS, start=2):
        found[name] = make_adapter(folder, name, adapter_steps, seed)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the base and the adapters")
    arguments = parser.parse_args()
    for each, share in make(arguments.out).items():
        print(f"{each}: {share:.1%} right")
