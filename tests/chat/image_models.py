"""Tiny folders of models that take images: a tokenizer, an image processor and a chat template for each family."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.fakes import byte_level_tokenizer

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """How a family of models names and processes images.

    Attributes:
        processor: name of the processor's class.
        image_processor: name of the image processor's class, and its options.
        tokens: named tokens of the tokenizer.
        others: tokens without a name.
        in_template: the text of an image in the chat template.
        embedding: the token that the model replaces.
        options: options of the processor.
    """

    processor: str
    image_processor: tuple[str, dict[str, Any]]
    tokens: dict[str, str]
    in_template: str
    embedding: str
    others: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})


_SMALL = {"height": 28, "width": 28}
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_IDEFICS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
}
_TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}

FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096}),
        _QWEN,
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_pad|>",
    ),
    "qwen3_vl": Family(
        "Qwen3VLProcessor",
        ("Qwen2VLImageProcessorPil", {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096}),
        _QWEN | {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_pad|>",
    ),
    "gemma3": Family(
        "Gemma3Processor",
        ("Gemma3ImageProcessorPil", {"size": _SMALL}),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        "<image_soft_token>",
        options={"image_seq_length": 4},
    ),
    "gemma4": Family(
        "Gemma4Processor",
        ("Gemma4ImageProcessorPil", {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}),
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        "<|image|>",
        "<|image|>",
        options={"image_seq_length": 70},
    ),
    "llava": Family(
        "LlavaProcessor",
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 28}, "crop_size": _SMALL}),
        {},
        "<image>\n",
        "<image>",
        ("<image>",),
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Family(
        "LlavaNextProcessor",
        (
            "LlavaNextImageProcessorPil",
            {
                "size": {"shortest_edge": 28},
                "crop_size": _SMALL,
                "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            },
        ),
        {},
        "<image>\n",
        "<image>",
        ("<image>",),
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Family(
        "LlavaOnevisionProcessor",
        ("LlavaOnevisionImageProcessorPil", {"size": _SMALL, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]}),
        {},
        "<image>\n",
        "<image>",
        ("<image>", "<video>"),
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": Family(
        "Idefics3Processor",
        ("Idefics3ImageProcessorPil", _TILES),
        {},
        "<image>",
        "<image>",
        tuple(_IDEFICS.values()) + _ROWS,
        {"image_seq_len": 4},
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        ("SmolVLMImageProcessorPil", _TILES),
        _IDEFICS,
        "<image>",
        "<image>",
        _ROWS,
        {"image_seq_len": 4},
    ),
    "internvl": Family(
        "InternVLProcessor",
        ("GotOcr2ImageProcessorPil", {"size": _SMALL, "crop_to_patches": True, "max_patches": 4}),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>\n",
        "<IMG_CONTEXT>",
        options={"image_seq_length": 4},
    ),
    "pixtral": Family(
        "PixtralProcessor",
        ("PixtralImageProcessorPil", {"patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 48}}),
        {},
        "[IMG]",
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "paligemma": Family(
        "PaliGemmaProcessor",
        ("SiglipImageProcessorPil", {"size": _SMALL, "image_seq_length": 4}),
        {"image_token": "<image>"},
        "<image>",
        "<image>",
    ),
}


def write_model(folder: Path, name: str) -> Path:
    """Write the files of a family that are needed to process prompts with images; its config has no weights."""
    import transformers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=family.tokens,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.others)}, replace_extra_special_tokens=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    kind, options = family.image_processor
    make: Callable[..., Any] = getattr(transformers, kind)
    make(**options).save_pretrained(folder)
    processor = {"processor_class": family.processor, **family.options}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    token_id = tokenizer.convert_tokens_to_ids(family.embedding)
    (folder / "config.json").write_text(json.dumps({"model_type": name, "image_token_id": token_id}))
    (folder / "chat_template.jinja").write_text(_CHAT.replace("IMAGE", family.in_template))
    return folder
