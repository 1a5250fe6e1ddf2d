"""Adds LoRA to the matrices of modules that are not linear layers, such as the routers of mixtures of experts.

Such a module multiplies its rows by a parameter inside its ``forward``, by ``torch.nn.functional.linear``. A tensor
that stands for the parameter gives the product to a function, which adds the deltas of adapters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lorikeet.core.geometry import MatrixPath, split_layer
from lorikeet.kernels.extras import prepare_product, replace_products, row_norms, scale_and_shift, scaled_inputs
from lorikeet.kernels.interface import Kernels
from lorikeet.kernels.lora import LoraDelta, LoraTargets, LoraWeights
from lorikeet.models.transformers_experts import are_experts, older_names, renamings_of
from lorikeet.models.transformers_modules import LoraModules, StepLora, is_linear, replaced

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Returns ``x Wᵀ + b`` for x, W and b."""


class StandIn(Tensor):
    """A tensor with a parameter's values that gives products with the parameter to a function.

    Attributes:
        product: the function.
        see_other: function that is called when an operation besides products, conversions and attributes uses it.
    """

    product: LinearProduct
    see_other: Callable[[], None]

    @classmethod
    def of(cls, parameter: Tensor, product: LinearProduct, see_other: Callable[[], None] = lambda: None) -> "StandIn":
        """Return a tensor that stands for a parameter."""
        made = parameter.detach().as_subclass(cls)
        made.product = product
        made.see_other = see_other
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation that has one of these tensors among its arguments."""
        given = dict(kwargs or {})
        own = next(each for each in tree_leaves((args, given)) if isinstance(each, cls))
        with torch._C.DisableTorchFunctionSubclass():
            weight = args[1] if len(args) > 1 else given.get("weight")
            if func is nn.functional.linear and isinstance(weight, cls) and not isinstance(args[0], cls):
                bias = args[2] if len(args) > 2 else given.get("bias")
                return weight.product(args[0], weight.as_subclass(Tensor), bias)
            found = func(*args, **given)
            if func in _CONVERSIONS:
                return cls.of(found.as_subclass(Tensor), own.product, own.see_other)
            if func.__name__ != "__get__":
                own.see_other()
            return found


_CONVERSIONS = (Tensor.type, Tensor.to, Tensor.float)


class Matrix(NamedTuple):
    """A matrix that multiplies the rows of a step once.

    Attributes:
        name: full name of the parameter.
        module, parameter: the module that multiplies, and the name of its parameter.
        path, layer: parts of the module's name below the decoder, see ``split_layer``.
        bias: the summand of the product, ``[out]``; None if there is none.
    """

    name: str
    module: nn.Module
    parameter: str
    path: str
    layer: int
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The matrix, ``[out, in]``."""
        weight = getattr(self.module, self.parameter).detach()
        assert isinstance(weight, Tensor)
        return weight


class MatrixProbe:
    """Finds the matrices of a decoder while it computes a few tokens.

    Args:
        decoder: the decoder.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._candidates = list(_candidates(decoder))
        self._uses: dict[tuple[str, str], list[tuple[int, Tensor | None]]] = {}

    def begin(self, hooks: ExitStack) -> None:
        """Observe the products until the hooks are removed."""
        for name, module, parameters in self._candidates:
            inner = hooks.enter_context(ExitStack())

            def before(
                module: nn.Module, _: Any, name: str = name, parameters: Any = parameters, inner: ExitStack = inner
            ) -> None:
                seen = {each: self._stand_in(name, each, parameter) for each, parameter in parameters.items()}
                inner.enter_context(replaced(module, seen))

            def after(*_: Any, inner: ExitStack = inner) -> None:
                inner.close()

            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)

    def _stand_in(self, name: str, parameter: str, value: Tensor) -> StandIn:
        uses = self._uses.setdefault((name, parameter), [])

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            uses.append((x.numel() // x.shape[-1], bias))
            return nn.functional.linear(x, weight, bias)

        return StandIn.of(value, product, lambda: uses.append((-1, None)))

    def found(self, prefix: str, rows: int) -> list[Matrix]:
        """Return the matrices that were used for one product of this many rows, and for nothing else."""
        return [
            Matrix(f"{prefix}{name}.{each}", module, each, *split_layer(name), bias=uses[0][1])
            for name, module, parameters in self._candidates
            for each in parameters
            if len(uses := self._uses.get((name, each), [])) == 1 and uses[0][0] == rows
        ]


def _candidates(decoder: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield the modules with matrices of their own that no other code computes."""
    for name, module in decoder.named_modules():
        own = {each: value for each, value in module.named_parameters(recurse=False) if value.dim() == 2}
        if own and not is_linear(module) and not isinstance(module, nn.Embedding) and not are_experts(module):
            yield name, module, own


