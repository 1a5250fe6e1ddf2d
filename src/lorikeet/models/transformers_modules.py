"""LoRA on the linear layers of a transformers model: their ``forward`` is replaced by the kernels' grouped product."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lorikeet.core.geometry import (
    PREFIXES,
    UNUSED_PARTS,
    ModelGeometry,
    ModuleNames,
    ModulePath,
    ModuleShape,
    split_layer,
)
from lorikeet.kernels.base import Kernels, LoraBatch, LoraDelta, LoraTarget, LoraTargets, Weight

_EXPERT = re.compile(r"expert.*\.\d+(\.|$)")
"""A path of one of several experts, which see some of the rows only."""

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Names of fused linear layers, and of those of which they consist, in the order of their outputs."""


class StepLora:
    """The adapters of the step that runs. Shared by all linear layers of a model.

    Attributes:
        lora: None: none.
        rows: of the step.
    """

    def __init__(self) -> None:
        self.lora: LoraBatch | None = None
        self.rows = 0
        self._segments: npt.NDArray[np.int64] | None = None

    def begin(self, lora: LoraBatch | None, rows: int) -> None:
        """Begin a step."""
        self.lora, self.rows, self._segments = lora, rows, None

    @property
    def segments(self) -> npt.NDArray[np.int64]:
        """The number of the segment of each row, -1 for none."""
        assert self.lora is not None
        if self._segments is None:
            self._segments = np.full(self.rows, -1)
            for number, segment in enumerate(self.lora.segments):
                self._segments[segment.start : segment.stop] = number
        return self._segments


