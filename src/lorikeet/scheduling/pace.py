"""How long steps take, learned from the steps themselves."""

from lorikeet.scheduling.online_fit import OnlineFit


class Pace:
    """A line through the durations of recent steps: so much for a step, for a token of prefill, and for a decode.

    It needs no profile, so a live engine and a simulated one decide by the same rule. Before the first steps it says 0.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(features=3)

    def note(self, prefill_tokens: int, decodes: int, duration_s: float) -> None:
        """Take a step in."""
        self._fit.note((1.0, prefill_tokens, decodes), duration_s)

    @property
    def is_known(self) -> bool:
        """Whether there have been steps."""
        return self._fit.is_known

    def step_s(self, prefill_tokens: float, decodes: float) -> float:
        """Return about how long a step takes."""
        base_s, prefill_s, decode_s = self._fit.parts().tolist()
        return float(base_s + prefill_s * prefill_tokens + decode_s * decodes)

    def alone_s(self, input_tokens: float, output_tokens: float) -> float:
        """Return about how long a request takes that has the engine for itself."""
        return self.step_s(input_tokens, 0) + (output_tokens - 1) * self.step_s(0, 1)
