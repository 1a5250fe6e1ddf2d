"""Keys of images: of their embeddings, and of the KV of prompts that have images."""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from lorikeet.core.images import PromptImage
from lorikeet.core.request import Request


def image_key(request: Request, image: PromptImage) -> bytes:
    """Return the key of an image's embeddings.

    Requests of adapters that do not change the tower share them.
    """
    adapter = request.adapter
    if adapter is None or not adapter.changes_tower or image.offset < request.adapter_start:
        return image.digest
    return image.digest + b"\0" + adapter.digest.encode()


def salted_by_prompt(request: Request) -> Request:
    """Return a request that finds only KV of its own prompt, for models whose tokens see the whole prompt."""
    token_ids = hashed_token_ids(request.prompt_token_ids, request.images)
    salt = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16).hexdigest()
    if request.cache_salt.endswith(salt):  # The request was exported by another engine.
        return request
    return msgspec.structs.replace(request, cache_salt=f"{request.cache_salt}\0{salt}")


def hashed_token_ids(token_ids: list[int], images: Sequence[PromptImage]) -> list[int]:
    """Return tokens for the keys of KV, in which numbers made of an image's digest replace its placeholders.

    KV of another image is never found then, though its placeholders are the same tokens.
    """
    if not images:
        return token_ids
    found = list(token_ids)
    for image in images:
        numbers = array("i", hashlib.shake_128(image.digest).digest(4 * image.length))
        found[image.offset : image.offset + image.length] = numbers
    return found
