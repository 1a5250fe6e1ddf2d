"""How far a kernel is from the exact result, in units of what torch is off in the same dtype."""

import torch
from torch import Tensor

WORST: dict[str, float] = {}
"""Kernel → the largest ratio that this process has seen."""


def check_error(kernel: str, found: Tensor, by_torch: Tensor, exact: Tensor, bound: float = 2.0) -> None:
    """Assert that the largest error of ``found`` is at most ``bound`` times torch's.

    Over few elements torch may be right by luck, so its error counts as some of the largest result's unit in the last
    place at least: half a unit in bfloat16, which the last rounding alone may cost, and a whole one in fp32, where every
    step of a sum rounds.

    Args:
        kernel: under what name the ratio is kept in ``WORST``.
        found, by_torch: of one dtype and shape.
        exact: in fp64.
    """
    if not exact.numel():
        return
    units = 1.0 if found.dtype == torch.float32 else 0.5
    floor = units * torch.finfo(found.dtype).eps * exact.abs().max()
    allowed = torch.maximum((by_torch.double() - exact).abs().max(), floor)
    error = (found.double() - exact).abs().max()
    ratio = float(error / allowed) if allowed else float(error > 0)
    WORST[kernel] = max(WORST.get(kernel, 0.0), ratio)
    assert ratio <= bound, f"{kernel}: an error of {float(error):.3g} where torch's is {float(allowed):.3g}"
