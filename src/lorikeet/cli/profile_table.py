"""Prints a cost profile as tables."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec
from rich.table import Column, Table

from lorikeet.cli.console import output
from lorikeet.core.request import format_slo
from lorikeet.costs.profile import Constant, CostProfile, Curve, FitQuality, OperatingLoads

_PREFIXES = ((1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"), (0, "p"))


def print_profile(profile: CostProfile) -> None:
    """Print every constant with its unit and error, and how well the models fit the measurements."""
    console = output()
    console.print(f"{profile.name}: {profile.model} on {profile.device}; {profile.made}", soft_wrap=True, markup=False)
    constants = Table(
        Column("constant", no_wrap=True),
        Column("value", justify="right", no_wrap=True),
        Column("± 95 %", justify="right", no_wrap=True),
    )
    fits = Table(*(Column(name, no_wrap=True) for name in ("model", "R²", "largest error", "points")))
    for name, value in _walk("", profile):
        match value:
            case Constant():
                constants.add_row(name, *_figure(value))
            case Curve():
                for (count, seconds), error in zip_longest(value.points, value.errors):
                    told = "" if error is None else _seconds(error, "s")
                    constants.add_row(f"{name}, {count} {value.unit}", _seconds(seconds, "s"), told)
                if value.error is not None:
                    constants.add_row(f"{name}, between points", "", f"{value.error:.0%}")
            case FitQuality():
                fits.add_row(name, f"{value.r2:.4f}", f"{value.worst:.0%}", str(value.points))
    console.print(constants)
    console.print(fits)
    if profile.operating_points:
        console.print(_operating_points(profile.operating_points))


def _operating_points(all_loads: Sequence[OperatingLoads]) -> Table:
    table = Table(
        "operating points", "SLO", "tokens", Column("rank", justify="right"), Column("tokens/s", justify="right")
    )
    for loads in all_loads:
        for rank, tokens_per_s in sorted(loads.tokens_per_s.items()):
            lengths = f"{loads.prompt_tokens} + {loads.output_tokens}"
            table.add_row(loads.kernel_form, format_slo(loads.slo), lengths, str(rank), f"{tokens_per_s:,.0f}")
    return table


def _walk(name: str, value: object) -> Iterator[tuple[str, Constant | Curve | FitQuality]]:
    """Yield all constants, curves and fits below ``value`` with their dotted names."""
    if isinstance(value, Constant | Curve | FitQuality):
        yield name, value
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            yield from _walk(f"{name}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(f"{name}.{key}", inner)


def _figure(figure: Constant) -> tuple[str, str]:
    if figure.unit == "bytes/s":
        error = "" if figure.error is None else f"{figure.error / 1e9:.2f}"
        return f"{figure.value / 1e9:.2f} GB/s", error
    if figure.unit != "s" and not figure.unit.startswith("s/"):
        return f"{figure.value:.1%} {figure.unit}", ""
    return _seconds(figure.value, figure.unit), "" if figure.error is None else _seconds(figure.error, "s")


def _seconds(seconds: float, unit: str) -> str:
    scale, prefix = next((s, p) for s, p in _PREFIXES if seconds >= s)
    return f"{seconds / (scale or 1e-12):.3g} {prefix}{unit}"
