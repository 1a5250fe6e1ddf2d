"""Kernels that tell how long they took, step by step."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from lorikeet.kernels.base import Kernels
from lorikeet.kernels.choose import ChoiceParameters
from lorikeet.kernels.layers import Layers, LayersShape, LayerWeights

KERNELS = ("linear", "add_norm", "rotary_store", "attention", "silu_mul", "choose")
"""All of a step, one by one."""
AT_ONCE = ("layers", "add_norm", "linear", "choose")
"""All of a step whose layers are one call."""


class StepTimes(NamedTuple):
    """One forward pass, from the choice of the tokens before it to the choice of its own.

    Attributes:
        end_s: monotonic time of its end.
        rows: sequences that got a token.
        in_kernels_s: kernel → seconds, of those that are timed.
    """

    end_s: float
    rows: int
    in_kernels_s: dict[str, float]


class Stopwatch:
    """Wraps a backend and appends to ``steps`` whenever tokens have been chosen.

    Args:
        inner: computes.
        timed: kernels whose time is taken; if there are any, but ``layers`` is not among them, all kernels are called
            one by one, which takes longer.
    """

    def __init__(self, inner: Kernels, timed: Collection[str] = ()) -> None:
        self._inner = inner
        self._in_kernels_s: dict[str, float] = defaultdict(float)
        self.steps: list[StepTimes] = []
        self._choose, self.layers_in_one_call = inner.choose, inner.layers_in_one_call
        if timed and "layers" not in timed:
            self.layers_in_one_call = lambda weights, shape: None
        for name in timed:
            if name == "layers":
                self.layers_in_one_call = self._timed_layers
            else:
                setattr(self, "_choose" if name == "choose" else name, self._timed(name, getattr(inner, name)))

    @property
    def threads(self) -> int:
        """The wrapped backend's."""
        return self._inner.threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._inner.threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def choose(self, logits: Tensor, parameters: ChoiceParameters) -> Tensor:
        """Ends a step."""
        token_ids = self._choose(logits, parameters)
        self.steps.append(StepTimes(time.monotonic(), len(logits), dict(self._in_kernels_s)))
        self._in_kernels_s.clear()
        return token_ids

    def decode_steps(self, rows: int) -> list[tuple[float, StepTimes]]:
        """Return seconds and times of the steps that decoded ``rows`` sequences and did nothing else.

        In the step before, all of them had got a token too, so that none was still at its prompt.
        """
        return [
            (after.end_s - before.end_s, after)
            for before, after in pairwise(self.steps)
            if before.rows == after.rows == rows
        ]

    def _timed_layers(self, weights: Sequence[LayerWeights], shape: LayersShape) -> Layers | None:
        layers = self._inner.layers_in_one_call(weights, shape)
        return None if layers is None else self._timed("layers", layers)

    def _timed(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = kernel(*arguments)
            self._in_kernels_s[name] += time.perf_counter() - start_s
            return result

        return timed
