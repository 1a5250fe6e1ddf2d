"""Replaces the ``forward`` of experts in transformers' models by products grouped by expert and adapter.

transformers keeps the weights of all experts of a layer in parameters of three dimensions, and marks classes with the
usual layout by attributes that describe it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from lorikeet.core.geometry import ExpertsPath, split_layer
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.interface import GroupedRows, Kernels
from lorikeet.kernels.lora import LoraBatch, LoraSegment
from lorikeet.kernels.quantized import QuantizedWeight, quantize
from lorikeet.models.layer_ops import Product
from lorikeet.models.transformers_modules import AdaptedLinear, LoraModules, StepLora

_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""Attributes of transformers' experts whose weights are laid out in the usual way."""


class Experts(NamedTuple):
    """The experts of one layer.

    Attributes:
        name: full name of the module.
        module: the module that computes the experts.
        path, layer: parts of the module's name below the decoder, see ``split_layer``.
    """

    name: str
    module: Any
    path: str
    layer: int

    @property
    def number(self) -> int:
        """Number of experts."""
        return len(self.module.down_proj)

    @property
    def parameters(self) -> tuple[str, str]:
        """Names of the parameters of the linear layers before and after the activation."""
        return ("gate_up_proj" if self.module.has_gate else "up_proj"), "down_proj"

    def weight(self, parameter: str, expert: int) -> Tensor:
        """Return the weight of a linear layer of one expert, ``[out, in]``."""
        weight = getattr(self.module, parameter).detach()[expert]
        assert isinstance(weight, Tensor)
        return weight.T.contiguous() if self.module.is_transposed else weight

    def bias(self, parameter: str, expert: int) -> Tensor | None:
        """Return the bias of an expert; None if it has no bias."""
        return getattr(self.module, f"{parameter}_bias").detach()[expert] if self.module.has_bias else None

    def parts(self, parameter: str) -> tuple[str, ...]:
        """Return the linear layers that a parameter combines, in the order of their outputs."""
        is_split = parameter == "gate_up_proj" and self.module.is_concatenated
        return ("gate_proj", "up_proj") if is_split else (parameter,)


def quantize_experts(experts: Experts, bits: int) -> dict[tuple[str, int], QuantizedWeight]:
    """Quantise the weights of experts, and overwrite their parameters with the dequantised weights."""
    found = {}
    for parameter in experts.parameters:
        old = getattr(experts.module, parameter)
        for i in range(experts.number):
            found[parameter, i] = made = quantize(experts.weight(parameter, i), bits)
            wide = made.dequantized(old.dtype)
            old[i].copy_(wide.T if experts.module.is_transposed else wide)
    return found


def experts_of(prefix: str, decoder: nn.Module) -> list[Experts]:
    """Return the experts of a decoder that have the usual layout.

    Args:
        prefix: prefix of the decoder's names in the model.
        decoder: the decoder.
    """
    return [
        Experts(prefix + name, module, *split_layer(name))
        for name, module in decoder.named_modules()
        if are_experts(module)
    ]


