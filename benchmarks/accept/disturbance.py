"""What others on the same hardware did to this machine while something was measured."""

from collections.abc import Callable
from typing import Any

import psutil

MOST_STOLEN, MOST_DRIFT, ATTEMPTS = 0.01, 0.1, 2


def undisturbed(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure again if others disturbed it much; return the least disturbed result, whatever it says.

    Args:
        measure: returns a result; ``drift`` in it, if there, is by how much the machine was slower than its profile,
            as a share: that happens without any processor being taken.

    Returns:
        What ``measure`` returned, and ``stolen``: the share of all cores' time in which a virtual machine was ready to
        run and did not. It is 0 where the system does not tell.
    """
    results: list[dict[str, Any]] = []
    for _ in range(ATTEMPTS):
        before = psutil.cpu_times()
        result = measure()
        stolen = _stolen(before, psutil.cpu_times())
        results.append(result | {"stolen": stolen})
        if _disturbance(results[-1]) <= 1:
            break
    return min(results, key=_disturbance)


def disturbance_words(stolen: float) -> str:
    """Return the rule for the notes of a line with one such measurement, and what others took of it."""
    return f"{disturbance_rule()}: they took {stolen:.1%}"


def disturbance_rule() -> str:
    """Return the rule for the notes of a line with several such measurements."""
    return (
        f"measured {ATTEMPTS} times if others on the hardware took more than {MOST_STOLEN:.0%}, and the least "
        "disturbed counts"
    )


def drift_words() -> str:
    """Return the rule for the notes of a line whose measurements tell how far the machine had left its profile."""
    return (
        f"measured {ATTEMPTS} times if others on the hardware took more than {MOST_STOLEN:.0%} or if its steps took "
        f"{MOST_DRIFT:.0%} longer or shorter than its profile says, and the least disturbed counts"
    )


def _disturbance(result: dict[str, Any]) -> float:
    """Return what counts against a result, 1 for as much as it may be."""
    return max(float(result["stolen"]) / MOST_STOLEN, abs(float(result.get("drift", 0.0))) / MOST_DRIFT)


def _stolen(before: Any, after: Any) -> float:
    passed = [end - start for start, end in zip(before, after, strict=True)]
    return float(getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / sum(passed)
