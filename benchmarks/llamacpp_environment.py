"""Make the environment of llama-cpp-python: ``python -m benchmarks.llamacpp_environment`` prints its Python.

It is built here for this processor, which takes minutes; the wheels of the registry are built for any.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".venvs" / "llama-cpp-python"

PACKAGES = ("llama-cpp-python==0.3.36", "gguf==0.19.0")
FLAGS = "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-fno-tree-dse"
"""Without the second, GCC 12 leaves out most of the tile unit's configuration, which nothing seems to read: the first
product ends in an illegal instruction."""


def llamacpp_python() -> Path:
    """Return the Python of the environment. The first call makes it."""
    python, stamp, wanted = FOLDER / "bin" / "python", FOLDER / ".packages", repr((PACKAGES, FLAGS))
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-binary", "llama-cpp-python", *PACKAGES]
        subprocess.run(command, check=True, env={**os.environ, "CMAKE_ARGS": FLAGS})
        stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(llamacpp_python())
