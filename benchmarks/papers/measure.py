"""Declarations of a paper's module: measurements, their runs, and figures computed from results."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.stats import t as student

SEEDS = (1, 2, 3, 4, 5)
"""Seeds on which systems are compared. With one seed, all systems get the same work."""
CONFIDENCE = 0.95


class Run(NamedTuple):
    """Describes a run: a function of a module, called in another process.

    Attributes:
        function: deterministic function that returns plain data.
        arguments: plain data: strings, numbers, and tuples and structs of these.
        after: runs whose results come before the arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    after: tuple["Run", ...] = ()

    @property
    def specification(self) -> dict[str, Any]:
        """Plain data that identifies the run; the result is stored under the digest of this data."""
        return {
            "function": f"{self.function.__module__}.{self.function.__qualname__}",
            "arguments": msgspec.to_builtins(self.arguments),
            "after": [each.specification for each in self.after],
        }

    @property
    def key(self) -> str:
        """Digest of the specification."""
        encoded = msgspec.json.encode(self.specification, order="deterministic")
        return hashlib.sha256(encoded).hexdigest()[:24]

    def __str__(self) -> str:
        """Return the run's name for progress lines."""
        return " ".join([self.function.__name__, *(str(each)[:40] for each in self.arguments)])


class Answer(NamedTuple):
    """Our figure in the printed unit, with the ends of its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


class Figure(NamedTuple):
    """Computes a claim's figure from the results of ``runs``, which the pure function ``of`` gets in their order."""

    runs: tuple[Run, ...]
    of: Callable[[Sequence[Any]], Answer | float]


class Series(NamedTuple):
    """Points of one line of a plot; ``printed`` ones are the paper's."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    printed: bool = False


class Plot(NamedTuple):
    """A plot in addition to the plot of the claims that every measurement has. Labels of axes name units."""

    title: str
    x_label: str
    y_label: str
    runs: tuple[Run, ...]
    series: Callable[[Sequence[Any]], Sequence[Series]]
    log_y: bool = False


class Table(NamedTuple):
    """A table in addition to the table of claims, such as a whole grid."""

    title: str
    headings: Sequence[str]
    runs: tuple[Run, ...]
    rows: Callable[[Sequence[Any]], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Measurement:
    """A group of claims that share a setting.

    Attributes:
        title: heading on the paper's page.
        setting: model, device, link, lengths, arrivals, load, windows, seeds ..., as the page prints them.
        figures: figures by id of the claim.
        plots: plots in addition to the plot of the claims.
        tables: tables in addition to the table of the claims.
    """

    title: str
    setting: Mapping[str, str]
    figures: Mapping[str, Figure]
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()

    def runs(self, claims: Iterable[str] | None = None) -> list[Run]:
        """Return the runs of some claims, or all of the measurement."""
        if claims is not None:
            return [run for claim in claims if claim in self.figures for run in self.figures[claim].runs]
        parts: list[Figure | Plot | Table] = [*self.figures.values(), *self.plots, *self.tables]
        return [run for part in parts for run in part.runs]


@dataclass(frozen=True)
class Paper:
    """Declares all measurements of a paper; a paper's module has one in ``PAPER``.

    Attributes:
        measurements: measurements of all testable claims.
    """

    measurements: Sequence[Measurement]

    def figure(self, claim: str) -> Figure | None:
        """Return the figure of a claim; ``None`` if the claim is not measured."""
        found = [each.figures[claim] for each in self.measurements if claim in each.figures]
        return found[0] if found else None


# --- figures -----------------------------------------------------------------------------------------


def times(more: float, less: float) -> float:
    """Return ``more`` divided by ``less``: the baseline's latency by ours, or our throughput by the baseline's."""
    return more / less


def increase(value: float, base: float) -> float:
    """Return the percentage by which a value is more than another."""
    return 100 * (value / base - 1)


def reduction(value: float, base: float) -> float:
    """Return the percentage by which a value is less than another."""
    return 100 * (1 - value / base)


def difference(value: float, base: float) -> float:
    """Return the percentage points by which one share is more than another, both from 0 to 1."""
    return 100 * (value - base)


def over_seeds(values: Sequence[float]) -> Answer:
    """Return the mean of one figure per seed, with its 95 % interval by Student's distribution."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Answer(mean)
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return Answer(mean, mean - half, mean + half)


Value = str | Callable[[Any], float]
"""A number of a run's result: its key, or a function of the result."""


def _number(result: Any, value: Value) -> float:
    return float(result[value] if isinstance(value, str) else value(result))


def compared(
    change: Callable[[float, float], float], first: Sequence[Run], second: Sequence[Run], value: Value
) -> Figure:
    """Return the figure that compares one number of two systems' results, seed by seed.

    Args:
        change: function of the first's number and the second's, such as :func:`increase`.
        first: one run per seed.
        second: runs with the same seeds in the same order.
        value: number to compare.
    """
    count = len(first)

    def of(made: Sequence[Any]) -> Answer:
        pairs = zip(made[:count], made[count:], strict=True)
        return over_seeds([change(_number(one, value), _number(other, value)) for one, other in pairs])

    return Figure((*first, *second), of)


def mean_of(runs: Sequence[Run], value: Value) -> Figure:
    """Return the mean of a number over runs, one per seed."""
    return Figure(tuple(runs), lambda made: over_seeds([_number(each, value) for each in made]))


def most_of(figures: Sequence[Figure]) -> Figure:
    """Return the largest of some figures, for a claim of "up to" over several settings."""

    def of(made: Sequence[Any]) -> Answer:
        results, answers = iter(made), []
        for figure in figures:
            answer = figure.of([next(results) for _ in figure.runs])
            answers.append(answer if isinstance(answer, Answer) else Answer(answer))
        return max(answers, key=lambda answer: answer.value)

    return Figure(tuple(run for figure in figures for run in figure.runs), of)


def computed(value: Callable[[], float]) -> Figure:
    """Return a figure that needs no run."""
    return Figure((), lambda _: value())