def add_matrices(lora: LoraModules, matrices: Iterable[Matrix], model: Any) -> None:
    """Add the modules of matrices to the modules of a decoder that adapters may change.

    Args:
        lora: modules of the decoder, changed in place.
        matrices: the matrices.
        model: the whole model. Its conversions of older checkpoints contain the names of linear layers.
    """
    assert lora.names is not None
    renamings = renamings_of(model)
    paths: dict[MatrixPath, None] = {}
    for each in matrices:
        outputs, inputs = each.weight.shape
        path = each.path if each.parameter == "weight" else f"{each.path}.{each.parameter}"
        (module,) = lora.add(each.name, [(path, outputs)], each.layer, inputs)
        spellings = older_names([each.path], renamings) if each.parameter == "weight" else ()
        paths[MatrixPath(f"{each.path}.{each.parameter}", module, spellings)] = None
    lora.names = msgspec.structs.replace(lora.names, matrices=tuple(paths))


class AdaptedMatrix:
    """The product with a matrix, with the step's adapters.

    The base's product is computed as the module computes it, and the deltas are added. So the answers of the base do
    not depend on the adapters beside it.

    Args:
        matrix: the matrix.
        targets: the module of the product.
        kernels: the kernel backend.
        step: the object that holds the adapters of the step.
    """

    def __init__(self, matrix: Matrix, targets: LoraTargets, kernels: Kernels, step: StepLora) -> None:
        self._matrix = matrix
        self._kernels = kernels
        self._step = step
        self._targets = targets
        self._zeros = kernels.pack(torch.zeros_like(matrix.weight))

    @property
    def is_changed(self) -> bool:
        """Whether adapters of the step may change the product."""
        lora = self._step.lora
        return lora is not None and (lora.has_extras or lora.changes(self._targets))

    def prepare(self, adapter: LoraWeights) -> None:
        """Compute the extras of an adapter that depend on the weight."""
        weight = self._matrix.weight
        prepare_product(
            adapter,
            self._matrix.layer,
            self._targets,
            self._matrix.bias,
            lambda x: nn.functional.linear(x, weight),
            lambda: row_norms(weight),
        )

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x Wᵀ + b``, plus the change by each row's adapter."""
        lora = self._step.lora
        assert lora is not None
        flat = x.reshape(-1, x.shape[-1])
        assert len(flat) == self._step.rows, "a module sees other rows than those of the step"
        layer = self._matrix.layer
        targets = self._targets
        if lora.has_extras:
            flat = scaled_inputs(flat, lora, layer, targets)
        out = nn.functional.linear(flat, weight, bias)
        # Modules may compute in fp32, but adapters have the dtype of the model.
        rows = flat.to(self._matrix.weight.dtype).contiguous()
        if lora.changes(targets):
            out += self._kernels.linear(rows, self._zeros, None, LoraDelta(lora, layer, targets))
        if lora.has_extras:
            replace_products(out, rows, bias, lora, layer, targets)
            scale_and_shift(out, lora, layer, targets)
        return out.view(*x.shape[:-1], -1)


class AdaptedModule:
    """The ``forward`` of a module with matrices that adapters change.

    Args:
        module: the module.
        products: the products by the names of parameters.
    """

    def __init__(self, module: nn.Module, products: Mapping[str, AdaptedMatrix]) -> None:
        self._module = module
        self._products = products
        self._forward = module.forward
        self._stand_ins = {name: StandIn.of(getattr(module, name), each.product) for name, each in products.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module computes."""
        if not any(each.is_changed for each in self._products.values()):
            return self._forward(*args, **kwargs)
        with replaced(self._module, self._stand_ins):
            return self._forward(*args, **kwargs)


def adapt_matrices(
    matrices: Iterable[Matrix], lora: LoraModules, kernels: Kernels, step: StepLora
) -> list[AdaptedMatrix]:
    """Make modules add the deltas of adapters to their products, and return the products."""
    by_module: dict[nn.Module, dict[str, AdaptedMatrix]] = {}
    for each in matrices:
        targets = lora.targets(each.name)
        assert targets is not None
        by_module.setdefault(each.module, {})[each.parameter] = AdaptedMatrix(each, targets, kernels, step)
    for module, products in by_module.items():
        module.forward = AdaptedModule(module, products)
    return [each for products in by_module.values() for each in products.values()]
