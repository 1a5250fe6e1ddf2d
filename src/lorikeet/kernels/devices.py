"""Dtypes by name, and copies to a device."""

import torch
from torch import Tensor

SLOW_HALVES = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
"""Whether torch's half-precision products on this CPU are not vectorised, and many times slower than fp32."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        ValueError: Lorikeet does not support the dtype.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for the copy.

    The source is pinned first. A copy from pageable memory would wait for all earlier work of the device. It would
    deadlock if that work waits for the calling thread, like in an assisted prefill.
    """
    registered = tensor.pin_memory() if device.type == "cuda" else tensor
    return registered.to(device, non_blocking=True)
