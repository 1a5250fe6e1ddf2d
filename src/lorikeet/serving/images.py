"""Reads the images of prompts in separate processes, and fetches those that requests name by a URL."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from lorikeet.chat.image_parts import ImageFile
from lorikeet.chat.image_process import ImageAnswer, ImagePrompt, ImageRefused, ImageSetup, ProcessorReady, PromptRead
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.config import ServerSettings
from lorikeet.core.images import ImageTokens, PromptImage
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.helper_processes import HelperProcesses
from lorikeet.http.logs import log
from lorikeet.http.threads import off_the_loop
from lorikeet.observe.image_counts import ImageCounts
from lorikeet.serving.requests import Prompt

_READ_S = 60.0
_CORES_PER_PROCESS = 4
_MAX_PROCESSES = 4
_MAX_FETCHES = 4
"""Images that one request fetches at once."""
_PARAM = "messages"
_ANSWER: msgspec.msgpack.Decoder[ImageAnswer] = msgspec.msgpack.Decoder(ImageAnswer)


class PromptImages:
    """Reads the images of prompts.

    Args:
        settings: the server's settings.
        folder: the model's folder; None for a model that takes no images.

    Attributes:
        tokens: the texts that stand for images in prompts; None if the model takes none.
        counts: counts of images, for metrics.
    """

    def __init__(self, settings: ServerSettings, folder: Path | None) -> None:
        self.tokens: ImageTokens | None = None
        self.counts = ImageCounts()
        self._settings = settings
        self._folder = folder
        most = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // _CORES_PER_PROCESS))
        self._processes = HelperProcesses("lorikeet.chat.image_process", self._setup, most)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return self._processes.pids

    async def start(self, refused: str = "") -> ImageTokens | None:
        """Start a process, so that the first image does not wait for it, and return :attr:`tokens`.

        Args:
            refused: why the engine refuses images; empty if it takes them.
        """
        if self._folder is None:
            return None
        if refused:
            log.warning("images are refused", reason=refused)
            return None
        try:
            answer = await self._ask(ImagePrompt())
        except (ApiError, EOFError, OSError, TimeoutError) as error:
            answer = ProcessorReady(refused=f"its image processor did not start: {error!r}")
        assert isinstance(answer, ProcessorReady)
        self.tokens = answer.tokens
        if answer.tokens is None:
            log.warning("images are refused", reason=answer.refused)
        else:
            log.info("images are read", placeholder=answer.tokens.placeholder)
        return self.tokens

    async def encode(
        self, texts: TextProcessor, prompt: str, images: Sequence[ImageFile], limits: ModelLimits | None = None
    ) -> Prompt:
        """Return a prompt with images in the engine's form.

        Args:
            texts: the model's tokenizer.
            prompt: the rendered prompt, with a placeholder for each image.
            images: the images.
            limits: the model's limits; None accepts a prompt of any length.

        Raises:
            ApiError: 400, an image cannot be used; the message names its place in the body.
        """
        assert self.tokens is not None, "the model takes no images"
        if len(images) > self._settings.max_images:
            where = images[self._settings.max_images].where
            raise bad_request(f"{where}: a request may have {self._settings.max_images} images.", _PARAM)
        files = await self._contents(images)
        began_s = time.monotonic()
        try:
            answer = await self._ask(ImagePrompt(prompt, files))
        except (EOFError, OSError, TimeoutError) as error:
            log.warning("images were not read", images=len(files), bytes=sum(map(len, files)), reason=repr(error))
            self.counts.refused += 1
            raise bad_request("Reading the images takes too much memory or time.", _PARAM) from error
        if isinstance(answer, ImageRefused):
            self.counts.refused += 1
            raise bad_request(f"{images[answer.index].where}: the image {answer.reason}.", _PARAM)
        assert isinstance(answer, PromptRead)
        self.counts.add(len(files), sum(map(len, files)), time.monotonic() - began_s)
        return await self._tokenized(texts, answer, limits)

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    async def _ask(self, job: ImagePrompt) -> ImageAnswer:
        return _ANSWER.decode(await self._processes.ask(msgspec.msgpack.encode(job), timeout_s=_READ_S))

    async def _contents(self, images: Sequence[ImageFile]) -> tuple[bytes, ...]:
        """Return the content of each image, fetched if the request names a URL."""
        if not any(image.url for image in images):
            return tuple(image.data for image in images)
        # Few requests have URLs, and aiohttp takes time to import.
        from lorikeet.http.url_fetcher import FetchError, UrlFetcher

        settings = self._settings
        fetcher = UrlFetcher(settings.allowed_media_domains, settings.max_body_bytes, settings.media_timeout_s)
        free = asyncio.Semaphore(_MAX_FETCHES)

        async def content(image: ImageFile) -> bytes:
            if not image.url:
                return image.data
            try:
                async with free:
                    return await fetcher.fetch(image.url)
            except FetchError as error:
                raise bad_request(f"{image.where}: the URL {error}.", _PARAM) from error

        tasks = [asyncio.create_task(content(image)) for image in images]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _tokenized(self, texts: TextProcessor, read: PromptRead, limits: ModelLimits | None) -> Prompt:
        assert self.tokens is not None
        embedding = texts.tokenizer.token_to_id(self.tokens.embedding)

        def run() -> Prompt:
            ids = texts.token_ids(read.prompt, add_special_tokens=False, limits=limits, param=_PARAM)
            places = np.flatnonzero(np.asarray(ids) == embedding)
            ends = np.cumsum([image.embeddings for image in read.images])
            if len(places) != ends[-1]:
                named = self.tokens.embedding if self.tokens is not None else ""
                raise bad_request(f"messages: the text contains {named!r}, which stands for an image.", _PARAM)
            found = []
            for image, end in zip(read.images, ends, strict=True):
                offset = int(places[end - image.embeddings])
                length = int(places[end - 1]) + 1 - offset
                found.append(PromptImage(image.digest, offset, length, image.tensors))
            return Prompt(ids, tuple(found))

        return await off_the_loop(run, len(read.prompt))

    def _setup(self) -> bytes:
        assert self._folder is not None
        return msgspec.msgpack.encode(ImageSetup(str(self._folder), self._settings.max_image_pixels))


def may_take_images(folder: Path) -> bool:
    """Return whether the files of a model may contain an image processor."""
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
