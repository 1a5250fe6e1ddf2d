"""Measures a kernel's error against the exact result, in units of torch's error in the same dtype."""

from collections.abc import Callable

import torch
from torch import Tensor

WORST: dict[str, float] = {}
"""Kernel → the largest ratio that this process has seen."""

Draw = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""Seed → results on random values: the kernel's, torch's in the same dtype, and the exact one in fp64."""

_ELEMENTS = 1000
_DRAWS = 50


def check_error(kernel: str, draw: Draw, bound: float = 2.0) -> None:
    """Assert that the error of a kernel is at most ``bound`` times torch's.

    An error is the root of the mean square over the results of enough draws: of a few numbers, torch gets some right by
    luck. It counts as an eighth of a unit in the last place at least, less than any rounding costs. Where a thousand
    results exceed the bound, fifty draws decide: all results of a normed row share one rounding, that of its norm.

    Args:
        kernel: under what name the ratio is kept in ``WORST``.
        draw: computes on one shape.
        bound: the largest ratio that is right.
    """
    ours = theirs = size = 0.0
    elements = 0
    for seed in range(_DRAWS):
        found, by_torch, exact = draw(seed)
        ours += float((found.double() - exact).square().sum())
        theirs += float((by_torch.double() - exact).square().sum())
        size += float(exact.square().sum())
        elements += exact.numel()
        floor = torch.finfo(found.dtype).eps / 8 * size**0.5
        allowed = max(theirs**0.5, floor)
        ratio = ours**0.5 / allowed if allowed else float(ours > 0)
        if not exact.numel() or (elements >= _ELEMENTS and ratio <= bound):
            break
    WORST[kernel] = max(WORST.get(kernel, 0.0), ratio)
    # Written this way round, so that NaN fails.
    assert ratio <= bound, f"{kernel}: {ratio:.2f} times torch's error"
