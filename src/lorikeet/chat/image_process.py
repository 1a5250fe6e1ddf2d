"""Decodes the images of prompts for an API process, as ``python -m lorikeet.chat.image_process``.

The process loads the model's image processor once. Each prompt is then processed in a child of its own, by ``fork``: a
file that makes a decoder take too much memory or time, or crash, ends only the child, and nothing that it wrote stays.
torch is not imported, since it would take most of the memory and of the start.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from lorikeet.core.images import ImageTensor, ImageTokens
from lorikeet.http.helper_main import run_helper

if TYPE_CHECKING:
    from lorikeet.chat.image_processor import ImageProcessor

_MEMORY_BYTES = 3 * 2**29
"""Most address space that the images of a prompt may take."""
_DECODE_CPU_S = 0.5
_DECODE_CPU_S_PER_PIXEL = 1.5e-7
"""Most CPU time to decode an image: a constant, and a share for each pixel that its head names. Noise takes 60 ns a
pixel as WebP, and less in the other formats."""
_PROCESS_CPU_S = 10.0
"""Most CPU time of the image processor for an image. Its work depends on the model, and little on the file."""
_MAX_TENSOR_BYTES = 2**28
"""Most bytes of the tensors of a prompt, which travel to the engine in one message."""
_TOO_MUCH = "takes too much memory or time"
_BEGUN = b"i"
_ANSWER = b"a"
"""Marks in a child's output: before each image, and before the answer."""


class ImageSetup(msgspec.Struct, frozen=True):
    """Setup of a process.

    Attributes:
        folder: the model's folder.
        max_pixels: largest area of an image.
    """

    folder: str
    max_pixels: int


class ImagePrompt(msgspec.Struct, frozen=True):
    """A prompt from a chat template, which has a placeholder for each image. Without images it asks for the processor.

    Attributes:
        prompt: the text.
        images: content of the images' files, in the order of the placeholders.
    """

    prompt: str = ""
    images: tuple[bytes, ...] = ()


class ProcessorReady(msgspec.Struct, frozen=True, tag=True):
    """The answer to a prompt without images.

    Attributes:
        tokens: the texts that stand for images; None if images cannot be processed.
        refused: why they cannot.
    """

    tokens: ImageTokens | None = None
    refused: str = ""


class ReadImage(msgspec.Struct, frozen=True):
    """The model's input for an image.

    Attributes:
        digest, tensors: see ``PromptImage``.
        embeddings: number of embedding tokens in the expanded prompt.
    """

    digest: bytes
    embeddings: int
    tensors: dict[str, ImageTensor]


class PromptRead(msgspec.Struct, frozen=True, tag=True):
    """A prompt whose placeholders are expanded, and its images."""

    prompt: str
    images: tuple[ReadImage, ...]


class ImageRefused(msgspec.Struct, frozen=True, tag=True):
    """An image that cannot be used.

    Attributes:
        index: position of the image in the prompt.
        reason: what is wrong with it.
    """

    index: int
    reason: str


ImageAnswer = ProcessorReady | PromptRead | ImageRefused


def main() -> None:
    """Process prompts from standard input until the input ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then does without it.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # And says so.
    run_helper(_prepare, _MEMORY_BYTES)


def _prepare(setup_message: bytes) -> Callable[[bytes], bytes]:
    # The API process imports this module for its messages, so that only functions import transformers.
    from lorikeet.chat.image_processor import ImageProcessor, NoImageProcessor

    setup = msgspec.msgpack.decode(setup_message, type=ImageSetup)
    processor: ImageProcessor | None = None
    try:
        processor = ImageProcessor(Path(setup.folder))
        ready = ProcessorReady(processor.tokens)
    except NoImageProcessor as error:
        ready = ProcessorReady(refused=str(error))

    def answer(message: bytes) -> bytes:
        job = msgspec.msgpack.decode(message, type=ImagePrompt)
        if processor is None or not job.images:
            return msgspec.msgpack.encode(ready)
        return _in_child(_Reader(processor, setup.max_pixels, job).encoded)

    return answer


class _Reader:
    """Reads the images of one prompt.

    Args:
        processor: the model's image processor.
        max_pixels: largest area of an image.
        job: the prompt.
    """

    def __init__(self, processor: "ImageProcessor", max_pixels: int, job: ImagePrompt) -> None:
        self._processor = processor
        self._max_pixels = max_pixels
        self._job = job

    def encoded(self, begin: Callable[[], None]) -> bytes:
        """Return the encoded answer. ``begin`` is called before each image."""
        return msgspec.msgpack.encode(self._read(begin))

    def _read(self, begin: Callable[[], None]) -> PromptRead | ImageRefused:
        from lorikeet.chat.image_decoding import ImageError, open_image, rgb_pixels

        texts: list[str] = []
        images: list[ReadImage] = []
        tensor_bytes = 0
        for index, data in enumerate(self._job.images):
            begin()
            try:
                _limit_cpu(_DECODE_CPU_S)
                image = open_image(data, self._max_pixels)
                _limit_cpu(_DECODE_CPU_S + _DECODE_CPU_S_PER_PIXEL * image.width * image.height)
                pixels = rgb_pixels(image)
                _limit_cpu(_PROCESS_CPU_S)
                read = self._processor.process(pixels)
                tensor_bytes += sum(len(tensor.data) for tensor in read.tensors.values())
                if tensor_bytes > _MAX_TENSOR_BYTES:
                    raise ImageError(f"is too much: the prompt's images take over {_MAX_TENSOR_BYTES} bytes")
            except ImageError as error:
                return ImageRefused(index, str(error))
            except MemoryError:
                return ImageRefused(index, _TOO_MUCH)
            embeddings = read.text.count(self._processor.tokens.embedding)
            if not embeddings:
                return ImageRefused(index, "has no tokens in the prompt")
            texts.append(read.text)
            images.append(ReadImage(read.digest, embeddings, read.tensors))
        return PromptRead(self._processor.expand(self._job.prompt, texts), tuple(images))


def _limit_cpu(seconds: float) -> None:
    """End the process after so much CPU time from now, since nothing else interrupts a decoder."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _in_child(encoded: Callable[[Callable[[], None]], bytes]) -> bytes:
    """Return the answer that a child process makes, or a refusal of the image at which the child ended early.

    Args:
        encoded: makes the answer; it calls its argument at the beginning of each image.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        _answer_and_exit(encoded, sink)
    os.close(sink)
    with os.fdopen(source, "rb") as answers:
        begun = 0
        while answers.read(1) == _BEGUN:
            begun += 1
        content = answers.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return content
    reason = _TOO_MUCH if os.WIFSIGNALED(status) else "cannot be processed; the server's log has the cause"
    return msgspec.msgpack.encode(ImageRefused(max(0, begun - 1), reason))


def _answer_and_exit(encoded: Callable[[Callable[[], None]], bytes], sink: int) -> NoReturn:
    try:
        with os.fdopen(sink, "wb") as answers:

            def begin() -> None:
                answers.write(_BEGUN)
                answers.flush()

            content = encoded(begin)
            answers.write(_ANSWER)
            answers.write(content)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
