"""Make the environment of llama-cpp-python: ``python -m benchmarks.llamacpp_environment`` prints its Python.

It is built here for this processor, which takes minutes; the wheels of the registry are built for any.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".venvs" / "llama-cpp-python"

PACKAGE, OTHERS, FLAGS = "llama-cpp-python==0.3.36", ("gguf==0.19.0",), "-DGGML_NATIVE=ON"

PATCHED = "vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
PATCH = ("_tile_loadconfig(&tc);", 'asm volatile("ldtilecfg %0" ::"m"(tc));')
"""GCC 12 leaves out most of the tile unit's configuration, since its intrinsic says that only eight bytes are read: the
first product of such a build ends in an illegal instruction."""


def llamacpp_python() -> Path:
    """Return the Python of the environment. The first call makes it."""
    python, stamp, wanted = FOLDER / "bin" / "python", FOLDER / ".steps", repr((PACKAGE, OTHERS, FLAGS, PATCH))
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
        pip = [str(python), "-m", "pip"]
        with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
            source = [*pip, "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", PACKAGE]
            subprocess.run(source, check=True, cwd=scratch)
            (archive,) = Path(scratch).glob("llama_cpp_python-*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
            root = archive.with_name(archive.name.removesuffix(".tar.gz"))
            text = (root / PATCHED).read_text()
            assert PATCH[0] in text, f"{PATCHED} has changed"
            (root / PATCHED).write_text(text.replace(*PATCH))
            install = [*pip, "install", "--quiet", str(root), *OTHERS]
            subprocess.run(install, check=True, env={**os.environ, "CMAKE_ARGS": FLAGS})
        stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(llamacpp_python())
