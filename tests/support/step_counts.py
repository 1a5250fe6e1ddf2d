"""How long stateful property tests run, and what they did: for their acceptance, which asks for many steps."""

import atexit
import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import hypothesis

from tests.support import sampling

STEPS_VARIABLE = "LORIKEET_PROPERTY_STEPS"
"""Least number of steps to run; unset: as many as a suite has time for."""
REPORT_VARIABLE = "LORIKEET_PROPERTY_REPORT"
"""File for the counts, as JSON: name → how often."""

RUNS_WITH_ALL = 4
QUICK_PART = 3
"""With ``--all`` a property test runs its number of examples 4 times over; without, a third of them."""

_LEAST = 3

P = ParamSpec("P")
T = TypeVar("T")

_COUNTS: Counter[str] = Counter()


def examples(number: int) -> int:
    """Return how many examples a property test runs: a part of ``number``, or with ``--all`` several times as many."""
    return number * RUNS_WITH_ALL if sampling.runs_all else max(_LEAST, number // QUICK_PART)


def machine_settings(number: int, steps: int) -> hypothesis.settings:
    """Return the settings of a state machine's test.

    Args:
        number: runs of the machine, see :func:`examples`.
        steps: most rules of one run.
    """
    least = int(os.environ.get(STEPS_VARIABLE, "0"))
    # Runs end early as often as not: twice as many as would do at full length.
    return hypothesis.settings(
        hypothesis.settings.get_profile("lorikeet"),
        max_examples=max(examples(number), 2 * least // steps),
        stateful_step_count=steps,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def count(name: str, times: int = 1) -> None:
    """Count something that happened."""
    _COUNTS[name] += times


def counted(rule: Callable[P, T]) -> Callable[P, T]:
    """Count every call of a rule's function as a step; stands below the rule's own decorators."""

    @functools.wraps(rule)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        count(f"step: {rule.__name__}")
        return rule(*arguments, **options)

    return call


@atexit.register
def _write_report() -> None:
    if REPORT_VARIABLE in os.environ:
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(dict(sorted(_COUNTS.items()))))
