"""Implements batching modes that run one adapter at a time: merged, unmerged, or as whole models in turn."""

from collections.abc import Sequence
from itertools import count

from lorikeet.core.ids import AdapterDigest
from lorikeet.papers.dlora.dynamic import requests_of
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchingMode, BatchingSetup, BatchWork, LiveRequest, allow


class OneAdapter(BatchingMode):
    """Runs the adapter of the oldest request alone until all of its requests, including later ones, have ended.

    The base model has turns like an adapter, without merging. An adapter that is not yet on the device may be chosen
    too, because only the choice loads it. The adapter is merged after it has arrived.

    Args:
        setup: facts about the replica.
        merged: whether the adapter is merged into the base weights for its turn. Unmerged is how PEFT serves adapters.
        even_shares: whether the running requests are limited to an equal share of the memory for each registered
            adapter, as if each adapter had a separate engine. The oldest request runs even if it exceeds the share.
        turn_s: seconds of steps after which a turn ends if requests of other adapters wait. The waiting adapter whose
            last turn is longest ago has the next turn, like engines that share a device by time.
    """

    def __init__(
        self, setup: BatchingSetup, *, merged: bool, even_shares: bool = False, turn_s: float = float("inf")
    ) -> None:
        self._setup = setup
        self._turn_s, self._left_s, self._step_s = turn_s, turn_s, 0.0
        self._turns = count(1)
        self._last_turns: dict[AdapterDigest | None, int] = {}
        self._merged, self._even_shares = merged, even_shares
        self._type: AdapterDigest | None = None
        self._has_turn = False
        self._steps_left = float("inf")

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return the oldest requests of the adapter whose turn it is."""
        self._steps_left = float("inf")
        batch = requests_of(self._type, live) if self._has_turn else []
        self._has_turn = bool(live)
        if not live:
            return BatchingChoice(self._type if self._merged else None, frozenset())
        if not batch or (self._left_s <= 0 and len(batch) < len(live)):
            self._begin_turn(live)
            batch = requests_of(self._type, live)
        if len(batch) < len(live) and self._turn_s < float("inf"):
            self._steps_left = max(1, self._left_s // self._step_s) if self._step_s else 1
        batch = batch[: self._setup.max_batch]
        if self._even_shares:
            batch = self._within_share(batch)
        merged = self._type if self._merged and batch[0].is_legal else None
        return allow(batch, live, merged)

    def steps_until_review(self) -> float:
        """Return the number of steps until the turn ends, or the requests exceed their share of the memory."""
        return self._steps_left

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        """Add the time of steps to the turn."""
        self._left_s, self._step_s = self._left_s - steps * step_s, step_s

    def _begin_turn(self, live: Sequence[LiveRequest]) -> None:
        """Choose the adapter of the oldest request.

        With turns by time, choose the adapter that has waited longest for a turn.
        """
        if self._turn_s == float("inf"):
            self._type = live[0].adapter
            return
        self._last_turns[self._type] = next(self._turns)
        waiting = dict.fromkeys(request.adapter for request in live)
        self._type = min(waiting, key=lambda each: self._last_turns.get(each, 0))
        self._left_s = self._turn_s

    def _within_share(self, batch: list[LiveRequest]) -> list[LiveRequest]:
        share_tokens = self._setup.total_tokens // max(1, self._setup.known_adapters())
        taken, held_tokens = 0, 0
        for request in batch:
            if taken and held_tokens + request.tokens > share_tokens:
                break
            taken, held_tokens = taken + 1, held_tokens + request.tokens
        if taken > 1:
            self._steps_left = min(self._steps_left, (share_tokens - held_tokens) // taken + 1)
        return batch[:taken]


class MergedOnly(OneAdapter):
    """Runs one adapter at a time, merged into the base weights.

    Args:
        setup: facts about the replica.
    """

    merges = True

    def __init__(self, setup: BatchingSetup) -> None:
        super().__init__(setup, merged=True)


class UnmergedTurns(OneAdapter):
    """Runs one adapter at a time without merging it, as PEFT serves adapters.

    Args:
        setup: facts about the replica.
    """

    def __init__(self, setup: BatchingSetup) -> None:
        super().__init__(setup, merged=False)


class WholeModels(OneAdapter):
    """Runs each adapter as a whole merged model, which is swapped in and out and has an equal share of the memory.

    Args:
        setup: facts about the replica.
        turn_s: seconds of steps after which another model has a turn; infinite for no limit.
    """

    merges = True

    def __init__(self, setup: BatchingSetup, *, turn_s: float = float("inf")) -> None:
        super().__init__(setup, merged=True, even_shares=True, turn_s=turn_s)
