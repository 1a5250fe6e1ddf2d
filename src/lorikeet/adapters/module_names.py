"""Finds the modules of a base by the names that an adapter uses."""

from collections.abc import Iterable
from typing import NamedTuple

from lorikeet.core.geometry import DECODER_NAMES, LORA_MODULES, ExpertsPath, ModelGeometry, split_layer


class ModulePlace(NamedTuple):
    """A linear layer of a base: the index of its layer, and the geometry's modules in it.

    Attributes:
        layer: index of the layer.
        modules: the modules of one linear layer, or of all experts in order.
        experts: number of experts if these are the linear layers of experts, else 0.
    """

    layer: int
    modules: tuple[str, ...]
    experts: int = 0


_WEIGHT = ".weight"
"""The end of the name of a linear layer's parameter."""


class BaseModules:
    """The linear layers of a base, found by the names that adapters use.

    Args:
        geometry: sizes of the base. If None, any name stands for a module, which gets its path or Llama's name.
    """

    def __init__(self, geometry: ModelGeometry | None) -> None:
        self._geometry = geometry
        self._names = DECODER_NAMES if geometry is None or geometry.names is None else geometry.names
        self._paths: dict[str, list[tuple[str, ...]]] = {}
        for each in self._names.paths:
            self._paths.setdefault(each.path, []).append(each.modules)
            self._paths.setdefault(each.path + _WEIGHT, []).append(each.modules)
        for matrix in self._names.matrices:
            for path in (matrix.path, *matrix.spellings):
                self._paths.setdefault(path, []).append((matrix.module,))
        self._single_experts: list[tuple[str, tuple[str, ...]]] = []
        self._all_experts: dict[str, list[ExpertsPath]] = {}
        for experts in self._names.experts:
            self._all_experts.setdefault(experts.path, []).append(experts)
            for i in range(experts.experts):
                for module, spellings in zip(experts.modules_of(i), experts.spellings, strict=True):
                    for path in spellings:
                        spelled = path.replace("*", str(i))
                        self._paths.setdefault(spelled, []).append((module,))
                        self._single_experts.append((spelled, (module,)))
        modules = LORA_MODULES if geometry is None else tuple(geometry.modules)
        self._numbers = {module: number for number, module in enumerate(modules)}

    @property
    def knows_base(self) -> bool:
        """Whether the base's geometry is known."""
        return self._geometry is not None

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the linear layers, with ``{}`` in place of the layer's number."""
        return tuple(dict.fromkeys(each.path for each in self._names.paths))

    def prefix_of(self, name: str) -> str:
        """Return the longest known prefix of a name; "" if it has none."""
        return max((prefix for prefix in self._names.prefixes if name.startswith(prefix)), key=len, default="")

    def is_unused(self, name: str) -> bool:
        """Return whether text requests do not use a module."""
        return name.startswith(self._names.unused)

    def place(self, name: str) -> ModulePlace | None:
        """Return the place of a linear layer; None if LoRA on the layer is not supported.

        Args:
            name: the full name of the layer or of its parameter in the adapter, such as
                ``model.layers.0.self_attn.q_proj``.
        """
        path, layer = split_layer(name.removeprefix(self.prefix_of(name)))
        known = self._paths.get(path, [])
        if self._geometry is None:
            return ModulePlace(layer, known[0] if known and len(known[0]) == 1 else (path,))
        for each in self._all_experts.get(path, ()):
            modules = tuple(module for i in range(each.experts) for module in each.modules_of(i))
            if self._is_on(layer, modules):
                return ModulePlace(layer, modules, each.experts)
        return next((ModulePlace(layer, modules) for modules in known if self._is_on(layer, modules)), None)

    def parameters(self, name: str) -> list[str]:
        """Return the full names of a module's parameters on which LoRA is supported, in the order of PEFT's wrappers.

        Args:
            name: the module's full name, such as ``model.layers.0.mlp.experts``.
        """
        path, _ = split_layer(name.removeprefix(self.prefix_of(name)))
        paths = (*self._all_experts, *(each.path for each in self._names.matrices))
        found = [each.rpartition(".") for each in dict.fromkeys(paths)]
        parameters = [f"{name}.{parameter}" for parent, _, parameter in found if parent == path]
        return parameters or [name + _WEIGHT]

    def is_transposed(self, name: str) -> bool:
        """Return whether a name is that of a linear layer's parameter with a row for each input."""
        path, _ = split_layer(name.removeprefix(self.prefix_of(name)))
        return path.endswith(_WEIGHT) and path.removesuffix(_WEIGHT) in self._names.transposed

    def rows(self, place: ModulePlace) -> tuple[int, ...]:
        """Return the number of output features of each module of a linear layer."""
        assert self._geometry is not None
        return tuple(self._geometry.modules[module].out_features for module in place.modules)

    def number(self, module: str) -> int:
        """Return a module's index in packing order. Unknown modules come last."""
        return self._numbers.get(module, len(self._numbers))

    def names(self, prefix: str) -> dict[str, ModulePlace]:
        """Return all linear layers except experts, by full names with this prefix."""
        return self._named(prefix, ((path.path, path.modules) for path in self._names.paths))

    def names_of_experts(self, prefix: str) -> dict[str, ModulePlace]:
        """Return the linear layers of single experts, by the full names in checkpoints with separate experts."""
        return self._named(prefix, self._single_experts)

    def names_of_matrices(self, prefix: str) -> dict[str, ModulePlace]:
        """Return the modules with a matrix, such as routers, by the full names of linear layers in their place."""
        return self._named(prefix, ((path, (each.module,)) for each in self._names.matrices for path in each.spellings))

    def names_of_parameters(self, prefix: str) -> dict[str, ModulePlace]:
        """Return the parameters of linear layers, experts and modules with a matrix, by full names."""
        paths = [(each.path, each.modules_of(0)) for each in self._names.experts]
        paths += [(each.path, (each.module,)) for each in self._names.matrices]
        paths += [(each.path + _WEIGHT, each.modules) for each in self._names.paths]
        return {name: place for name in self._named(prefix, paths) if (place := self.place(name)) is not None}

    def _named(self, prefix: str, paths: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, ModulePlace]:
        geometry = self._geometry
        assert geometry is not None
        return {
            prefix + path.replace("{}", str(layer)): ModulePlace(layer, modules)
            for path, modules in paths
            for layer in (range(geometry.layers) if "{}" in path else (0,))
            if all(geometry.has_module(layer, module) for module in modules)
        }

    def vocabulary_names(self, prefix: str) -> list[str]:
        """Return the full names of embedding and output layer, if adapters may change them."""
        weights = self._geometry.replaceable if self._geometry is not None else None
        if weights is None:
            return []
        return [name for name in (weights.embedding and prefix + weights.embedding, weights.head) if name]

    def _is_on(self, layer: int, modules: tuple[str, ...]) -> bool:
        """Return whether a layer has all these modules. Layers that the model lacks get a separate error elsewhere."""
        geometry = self._geometry
        assert geometry is not None
        return layer >= geometry.layers or all(geometry.has_module(layer, module) for module in modules)
