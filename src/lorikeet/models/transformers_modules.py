"""Replaces the ``forward`` of the linear layers of a transformers model by the kernels' grouped product, with LoRA."""

import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    ReplaceableWeights,
    split_layer,
)
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.extras import adjust_logits, embed, prepare_product
from lorikeet.kernels.interface import GroupProduct, Kernels, Weight
from lorikeet.kernels.lora import LoraBatch, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.quantized import QuantizedWeight, quantize, stacked
from lorikeet.models.adapted_ops import adapted_linear
from lorikeet.models.layer_ops import Product

_EXPERT = re.compile(r"expert.*\.\d+(\.|$)")
"""A path of one of several experts, which see only some of the rows."""

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Names of fused linear layers, with the names of their parts in the order of outputs."""


class StepLora:
    """The adapters of the running step.

    All linear layers of a model share this object.

    Attributes:
        lora: the adapters of all rows; None without adapters.
        rows: number of rows.
        key_lora: the adapters of all tokens of the sequences, which modules see that read keys or values from a cache.
        keys: number of these tokens; 0 if no module sees them.
        head_lora: the adapters of the rows whose logits are computed, if any has more than A and B.
    """

    def __init__(self) -> None:
        self.lora: LoraBatch | None = None
        self.rows = 0
        self.key_lora: LoraBatch | None = None
        self.keys = 0
        self.head_lora: LoraBatch | None = None
        self._only_segment: tuple[LoraWeights, KernelForm] | None = None
        self._segments: npt.NDArray[np.int64] | None = None

    def begin(self, lora: LoraBatch | None, rows: int, key_lora: LoraBatch | None = None, keys: int = 0) -> None:
        """Begin a step."""
        self.lora = lora
        self.rows = rows
        self.key_lora = key_lora
        self.keys = keys
        self._segments = None

    def begin_whole(self, lora: LoraBatch | None) -> None:
        """Begin a pass in which modules see any rows, all of them of one sequence. ``lora`` has its adapter."""
        self.begin(lora, 0)
        if lora is not None:
            self._only_segment = lora.segments[0].weights, lora.form

    def end(self) -> None:
        """End a step."""
        self.lora = None
        self.key_lora = None
        self._only_segment = None

    def adapters(self, rows: int, targets: LoraTargets) -> LoraBatch | None:
        """Return the adapters of a linear layer's rows: those of the step, or all tokens of its sequences."""
        if self._only_segment is not None:
            weights, form = self._only_segment
            return LoraBatch([LoraSegment(0, rows, weights)], form)
        is_keys = rows == self.keys != self.rows
        lora = self.key_lora if is_keys else self.lora
        if lora is not None and (lora.has_extras or lora.changes(targets)):
            assert is_keys or rows == self.rows, "a module sees other rows than those of the step"
        return lora

    @contextmanager
    def only(self, start: int, stop: int) -> Iterator[None]:
        """Restrict the step to some of its rows within the context, for modules that run for one sequence at a time."""
        before = self.lora, self.rows, self.key_lora, self.keys, self._segments
        if (start, stop) == (0, self.rows):
            yield
            return
        lora = None if self.lora is None else self.lora.select_rows(range(start, stop))
        self.begin(lora, stop - start)
        try:
            yield
        finally:
            self.lora, self.rows, self.key_lora, self.keys, self._segments = before

    @property
    def segments(self) -> npt.NDArray[np.int64]:
        """The number of each row's segment, -1 for none."""
        assert self.lora is not None
        if self._segments is None:
            self._segments = np.full(self.rows, -1)
            for number, segment in enumerate(self.lora.segments):
                self._segments[segment.start : segment.stop] = number
        return self._segments

    @property
    def extras(self) -> LoraBatch | None:
        """The step's adapters, if any has more than A and B."""
        return self.extras_of(self.rows)

    def extras_of(self, rows: int) -> LoraBatch | None:
        """Return the adapters of the step's rows, or of all tokens of its sequences, if any has more than A and B."""
        lora = self.key_lora if rows == self.keys != self.rows else self.lora
        return lora if lora is not None and lora.has_extras else None


