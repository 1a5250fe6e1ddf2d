"""Turns images into a model's input by the image processor of the model's own files. Runs only in a helper process.

Processors of transformers do two things: they make tensors of pixels, and they replace each image's placeholder in the
prompt by as many tokens as the image has embeddings, with the marks of rows and tiles between them. Both are called
here, image by image. A processor's parts for video and sound are left out, since their classes need torchvision.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from lorikeet.chat.image_decoding import ImageError
from lorikeet.core.images import ImageTensor, ImageTokens


class NoImageProcessor(ValueError):
    """Raised for a model whose files have no image processor that can run here. The message has the reason."""


class ProcessedImage(NamedTuple):
    """The model's input for one image.

    Attributes:
        digest: see ``PromptImage``.
        text: the text that replaces the image's placeholder in the prompt.
        tensors: the outputs of the image processor that the model reads.
    """

    digest: bytes
    text: str
    tensors: dict[str, ImageTensor]


class ImageProcessor:
    """The image processor of a model folder.

    Args:
        folder: the model's folder.

    Attributes:
        tokens: the texts that stand for images in the model's prompts.

    Raises:
        NoImageProcessor: the folder has no usable image processor.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        try:
            self._processor = _load(folder, str(config.get("model_type", "")))
            token_id = config.get("image_token_id", config.get("image_token_index"))
            if token_id is None:
                token_id = self._processor.image_token_id
            embedding = self._processor.tokenizer.convert_ids_to_tokens(token_id)
            self.tokens = ImageTokens(self._processor.image_token, embedding)
        except NoImageProcessor:
            raise
        except Exception as error:  # Files of a model may be wrong in any way.
            raise NoImageProcessor(f"its image processor cannot be loaded: {type(error).__name__}: {error}") from error
        if not self.tokens.placeholder or not self.tokens.embedding:
            raise NoImageProcessor("its processor does not name the token of images")
        self._options = self._processor._merge_kwargs(tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs)
        self._options = {**self._options["images_kwargs"], "return_tensors": "np"}

    @cached_property
    def identity(self) -> bytes:
        """Digest of everything that determines the tensors of given pixels."""
        import transformers

        images = self._processor.image_processor
        known = [transformers.__version__, type(self._processor).__name__, type(images).__name__, images.to_dict()]
        text = json.dumps([*known, self._options], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).digest()

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the model's input for an RGB image.

        Raises:
            ImageError: the processor refuses the image.
        """
        processor = self._processor
        digest = hashlib.sha256(self.identity)
        digest.update(repr((image.mode, image.size)).encode())
        digest.update(image.tobytes())
        try:
            layout = processor.prepare_inputs_layout(images=[image], text=None)
            outputs, texts = processor._process_images(layout[0], **self._options)
        except MemoryError:
            raise
        except Exception as error:  # Processors fail in many ways on images that are too small or too long.
            raise ImageError(f"cannot be processed: {str(error)[:200] or type(error).__name__}") from error
        wanted = set(processor.image_processor.model_input_names) - set(processor.unused_input_names)
        tensors = {name: _tensor(outputs[name]) for name in outputs if name in wanted}
        return ProcessedImage(digest.digest(), texts[0], tensors)

    def expand(self, prompt: str, texts: Sequence[str]) -> str:
        """Return a prompt with each placeholder replaced by the text of an image, in order.

        Args:
            prompt: the prompt, with one placeholder for each text.
            texts: texts of :meth:`process`.
        """
        stand_ins = [Image.new("RGB", (1, 1))] * len(texts)
        prepared = self._processor.prepare_inputs_layout(images=stand_ins, text=[prompt])[1]
        pieces = prepared[0].split(self.tokens.placeholder)
        return "".join(piece + text for piece, text in zip(pieces, (*texts, ""), strict=True))


def _tensor(value: Any) -> ImageTensor:
    array = np.ascontiguousarray(value)
    if array.dtype == object:
        raise ImageError("cannot be processed: its parts have different sizes")
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return ImageTensor(array.dtype.name, array.shape, array.tobytes())


def _load(folder: Path, model_type: str) -> Any:
    """Return a processor of transformers without its parts for video and sound.

    Raises:
        NoImageProcessor: the folder names no processor for images, or one that needs a missing package.
    """
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    kind = _processor_class(folder, model_type)

    class WithoutVideo(kind):  # type: ignore[misc, valid-type]
        """The same processor, of which only the images and the tokenizer are loaded."""

        @classmethod
        def _get_arguments_from_pretrained(cls, source: Any, processor_dict: Any = None, **options: Any) -> list[Any]:
            makers = {
                "tokenizer": lambda: AutoTokenizer.from_pretrained(source),
                "image_processor": lambda: AutoImageProcessor.from_pretrained(source, backend="pil"),
            }
            return [makers.get(name, lambda: None)() for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    processor = WithoutVideo.from_pretrained(folder, local_files_only=True)
    if getattr(processor, "image_processor", None) is None:
        raise NoImageProcessor(f"its processor {kind.__name__} takes no images")
    return processor


def _processor_class(folder: Path, model_type: str) -> Any:
    """Return the class of a model's processor: the one that the files name, else that of the model's type."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = []
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            names.append(json.loads((folder / file).read_text()).get("processor_class"))
    name = next(filter(None, names), None) or PROCESSOR_MAPPING_NAMES.get(model_type)
    if name is None:
        raise NoImageProcessor("its files name no processor for images")
    if name == "PixtralProcessor":
        return _pixtral()
    kind = getattr(transformers, name, None)
    if kind is None:
        raise NoImageProcessor(f"transformers has no class {name}")
    if name == "SmolVLMProcessor":
        _allow_smolvlm()
    return kind


def _pixtral() -> Any:
    """Return Pixtral's processor, whose module imports one function from a module that needs torchvision.

    The module for Pillow has the same function, and takes the place of the other one.
    """
    from transformers.models.pixtral import image_processing_pil_pixtral

    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor


def _allow_smolvlm() -> None:
    """Let SmolVLM's processor be made without num2words, which it uses only for the length of videos."""
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = processing_smolvlm.num2words or str
