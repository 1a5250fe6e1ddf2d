"""Lorikeet's multi-level queue: Chameleon's, changed where memory stays empty or large requests starve.

docs/decisions/chameleon-queues.md says what was changed and why.
"""

from collections.abc import Iterable
from typing import NamedTuple

from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.papers.chameleon.options import MultilevelOptions
from lorikeet.papers.chameleon.queue import (
    LOOK_AHEAD,
    AdmittedEntry,
    ChameleonQueue,
    InitialClasses,
    WaitingEntry,
)
from lorikeet.papers.chameleon.quotas import SurplusShare
from lorikeet.papers.chameleon.size_classes import KRule
from lorikeet.scheduling.admission import Admission, AdmissionCandidate, AdmissionView, tokens_needed

SIZE_AWARE = MultilevelOptions(
    maximum_percentile=99.9,
    k_rule=KRule.ELBOW,
    largest_percentile=95.0,
    floor=True,
    share=SurplusShare.LEAST,
)
JOIN_FROM = 0.25
"""A request joins running ones before its turn if their adapter is at least this many times as large as its tokens."""
PATIENCE = 0.5
"""Share of the longest run of a class after which its head has waited for long: joining requests then leave it what it
waits for, and it is tried first in a step."""


class SizeAwareQueue(ChameleonQueue):
    """Chameleon's queue with five changes, for engines that admit by the memory that is needed now.

    * All quotas together are twice the memory (``overcommit``), and of the requests that use an adapter one holds
      tokens for it. A request holds tokens for its whole expected output, of which it has made half on average: with
      quotas for exactly the memory, part of it stays empty.
    * Requests whose adapter is in use join the running ones first, if the adapter is large compared with them.
    * Requests of other classes leave memory to the oldest head that lacks it, and classes that were not tried for long
      come first: with more tokens lent than there is memory, large requests would starve otherwise.
    * A squashed request keeps its output and continues.
    * An outlier neither makes all other requests small, nor enlarges the quota of its class; the number of classes
      follows the sizes (``SIZE_AWARE``).

    What it wins over ``ChameleonQueue`` and FIFO, and what it costs: docs/decisions/chameleon-queues.md.

    Args:
        view: of the engine.
        options: how sizes, classes and quotas are computed.
        initial: classes to start with; None for one class that has all tokens.
    """

    overcommit = 2.0
    restarts_squashed = False

    def __init__(
        self, view: AdmissionView, options: MultilevelOptions = SIZE_AWARE, initial: InitialClasses | None = None
    ) -> None:
        self._blocked = BlockedHeads()
        super().__init__(view, options, initial)

    @property
    def longest_run_s(self) -> dict[int, float]:
        """By class, the longest run of requests that ended lately, in seconds."""
        return self._blocked.longest_run_s

    def _before_phases(self, blocked: set[int], refused: set[RequestId], now: float) -> Admission:
        """Yield heads of classes that full steps have kept untried for long, then requests that join others."""
        for number in self._blocked.untried_for_long((n for n, queue in enumerate(self._waiting) if queue), now):
            yield from self._put_batch(number, self._own_quota(number), blocked, refused, now)
        for number in range(len(self._waiting)):
            yield from self._join(number, refused, now)

    def _join(self, number: int, refused: set[RequestId], now: float) -> Admission:
        """Admit requests of a class, by its own quota, that use the adapter of running requests and save much by that.

        Once the head of the class has waited for long, they leave the head its tokens.
        """
        lenders, head = self._own_quota(number), self._blocked.of(number)
        kept = self._need(head.entry) if head is not None and self._blocked.has_waited(head, now) else 0
        for entry in self._waiting[number][:LOOK_AHEAD]:
            is_saving = entry.sizes.adapter_tokens >= JOIN_FROM * self._tokens(entry)
            if not is_saving or not self._users[entry.request.digest]:
                continue
            need = self._need(entry)
            if need > lenders[number] - kept or tokens_needed(entry.request, self.view) > self.view.free_tokens():
                continue
            if self._leaves_memory_to_another(entry, number, now, joins=True):
                continue
            match (yield AdmissionCandidate(entry.request)):
                case None:
                    self._take(entry, number, need, lenders, now)
                    self._counts["joined"] += 1
                case WaitReason.TRANSFER | WaitReason.SLOT:
                    refused.add(entry.request.request_id)
                case _:
                    return

    def _leaves_memory_to_another(self, entry: WaitingEntry, number: int, now: float, *, joins: bool = False) -> bool:
        """Whether a request would take memory that the oldest blocked head waits for.

        With overcommit, small classes could otherwise take everything that becomes free. Requests that join others may
        take it until the head has waited for long.
        """
        head, view = self._blocked.oldest_without_memory(), self.view
        if head is None or head.entry is entry or (head.number == number and not joins):
            return False
        if joins and not self._blocked.has_waited(head, now):
            return False
        if not view.may_run(head.entry.request):  # the batching mode runs others first, which may wait here too
            return False
        return view.free_tokens() - tokens_needed(entry.request, view) < tokens_needed(head.entry.request, view)

    def _adapter_charge(self, entry: WaitingEntry) -> int:
        """Return the tokens that a request holds for its adapter: none if a running request uses it."""
        return 0 if self._users[entry.request.digest] else super()._adapter_charge(entry)

    def _on_blocked(self, number: int, entry: WaitingEntry, now: float, *, lacks_memory: bool) -> None:
        self._blocked.note(number, entry, now, lacks_memory=lacks_memory)

    def _on_tried(self, number: int) -> None:
        self._blocked.tried(number)

    def _on_left(self, number: int, request: Request) -> None:
        self._blocked.forget(number, request)

    def _on_ended(self, entry: AdmittedEntry, ran_s: float, *, will_resume: bool) -> None:
        """Pass the tokens of the adapter on to another request that uses it."""
        request = entry.waiting.request
        if entry.adapter_tokens and self._users[request.digest]:
            heir = next(each for each in self._admitted.values() if each.waiting.request.digest == request.digest)
            heir.adapter_tokens = entry.adapter_tokens
            self._quotas.hold(heir.waiting.request.request_id, heir.number, heir.adapter_tokens)
        if not will_resume:
            self._blocked.ran(entry.number, ran_s)

    def _on_new_classes(self, longest_run_s: dict[int, float]) -> None:
        self._blocked.reset(longest_run_s)