class Linear(NamedTuple):
    """A linear layer of a model.

    Attributes:
        name: full name of the layer.
        module: a ``Linear`` or ``Conv1D``.
        path, layer: parts of the layer's name below the decoder, see ``split_layer``.
    """

    name: str
    module: nn.Module
    path: str
    layer: int

    @property
    def weight(self) -> Tensor:
        """The weight, ``[out, in]``."""
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
        layers: number of decoder layers that have such linear layers.
        shapes, names: see ``ModelGeometry``.
        layers_of: for each module, the layers that have it.
        parts: the modules of each linear layer, by the layer's full name.
    """

    layers: int = 0
    shapes: dict[str, ModuleShape] = field(default_factory=dict)
    layers_of: dict[str, list[int]] = field(default_factory=dict)
    names: ModuleNames | None = None
    parts: dict[str, tuple[LoraTarget, ...]] = field(default_factory=dict)

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        """The layers of each module, see ``ModelGeometry``."""
        everywhere = list(range(self.layers))
        return {module: tuple(each) for module, each in self.layers_of.items() if each != everywhere}

    def add_module(self, path: str, layer: int, shape: ModuleShape) -> str:
        """Add the module at a path on a layer, and return its name.

        Layers with other shapes than the first layer get separate modules.
        """
        name = path
        while self.shapes.setdefault(name, shape) != shape:
            name = f"{path}#{int(name.rpartition('#')[2]) + 1 if '#' in name else 2}"
        self.layers_of.setdefault(name, []).append(layer)
        return name

    def add(self, name: str, parts: Sequence[tuple[str, int]], layer: int, inputs: int) -> tuple[str, ...]:
        """Add a linear layer.

        Args:
            name: full name of the layer.
            parts: paths and outputs of the linear layers that it combines.
            layer: index of the decoder layer.
            inputs: number of input features.

        Returns:
            The modules.
        """
        targets = []
        column = 0
        for path, outputs in parts:
            targets.append(LoraTarget(self.add_module(path, layer, ModuleShape(inputs, outputs)), column, outputs))
            column += outputs
        self.parts[name] = tuple(targets)
        return tuple(target.module for target in targets)

    def targets(self, *names: str) -> LoraTargets | None:
        """Return the modules of linear layers whose outputs are side by side.

        None if adapters do not change them. All layers must have been added.
        """
        targets = []
        column = 0
        for name in names:
            if not (parts := self.parts.get(name)):
                return None
            targets += [part._replace(column=column + part.column) for part in parts]
            column += sum(part.outputs for part in parts)
        slots = ModelGeometry(self.layers, 1, 1, self.shapes, 1).module_slots
        return LoraTargets(*targets, modules=tuple(self.shapes), slots=slots)


def find_modules(
    linears: list[Linear],
    prefix: str,
    layers: int,
    parts_of_qkv: Mapping[int, tuple[int, ...]],
    idle: Sequence[str] = (),
) -> LoraModules:
    """Return the modules that adapters may change.

    Args:
        linears: linear layers of the decoder that process each row of a step once.
        prefix: prefix of the decoder's names.
        layers: minimum number of layers.
        parts_of_qkv: features of queries, keys and values, by layer.
        idle: full names of linear layers that text requests do not use.
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
    transposed = dict.fromkeys(linear.path for linear in linears if isinstance(linear.module, Conv1D))
    unused = (*UNUSED_PARTS, *idle)
    found.names = ModuleNames(spellings, tuple(paths), unused, transposed=tuple(transposed))
    return found


