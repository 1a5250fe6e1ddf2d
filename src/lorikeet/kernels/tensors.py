"""Helpers for tensors: dtypes by name, and copies from the host to a device."""

import torch
from torch import Tensor

SLOW_HALVES = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
"""Whether torch multiplies half precision one number at a time on this CPU, many times slower than single."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        ValueError: it is not one that Lorikeet computes in.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host's where kernels on a device can read it; the host does not wait for the copy.

    It would wait for a copy from memory that is not registered, and for all that the device has to do before: for ever,
    if that in turn waits for something that the calling thread has still to do, as an assisted prefill does.
    """
    registered = tensor.pin_memory() if device.type == "cuda" else tensor
    return registered.to(device, non_blocking=True)
