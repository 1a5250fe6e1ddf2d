"""What Lorikeet computes in."""

import torch

SLOW_HALVES = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
"""Whether torch multiplies half precision one number at a time on this CPU, many times slower than single."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        ValueError: it is not one that Lorikeet computes in.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]
