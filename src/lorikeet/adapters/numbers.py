"""Conversion between fp32 and the dtypes of checkpoints in numpy, which has no bfloat16.

Arrays of bfloat16 hold its bits as uint16.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_AS: dict[str, type[np.uint16 | np.float16 | np.float32]] = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
}
"""The numpy type in which arrays of each dtype are stored."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""The dtypes of safetensors files."""


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return values of ``dtype`` in fp32, exactly. fp32 is not copied."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Round fp32 to ``dtype``, to nearest with ties to even.

    Values that are too large become infinity.

    Values must not be NaN. fp32 is not copied.
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


def to_codes(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the nearest codes of 8 bits, from -127 to 127, and the scale of each row. A row of zeros has scale 0."""
    scales = np.abs(values).max(axis=1, initial=0.0) / np.float32(127)
    # A scale close to the denormal numbers has no inverse in fp32.
    inverses = np.divide(1.0, scales, where=scales > 1e-37, out=np.zeros_like(scales))
    return np.rint(values * inverses[:, None]).astype(np.int8), scales


def fits(value: float, dtype: str) -> bool:
    """Return whether a number is finite in ``dtype``."""
    with np.errstate(over="ignore"):
        single = np.array([value]).astype(np.float32)
    return bool(np.isfinite(single)[0] and np.isfinite(to_float32(from_float32(single, dtype), dtype))[0])
