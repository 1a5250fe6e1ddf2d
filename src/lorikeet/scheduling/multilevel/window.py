"""What arrived, and how long requests ran, lately."""

import numpy as np
from numpy.typing import NDArray


class Window:
    """Rows of numbers by time, of which the recent ones are asked for.

    Args:
        columns: numbers in a row besides the time.
    """

    def __init__(self, columns: int) -> None:
        self._rows = np.empty((256, columns + 1))
        self._begin = self._end = 0

    def add(self, at_s: float, *values: float) -> None:
        """Append a row; times do not fall."""
        if self._end == len(self._rows):
            kept = self._rows[self._begin : self._end]
            grown = np.empty((max(256, 2 * len(kept)), self._rows.shape[1]))
            grown[: len(kept)] = kept
            self._rows, self._begin, self._end = grown, 0, len(kept)
        self._rows[self._end] = (at_s, *values)
        self._end += 1

    def since(self, at_s: float) -> NDArray[np.float64]:
        """Forget all rows before ``at_s``, and return the others without their times: ``[rows, columns]``."""
        times = self._rows[self._begin : self._end, 0]
        self._begin += int(np.searchsorted(times, at_s))
        return self._rows[self._begin : self._end, 1:]

    def __len__(self) -> int:
        """Return the number of rows that are remembered."""
        return self._end - self._begin
