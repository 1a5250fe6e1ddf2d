"""What this machine is, read from the system without any library of the device."""

import platform
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")


def cpu_model() -> str:
    """Return the name of the processor."""
    named = _named(_PROCESSORS, "model name")
    return named or platform.processor() or platform.machine()


def gpu_models() -> list[str]:
    """Return the names of the GPUs that NVIDIA's driver lists; none without the driver."""
    if not _GPUS.is_dir():
        return []
    return [name for folder in sorted(_GPUS.iterdir()) if (name := _named(folder / "information", "Model"))]


def _named(file: Path, field: str) -> str:
    """Return the first value of a field in a file of ``field : value`` lines; empty for none."""
    if file.is_file():
        for row in file.read_text().splitlines():
            name, _, value = row.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""
