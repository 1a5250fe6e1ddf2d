"""One request and its streamed answer, as the client saw them."""

from itertools import pairwise

import msgspec

from lorikeet.core.slo import Slo


class Exchange(msgspec.Struct, frozen=True):
    """What was sent and what came back, with times in seconds since the run began.

    Attributes:
        adapter: its name, None for the base model.
        due_s: when the workload has it arrive.
        sent_s: when it was sent.
        ended_s: when its answer was complete, or failed.
        held_s: how long the limit on requests under way held it back.
        token_times_s: when each event with new tokens arrived.
        input_tokens: length of the prompt, as the server counts it if it does.
        output_tokens: length of the answer, as the server counts it; else the number of events with text.
        asked_tokens: length that was asked for.
        cached_tokens: prompt tokens that the server found in its prefix cache, None if it does not say.
        error: its kind, None for a whole answer.
        message: what the server or the connection said of the error.
        slo: limits of this request.
    """

    adapter: str | None
    due_s: float
    sent_s: float
    ended_s: float
    held_s: float = 0.0
    token_times_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None
    message: str = ""
    slo: Slo | None = None

    @property
    def lateness_s(self) -> float:
        """By how much the client itself was late."""
        return max(0.0, self.sent_s - self.due_s - self.held_s)

    @property
    def ttft_s(self) -> float | None:
        """Sending to the first token."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        if not self.token_times_s or self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """ITL: the gaps between events with tokens."""
        times_s = self.token_times_s
        return [after - before for before, after in pairwise(times_s)]

    @property
    def e2e_s(self) -> float:
        """Sending to the end of the answer."""
        return self.ended_s - self.sent_s

    def meets(self, common: Slo) -> bool:
        """Whether it has a whole answer within its own limits, or within ``common`` if it has none of its own."""
        limits = self.slo or common
        if self.error is not None:
            return False
        pairs = ((self.ttft_s, limits.ttft_s), (self.tpot_s, limits.tpot_s), (self.e2e_s, limits.e2e_s))
        return all(limit is None or measured is None or measured <= limit for measured, limit in pairs)
