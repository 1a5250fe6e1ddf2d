"""Finds the images in the messages of a body, and reads their ``data:`` URLs."""

import base64
import binascii
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lorikeet.chat.protocol import ChatMessage, ContentPart
from lorikeet.http.errors import bad_request

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts with an image: OpenAI's chats and responses, and Anthropic's messages."""
_SPACE = str.maketrans("", "", " \t\r\n")


class ImageSource(NamedTuple):
    """An image of a body.

    Attributes:
        where: the place in the body, for errors, such as ``messages.0.content.1.image_url``.
        url: a ``data:`` URL, or another one, which must be fetched.
    """

    where: str
    url: str


def images_of(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """Return the images of a conversation in the order of their placeholders in the prompt.

    Raises:
        ApiError: 400, a part for an image lacks its URL.
    """
    found: list[ImageSource] = []
    for at, message in enumerate(messages):
        found += [
            ImageSource(f"messages.{at}.images.{index}", f"data:;base64,{data}")
            for index, data in enumerate(message.images or ())
        ]
        if isinstance(message.content, list):
            found += [
                _source(part, f"messages.{at}.content.{index}")
                for index, part in enumerate(message.content)
                if part.type in IMAGE_PARTS
            ]
    return found


def _source(part: ContentPart, where: str) -> ImageSource:
    if part.image_url is None or not part.image_url.url:
        raise bad_request(f"{where}: a part of type {part.type!r} needs image_url with a url.", "messages")
    return ImageSource(where_of(part) or f"{where}.image_url", part.image_url.url)


def where_of(part: ContentPart) -> str | None:
    """Return the place of a part in a body of another API; None for the place in the chat."""
    return None if part.image_url is None else part.image_url.where


class ImageFile(msgspec.Struct, frozen=True):
    """The content of an image of a body, or its URL.

    Attributes:
        where: see ``ImageSource``.
        data: the file; empty if it must be fetched.
        url: the URL to fetch; empty if the data is there.
    """

    where: str
    data: bytes = b""
    url: str = ""


def image_files(messages: Sequence[ChatMessage]) -> tuple[ImageFile, ...]:
    """Return the images of a conversation; see :func:`images_of`. The data of ``data:`` URLs is decoded.

    Raises:
        ApiError: 400, a part lacks its URL, or its data is not base64.
    """
    return tuple(
        ImageFile(each.where, data=_data_of(each))
        if each.url[:5].lower() == "data:"
        else ImageFile(each.where, url=each.url)
        for each in images_of(messages)
    )


def _data_of(source: ImageSource) -> bytes:
    head, comma, text = source.url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise bad_request(f"{source.where}: a data: URL must have the form data:image/png;base64,….", "messages")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        try:
            data = base64.b64decode(text.translate(_SPACE), validate=True)
        except (binascii.Error, ValueError) as error:
            raise bad_request(f"{source.where}: the data is not base64: {error}.", "messages") from error
    if not data:
        raise bad_request(f"{source.where}: the image is empty.", "messages")
    return data
