"""Finds the modules of a base that an adapter names."""

from typing import NamedTuple

from lorikeet.core.geometry import DECODER_NAMES, LORA_MODULES, ModelGeometry, ModulePath, split_layer


class ModulePlace(NamedTuple):
    """A linear layer of a base: its layer, and the modules of the geometry that it consists of."""

    layer: int
    modules: tuple[str, ...]


class BaseModules:
    """The linear layers of a base, by their names in adapters.

    Args:
        geometry: of the base; None: any name stands for a module, called by its path unless it is one of Llama's.
    """

    def __init__(self, geometry: ModelGeometry | None) -> None:
        self._geometry = geometry
        self._names = DECODER_NAMES if geometry is None or geometry.names is None else geometry.names
        self._paths: dict[str, list[tuple[str, ...]]] = {}
        for each in self._names.paths:
            self._paths.setdefault(each.path, []).append(each.modules)
        modules = LORA_MODULES if geometry is None else tuple(geometry.modules)
        self._numbers = {module: number for number, module in enumerate(modules)}

    def prefix_of(self, name: str) -> str:
        """Return the longest of the known prefixes that a name has, "" if it has none."""
        return max((prefix for prefix in self._names.prefixes if name.startswith(prefix)), key=len, default="")

    def is_unused(self, name: str) -> bool:
        """Return whether text requests do not use a module."""
        return name.startswith(self._names.unused)

    def place(self, name: str) -> ModulePlace | None:
        """Return where a linear layer is, None if LoRA on it is not supported.

        Args:
            name: its full name in the adapter, as in ``model.layers.0.self_attn.q_proj``.
        """
        path, layer = split_layer(name.removeprefix(self.prefix_of(name)))
        known = self._paths.get(path, [])
        if self._geometry is None:
            return ModulePlace(layer, known[0] if known and len(known[0]) == 1 else (path,))
        return next((ModulePlace(layer, modules) for modules in known if self._is_on(layer, modules)), None)

    def rows(self, place: ModulePlace) -> tuple[int, ...]:
        """Return the output features of each module of a linear layer."""
        assert self._geometry is not None
        return tuple(self._geometry.modules[module].out_features for module in place.modules)

    def number(self, module: str) -> int:
        """Return a module's index in packing order; unknown modules come last."""
        return self._numbers.get(module, len(self._numbers))

    def names(self, prefix: str) -> dict[str, ModulePlace]:
        """Return all linear layers by their full names with this prefix."""
        geometry = self._geometry
        assert geometry is not None
        return {
            prefix + path.path.replace("{}", str(layer)): ModulePlace(layer, path.modules)
            for path in self._names.paths
            for layer in (range(geometry.layers) if "{}" in path.path else (0,))
            if self._exists(layer, path)
        }

    def vocabulary_names(self, prefix: str) -> list[str]:
        """Return the full names of the embedding and the output layer, of those that adapters may change."""
        around = self._geometry.surroundings if self._geometry is not None else None
        if around is None:
            return []
        return [name for name in (around.embedding and prefix + around.embedding, around.head) if name]

    def _is_on(self, layer: int, modules: tuple[str, ...]) -> bool:
        """Return whether a layer has all these modules; layers that the model lacks have their own error."""
        geometry = self._geometry
        assert geometry is not None
        return layer >= geometry.layers or all(geometry.has_module(layer, module) for module in modules)

    def _exists(self, layer: int, path: ModulePath) -> bool:
        assert self._geometry is not None
        return all(self._geometry.has_module(layer, module) for module in path.modules)
