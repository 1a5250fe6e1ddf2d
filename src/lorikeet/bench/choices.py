"""What options of workloads are made of."""

from typing import NamedTuple

import numpy as np

from lorikeet.core import slo
from lorikeet.core.slo import Slo


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
    """Read limits, see ``slo.parse_slo``.

    Raises:
        ChoiceError: they cannot be read.
    """
    try:
        return slo.parse_slo(text)
    except slo.SloError as error:
        raise ChoiceError(str(error)) from None
