"""Describes the content of an adapter's folder, as data and as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lorikeet.adapters.description import AdapterDescription, ExtraTensor
from lorikeet.cli.console import output
from lorikeet.core.adapter import EMBEDDING, HEAD
from lorikeet.core.geometry import LORA_MODULES, SCORE, split_layer
from lorikeet.core.text import format_size

if TYPE_CHECKING:  # The module imports torch, which a description does not need.
    from lorikeet.convert.algebra import AdapterDifference

_NOT_OF_MODULES = frozenset({"vector", "rows"})
"""Kinds of extras that are of no linear module."""


def describe(folder: Path, adapter: AdapterDescription, base: str) -> dict[str, Any]:
    """Return an adapter's figures, and the layers, ranks, scalings and dtypes of each module.

    Args:
        folder: the adapter's folder.
        adapter: the adapter's content.
        base: folder of the base with which the adapter was compared; "" without a comparison.
    """
    modules = {}
    for module in dict.fromkeys(each.module for each in adapter.modules):
        found = [each for each in adapter.modules if each.module == module]
        modules[module] = {
            "layers": [each.layer for each in found],
            "ranks": sorted({each.rank for each in found}) if module != SCORE else [],
            "scalings": sorted({each.scaling for each in found}),
            "dtypes": sorted({tensor.dtype for each in found for tensor in (each.a, each.b)}),
            "in_features": sorted({each.a.shape[1] for each in found}),
            "out_features": sorted({(each.a if module == SCORE else each.b).shape[0] for each in found}),
        }
    extras = {each.module for each in adapter.extras if each.kind not in _NOT_OF_MODULES}
    changed = (modules.keys() | extras) - {SCORE, EMBEDDING, HEAD}
    is_llama = bool(changed) and changed <= set(LORA_MODULES)
    return {
        "folder": str(folder),
        "base_model": adapter.base_model,
        "fits": base or None,
        "digest": adapter.digest,
        "weight_bytes": adapter.weight_bytes,
        "parameters": adapter.parameters,
        "modules": modules,
        "extras": _extras(adapter),
        "not_covered": [module for module in LORA_MODULES if module not in changed] if is_llama else [],
        "warnings": list(adapter.warnings),
    }


def _extras(adapter: AdapterDescription) -> list[dict[str, Any]]:
    """Return the tensors of an adapter beside A and B, by kind and module."""
    found: dict[tuple[str, str], list[ExtraTensor]] = {}
    for each in adapter.extras:
        if each.entry is not None:
            found.setdefault((each.kind, each.module), []).append(each)
    return [
        {
            "kind": kind,
            "module": module,
            "layers": [each.layer for each in several],
            "shape": [several[0].rows, several[0].columns],
            "dtypes": sorted({each.entry.dtype for each in several if each.entry is not None}),
        }
        for (kind, module), several in found.items()
    ]


def show(description: dict[str, Any]) -> None:
    """Print a description as text and a table."""
    console = output()
    size = format_size(description["weight_bytes"])
    console.print(f"{description['folder']}: {description['parameters']:,} parameters, {size}", markup=False)
    console.print(f"base model: {description['base_model'] or 'not named'}", markup=False)
    fits = description["fits"] or "not checked; name the base with --base"
    console.print(f"fits:       {fits}", markup=False)
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
    if description["extras"]:
        extras = Table("beside LoRA", "of", "layers", "shape", "dtype")
        for each in description["extras"]:
            shape = " × ".join(map(str, each["shape"]))
            extras.add_row(each["kind"], each["module"], _ranges(each["layers"]), shape, _join(each["dtypes"]))
        console.print(extras)
    if (check := description.get("check")) is not None:
        if check["same"]:
            count = len(check["own"])
            difference = check["logprob_difference"]
            console.print(f"check: {count} tokens equal PEFT's; log probabilities differ by at most {difference:.2g}")
            if SCORE in description["modules"]:
                console.print("check: of the language model's tokens; the score head is not compared")
        else:
            at = len(check["by_peft"]) - 1
            console.print(f"check: token {at} is {check['own'][at]}, but {check['by_peft'][at]} by PEFT")
    if description["not_covered"]:
        console.print(f"not changed by the adapter: {_join(description['not_covered'])}")
    for warning in description["warnings"]:
        console.print(f"warning: {warning}", markup=False)


def show_differences(
    config: Mapping[str, tuple[Any, Any]],
    modules: "Sequence[AdapterDifference]",
    tensors: "Sequence[AdapterDifference]",
) -> None:
    """Print how two adapters differ."""
    console = output()
    for key, (one, two) in config.items():
        console.print(f"{key}: {one!r} → {two!r}", markup=False)
    for kind, size, found in (("module", "ranks", modules), ("tensor", "elements", tensors)):
        if found:
            console.print(_differences(kind, size, found))
    if not config and not any(each.relative != 0 for each in (*modules, *tensors)):
        console.print("the adapters add the same")


def _differences(kind: str, size: str, differences: "Sequence[AdapterDifference]") -> Table:
    """Return a table with a row for the same module or tensor of all layers.

    Args:
        kind: ``module`` or ``tensor``.
        size: name of the figure in ``AdapterDifference.ranks``.
        differences: differences of one kind.
    """
    by_path: dict[str, list[tuple[int, AdapterDifference]]] = {}
    for each in differences:
        path, layer = split_layer(each.name)
        by_path.setdefault(path, []).append((layer, each))
    table = Table(kind, "layers", size, "relative difference", "largest in layer")
    for path, found in by_path.items():
        sizes = sorted({each.ranks for _, each in found})
        both = [(each.relative, layer) for layer, each in found if each.relative is not None]
        mean = sum(relative for relative, _ in both) / len(both) if both else 0.0
        largest, at = max(both, default=(0.0, 0))
        alone = sum(0 in each.ranks for _, each in found)
        other = len(found) - len(both) - alone
        notes = (
            f"{mean:.3g} in the mean" if both else "",
            f"{alone} {kind}{'s' * (alone > 1)} in one only" if alone else "",
            f"{other} {kind}{'s' * (other > 1)} of different shapes" if other else "",
        )
        table.add_row(
            path,
            _ranges([layer for layer, _ in found]),
            _join(f"{one} → {two}" if one != two else str(one) for one, two in sizes),
            ", ".join(filter(None, notes)),
            f"{largest:.3g} in {at}" if largest else "",
        )
    return table


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