def are_experts(module: Any) -> bool:
    """Return whether a module computes experts that have the usual layout."""
    if not all(isinstance(getattr(module, mark, None), bool) for mark in _MARKS):
        return False
    weights = [getattr(module, name, None) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def add_experts(lora: LoraModules, experts: Iterable[Experts], model: Any) -> None:
    """Add the modules of experts to the modules of a decoder that adapters may change.

    Args:
        lora: modules of the decoder, changed in place.
        experts: experts that process each row of a step once.
        model: the whole model. Its conversions of older checkpoints contain the names of single experts.
    """
    assert lora.names is not None
    conversions = get_model_conversion_mapping(model)
    paths: dict[ExpertsPath, None] = {}
    for each in experts:
        for parameter in each.parameters:
            outputs, inputs = each.weight(parameter, 0).shape
            parts = each.parts(parameter)
            for i in range(each.number):
                of_expert = [(f"{each.path}.{i}.{part}", outputs // len(parts)) for part in parts]
                modules = lora.add(f"{each.name}.{i}.{parameter}", of_expert, each.layer, inputs)
            path = f"{each.path}.{parameter}"
            starred = tuple(module.replace(f".{each.number - 1}.", ".*.") for module in modules)
            paths[ExpertsPath(path, each.number, starred, _old_paths(path, starred, conversions))] = None
    lora.names = msgspec.structs.replace(lora.names, experts=tuple(paths))


def _old_paths(path: str, modules: Sequence[str], conversions: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """Return the paths of a parameter's parts in checkpoints that store each expert separately."""
    found: list[tuple[str, ...]] = [(module.partition("#")[0],) for module in modules]
    for each in conversions:
        sources = [_literal(source) for source in each.source_patterns]
        target = _literal(each.target_patterns[0])
        if not isinstance(each, WeightConverter) or len(sources) != len(modules):
            continue
        if all("*" in source for source in sources) and path.endswith(f".{target}"):
            head = path.removesuffix(target)
            found = [(*known, head + source) for known, source in zip(found, sources, strict=True)]
    renamings = _renamings(conversions)
    return tuple(older_names(names, renamings) for names in found)


def renamings_of(model: Any) -> list[tuple[str, str]]:
    """Return the parts of names that checkpoints of older versions of a model have, with the parts of today."""
    return _renamings(get_model_conversion_mapping(model))


def _renamings(conversions: Sequence[Any]) -> list[tuple[str, str]]:
    return [
        (f".{_literal(each.source_patterns[0])}.", f".{_literal(each.target_patterns[0])}.")
        for each in conversions
        if not isinstance(each, WeightConverter)
    ]


def older_names(names: Sequence[str], renamings: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return names of modules, and the names that they have in older checkpoints."""
    older = (f"{name}.".replace(new, old)[:-1] for name in names for old, new in renamings)
    return tuple(dict.fromkeys((*names, *older)))


def _literal(pattern: str) -> str:
    """Return the name that a pattern of transformers' conversions stands for."""
    return pattern.replace("\\", "").removesuffix(".weight").strip(".")


class AdaptedExperts:
    """The ``forward`` of a layer's experts, with the adapters of the step.

    The pairs of a row and an expert are sorted by expert, then by row. The rows of one adapter are then neighbours, and
    each expert computes its rows like other linear layers.

    Args:
        experts: the layer's experts. Afterwards their parameters hold no data.
        kernels: the backend.
        step: the object that holds the adapters of the step.
        lora: the decoder's modules, including these experts if adapters may change them.
        quantized: the quantised weights by parameter and expert; empty without quantisation.

    Attributes:
        linears: the linear layers of all experts.
    """

    def __init__(
        self,
        experts: Experts,
        kernels: Kernels,
        step: StepLora,
        lora: LoraModules,
        quantized: Mapping[tuple[str, int], QuantizedWeight],
    ) -> None:
        self._module = experts.module
        self._step = step
        modules: set[str] = set()

        def taken(parameter: str) -> list[AdaptedLinear]:
            found = []
            for i in range(experts.number):
                targets = lora.targets(f"{experts.name}.{i}.{parameter}")
                modules.update(targets.modules if targets is not None else ())
                plain = experts.weight(parameter, i)
                packed = quantized.get((parameter, i))
                weight = kernels.pack(plain) if packed is None else kernels.pack(packed, plain.dtype)
                bias = experts.bias(parameter, i)
                found.append(AdaptedLinear(Product(weight, bias, experts.layer, targets), kernels, step))
            old = getattr(experts.module, parameter)
            empty = torch.full((1,), torch.nan, dtype=old.dtype, device=old.device).expand(old.shape)
            setattr(experts.module, parameter, nn.Parameter(empty, requires_grad=False))
            return found

        self._up, self._down = (taken(parameter) for parameter in experts.parameters)
        self._in_one_call = [
            kernels.products_in_one_call([linear.as_group for linear in linears], experts.layer)
            for linears in (self._up, self._down)
        ]
        self._modules = frozenset(modules)
        self.linears = [*self._up, *self._down]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each row's sum over its experts, weighted.

        Args:
            hidden_states: ``[T, hidden]``.
            top_k_index: int64 ``[T, k]``, the experts of each row. Numbers beyond the last expert compute nothing.
            top_k_weights: ``[T, k]``.
        """
        chosen = top_k_index.shape[1]
        of_pair = top_k_index.flatten().cpu().numpy()
        order = np.argsort(of_pair, kind="stable")
        rows = order // chosen
        bounds = np.searchsorted(of_pair[order], np.arange(len(self._up) + 1)).tolist()
        total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        if bounds[-1] == 0:
            return total.to(hidden_states.dtype)
        module = self._module
        at = torch.from_numpy(rows[: bounds[-1]]).to(hidden_states.device)
        products = self._products(rows, bounds)
        inner = products(0, hidden_states.index_select(0, at))
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = products(1, inner.contiguous())
        if module.has_post_expert_norm:
            found = module.post_expert_norm(found)
        weights = top_k_weights.flatten()[torch.from_numpy(order[: bounds[-1]]).to(at.device)]
        # The sum is in fp32, since a row may have many experts.
        return total.index_add_(0, at, (found * weights[:, None]).float()).to(hidden_states.dtype)

    def _products(self, rows: npt.NDArray[np.int64], bounds: Sequence[int]) -> Callable[[int, Tensor], Tensor]:
        """Return a function of 0 (before the activation) or 1 and the rows, which computes their products.

        Args:
            rows, bounds: see :meth:`_adapters`.
        """
        lora = self._step.lora
        calls = self._in_one_call
        if calls[0] is None or (lora is not None and (lora.has_extras or lora.form is KernelForm.EINSUM)):
            adapters = self._adapters(rows, bounds)
            return lambda number, x: _each((self._up, self._down)[number], x, bounds, adapters)
        if lora is not None and lora.modules.isdisjoint(self._modules):
            lora = None
        segments = None if lora is None else self._step.segments[rows[: bounds[-1]]]
        grouped = grouped_rows(np.asarray(bounds), lora, segments)

        def product(number: int, x: Tensor) -> Tensor:
            call = calls[number]
            assert call is not None
            return call(x, grouped)

        return product

    def _adapters(self, rows: npt.NDArray[np.int64], bounds: Sequence[int]) -> dict[int, LoraBatch]:
        """Return the adapters of each expert's rows.

        Args:
            rows: each pair's row in the step, sorted by expert.
            bounds: the first pair of each expert, and the end.
        """
        lora = self._step.lora
        if lora is None or (lora.modules.isdisjoint(self._modules) and not lora.has_extras):
            return {}
        segments = self._step.segments[rows]
        changes = np.flatnonzero(np.diff(segments, prepend=-2)).tolist()
        starts = sorted(start for start in {*changes, *bounds} if start < bounds[-1])
        found: dict[int, list[LoraSegment]] = {}
        expert = 0
        for start, stop in pairwise((*starts, bounds[-1])):
            while start >= bounds[expert + 1]:
                expert += 1
            if (number := segments[start]) >= 0:
                first = bounds[expert]
                segment = LoraSegment(start - first, stop - first, lora.segments[number].weights)
                found.setdefault(expert, []).append(segment)
        return {expert: LoraBatch(each, lora.form) for expert, each in found.items()}


def grouped_rows(
    bounds: npt.NDArray[np.int64], lora: LoraBatch | None, numbers: npt.NDArray[np.int64] | None
) -> GroupedRows:
    """Return rows that are sorted by group, with their adapters.

    Args:
        bounds: int64 ``[groups + 1]``, the first row of each group, and the end.
        lora: the adapters; None without any.
        numbers: int64 ``[rows]``, the number of each row's segment in ``lora``, -1 for none; None without adapters.
    """
    rows = np.diff(bounds)
    groups = np.flatnonzero(rows)
    none = np.zeros((0, 4), dtype=np.int64)
    if lora is None or numbers is None:
        return GroupedRows(groups, rows[groups], none, np.zeros(len(groups), dtype=np.int64))
    is_start = np.diff(numbers, prepend=-2) != 0
    is_start[bounds[groups]] = True
    starts = np.flatnonzero(is_start)
    stops = np.append(starts[1:], len(numbers))
    has_adapter = numbers[starts] >= 0
    starts = starts[has_adapter]
    group = np.searchsorted(bounds, starts, side="right") - 1
    # Groups without rows begin where the next one begins. The last of those that begin there has the rows.
    first = bounds[group]
    segments = lora.table.numpy()[numbers[starts]]
    segments[:, 0] = starts - first
    segments[:, 1] = stops[has_adapter] - first
    counts = np.bincount(group, minlength=len(rows))[groups]
    record = lora.record
    return GroupedRows(groups, rows[groups], segments, counts, record.padded_rank, record.bits)


def _each(
    linears: Sequence[AdaptedLinear], x: Tensor, bounds: Sequence[int], adapters: Mapping[int, LoraBatch]
) -> Tensor:
    """Return the products of each expert's rows, stacked.

    Args:
        linears: the linear layer of each expert.
        x: rows, sorted by expert.
        bounds: the first row of each expert, and the end.
        adapters: the adapters of the rows, for each expert that has any.
    """
    products = [
        linears[expert].compute(x[start:stop], adapters.get(expert))
        for expert, (start, stop) in enumerate(pairwise(bounds))
        if start < stop
    ]
    return torch.cat(products)
