"""A GPU as the lines of cuda see it: what it can do, and engines on it with dummy weights of a published shape."""

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.model_shapes import write_model_shape
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.engine.build import Replica, build_replica
from lorikeet.kernels.backends import choose_kernels
from lorikeet.models.config import ModelConfig, read_model_config

SHAPE = "llama-2-7b"
_COPY_BYTES, _LINK_BYTES = 2**30, 2**28
_GEMM = (8192, 4096, 11008)
"""Rows, inputs and outputs: a prefill's largest product."""
_WRITERS = 8


class GpuLimits(NamedTuple):
    """What a GPU can do.

    Attributes:
        device, driver: names.
        software: what computes, with versions.
        copy_bytes_per_s: read and written, of a copy within its memory.
        gemm_flops: of a large product in bfloat16.
        link_bytes_per_s: of a copy from registered host memory.
    """

    device: str
    driver: str
    software: str
    copy_bytes_per_s: float
    gemm_flops: float
    link_bytes_per_s: float


def why_no_gpu() -> str | None:
    """Return why nothing can be measured here; None if it can."""
    return None if torch.cuda.is_available() else "torch sees no CUDA device on this machine"


def gpu_limits() -> dict[str, Any]:
    """Measure :class:`GpuLimits`, as plain data; medians of many."""
    from triton.testing import do_bench  # asks for a GPU as it is imported

    place = torch.device("cuda")
    source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=place) for _ in range(2))
    rows, inputs, outputs = _GEMM
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=place)
    weight = torch.randn(inputs, outputs, dtype=torch.bfloat16, device=place)
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call, return_mode="median")) / 1e3

    return GpuLimits(
        device=torch.cuda.get_device_name(),
        driver=_driver(),
        software=f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {version('triton')}, "
        f"kernels {choose_kernels('auto', torch.bfloat16, place).name!r}",
        copy_bytes_per_s=2 * _COPY_BYTES / seconds(lambda: target.copy_(source)),
        gemm_flops=2 * rows * inputs * outputs / seconds(lambda: x @ weight),
        link_bytes_per_s=_LINK_BYTES / seconds(lambda: target[:_LINK_BYTES].copy_(host, non_blocking=True)),
    )._asdict()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]


class GpuRig:
    """Engines of one shape, and adapters for them. Made by :func:`gpu_rig`.

    Args:
        folder: for the config and adapters.
        shape: of the model.
        engine: settings of all engines, in place of those that they would have.

    Attributes:
        config: of the model.
        model: its folder.
    """

    def __init__(self, folder: Path, shape: str = SHAPE, **engine: object) -> None:
        self._folder = folder
        self._engine: dict[str, Any] = {"device": "cuda"} | engine
        self.model = write_model_shape(folder / shape, shape)
        self.config: ModelConfig = read_model_config(self.model)

    def settings(self, **engine: object) -> Settings:
        """Return settings; ``engine`` are engine settings."""
        model = ModelSettings(model=str(self.model), dtype="bfloat16", load_format="dummy")
        return Settings(model, EngineSettings(**(engine | self._engine)))  # type: ignore[arg-type]

    @contextmanager
    def replica(self, on_load_done: Callable[[], None] = lambda: None, **engine: object) -> Iterator[Replica]:
        """Build a replica and close it in the end."""
        built = build_replica(self.settings(**engine), on_load_done=on_load_done)
        with closing(built.engine):
            yield built

    def folders(self, name: str, ranks: Sequence[int], modules: Sequence[str]) -> list[Path]:
        """Return adapters with these ranks, in bfloat16, written by threads: whoever uses CUDA does not fork."""
        geometry = self.config.geometry(2)
        paths = [self._folder / f"{name}{i}" for i in range(len(ranks))]
        write = partial(write_random_adapter, modules=tuple(modules), dtype=torch.bfloat16)
        with ThreadPoolExecutor(_WRITERS) as pool:
            jobs = [
                pool.submit(write, path, geometry, rank, seed=seed)
                for seed, (path, rank) in enumerate(zip(paths, ranks, strict=True))
            ]
            return [job.result() for job in jobs]

    def references(self, folders: Sequence[Path]) -> list[AdapterRef]:
        """Return what requests name."""
        geometry = self.config.geometry(2)
        return [reference(folder.name, folder, geometry) for folder in folders]


@contextmanager
def gpu_rig() -> Iterator[GpuRig]:
    """Yield a rig whose files are gone in the end."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-gpu-") as scratch:
        yield GpuRig(Path(scratch))
