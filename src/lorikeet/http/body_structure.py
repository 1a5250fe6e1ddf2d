"""Counts the structure of a large JSON body in its bytes, before any object is made of it."""

from typing import NamedTuple

import numpy as np

from lorikeet.http.errors import bad_request


class BodyStructure(NamedTuple):
    """Counts of a body's structure, or their limits.

    Attributes:
        depth: levels of nested arrays and objects.
        containers: number of arrays and objects.
        keys: number of keys of all objects.
        values: number of values of all arrays and objects; empty ones add a few more.
    """

    depth: int
    containers: int
    keys: int
    values: int


_CHUNK_BYTES = 2**18
"""Bytes that are counted at a time. Counting takes about thirty times as much memory as the chunk."""
_NAMES = BodyStructure("levels of nested arrays and objects", "arrays and objects", "keys", "values")  # type: ignore[arg-type]


def count_structure(body: bytes) -> BodyStructure:
    """Count brackets, colons and commas outside strings. The counts mean nothing if the body is not JSON."""
    depth = deepest = containers = keys = commas = 0
    in_string = False
    begin = 0
    while begin < len(body):
        end = min(len(body), begin + _CHUNK_BYTES)
        # A chunk never ends within a pair of backslashes, so that an escaped character stays with its backslash.
        end -= (end - begin - len(body[begin:end].rstrip(b"\\"))) % 2 if end < len(body) else 0
        chunk = body[begin:end]
        begin = end
        # Every quote begins or ends a string, once escaped characters are gone.
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
        keys = keys + int(counts[ord(":")])
        commas = commas + int(counts[ord(",")])
    return BodyStructure(deepest, containers, keys, commas + containers)


def check_structure(body: bytes, most: BodyStructure) -> None:
    """Check that the counts of a body are within limits.

    Raises:
        ApiError: 400, a count is above its limit; the message names it.
    """
    if b"\0" in body:
        raise bad_request("A body of this size must be UTF-8.")
    for name, count, limit in zip(_NAMES, count_structure(body), most, strict=True):
        if count > limit:
            raise bad_request(f"The body has {count} {name}; at most {limit} are allowed.")
