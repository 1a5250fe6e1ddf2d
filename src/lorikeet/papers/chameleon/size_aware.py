"""Implements Lorikeet's multi-level queue, a change of Chameleon's queue that fills the memory.

Large requests do not starve in it. See docs/decisions/chameleon-queues.md for the changes and their reasons.
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
"""A request joins running requests before its turn if their adapter is at least this many times as large as its
tokens."""
PATIENCE = 0.5
"""Share of the longest run of a class after which its head counts as waiting long.

Joining requests then leave the head its memory, and the head is tried first in a step.
"""


class SizeAwareQueue(ChameleonQueue):
    """Extends Chameleon's queue by five changes, for engines that admit by the memory that is needed now.

    * All quotas together are twice the memory (``overcommit``). A request holds tokens for its whole expected output,
      but has generated only half of it on average. With quotas equal to the memory, a part of the memory would stay
      empty.
    * Requests whose adapter is in use join the running requests first, if the adapter is large compared with them.
    * Requests of other classes leave memory to the oldest head that lacks memory, and classes that were not tried for
      long come first. Otherwise large requests would starve, because the lent tokens exceed the memory.
    * A squashed request keeps its output and continues.
    * An outlier neither makes all other requests small, nor enlarges the quota of its class; the number of classes
      follows the sizes (``SIZE_AWARE``).

    See docs/decisions/chameleon-queues.md for the gains and costs compared with ``ChameleonQueue`` and FIFO.

    Args:
        view: state of the engine.
        options: options for computing sizes, classes and quotas.
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
        """Longest run of recently ended requests by class, in seconds."""
        return self._blocked.longest_run_s

    def _before_phases(self, blocked: set[int], refused: set[RequestId], now: float) -> Admission:
        """Yield heads of classes that were long untried because steps were full, then requests that join others."""
        for number in self._blocked.untried_for_long((n for n, queue in enumerate(self._waiting) if queue), now):
            yield from self._put_batch(number, self._own_quota(number), blocked, refused, now)
        for number in range(len(self._waiting)):
            yield from self._join(number, refused, now)

    def _join(self, number: int, refused: set[RequestId], now: float) -> Admission:
        """Admit requests of a class, by its quota, that save much memory by sharing the adapter of running requests.

        After the head of the class has waited for long, joining requests leave the head its tokens.
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
        """Return whether a request would take memory for which the oldest blocked head waits.

        With overcommit, small classes could otherwise take all memory that becomes free. Requests that join others may
        take memory until the head has waited for long.
        """
        head, view = self._blocked.oldest_without_memory(), self.view
        if head is None or head.entry is entry or (head.number == number and not joins):
            return False
        if joins and not self._blocked.has_waited(head, now):
            return False
        # The batching mode runs other requests first, which may also wait in this queue
        if not view.may_run(head.entry.request):
            return False
        return view.free_tokens() - tokens_needed(entry.request, view) < tokens_needed(head.entry.request, view)

    def _on_blocked(self, number: int, entry: WaitingEntry, now: float, *, lacks_memory: bool) -> None:
        self._blocked.note(number, entry, now, lacks_memory=lacks_memory)

    def _on_tried(self, number: int) -> None:
        self._blocked.tried(number)

    def _on_left(self, number: int, request: Request) -> None:
        self._blocked.forget(number, request)

    def _on_ended(self, entry: AdmittedEntry, ran_s: float, *, will_resume: bool) -> None:
        if not will_resume:
            self._blocked.ran(entry.number, ran_s)

    def _on_new_classes(self, longest_run_s: dict[int, float]) -> None:
        self._blocked.reset(longest_run_s)


class BlockedHead(NamedTuple):
    """Describes the head of a class, which could not be admitted.

    Attributes:
        number: number of the class.
        entry: the waiting request.
        since_s: time of the first refusal.
        lacks_memory: whether the head lacks memory. If not, it lacks tokens of the quota.
    """

    number: int
    entry: WaitingEntry
    since_s: float
    lacks_memory: bool


class BlockedHeads:
    """Tracks the blocked heads of the classes, and the time for which each class has not been tried."""

    def __init__(self) -> None:
        self._by_class: dict[int, BlockedHead] = {}
        self._untried_since_s: dict[int, float] = {}
        self._longest_run_s: dict[int, float] = {}

    @property
    def longest_run_s(self) -> dict[int, float]:
        """Longest run of recently ended requests by class, in seconds."""
        return dict(self._longest_run_s)

    def ran(self, number: int, ran_s: float) -> None:
        """Record the run time of a finished request of a class."""
        self._longest_run_s[number] = max(self._longest_run_s.get(number, 0.0), ran_s)

    def has_waited(self, head: BlockedHead, now: float) -> bool:
        """Return whether a head has waited for half of the longest run of its class.

        The limit lets the head start within the longest run.
        """
        return now - head.since_s >= self._patience_s(head.number)

    def untried_for_long(self, numbers: Iterable[int], now: float) -> list[int]:
        """Return the classes among ``numbers`` that were not tried for long, the longest time first.

        All of ``numbers`` must have waiting requests. The time of classes that were tried in the last step starts now.
        """
        since_s = {number: self._untried_since_s.get(number, now) for number in numbers}
        self._untried_since_s = since_s
        late = (number for number, at_s in since_s.items() if at_s < now and now - at_s >= self._patience_s(number))
        return sorted(late, key=lambda number: since_s[number])

    def tried(self, number: int) -> None:
        """Record that the head of a class was tried, or need not be tried because it lacks tokens or memory."""
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
        """Reset the state for new classes.

        ``longest_run_s`` is the longest recent run of classes with finished requests.
        """
        self._by_class.clear()
        self._untried_since_s.clear()
        self._longest_run_s = longest_run_s

    def of(self, number: int) -> BlockedHead | None:
        """Return the head of a class if it is blocked; otherwise None."""
        return self._by_class.get(number)

    def oldest_without_memory(self) -> BlockedHead | None:
        """Return the oldest head that lacks memory; None if no head lacks memory."""
        heads = (head for head in self._by_class.values() if head.lacks_memory)
        return min(heads, key=lambda head: head.entry.request.arrival_s, default=None)
