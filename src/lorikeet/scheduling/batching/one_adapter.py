"""Batching modes that run one adapter at a time: merged, unmerged, or as whole models in turn."""

from collections.abc import Sequence

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.dynamic import requests_of
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchingMode, BatchingSetup, LiveRequest, allow


class OneAdapter(BatchingMode):
    """Runs the adapter of the oldest request alone until none of its requests is left, later ones included.

    The base model gets its turn like an adapter, with nothing merged. An adapter that is not on the device yet is
    chosen too, since only then it is loaded; it is merged once it has arrived.

    Args:
        setup: of the replica.
        merged: whether the adapter is merged into the base weights for its turn. Unmerged is how PEFT serves adapters.
        even_shares: limit the running requests together to an equal share of the memory for each registered adapter,
            as if each adapter had an engine of its own. The oldest request runs even if it is larger.
    """

    def __init__(self, setup: BatchingSetup, *, merged: bool, even_shares: bool = False) -> None:
        self._setup = setup
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
        if not batch:
            self._type = live[0].adapter
            batch = requests_of(self._type, live)
        batch = batch[: self._setup.max_batch]
        if self._even_shares:
            batch = self._within_share(batch)
        merged = self._type if self._merged and batch[0].is_legal else None
        return allow(batch, live, merged)

    def steps_until_review(self) -> float:
        """Return the number of steps until the requests exceed their share of the memory."""
        return self._steps_left

    def _within_share(self, batch: list[LiveRequest]) -> list[LiveRequest]:
        share_tokens = self._setup.total_tokens // max(1, self._setup.known_adapters())
        taken, held_tokens = 0, 0
        for request in batch:
            if taken and held_tokens + request.tokens > share_tokens:
                break
            taken, held_tokens = taken + 1, held_tokens + request.tokens
        if taken > 1:
            self._steps_left = (share_tokens - held_tokens) // taken + 1
        return batch[:taken]
