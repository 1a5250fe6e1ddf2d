"""Parts of a batch that kernels may compute apart: sequences of one row, and those of more."""

from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.kernels.sending import send

LONG_TOKENS = 8192
"""A context that may be longer is worth more programs, whoever shares its step; graphs for such are others."""


class Part(NamedTuple):
    """Some sequences of a batch.

    Attributes:
        numbers: int64 on the device, which of the batch's they are; None: all of them.
        sequences: how many they are.
        most_rows: of any of them, at most.
        longest: context of any of them, at most; None if nobody knows before the device does.
    """

    numbers: Tensor | None
    sequences: int
    most_rows: int
    longest: int | None


def parts_of(row_starts: Tensor, contexts: Tensor, device: torch.device) -> tuple[Part, ...]:
    """Part a batch of which the host knows this; the numbers are sent to the device, which is not waited for."""
    rows = row_starts.diff()
    ones = int((rows == 1).sum())
    if not len(rows):
        return ()
    if ones in (0, len(rows)):
        return (Part(None, len(rows), int(rows.amax()), int(contexts.amax())),)
    order = (rows != 1).argsort(stable=True)
    numbers, ordered = send(order, device), contexts[order]
    return (
        Part(numbers[:ones], ones, 1, int(ordered[:ones].amax())),
        Part(numbers[ones:], len(rows) - ones, int(rows.amax()), int(ordered[ones:].amax())),
    )
