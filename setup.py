"""Builds the native CPU kernels, one library per instruction set; what fails to build is left out.

The libraries are opened with ctypes and use nothing of Python, so their names and the wheel's tag name no version of
it: one wheel per platform serves every Python. Everything else about the package stands in pyproject.toml.
"""

import platform
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_AVX512_BF16 = [*_AVX512, "-mavx512bf16"]
_X86 = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512_BF16,
    "amx": [*_AVX512_BF16, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"],
}
_ARM = {"neon": ["-march=armv8-a"], "neonbf16": ["-march=armv8.2-a+bf16"]}
INSTRUCTION_SETS = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}.get(platform.machine(), {})

# OpenMP is compiled in but not linked: the symbols come from the runtime that torch brings.
_IS_MACOS = sys.platform == "darwin"
_COMMON = [
    "-std=c++17",
    "-O3",
    "-g0",
    *(["-Xpreprocessor"] if _IS_MACOS else []),  # Apple's compiler has no option for it, but the pragmas
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]


class BuildLibraries(build_ext):
    """Leaves the version of Python out of the names of the libraries."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel for this platform and any Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Has a wheel of its own on each platform, also where no library is built."""

    def has_ext_modules(self):
        return True


_can_build = sys.platform == "linux" or (_IS_MACOS and platform.machine() == "arm64")

setup(
    distclass=PlatformDistribution,
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            f"lorikeet.kernels._cpu_{name}",
            sources=sorted(str(path) for path in Path("native").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("native").glob("*.h")),
            extra_compile_args=[*_COMMON, *flags],
            extra_link_args=["-undefined", "dynamic_lookup"] if _IS_MACOS else ["-Wl,-Bsymbolic"],
            language="c++",
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.items()
    ]
    if _can_build
    else [],
)
