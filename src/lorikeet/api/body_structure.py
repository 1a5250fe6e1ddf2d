"""The structure of a large JSON body, counted in its bytes before any object is made of it."""

from typing import NamedTuple

import numpy as np

from lorikeet.api.errors import bad_request


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


_NAMES = BodyStructure("levels of nested arrays and objects", "arrays and objects", "keys", "values")  # type: ignore[arg-type]


def count_structure(body: bytes) -> BodyStructure:
    """Count brackets, colons and commas outside strings. Of what is no JSON the counts mean nothing."""
    # Without escaped characters, every quote begins or ends a string.
    plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in body else body
    letters = np.frombuffer(plain, np.uint8)
    outside = letters[~np.logical_xor.accumulate(letters == ord('"'))]
    counts = np.bincount(outside, minlength=256)
    folded = outside | 0x20  # [ becomes {, and ] becomes }
    brackets = folded[(folded == ord("{")) | (folded == ord("}"))]
    steps = ord("|") - brackets.astype(np.int8)  # 1 or -1
    containers = int((steps == 1).sum())
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    return BodyStructure(depth, containers, int(counts[ord(":")]), int(counts[ord(",")]) + containers)


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
