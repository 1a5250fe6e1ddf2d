"""Shadow of the order of admission: it prices short requests first beside first come, first served."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lorikeet.core.guard import GuardedPart, Guards
from lorikeet.core.ids import RequestId

_MOST_PAIRS: Final = 4096
"""Most pairs of requests whose costs are awaited at a time."""
_MOST_COSTS: Final = 8192
"""Most running requests whose costs are kept; of those that moved to another engine nobody reports an end."""
_FADE: Final = 0.95
"""Factor by which a pair's weight falls with each later one."""
_MOST_RATIO: Final = 3.0
"""Largest ratio of true gains to expected ones, in either direction."""


class _Pair(NamedTuple):
    """An older request that a younger one passes, or would pass."""

    older: RequestId
    younger: RequestId
    expected_s: float


@dataclass(slots=True)
class _Cost:
    """What a request costs the engine, as it was expected at its admission."""

    expected_s: float
    prompt_share: float
    expected_tokens: int


class OrderShadow:
    """Prices the order of admission by pairs of requests.

    If a younger request passes an older one, it waits less by the older one's cost, and the older one waits longer by
    the younger one's. While the order is off, the pairs are those that it would swap. Their gain is expected by the
    predicted lengths of answers, and corrected by the ratio of true to expected gains of the pairs that have ended.

    Args:
        guards: gets the costs.

    Attributes:
        virtually_admitted: waiting requests that the order would have admitted, while it is off.
    """

    def __init__(self, guards: Guards) -> None:
        guards.add(GuardedPart.ORDER)
        self._guards = guards
        self.virtually_admitted: set[RequestId] = set()
        self._costs: dict[RequestId, _Cost] = {}
        self._ended_s: dict[RequestId, float] = {}
        self._pairs: defaultdict[RequestId, list[_Pair]] = defaultdict(list)
        self._open = self._turns = 0
        self._true_s = self._expected_s = 0.0

    def passes(
        self, older: Sequence[RequestId], younger: RequestId, older_s: Sequence[float], younger_s: float, now: float
    ) -> None:
        """Record that a younger request passes older ones, or would.

        Args:
            older: the requests that it passes.
            younger: the request.
            older_s: expected cost of each of them.
            younger_s: its expected cost.
            now: the time.
        """
        gain_s = sum(older_s) - len(older) * younger_s
        ratio = self._true_s / self._expected_s if self._expected_s > 0 else 1.0
        judged_s = gain_s * max(-_MOST_RATIO, min(_MOST_RATIO, ratio))
        self._guards.note(GuardedPart.ORDER, max(0.0, -judged_s), max(0.0, judged_s), now)
        if self._guards.is_on(GuardedPart.ORDER):
            self.virtually_admitted.clear()
        else:
            self.virtually_admitted.add(younger)
        if self._open < _MOST_PAIRS:
            self._open += 1
            self._turns += 1
            place = self._turns % len(older)  # one of the older requests stands for all
            pair = _Pair(older[place], younger, older_s[place] - younger_s)
            self._pairs[pair.older].append(pair)
            self._pairs[pair.younger].append(pair)

    def admitted(
        self, request: RequestId, waited_s: float, cost_s: float, prompt_share: float, tokens: int, now: float
    ) -> None:
        """Record an admission.

        Args:
            request: the request.
            waited_s: time that it has waited.
            cost_s: its expected cost.
            prompt_share: share of that for its prompt.
            tokens: expected length of its answer.
            now: the time.
        """
        self.virtually_admitted.discard(request)
        self._costs[request] = _Cost(cost_s, prompt_share, max(1, tokens))
        if len(self._costs) > _MOST_COSTS:
            self.forget(next(iter(self._costs)))
        self._guards.note(GuardedPart.ORDER, waited_s, waited_s, now)

    def ended(self, request: RequestId, tokens: int) -> None:
        """Record the end of a running request after an answer of so many tokens."""
        cost = self._costs.pop(request, None)
        if cost is None:
            self.forget(request)
            return
        if request not in self._pairs:
            return
        answer_share = (1 - cost.prompt_share) * tokens / cost.expected_tokens
        self._ended_s[request] = cost.expected_s * (cost.prompt_share + answer_share)
        for pair in tuple(self._pairs[request]):
            if pair.older in self._ended_s and pair.younger in self._ended_s:
                true_s = self._ended_s[pair.older] - self._ended_s[pair.younger]
                self._true_s = _FADE * self._true_s + true_s
                self._expected_s = _FADE * self._expected_s + pair.expected_s
                self._close(pair)

    def forget(self, request: RequestId) -> None:
        """Drop a request that was aborted or moved away before its end."""
        self._costs.pop(request, None)
        self.virtually_admitted.discard(request)
        for pair in tuple(self._pairs.get(request, ())):
            self._close(pair)

    def _close(self, pair: _Pair) -> None:
        self._open -= 1
        for request in (pair.older, pair.younger):
            left = self._pairs[request]
            left.remove(pair)
            if not left:
                del self._pairs[request]
                self._ended_s.pop(request, None)
