"""The native libraries: which this machine can run, and how their functions are called."""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

INSTRUCTION_SETS = ("amx", "avx512bf16", "avx512", "avx2")
"""Best first."""

_ADDRESS, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "lorikeet_supported": (),
    "lorikeet_packed_elements": (_INT,) * 3,
    "lorikeet_pack": (_ADDRESS,) * 2 + (_INT,) * 4,
    "lorikeet_linear": (_ADDRESS, _INT, *(_ADDRESS,) * 3, _INT, _INT, _ADDRESS, _INT, _ADDRESS),
    "lorikeet_linear_gated": (_ADDRESS, _INT, *(_ADDRESS,) * 3, _INT, _INT),
    "lorikeet_add_norm": (_ADDRESS,) * 4 + (_INT, _INT, _FLOAT, _INT, _INT),
    "lorikeet_rotary_store": (_ADDRESS, *(_INT,) * 4, *(_ADDRESS,) * 4, _FLOAT, _ADDRESS, _INT, _INT, *(_ADDRESS,) * 2)
    + (_INT,) * 3,
    "lorikeet_silu_mul": (_ADDRESS,) * 2 + (_INT,) * 4,
    "lorikeet_attention": (_ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS, _INT, *(_ADDRESS,) * 3, *(_INT,) * 6, _FLOAT)
    + (_INT,) * 3,
    "lorikeet_layers": (_ADDRESS, _ADDRESS, _FLOAT, _FLOAT, _INT),
    "lorikeet_copy": (_ADDRESS, _ADDRESS, _INT, _ADDRESS, _INT, _FLOAT),
    "lorikeet_place": (_ADDRESS, _INT, _INT),
    "lorikeet_choose": (_ADDRESS, *(_INT,) * 4, *(_ADDRESS,) * 7, _INT),
}
_RESULTS = {"lorikeet_supported": _INT, "lorikeet_packed_elements": _INT, "lorikeet_linear_gated": ctypes.c_bool}


class NativeUnavailableError(RuntimeError):
    """No native library can be used; the message says why."""


@cache
def load_library(instruction_set: str) -> ctypes.CDLL:
    """Return the library built for one of ``INSTRUCTION_SETS``, its functions ready to be called.

    Raises:
        NativeUnavailableError: it was not built, does not load, or needs instructions that this CPU lacks.
    """
    folder = Path(__file__).parent
    paths = [folder / f"_cpu_{instruction_set}{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise NativeUnavailableError(f"the native module for {instruction_set} was not built with the package")
    # The OpenMP functions that it calls are those of the runtime that torch has loaded by now, for everybody.
    assert torch.get_num_threads() > 0
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"the native module does not load: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    if not library.lorikeet_supported():
        raise NativeUnavailableError(f"this CPU lacks {instruction_set}")
    return library


def supported_instruction_sets() -> list[str]:
    """Return those of ``INSTRUCTION_SETS`` that this machine can run, best first."""
    found = []
    for name in INSTRUCTION_SETS:
        try:
            load_library(name)
        except NativeUnavailableError:
            continue
        found.append(name)
    return found


def best_library() -> tuple[str, ctypes.CDLL]:
    """Return the best instruction set that this machine can run, and its library.

    Raises:
        NativeUnavailableError: there is none; the message has the reason of each.
    """
    reasons = []
    for name in INSTRUCTION_SETS:
        try:
            return name, load_library(name)
        except NativeUnavailableError as error:
            reasons.append(str(error))
    raise NativeUnavailableError("; ".join(dict.fromkeys(reasons)))
