"""The table of lines, and what a runner returns."""

import importlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accept.runs import StoredRuns

Figure = float | int | str | dict[str, Any]
NOT_RUN = "not run"


class UnknownLineError(LookupError):
    """No runner has this name."""


@dataclass(frozen=True)
class Result:
    """What one line came to.

    Attributes:
        figure: the measured value, or several by name; ``NOT_RUN`` if nothing could be measured: then what an earlier
            revision measured stays, and is told to be that.
        passed: whether the bound is met.
        interval: low and high end of the 95 % interval of the figure, where there is one.
        cause: why the bound is not met; empty if it is.
        notes: anything a reader must know to believe the figure.
        details: plain data for tables made from the line's file.
    """

    figure: Figure
    passed: bool
    interval: tuple[float, float] | None = None
    cause: str = ""
    notes: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One registered line.

    Attributes:
        name: such as ``serve.2``.
        title: what it shows, a few words.
        bound: what must hold, in words.
        run: the runner.
    """

    name: str
    title: str
    bound: str
    run: Callable[[StoredRuns], Result]

    def measure(self, runs: StoredRuns) -> Result:
        """Run it; a line that breaks down is a result too: not met, with the error as its cause."""
        try:
            return self.run(runs)
        except Exception as error:
            traceback.print_exc()
            return Result(figure="none", passed=False, cause=f"{type(error).__name__}: {error}")


_LINES: dict[str, Line] = {}


def line(
    name: str, *, title: str, bound: str
) -> Callable[[Callable[[StoredRuns], Result]], Callable[[StoredRuns], Result]]:
    """Register the decorated function as the runner of ``name``.

    The runner gets a :class:`StoredRuns` in which it may keep finished parts, so that a second call resumes.
    """

    def register(run: Callable[[StoredRuns], Result]) -> Callable[[StoredRuns], Result]:
        _LINES[name] = Line(name, title, bound, run)
        return run

    return register


def find_line(name: str) -> Line:
    """Return the line ``serve.2``, whose runner lies in the module ``serve_2`` beside this one.

    Raises:
        UnknownLineError: there is none.
    """
    if not re.fullmatch(r"[a-z]+\.\d+", name):
        raise UnknownLineError(f"{name!r} is not the name of a line, such as serve.2")
    module = f"{__package__}.{name.replace('.', '_')}"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnknownLineError(f"no runner for {name}: there is no module {module}") from None
    return _LINES[name]
