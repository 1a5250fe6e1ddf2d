"""Lengths of requests, scaled; which blocks they share with others stays what it is."""

from collections.abc import Sequence

import msgspec

from lorikeet.bench.choices import ChoiceError
from lorikeet.bench.workload import WorkloadRequest


def scale_lengths(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Return ``requests`` with prompts and answers ``factor`` times as long, of one token at least."""
    return [
        msgspec.structs.replace(
            request,
            input_tokens=max(1, round(request.input_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
        )
        for request in requests
    ]


def scaled_block_tokens(block_size: int, factor: float) -> int:
    """Return the length of a prefix block of ``block_size`` after scaling: 512 by 1/16 is 32.

    Raises:
        ChoiceError: it would not be a whole number of at least 2.
    """
    scaled = block_size * factor
    if scaled < 2 or scaled != round(scaled):
        raise ChoiceError(
            f"a length scale of {factor:g} makes {scaled:g} of {block_size} tokens; "
            f"blocks need a whole number from 2 on, for example by {2 / block_size:g}, {1 / 16:g} or {1 / 8:g}"
        )
    return round(scaled)


def scale_blocks(
    requests: Sequence[WorkloadRequest], factor: float, block_size: int, answer_factor: float | None = None
) -> list[WorkloadRequest]:
    """Return ``requests`` with lengths scaled so that each keeps its number of blocks.

    A full block stays full, and one that was begun stays begun: a prompt of 6,758 tokens (13 blocks of 512 and 102
    tokens) is by 1/16 one of 422 (13 blocks of 32 and 6 tokens). ``scale_lengths`` would lose blocks to rounding.

    Args:
        requests: whose prefix blocks have ``block_size``.
        factor: such that ``scaled_block_tokens`` is whole.
        block_size: before scaling.
        answer_factor: of answers; None for ``factor``.

    Raises:
        ChoiceError: blocks would not be whole.
    """
    scaled = scaled_block_tokens(block_size, factor)
    found = []
    for request in requests:
        full, rest = divmod(request.input_tokens, block_size)
        rest_tokens = min(max(1, round(rest * factor)), scaled - 1) if rest else 0
        output_tokens = max(1, round(request.output_tokens * (answer_factor or factor)))
        found.append(
            msgspec.structs.replace(
                request,
                input_tokens=full * scaled + rest_tokens,
                output_tokens=output_tokens,
                prefix_block_tokens=scaled if request.prefix_blocks else 0,
            )
        )
    return found
