"""Triton's interpreter, with a rounding that it lacks."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def _rounded(values: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
    """Round fp32 to the nearest bfloat16 as every GPU does: the interpreter cuts bits off instead."""
    if source == tl.float32 and target == tl.bfloat16:
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return np.asarray(wide.to(torch.bfloat16).view(torch.uint16).numpy()).reshape(values.shape)
    return np.asarray(_convert_float(values, source, target, rounding))


def round_to_nearest() -> None:
    """Have the interpreter round from now on."""
    interpreter._convert_float = _rounded