class BlockedHead(NamedTuple):
    """The head of a class, which could not be admitted.

    Attributes:
        number: number of the class.
        entry: the waiting request.
        since_s: when it was refused first.
        lacks_memory: whether it lacks memory; else it lacks tokens of the quota.
    """

    number: int
    entry: WaitingEntry
    since_s: float
    lacks_memory: bool


class BlockedHeads:
    """The blocked heads of the classes, and how long each class has not been tried."""

    def __init__(self) -> None:
        self._by_class: dict[int, BlockedHead] = {}
        self._untried_since_s: dict[int, float] = {}
        self._longest_run_s: dict[int, float] = {}

    @property
    def longest_run_s(self) -> dict[int, float]:
        """By class, the longest run of requests that ended lately, in seconds."""
        return dict(self._longest_run_s)

    def ran(self, number: int, ran_s: float) -> None:
        """Record the run time of a finished request of a class."""
        self._longest_run_s[number] = max(self._longest_run_s.get(number, 0.0), ran_s)

    def has_waited(self, head: BlockedHead, now: float) -> bool:
        """Whether a head has waited for half of the longest run of its class, so that it starts within that time."""
        return now - head.since_s >= self._patience_s(head.number)

    def untried_for_long(self, numbers: Iterable[int], now: float) -> list[int]:
        """Return those of the classes ``numbers`` that were not tried for long, the longest first.

        All of ``numbers`` must have waiting requests. The time of those that were tried in the last step starts now.
        """
        since_s = {number: self._untried_since_s.get(number, now) for number in numbers}
        self._untried_since_s = since_s
        late = (number for number, at_s in since_s.items() if at_s < now and now - at_s >= self._patience_s(number))
        return sorted(late, key=lambda number: since_s[number])

    def tried(self, number: int) -> None:
        """Record that the head of a class was tried, or need not be, since it lacks tokens or memory."""
        self._untried_since_s.pop(number, None)

    def _patience_s(self, number: int) -> float:
        runs_s = self._longest_run_s
        return PATIENCE * runs_s.get(number, max(runs_s.values(), default=0.0))

    def note(self, number: int, entry: WaitingEntry, now: float, *, lacks_memory: bool) -> None:
        """Record that the head of a class could not be admitted."""
        self.tried(number)
        before = self._by_class.get(number)
        since_s = before.since_s if before is not None and before.entry is entry else now
        self._by_class[number] = BlockedHead(number, entry, since_s, lacks_memory)

    def forget(self, number: int, request: Request) -> None:
        """Drop a request that no longer waits."""
        if number in self._by_class and self._by_class[number].entry.request is request:
            del self._by_class[number]

    def reset(self, longest_run_s: dict[int, float]) -> None:
        """Start over with new classes; ``longest_run_s`` has the longest recent run of those with finished requests."""
        self._by_class.clear()
        self._untried_since_s.clear()
        self._longest_run_s = longest_run_s

    def of(self, number: int) -> BlockedHead | None:
        """Return the head of a class if it is blocked."""
        return self._by_class.get(number)

    def oldest_without_memory(self) -> BlockedHead | None:
        """Return the oldest of the heads that lack memory; None if none does."""
        heads = (head for head in self._by_class.values() if head.lacks_memory)
        return min(heads, key=lambda head: head.entry.request.arrival_s, default=None)
