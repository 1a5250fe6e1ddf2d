"""Tells what, inside of work that is captured as a graph, would have to wait for the device."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from tests.support.interpreter import spare_needless_work

spare_needless_work()

_WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "lift_fresh", "masked_select", "nonzero", "unique")
"""Operations whose result, or whose size, the host must know; and tensors made of numbers, which are copied."""

_local = threading.local()


def is_graph_watched() -> bool:
    """Whether this thread is inside of such work."""
    return getattr(_local, "depth", 0) > 0


@contextmanager
def graph_watch(faults: list[str]) -> Iterator[None]:
    """Add to ``faults`` whatever this thread does that waits; kernels in Triton's interpreter may."""
    calls = {name: getattr(Tensor, name) for name in ("cpu", "numpy", "tolist")}
    launch = interpreter.GridExecutor.__call__

    def waits(name: str) -> None:
        if is_graph_watched() and not getattr(_local, "launches", False):
            faults.append(f"a graph waits for the device: {name}")

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            waits(name)
            return calls[name](*arguments, **keywords)

        return call

    def launched(self: Any, *arguments: Any, **keywords: Any) -> Any:
        _local.launches = True
        try:
            return launch(self, *arguments, **keywords)
        finally:
            _local.launches = False

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            name = op._schema.name.removeprefix("aten::")
            by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
            if by_mask or name in _WAITING:
                waits(name)
            return op(*args, **(kwargs or {}))

    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        with pytest.MonkeyPatch.context() as patch, Watch():
            for name in calls:
                patch.setattr(Tensor, name, watched(name))
            patch.setattr(interpreter.GridExecutor, "__call__", launched)
            yield
    finally:
        _local.depth -= 1
