"""Describes the content of an adapter's folder, as data and as a table."""

from typing import Any

from rich.console import Console
from rich.table import Table

from lorikeet.adapters.checkpoint import AdapterCheckpoint
from lorikeet.adapters.store import compute_digest
from lorikeet.cli.console import format_size
from lorikeet.core.geometry import LORA_MODULES


def describe(checkpoint: AdapterCheckpoint) -> dict[str, Any]:
    """Return an adapter's figures, and for each module the layers, ranks, scalings and dtypes that it has."""
    modules = {}
    for module in LORA_MODULES:
        layers = [layer for layer, name in checkpoint.pairs if name == module]
        if not layers:
            continue
        pairs = [checkpoint.pairs[layer, module] for layer in layers]
        modules[module] = {
            "layers": layers,
            "ranks": sorted({pair.rank for pair in pairs}),
            "scalings": sorted({checkpoint.scaling(layer, module) for layer in layers}),
            "dtypes": sorted({entry.dtype for pair in pairs for entry in pair}),
            "in_features": sorted({pair.a.shape[1] for pair in pairs}),
            "out_features": sorted({pair.b.shape[0] for pair in pairs}),
        }
    return {
        "folder": str(checkpoint.folder),
        "base_model": checkpoint.base_model,
        "digest": compute_digest(checkpoint),
        "weight_bytes": checkpoint.weight_bytes,
        "parameters": checkpoint.parameters,
        "modules": modules,
        "not_covered": [module for module in LORA_MODULES if module not in modules],
    }


def show(description: dict[str, Any]) -> None:
    """Print a description as text and a table."""
    console = Console(highlight=False)
    size = format_size(description["weight_bytes"])
    console.print(f"{description['folder']}: {description['parameters']:,} parameters, {size}", markup=False)
    console.print(f"base model: {description['base_model'] or 'not named'}", markup=False)
    console.print(f"version:    {description['digest']}")
    table = Table("module", "layers", "rank", "scaling", "dtype", "in → out")
    for name, module in description["modules"].items():
        table.add_row(
            name,
            _ranges(module["layers"]),
            _join(module["ranks"]),
            _join(f"{scaling:g}" for scaling in module["scalings"]),
            _join(module["dtypes"]),
            f"{_join(module['in_features'])} → {_join(module['out_features'])}",
        )
    console.print(table)
    if description["not_covered"]:
        console.print(f"not changed by the adapter: {_join(description['not_covered'])}")


def _join(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` → ``0-2, 5``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
