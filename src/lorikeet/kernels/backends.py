"""Chooses the kernel backend."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from lorikeet.config import KERNELS
from lorikeet.core.text import install_command
from lorikeet.kernels.interface import Kernels
from lorikeet.kernels.native import DTYPES, NativeKernels, NativeUnavailableError, best_library
from lorikeet.kernels.reference import ReferenceKernels

_FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)


def choose_kernels(name: str, dtype: torch.dtype, device: torch.device, *, one_order: bool = False) -> Kernels:
    """Return a backend.

    Args:
        name: one of ``config.KERNELS``. ``auto`` is native on a CPU and Triton on a GPU, with FlashInfer's attention if
            FlashInfer is installed. If neither can be used, ``auto`` is the reference backend, whose name then gives
            the reason.
        dtype: dtype of weights, adapters and KV.
        device: device of weights, adapters and KV.
        one_order: whether a row's bits must not depend on other rows, which only the native kernels can ensure.

    Raises:
        ValueError: the name is unknown, the backend cannot be used here, or FlashInfer is installed but broken.
    """
    if name not in KERNELS:
        raise ValueError(f"{name!r} is not one of {', '.join(KERNELS)}")
    if one_order:
        return _kernels_in_one_order(name, dtype, device)
    if name == "reference":
        return ReferenceKernels()
    try:
        if name == "triton":
            return _triton_kernels(device)
        if device.type == "cuda" and dtype in _FLASHINFER_DTYPES and importlib.util.find_spec("flashinfer"):
            return _flashinfer_kernels(device)
        if device.type == "cuda":
            return _triton_kernels(device)
        if device.type != "cpu" or dtype not in DTYPES:
            raise NativeUnavailableError(f"the native kernels do not compute {dtype} on {device.type}")
        return NativeKernels(*best_library())
    except (NativeUnavailableError, TritonUnavailableError) as error:
        if name != "auto":
            raise ValueError(str(error)) from error
        return ReferenceKernels(instead_of_faster=str(error))


def _kernels_in_one_order(name: str, dtype: torch.dtype, device: torch.device) -> Kernels:
    try:
        if name not in ("auto", "native") or device.type != "cpu" or dtype not in DTYPES:
            raise NativeUnavailableError(f"not {name} kernels for {str(dtype).removeprefix('torch.')} on {device.type}")
        return NativeKernels(*best_library(), one_order=True)
    except NativeUnavailableError as error:
        raise ValueError(
            f"deterministic needs the native kernels, for bfloat16 or float32 on a CPU: {error}"
        ) from error


def _flashinfer_kernels(device: torch.device) -> Kernels:
    _triton_kernels(device)  # This raises an error if Triton cannot be used.
    try:
        from lorikeet.kernels.triton.flashinfer_attention import FlashInferKernels
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"FlashInfer is installed but cannot be used: {error}; --kernels triton does not need it"
        ) from error
    return FlashInferKernels(device)


class TritonUnavailableError(RuntimeError):
    """Raised when the Triton kernels cannot be used. The message gives the reason."""


def _triton_kernels(device: torch.device) -> Kernels:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise TritonUnavailableError(f"the Triton kernels run on a GPU or in the interpreter, not on {device.type}")
    try:
        from lorikeet.kernels.triton.kernels import TritonKernels  # Triton is an extra, and its import takes a second.
    except ImportError as error:
        raise TritonUnavailableError(f"the Triton kernels need Triton: {install_command('gpu')} ({error})") from error
    if device.type == "cuda" and (missing := _missing_for_launchers()):
        raise TritonUnavailableError(f"Triton needs a C compiler for its launchers: {missing}")
    return TritonKernels()


def _missing_for_launchers() -> str | None:
    """Return why Triton cannot build kernel launchers; None if it can."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "neither gcc nor clang is installed"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not (header.exists() or os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH")):
        return f"{header} is missing (on Debian and Ubuntu it is in the package python3-dev)"
    return None