class Linear(NamedTuple):
    """A linear layer of a model.

    Attributes:
        name: its full name.
        module: a ``Linear`` or ``Conv1D``.
        path, layer: of its name below the decoder's, as of ``split_layer``.
    """

    name: str
    module: nn.Module
    path: str
    layer: int

    @property
    def weight(self) -> Tensor:
        """``[out, in]``."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.T.contiguous() if isinstance(self.module, Conv1D) else weight


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``x Wᵀ + b`` and nothing else."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward) or type(module).__name__ == "FalconLinear"


@dataclass
class LoraModules:
    """The linear layers of a decoder on which LoRA is supported.

    Attributes:
        layers: number of layers that have any.
        shapes, names: as of ``ModelGeometry``.
        layers_of: the layers that have a module.
        parts: of each linear layer by its full name, the modules that it consists of.
    """

    layers: int = 0
    shapes: dict[str, ModuleShape] = field(default_factory=dict)
    layers_of: dict[str, list[int]] = field(default_factory=dict)
    names: ModuleNames | None = None
    parts: dict[str, tuple[LoraTarget, ...]] = field(default_factory=dict)

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        """As of ``ModelGeometry``."""
        everywhere = list(range(self.layers))
        return {module: tuple(each) for module, each in self.layers_of.items() if each != everywhere}

    def add_module(self, path: str, layer: int, shape: ModuleShape) -> str:
        """Add what is under a path on a layer; return its module.

        Layers whose shapes differ from the first one's have modules of their own.
        """
        name = path
        while self.shapes.setdefault(name, shape) != shape:
            name = f"{path}#{int(name.rpartition('#')[2]) + 1 if '#' in name else 2}"
        self.layers_of.setdefault(name, []).append(layer)
        return name

    def add(self, name: str, parts: Sequence[tuple[str, int]], layer: int, inputs: int) -> tuple[str, ...]:
        """Add a linear layer.

        Args:
            name: its full name.
            parts: the paths of the linear layers of which it consists, with their outputs.
            layer: of the model.
            inputs: its input features.

        Returns:
            The modules.
        """
        targets, column = [], 0
        for path, outputs in parts:
            targets.append(LoraTarget(self.add_module(path, layer, ModuleShape(inputs, outputs)), column, outputs))
            column += outputs
        self.parts[name] = tuple(targets)
        return tuple(target.module for target in targets)

    def targets(self, name: str) -> LoraTargets | None:
        """Return the modules of a linear layer; None if adapters do not change it. All must have been added."""
        if not (parts := self.parts.get(name)):
            return None
        slots = ModelGeometry(self.layers, 1, 1, self.shapes, 1).module_slots
        return LoraTargets(*parts, modules=tuple(self.shapes), slots=slots)


def find_modules(
    linears: list[Linear],
    prefix: str,
    layers: int,
    parts_of_qkv: Mapping[int, tuple[int, ...]],
    idle: Sequence[str] = (),
) -> LoraModules:
    """Return the modules on which adapters may act.

    Args:
        linears: linear layers of the decoder that see each row of a step once.
        prefix: of the decoder's names.
        layers: least number of layers.
        parts_of_qkv: by layer, the features of its queries, keys and values.
        idle: full names of linear layers that text requests do not run.
    """
    found = LoraModules()
    spelled: dict[str, dict[tuple[str, ...], None]] = {}
    for linear in linears:
        if _EXPERT.search(linear.path):
            continue
        outputs, inputs = linear.weight.shape
        parts = _split(linear.path, outputs, parts_of_qkv.get(linear.layer, ()))
        modules = found.add(linear.name, parts, linear.layer, inputs)
        spelled.setdefault(linear.path, {})[modules] = None
    found.layers = max([layers, *(layer + 1 for each in found.layers_of.values() for layer in each)])
    paths = [ModulePath(path, modules) for path, several in spelled.items() for modules in several]
    paths += [ModulePath(path, (path,)) for path in found.shapes if path not in spelled and "#" not in path]
    paths += _fused_spellings(found.shapes, spelled)
    spellings = tuple(dict.fromkeys((prefix, *PREFIXES)))
    found.names = ModuleNames(spellings, tuple(paths), (*UNUSED_PARTS, *idle))
    return found


def _split(path: str, outputs: int, qkv: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return the linear layers of which one consists, with the outputs of each: itself, if it is not fused."""
    head, dot, name = path.rpartition(".")
    if name == "qkv_proj" and len(qkv) == 3 and sum(qkv) == outputs:
        return [(head + dot + part, features) for part, features in zip(FUSED[name], qkv, strict=True)]
    if name == "gate_up_proj" and outputs % 2 == 0:
        return [(head + dot + part, outputs // 2) for part in FUSED[name]]
    return [(path, outputs)]


def _fused_spellings(shapes: Mapping[str, ModuleShape], spelled: Container[str]) -> list[ModulePath]:
    """Return the names under which fused adapters may call layers that are split in the model."""
    found = []
    for name, parts in FUSED.items():
        for path in shapes:
            head, dot, last = path.rpartition(".")
            siblings = tuple(head + dot + part for part in parts)
            if last == parts[0] and all(each in shapes for each in siblings) and head + dot + name not in spelled:
                found.append(ModulePath(head + dot + name, siblings))
    return found


class AdaptedLinear:
    """The ``forward`` of a linear layer, with the adapters of the step.

    Args:
        weight: packed.
        bias: None for none.
        kernels: the backend.
        step: has the adapters.
        layer: of the model.
        targets: its modules; None: adapters do not change it.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        kernels: Kernels,
        step: StepLora,
        layer: int,
        targets: LoraTargets | None,
    ) -> None:
        self._weight, self._bias, self._kernels, self._step = weight, bias, kernels, step
        self._layer, self._targets = layer, targets

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, plus the LoRA delta of each row's adapter."""
        flat = x.reshape(-1, x.shape[-1])
        lora, targets = self._step.lora, self._targets
        delta = None
        if lora is not None and targets is not None and lora.changes(targets):
            assert len(flat) == self._step.rows, "a module with LoRA sees other rows than those of the step"
            delta = LoraDelta(lora, self._layer, targets)
        return self._kernels.linear(flat, self._weight, self._bias, delta).view(*x.shape[:-1], -1)


class OutputLayer:
    """The ``forward`` of the output layer, in the dtype of ``Kernels.logits``."""

    def __init__(self, weight: Weight, kernels: Kernels) -> None:
        self._weight, self._kernels = weight, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits."""
        flat = x.reshape(-1, x.shape[-1])
        return self._kernels.logits(flat, self._weight).view(*x.shape[:-1], -1)


class RmsNorm:
    """The ``forward`` of an RMS norm, in one kernel instead of six operations."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self._weight, self._eps, self._kernels = weight, eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of the last dimension."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()  # x may be a slice of wider rows
        return self._kernels.add_norm(flat, None, self._weight, self._eps).view(x.shape)


def rms_norm_of(module: nn.Module, kernels: Kernels) -> RmsNorm | None:
    """Return what computes the same as a module that is an RMS norm; None if it is none, judged by random rows."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or weight.dtype not in _EXACT:
        return None
    found = RmsNorm(weight, eps, kernels)
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(1)).to(weight) * 2
    expected = module(rows.clone())
    is_same = expected.dtype == weight.dtype
    is_same = is_same and torch.allclose(found(rows), expected, rtol=_EXACT[weight.dtype], atol=1e-6)
    return found if is_same else None


_EXACT = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest relative difference of what counts as the same: about a unit in the last place."""


def take_weight(linear: Linear, kernels: Kernels, *, keep: bool) -> Weight:
    """Pack the weight of a linear layer. Unless ``keep``, its parameter then holds no data of its own.

    Whatever would read that gets NaN, which shows.
    """
    weight = linear.weight.detach()
    packed = kernels.pack(weight)
    if not keep and (packed is not weight or isinstance(linear.module, Conv1D)):
        old = linear.module.weight
        assert isinstance(old, Tensor)
        empty = torch.full((1,), torch.nan, dtype=old.dtype, device=old.device).expand(old.shape)
        linear.module.weight = nn.Parameter(empty, requires_grad=False)
    return packed


def linears_of(model: nn.Module, decoder: nn.Module) -> tuple[str, list[Linear]]:
    """Return the prefix of the decoder's names in the model, and its linear layers."""
    name = next(name for name, module in model.named_modules() if module is decoder)
    prefix = f"{name}." if name else ""
    found = []
    for inner, module in decoder.named_modules():
        if is_linear(module):
            path, layer = split_layer(inner)
            found.append(Linear(prefix + inner, module, path, layer))
    return prefix, found
