"""Triton's interpreter, with a rounding that it lacks, and without work that changes nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float
_get_np_dtype = interpreter._get_np_dtype
_patch_lang = interpreter._patch_lang

_np_dtypes: dict[str, Any] = {}
_patched: set[str] = set()


def _rounded(values: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
    """Round fp32 to the nearest bfloat16 as every GPU does: the interpreter cuts bits off instead."""
    if source == tl.float32 and target == tl.bfloat16:
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return np.asarray(wide.to(torch.bfloat16).view(torch.uint16).numpy()).reshape(values.shape)
    return np.asarray(_convert_float(values, source, target, rounding))


def round_to_nearest() -> None:
    """Have the interpreter round from now on."""
    interpreter._convert_float = _rounded


def _known_np_dtype(of: Any) -> Any:
    """Look a type up: the interpreter makes a table of all of them for every operation."""
    if of.name not in _np_dtypes:
        _np_dtypes[of.name] = _get_np_dtype(of)
    return _np_dtypes[of.name]


def _patch_lang_once(fn: Any) -> Any:
    """Patch the language for the functions of a module, and leave it so.

    The interpreter searches the whole language for every launch and, inside of launches, for every call.
    """
    if fn.__module__ not in _patched:
        _patch_lang(fn)
        _patched.add(fn.__module__)
    return interpreter._LangPatchScope()


def spare_needless_work() -> None:
    """Have the interpreter leave out, from now on, what takes most of its time and changes no result."""
    interpreter._get_np_dtype = _known_np_dtype
    interpreter._patch_lang = _patch_lang_once
    # It looks for overflows, and tells of none unless it is debugged.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