def _split(path: str, outputs: int, qkv: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return the linear layers in a fused layer, with the outputs of each. A plain layer is its only part."""
    head, dot, name = path.rpartition(".")
    if name == "qkv_proj" and len(qkv) == 3 and sum(qkv) == outputs:
        return [(head + dot + part, features) for part, features in zip(FUSED[name], qkv, strict=True)]
    if name == "gate_up_proj" and outputs % 2 == 0:
        return [(head + dot + part, outputs // 2) for part in FUSED[name]]
    return [(path, outputs)]


def _fused_spellings(shapes: Mapping[str, ModuleShape], spelled: Container[str]) -> list[ModulePath]:
    """Return the names that fused adapters may use for layers that are split in the model."""
    found = []
    for name, parts in FUSED.items():
        for path in shapes:
            head, dot, last = path.rpartition(".")
            siblings = tuple(head + dot + part for part in parts)
            if last == parts[0] and all(each in shapes for each in siblings) and head + dot + name not in spelled:
                found.append(ModulePath(head + dot + name, siblings))
    return found


class AdaptedLinear:
    """The ``forward`` of a linear layer, with the step's adapters.

    Args:
        product: the layer's packed weight, bias and modules.
        kernels: the kernel backend.
        step: the object that holds the adapters of the step.
    """

    def __init__(self, product: Product, kernels: Kernels, step: StepLora) -> None:
        self._base = product
        self._kernels = kernels
        self._step = step
        self._norms: Tensor | None = None

    @property
    def as_group(self) -> GroupProduct:
        """The product as that of one of several groups of rows."""
        return GroupProduct(self._base.weight, self._base.bias, self._base.targets)

    def prepare(self, adapter: LoraWeights) -> None:
        """Compute the extras of an adapter that depend on the weight."""
        base = self._base
        if base.targets is not None:
            prepare_product(adapter, base.layer, base.targets, base.bias, self._times_weight, self._row_norms)

    def _times_weight(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._base.weight, None)

    def _row_norms(self) -> Tensor:
        if self._norms is None:
            self._norms = self._kernels.row_norms(self._base.weight)
        return self._norms

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, plus the LoRA delta of each row's adapter."""
        flat = x.reshape(-1, x.shape[-1])
        if flat.stride(1) != 1:  # Mamba 1 passes a transposed view.
            flat = flat.contiguous()
        targets = self._base.targets
        lora = None if targets is None else self._step.adapters(len(flat), targets)
        return self.compute(flat, lora).view(*x.shape[:-1], -1)

    def compute(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """Return ``x Wᵀ + b`` for ``x [rows, in]``, with the LoRA deltas of the rows' adapters."""
        return adapted_linear(self._kernels, x, self._base, lora)


class FusedLinear:
    """Linear layers that read the same input, such as q, k and v, as one product.

    The first call computes the outputs of all layers, and later calls return their parts.

    Args:
        linear: the linear layer of all outputs.
        outputs: number of outputs of each layer.
    """

    def __init__(self, linear: AdaptedLinear, outputs: Sequence[int]) -> None:
        self._linear = linear
        self._outputs = list(outputs)
        self._x: Tensor | None = None
        self._found: tuple[Tensor, ...] = ()
        self._left = 0

    def forward(self, number: int) -> Callable[[Tensor], Tensor]:
        """Return the ``forward`` of one of the layers."""
        return lambda x: self._part(number, x)

    def _part(self, number: int, x: Tensor) -> Tensor:
        if x is not self._x:
            self._x = x
            self._left = len(self._outputs)
            self._found = self._linear(x).split(self._outputs, dim=-1)
        found = self._found[number]
        self._left -= 1
        if not self._left:
            self._x = None
            self._found = ()
        return found


class GatedMlp:
    """The ``forward`` of an MLP gated by SiLU or GELU.

    Args:
        gate_up: gate and up as one product.
        gate: the kernel ``Kernels.silu_mul`` or ``gelu_mul``.
        down: the module of the last layer.
    """

    def __init__(self, gate_up: AdaptedLinear, gate: Callable[[Tensor], Tensor], down: nn.Module) -> None:
        self._gate_up = gate_up
        self._gate = gate
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``down(activation(gate(x)) * up(x))``."""
        inner = self._gate_up(x)
        out: Tensor = self._down(self._gate(inner.flatten(0, -2)).view(*inner.shape[:-1], -1))
        return out


def gate_of(
    mlp: nn.Module, group: Sequence[Linear], kernels: Kernels
) -> tuple[Callable[[Tensor], Tensor], nn.Module] | None:
    """Return the kernel that gates an MLP, and the last layer.

    None if no kernel gives the same result on random rows.

    Args:
        mlp: the module of transformers, unchanged.
        group: its linear layers that read the same input.
        kernels: the backend.
    """
    children = list(mlp.children())
    linears = [module for module in children if is_linear(module)]
    others = [module for module in children if module not in linears]
    if len(group) != 2 or len(linears) != 3 or any(list(module.parameters()) for module in others):
        return None
    if len(inspect.signature(type(mlp).forward).parameters) != 2:
        return None
    gate, up = (linear.module for linear in group)
    down = next(module for module in linears if module not in (gate, up))
    weight = group[0].weight
    x = 4 * torch.randn(1, 4, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight)
    expected = mlp(x)
    inner = torch.cat((gate(x), up(x)), dim=-1).flatten(0, 1)
    for kernel in (kernels.silu_mul, kernels.gelu_mul):
        found = down(kernel(inner)[None])
        if expected.shape == found.shape and (found - expected).norm() <= _EXACT[weight.dtype] * expected.norm():
            return kernel, down
    return None


class AdaptedVectors:
    """The ``forward`` of a norm, with the weights and biases of the step's adapters.

    Args:
        module: the norm.
        step: the object that holds the adapters of the step.
        path, layer: parts of the norm's name below the decoder.
        rows_at: the dimension of the input that has the rows of a step.
    """

    def __init__(self, module: nn.Module, step: StepLora, path: str, layer: int, rows_at: int) -> None:
        self._module = module
        self._step = step
        self._path = path
        self._layer = layer
        self._rows_at = rows_at
        self._forward = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm."""
        out: Tensor = self._forward(x)
        extras = self._step.extras_of(x.shape[self._rows_at])
        if extras is None:
            return out
        for segment in extras.segments_with("vector"):
            own = {
                name: vector
                for name in ("weight", "bias")
                if (vector := segment.extras.vector("vector", self._layer, f"{self._path}.{name}")) is not None
            }
            if own:
                rows = (slice(None),) * self._rows_at + (slice(segment.start, segment.stop),)
                with replaced(self._module, own):
                    out[rows] = type(self._module).forward(self._module, x[rows])
        return out


class AdaptedEmbedding:
    """The ``forward`` of the embedding, with the embeddings of the step's adapters."""

    def __init__(self, module: nn.Embedding, step: StepLora) -> None:
        self._module = module
        self._step = step
        self._forward = module.forward

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings."""
        extras = self._step.extras
        module = self._module
        if extras is None:
            return self._forward(token_ids)
        ids = token_ids.flatten()
        found = module.weight[ids.clamp(max=len(module.weight) - 1)]
        embed(found, ids, extras)
        # The embeddings replace the module's weight, so that a factor of the module counts.
        padding = module.padding_idx
        module.padding_idx = None
        try:
            with replaced(module, {"weight": found}):
                return self._forward(torch.arange(len(ids), device=ids.device).view(token_ids.shape))
        finally:
            module.padding_idx = padding


@contextmanager
def replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a module other parameters within the context."""
    old = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(old)


def replaceable_weights(
    model: nn.Module, prefix: str, norms: Iterable[nn.Module], hidden_size: int
) -> ReplaceableWeights:
    """Return the weights besides linear modules that adapters may replace.

    Args:
        model: a model with ``get_input_embeddings`` and ``get_output_embeddings``.
        prefix: prefix of the decoder's names.
        norms: norms that process all rows of a step.
        hidden_size: elements of a hidden state.
    """
    names = {module: name for name, module in model.named_modules()}
    vectors: dict[str, int] = {}
    for module in norms:
        path = split_layer(names[module].removeprefix(prefix))[0]
        vectors |= {f"{path}.{name}": value.numel() for name, value in module.named_parameters(recurse=False)}
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    rows, columns = embedding.weight.shape
    is_plain = type(embedding).forward is nn.Embedding.forward or hasattr(embedding, "embed_scale")
    has_head = output is not None and is_linear(output) and output.bias is None
    # An adapter's tokens change an output layer that shares the embedding's weight.
    is_stuck = not has_head and getattr(output, "weight", None) is embedding.weight
    if not is_plain or columns != hidden_size or is_stuck:
        return ReplaceableWeights("", "", 0, vectors)
    return ReplaceableWeights(
        names[embedding].removeprefix(prefix),
        names[output].removeprefix(prefix) if has_head else "",
        rows,
        vectors,
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm that has only vectors as parameters and contains no other module."""
    parameters = dict(module.named_parameters())
    return (
        "Norm" in type(module).__name__
        and bool(parameters)
        and parameters.keys() <= {"weight", "bias"}
        and all(value.dim() == 1 for value in parameters.values())
    )


class OutputLayer:
    """The ``forward`` of the output layer, in the dtype of ``Kernels.logits``.

    Args:
        weight: the packed weight.
        kernels: the kernel backend.
        step: the object that holds the adapters of the step.
        is_tied: whether the weight is shared with the embedding.

    Attributes:
        weight: the packed weight.
    """

    def __init__(self, weight: Weight, kernels: Kernels, step: StepLora, *, is_tied: bool) -> None:
        self.weight = weight
        self._kernels = kernels
        self._step = step
        self._is_tied = is_tied

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self._kernels.logits(flat, self.weight)
        if self._step.head_lora is not None:
            logits = adjust_logits(logits, flat, self._step.head_lora, is_tied=self._is_tied)
        return logits.view(*x.shape[:-1], -1)


class RmsNorm:
    """The ``forward`` of an RMS norm, in one kernel instead of six operations."""

    def __init__(self, weight: Tensor, eps: float, offset: float, kernels: Kernels) -> None:
        self._weight = weight
        self._eps = eps
        self._offset = offset
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of the last dimension."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()  # x may be a slice of wider rows.
        return self._kernels.add_norm(flat, None, self._weight, self._eps, self._offset).view(x.shape)


def rms_norm_of(module: nn.Module, kernels: Kernels) -> RmsNorm | None:
    """Return an RMS norm that equals a module on random rows. None if the module is not an RMS norm."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    # Some norms of layers with a state also take a gate.
    takes_one = len(inspect.signature(type(module).forward).parameters) == 2
    if weight.dim() != 1 or weight.dtype not in _EXACT or not takes_one:
        return None
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(1)).to(weight) * 2
    expected = module(rows.clone())
    for offset in (0.0, 1.0):  # The two forms are Llama's and Gemma's.
        found = RmsNorm(weight, eps, offset, kernels)
        if expected.dtype == weight.dtype and torch.allclose(found(rows), expected, _EXACT[weight.dtype], 1e-6):
            return found
    return None


_EXACT = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest relative difference of results that count as equal, about a unit in the last place."""


def take_weight(
    linears: Sequence[Linear], kernels: Kernels, quantized: Sequence[QuantizedWeight], *, keep: bool
) -> Weight:
    """Pack the stacked weights of linear layers.

    Unless ``keep``, their parameters then hold no data. Code that still reads a parameter gets NaN, which shows the
    mistake.

    Args:
        linears: the linear layers.
        kernels: the kernel backend.
        quantized: the quantised weights; empty if the weights are plain.
        keep: whether to leave the parameters unchanged.
    """
    weights = [linear.weight.detach() for linear in linears]
    if quantized:
        packed = kernels.pack(stacked(quantized), weights[0].dtype)
    else:
        packed = kernels.pack(weights[0] if len(weights) == 1 else torch.cat(weights))
    for linear, weight in zip(linears, weights, strict=True):
        if not keep and (packed is not weight or isinstance(linear.module, Conv1D)):
            old = linear.module.weight
            assert isinstance(old, Tensor)
            empty = torch.full((1,), torch.nan, dtype=old.dtype, device=old.device).expand(old.shape)
            linear.module.weight = nn.Parameter(empty, requires_grad=False)
    return packed


def quantize_linears(linears: Iterable[Linear], bits: int) -> dict[nn.Module, QuantizedWeight]:
    """Quantise the weights of linear layers, and overwrite their parameters with the dequantised weights."""
    found = {}
    for linear in linears:
        found[linear.module] = made = quantize(linear.weight.detach(), bits)
        old = linear.module.weight
        assert isinstance(old, Tensor)
        wide = made.dequantized(old.dtype)
        old.copy_(wide.T if isinstance(linear.module, Conv1D) else wide)
    return found


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
