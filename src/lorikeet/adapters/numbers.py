"""Numbers of checkpoints and models in numpy, which has no bfloat16: arrays of it hold its bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_AS: dict[str, type[np.uint16 | np.float16 | np.float32]] = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
}
"""How an array of each dtype is kept."""


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return values of ``dtype`` as they are, in fp32; of fp32 no copy is made."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Round fp32 to ``dtype``, to the nearest value and of two to the even one; what is too large becomes infinity.

    Values must not be NaN. Of fp32 no copy is made.
    """
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += 0x7FFF
        rounded >>= 16
        return rounded.astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(KEPT_AS[dtype], copy=False)
