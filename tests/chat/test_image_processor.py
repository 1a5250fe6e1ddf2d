"""Images as the model's input: the same tokens and tensors as by transformers' own processor."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lorikeet.chat.image_decoding import ImageError
from tests.chat.image_models import FAMILIES, write_model

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

from lorikeet.chat.image_processor import ImageProcessor, NoImageProcessor  # noqa: E402 - imports Pillow

_SIZES = ((40, 60), (31, 31), (90, 30))


def pictures() -> list["Image.Image"]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in _SIZES]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, name)
    processor = ImageProcessor(folder)
    images = pictures()
    prompt = "<|im_start|>user\nLook:\n" + " and ".join(FAMILIES[name].in_template for _ in images) + "\nWhat is it?"
    read = [processor.process(image) for image in images]
    text = processor.expand(prompt, [each.text for each in read])
    theirs = processor._processor
    wanted = theirs(text=[prompt], images=images, return_tensors="np", add_special_tokens=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text, add_special_tokens=False).ids == wanted["input_ids"][0].tolist()
    for image, ours in zip(images, read, strict=True):
        alone = theirs(text=[FAMILIES[name].in_template], images=[image], return_tensors="np")
        assert ours.tensors
        for tensor_name, tensor in ours.tensors.items():
            found = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
            np.testing.assert_array_equal(found, np.asarray(alone[tensor_name]).astype(found.dtype))


def test_the_digest_follows_pixels_and_options(tmp_path: Path) -> None:
    first, second, _ = pictures()
    processor = ImageProcessor(write_model(tmp_path / "a", "qwen2_5_vl"))
    assert processor.process(first).digest == processor.process(first.copy()).digest
    assert processor.process(first).digest != processor.process(second).digest
    assert len(processor.process(first).digest) == 32
    folder = write_model(tmp_path / "b", "qwen2_5_vl")
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace("4096", "2048"))
    assert ImageProcessor(folder).process(first).digest != processor.process(first).digest


def test_images_with_the_same_pixels_in_another_arrangement_differ(tmp_path: Path) -> None:
    processor = ImageProcessor(write_model(tmp_path / "a", "qwen2_5_vl"))
    wide, high = (Image.new("RGB", size) for size in ((60, 30), (30, 60)))
    assert processor.process(wide).digest != processor.process(high).digest


def test_an_image_that_the_processor_refuses_is_an_error_of_the_image(tmp_path: Path) -> None:
    processor = ImageProcessor(write_model(tmp_path / "a", "qwen2_5_vl"))
    with pytest.raises(ImageError, match="cannot be processed: absolute aspect ratio"):
        processor.process(Image.new("RGB", (300, 1)))


def test_a_folder_without_a_processor_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NoImageProcessor, match="its files name no processor for images"):
        ImageProcessor(tmp_path)
