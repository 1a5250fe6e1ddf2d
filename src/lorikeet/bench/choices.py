"""What options of workloads are made of."""

from typing import NamedTuple

import numpy as np

from lorikeet.bench.workload import Slo


class ChoiceError(ValueError):
    """An option has no meaning, or none for so many requests."""


class Range(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included, all equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Read ``128`` or ``64-256``.

        Raises:
            ChoiceError: it is neither.
        """
        low, dash, high = text.partition("-")
        try:
            found = cls(int(low), int(high if dash else low))
        except ValueError:
            found = cls(1, 0)
        if not 0 <= found.low <= found.high:
            raise ChoiceError(f"{text!r} is neither a number nor a range such as 64-256")
        return found

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Return ``count`` of them."""
        return generator.integers(self.low, self.high, count, endpoint=True).tolist()


def parse_slo(text: str) -> Slo:
    """Read ``ttft=0.5,tpot=0.1,e2e=10``, in seconds; any of them, or none.

    Raises:
        ChoiceError: an unknown name, or no number.
    """
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[{"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}[name.strip()]] = float(value)
        except (KeyError, ValueError):
            raise ChoiceError(f"{part!r} is no limit; write for example ttft=0.5,tpot=0.1,e2e=10 (seconds)") from None
    return Slo(**limits)
