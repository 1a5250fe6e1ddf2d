"""Builds the native CPU kernels, one library per instruction set; what fails to build is left out.

Everything else about the package stands in pyproject.toml.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_AVX512_BF16 = [*_AVX512, "-mavx512bf16"]
INSTRUCTION_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512_BF16,
    "amx": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}

# OpenMP is compiled in but not linked: the symbols come from the runtime that torch brings.
_COMMON = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]

_can_build = sys.platform == "linux" and platform.machine() == "x86_64"

setup(
    ext_modules=[
        Extension(
            f"lorikeet.kernels._cpu_{name}",
            sources=sorted(str(path) for path in Path("native").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("native").glob("*.h")),
            extra_compile_args=[*_COMMON, *flags],
            extra_link_args=["-Wl,-Bsymbolic"],
            language="c++",
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.items()
    ]
    if _can_build
    else [],
)
