"""Which backend computes."""

import torch

from lorikeet.kernels.base import Kernels
from lorikeet.kernels.library import NativeUnavailableError, best_library
from lorikeet.kernels.native import DTYPES, NativeKernels
from lorikeet.kernels.reference import ReferenceKernels

NAMES = ("auto", "native", "reference")


def choose_kernels(name: str, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return a backend.

    Args:
        name: one of ``NAMES``; ``auto`` is native where that can be, else the reference, whose name then says why.
        dtype, device: of weights, adapters and KV.

    Raises:
        ValueError: there is no such backend, or ``native`` cannot be.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is not one of {', '.join(NAMES)}")
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return ReferenceKernels()
    try:
        if device.type != "cpu" or dtype not in DTYPES:
            raise NativeUnavailableError(f"the native kernels do not compute {dtype} on {device.type}")
        return NativeKernels(*best_library())
    except NativeUnavailableError as error:
        if name == "native":
            raise ValueError(str(error)) from error
        return ReferenceKernels(instead_of_native=str(error))
