"""How long steps take, learned from the steps themselves."""

import numpy as np

_FORGET = 0.998
"""Weight of a step beside the one after it: about the last 500 count."""
_PRIOR = 1e-3


class Pace:
    """A line through the durations of recent steps: so much for a step, for a token of prefill, and for a decode.

    It needs no profile, so a live engine and a simulated one decide by the same rule. Before the first steps it says 0.
    """

    def __init__(self) -> None:
        self._squares = _PRIOR * np.eye(3)
        self._products = np.zeros(3)
        self._parts_s: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    def note(self, prefill_tokens: int, decodes: int, duration_s: float) -> None:
        """Take a step in."""
        features = np.array((1.0, prefill_tokens, decodes))
        self._squares = _FORGET * self._squares + np.outer(features, features)
        self._products = _FORGET * self._products + features * duration_s
        self._parts_s = None

    @property
    def is_known(self) -> bool:
        """Whether there have been steps."""
        return bool(self._products[0])

    def step_s(self, prefill_tokens: float, decodes: float) -> float:
        """Return about how long a step takes."""
        base_s, prefill_s, decode_s = self._parts()
        return base_s + prefill_s * prefill_tokens + decode_s * decodes

    def alone_s(self, input_tokens: float, output_tokens: float) -> float:
        """Return about how long a request takes that has the engine for itself."""
        return self.step_s(input_tokens, 0) + (output_tokens - 1) * self.step_s(0, 1)

    def _parts(self) -> tuple[float, float, float]:
        if self._parts_s is None:
            parts, used = np.zeros(3), [0, 1, 2]
            while used:  # least squares without parts below zero: the worst leaves until there is none
                parts[:] = 0.0
                parts[used] = np.linalg.solve(self._squares[np.ix_(used, used)], self._products[used])
                if parts.min() >= 0:
                    break
                used.remove(int(parts.argmin()))
            base_s, prefill_s, decode_s = parts.tolist()
            self._parts_s = base_s, prefill_s, decode_s
        return self._parts_s
