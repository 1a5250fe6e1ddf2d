"""The structure of a large JSON body, counted in its bytes before any object is made of it."""

from typing import NamedTuple

import numpy as np

from lorikeet.http.errors import bad_request


class BodyStructure(NamedTuple):
    """What a body holds, or the most that it may hold.

    Attributes:
        depth: levels of nested arrays and objects.
        containers: arrays and objects.
        keys: keys of all objects.
        values: values of all arrays and objects; a few more are counted where some are empty.
    """

    depth: int
    containers: int
    keys: int
    values: int


_CHUNK_BYTES = 2**18
"""Counting takes about thirty times as much memory as the chunk has."""
_NAMES = BodyStructure("levels of nested arrays and objects", "arrays and objects", "keys", "values")  # type: ignore[arg-type]


def count_structure(body: bytes) -> BodyStructure:
    """Count brackets, colons and commas outside strings. Of what is no JSON the counts mean nothing."""
    depth = deepest = containers = keys = commas = 0
    in_string = False
    begin = 0
    while begin < len(body):
        end = min(len(body), begin + _CHUNK_BYTES)
        # A chunk ends with a pair of backslashes or none, so that an escaped character stays with its backslash.
        end -= (end - begin - len(body[begin:end].rstrip(b"\\"))) % 2 if end < len(body) else 0
        chunk, begin = body[begin:end], end
        # Without escaped characters, every quote begins or ends a string.
        plain = chunk.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in chunk else chunk
        letters = np.frombuffer(plain, np.uint8)
        is_string = np.logical_xor.accumulate(letters == ord('"')) ^ in_string
        in_string = bool(is_string[-1])
        outside = letters[~is_string]
        counts = np.bincount(outside, minlength=256)
        folded = outside | 0x20  # [ becomes {, and ] becomes }
        brackets = folded[(folded == ord("{")) | (folded == ord("}"))]
        steps = ord("|") - brackets.astype(np.int8)  # 1 or -1
        containers += int((steps == 1).sum())
        depths = depth + np.cumsum(steps, dtype=np.int32)
        deepest = max(deepest, int(depths.max(initial=0)))
        depth = int(depths[-1]) if len(depths) else depth
        keys, commas = keys + int(counts[ord(":")]), commas + int(counts[ord(",")])
    return BodyStructure(deepest, containers, keys, commas + containers)


def check_structure(body: bytes, most: BodyStructure) -> None:
    """Refuse a body that holds more than could be served.

    Raises:
        ApiError: 400 naming what there is too much of.
    """
    if b"\0" in body:
        raise bad_request("A body of this size must be UTF-8.")
    for name, count, limit in zip(_NAMES, count_structure(body), most, strict=True):
        if count > limit:
            raise bad_request(f"The body has {count} {name}; at most {limit} are taken.")
