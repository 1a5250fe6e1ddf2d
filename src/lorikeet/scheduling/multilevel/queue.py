"""Chameleon's admission queue: one queue of waiting requests per size class, each with a quota of tokens.

``ChameleonQueue`` is the policy. ``ClassStats`` finds the classes and their quotas, and ``QuotaAccounting`` counts what
running requests hold of them. docs/decisions/chameleon-queues.md says what the paper leaves open and what was decided;
"spec" below refers to that page.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import msgspec

from lorikeet.core.ids import RequestId
from lorikeet.core.messages import QueueStats
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import Admission, AdmissionQueue, AdmissionView, RunningRequest, tokens_needed
from lorikeet.scheduling.multilevel.class_stats import ClassStats
from lorikeet.scheduling.multilevel.options import AdapterCharge, ChameleonOptions, QueueFigures
from lorikeet.scheduling.multilevel.quotas import QuotaAccounting
from lorikeet.scheduling.multilevel.size_classes import RequestSize


@dataclass(eq=False)
class WaitingEntry:
    """A waiting request.

    Attributes:
        request: the request.
        expected_tokens: expected output tokens; raised for a request that has run longer than predicted.
        sizes: sizes by which its class is found.
        may_pass: whether it may be admitted before an older request of its class (bypass); False once it was squashed.
        held_s: seconds that it has run before it was preempted.
        left_s: when it was preempted or exported last.
    """

    request: Request
    expected_tokens: int
    sizes: RequestSize
    may_pass: bool = True
    held_s: float = 0.0
    left_s: float = 0.0


@dataclass(eq=False)
class AdmittedEntry:
    """A running request.

    Attributes:
        waiting: its entry while it waited.
        number: number of its class.
        admitted_s: when it was admitted.
        passed: the older request that it bypassed, None if it did not; then it must end by its prediction.
        deadline_tokens: that prediction, in output tokens.
        reckoned_tokens: output tokens that its quota holding covers.
        adapter_tokens: tokens for its adapter that its quota holding covers.
    """

    waiting: WaitingEntry
    number: int
    admitted_s: float
    passed: Request | None
    deadline_tokens: int
    reckoned_tokens: int
    adapter_tokens: int


class InitialClasses(NamedTuple):
    """Classes to start with, until the queue finds its own.

    Attributes:
        quotas: tokens of each class, smallest requests first; their sum is the total to divide from then on.
        class_of: returns the class of a request of the given sizes.
        longest_run_s: by class, the longest time from admission to the end so far, in seconds.
    """

    quotas: tuple[int, ...]
    class_of: Callable[[RequestSize], int]
    longest_run_s: Mapping[int, float]


class QueueState(NamedTuple):
    """A copy of the queue's state, for tests and debugging.

    Attributes:
        waiting: waiting requests by class, the smallest class first, in order of arrival.
        admitted: running requests.
        quotas: tokens of each class.
        held_tokens: tokens held of each quota.
        held_by: tokens held by each running request.
        longest_run_s: by class, the longest run of requests that ended lately, in seconds.
    """

    waiting: tuple[tuple[WaitingEntry, ...], ...]
    admitted: dict[RequestId, AdmittedEntry]
    quotas: tuple[int, ...]
    held_tokens: tuple[int, ...]
    held_by: dict[RequestId, int]
    longest_run_s: dict[int, float]


_LOOK_AHEAD = 64
"""Most requests of a class that are considered for admission before their turn."""

_DEFAULT = ChameleonOptions()


class ChameleonQueue(AdmissionQueue):
    """Admits requests by size class and token quota (Chameleon, Algorithm 1).

    In every step each class admits requests from the front of its queue as far as its quota allows. Then the unused
    quota of classes without waiting requests goes to the others, smallest class first. A request whose adapter does not
    fit may be bypassed by younger ones that are expected to end before it can start; one that has not ended by then is
    squashed, which means preempted and queued again. Before all this, requests join running ones that use the same
    adapter, if the adapter is large compared with the request.

    Args:
        view: of the engine.
        options: choices that the paper leaves open.
        initial: classes to start with; None for one class that has all tokens.
    """

    def __init__(
        self, view: AdmissionView, options: ChameleonOptions = _DEFAULT, initial: InitialClasses | None = None
    ) -> None:
        super().__init__(view)
        self._options = options
        self._class_stats = ClassStats(options, view.max_model_len)
        self._quotas = QuotaAccounting(int(options.overcommit * view.total_tokens))
        self._waiting: list[list[WaitingEntry]] = [[]]
        self._admitted: dict[RequestId, AdmittedEntry] = {}
        self._users: Counter[str | None] = Counter()  # running requests by adapter version
        self._suspended: dict[RequestId, WaitingEntry] = {}
        self._blocked = BlockedHeads()
        self._first_arrival_s: float | None = None
        self._counts: Counter[str] = Counter()
        self._gaps = AdmissionGaps()
        self._last_s = 0.0
        self._initial_class_of: Callable[[RequestSize], int] | None = None
        if initial is not None:
            self._quotas = QuotaAccounting(sum(initial.quotas))
            self._quotas.divide(initial.quotas, {})
            self._waiting = [[] for _ in initial.quotas]
            self._blocked.reset(dict(initial.longest_run_s))
            self._initial_class_of = initial.class_of

    # --- requests ------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Insert a request into its class by arrival; a squashed one may not bypass again."""
        if self._first_arrival_s is None:
            self._first_arrival_s, self.due_s = now, now + self._options.refresh_s
        before = self._suspended.pop(request.request_id, None)
        least = before.expected_tokens if before is not None else 0
        expected = max(request.expected_tokens, len(request.output_token_ids) + 1, least)
        sizes = RequestSize(len(request.prompt_token_ids), expected, self.view.adapter_tokens(request.adapter))
        if not request.is_resumed:
            self._class_stats.arrived(sizes, now)
        # Limits and durations come from the step times, so the classes wait for those.
        early = self.view.step_times.is_known and self._class_stats.has_more_samples(now)
        # A preempted request may return in the middle of ``admit``, which iterates over the queues.
        if not request.is_resumed and (now >= self.due_s or early):
            self._refresh(now)
        number = self._class_of(sizes)
        entry = WaitingEntry(request, expected, sizes)
        if before is not None:
            entry.may_pass, entry.held_s = before.may_pass, before.held_s
        self._insert(entry, number, now)

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        for number, queue in enumerate(self._waiting):
            for place, entry in enumerate(queue):
                if entry.request.request_id == request.request_id:
                    del queue[place]
                    self._blocked.forget(number, request)
                    if not queue:
                        self._gaps.end(number, now)
                    return
        raise KeyError(request.request_id)

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        """Return its tokens to the classes that lent them; its run time counts once it has finished."""
        entry = self._admitted.pop(request.request_id)
        self._quotas.give_back(request.request_id)
        self._users -= Counter((request.digest,))  # drops entries of 0
        if self._options.charge is AdapterCharge.SHARED and entry.adapter_tokens and self._users[request.digest]:
            heir = next(each for each in self._admitted.values() if each.waiting.request.digest == request.digest)
            heir.adapter_tokens = entry.adapter_tokens
            self._quotas.hold(heir.waiting.request.request_id, heir.number, heir.adapter_tokens)
        ran_s = entry.waiting.held_s + now - entry.admitted_s
        if will_resume:
            entry.waiting.held_s, entry.waiting.left_s = ran_s, now
            self._suspended[request.request_id] = entry.waiting
            return
        self._class_stats.ended(entry.waiting.sizes, ran_s, now)
        self._blocked.ran(entry.number, ran_s)
        self._gaps.ran(entry.number, ran_s)

    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests by class, the smallest first, and by arrival."""
        return [entry.request for entry in chain.from_iterable(self._waiting)]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._waiting))

    # --- admission -----------------------------------------------------------------------------------

    def admit(self, now: float) -> Admission:
        """Yield requests that join others, then those of the two phases of Algorithm 1.

        Phase 1 uses the quota of each class, phase 2 the unused quota of classes without waiting requests. Classes that
        full steps have kept from being tried for long come first, the longest first.
        """
        if now >= self.due_s and len(self):
            self._refresh(now)
        self._last_s = now
        blocked: set[int] = set()
        refused: set[RequestId] = set()
        left: dict[int, int] = {}
        for number in self._blocked.untried_for_long((n for n, queue in enumerate(self._waiting) if queue), now):
            yield from self._put_batch(number, self._own_quota(number), blocked, refused, now)
        for number in range(len(self._waiting)):
            yield from self._join(number, refused, now)
        for number, queue in enumerate(self._waiting):
            own = self._own_quota(number)
            if queue and number not in blocked:
                yield from self._put_batch(number, own, blocked, refused, now)
            if not queue:
                left |= own
        for number, queue in enumerate(self._waiting):
            if not any(left.values()):
                return
            if queue and number not in blocked:
                yield from self._put_batch(number, left, blocked, refused, now)

    def _own_quota(self, number: int) -> dict[int, int]:
        return {number: max(0, self._quotas.available(number))}

    def _join(self, number: int, refused: set[RequestId], now: float) -> Admission:
        """Admit requests of a class, by its own quota, that use the adapter of running requests and save much by that.

        Once the head of the class has waited for long, they leave the head its tokens.
        """
        lenders, head = self._own_quota(number), self._blocked.of(number)
        kept = self._need(head.entry) if head is not None and self._blocked.has_waited(head, now) else 0
        for entry in self._waiting[number][:_LOOK_AHEAD]:
            is_saving = entry.sizes.adapter_tokens >= self._options.join_from * self._tokens(entry)
            if not is_saving or not self._users[entry.request.digest]:
                continue
            need = self._need(entry)
            if need > lenders[number] - kept or tokens_needed(entry.request, self.view) > self.view.free_tokens():
                continue
            if self._must_wait_for_head(entry, number, now, joins=True):
                continue
            match (yield entry.request):
                case None:
                    self._take(entry, number, need, lenders, now)
                    self._counts["joined"] += 1
                case WaitReason.TRANSFER | WaitReason.SLOT:
                    refused.add(entry.request.request_id)
                case _:
                    return

    def _put_batch(
        self, number: int, lenders: dict[int, int], blocked: set[int], refused: set[RequestId], now: float
    ) -> Admission:
        """Admit from the front of a class while the tokens of ``lenders`` (by class) suffice; they are reduced."""
        queue, place = self._waiting[number], 0
        while place < len(queue):
            entry = queue[place]
            if entry.request.request_id in refused:
                place += 1
                continue
            need = self._need(entry)
            if not self._can_pay(need, number, lenders):
                self._blocked.note(number, entry, now, lacks_memory=False)
                return
            if self._must_wait_for_head(entry, number, now):
                self._blocked.note(number, entry, now)
                return
            outcome = yield entry.request
            self._blocked.tried(number)
            match outcome:
                case None:
                    self._take(entry, number, need, lenders, now)
                case WaitReason.TRANSFER | WaitReason.SLOT:  # admitting others does not delay it
                    refused.add(entry.request.request_id)
                    place += 1
                case WaitReason.KV_BLOCKS:
                    blocked.add(number)
                    self._blocked.note(number, entry, now)
                    return
                case _:
                    blocked.add(number)
                    self._blocked.note(number, entry, now)
                    if self._options.bypass:
                        yield from self._bypass(entry, number, place, lenders, now)
                    return

    def _bypass(self, head: WaitingEntry, number: int, place: int, lenders: dict[int, int], now: float) -> Admission:
        """Admit younger requests that fit now and are expected to end before the adapter of the head fits."""
        view, queue = self.view, self._waiting[number]
        running = view.running()
        expected = {name: entry.waiting.expected_tokens for name, entry in self._admitted.items()}
        needed = tokens_needed(head.request, view)
        steps = wait_in_steps(needed, view.free_tokens(), running, expected, view)
        for entry in queue[place + 1 : place + 1 + _LOOK_AHEAD]:
            need, remaining = self._need(entry), entry.expected_tokens - len(entry.request.output_token_ids)
            if not entry.may_pass or remaining > steps or need > sum(lenders.values()):
                continue
            if tokens_needed(entry.request, view) <= view.free_tokens() and (yield entry.request) is None:
                self._take(entry, number, need, lenders, now, passed=head.request)

    def _must_wait_for_head(self, entry: WaitingEntry, number: int, now: float, *, joins: bool = False) -> bool:
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

    def _can_pay(self, need: int, number: int, lenders: dict[int, int]) -> bool:
        """Whether the tokens suffice; a request larger than its class's quota is admitted when nothing of it is held.

        Otherwise it would wait for ever, or until quotas change.
        """
        quota, held = self._quotas.quotas[number], self._quotas.held[number]
        return need <= sum(lenders.values()) or (need > quota and held <= 0)

    def _take(
        self,
        entry: WaitingEntry,
        number: int,
        need: int,
        lenders: dict[int, int],
        now: float,
        passed: Request | None = None,
    ) -> None:
        """Record an admission: each lender pays as much as it has, in order of class, until the need is covered."""
        request = entry.request
        self._waiting[number].remove(entry)
        self._blocked.forget(number, request)
        expected, adapter = entry.expected_tokens, need - self._tokens(entry)
        self._admitted[request.request_id] = AdmittedEntry(entry, number, now, passed, expected, expected, adapter)
        for lender in sorted(lenders):
            part = min(need, lenders[lender])
            self._quotas.hold(request.request_id, lender, part)
            need -= part
            lenders[lender] -= part
        if need:  # larger than the whole quota
            self._quotas.hold(request.request_id, number, need)
        self._users[request.digest] += 1
        self._counts["admitted"] += 1
        self._counts["bypassed"] += passed is not None
        self._gaps.end(number, now)
        if self._waiting[number]:
            self._gaps.begin(number, now)

    def _need(self, entry: WaitingEntry) -> int:
        """Return the tokens that a request holds while it runs: input, expected output, adapter (spec, section 3)."""
        request, charge = entry.request, self._options.charge
        tokens = self._tokens(entry)
        if charge is AdapterCharge.IF_ABSENT and self.view.is_resident(request.adapter):
            return tokens
        if charge is AdapterCharge.SHARED and self._users[request.digest]:
            return tokens
        return tokens + int(entry.sizes.adapter_tokens)

    @staticmethod
    def _tokens(entry: WaitingEntry) -> int:
        return len(entry.request.prompt_token_ids) + entry.expected_tokens

    # --- running requests ----------------------------------------------------------------------------

    def review(self, now: float) -> list[Request]:
        """Return the requests to squash, and let others that exceed their prediction hold more tokens.

        A request is squashed if it has bypassed another and has not ended by its prediction.
        """
        self._last_s = now
        back, helped = [], set[RequestId]()
        for request, output_tokens, kv_tokens in self.view.running():
            entry = self._admitted[request.request_id]
            if output_tokens < entry.reckoned_tokens:
                continue
            late = entry.passed is not None and output_tokens >= entry.deadline_tokens
            if late and (not self._options.lazy_squash or self._could_start(entry, kv_tokens, helped)):
                entry.waiting.may_pass, entry.waiting.expected_tokens = False, output_tokens + 1
                self._counts["squashed"] += 1
                back.append(request)
                continue
            self._quotas.hold(request.request_id, entry.number, output_tokens + 1 - entry.reckoned_tokens)
            entry.reckoned_tokens = entry.waiting.expected_tokens = output_tokens + 1
        return back

    def _could_start(self, entry: AdmittedEntry, kv_tokens: int, helped: set[RequestId]) -> bool:
        """Whether the bypassed request still waits, and fits only if this one is squashed."""
        head, last = entry.passed, self._users[entry.waiting.request.digest] == 1
        waiting = chain.from_iterable(self._waiting)
        if head is None or head.request_id in helped or not any(each.request is head for each in waiting):
            return False
        freed = kv_tokens + (int(entry.waiting.sizes.adapter_tokens) if last else 0)
        if not 0 < tokens_needed(head, self.view) - self.view.free_tokens() <= freed:
            return False
        helped.add(head.request_id)
        return True

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        """Return the least number of tokens until a request that has bypassed another reaches its prediction."""
        entries = ((self._admitted[request.request_id], made) for request, made in running)
        left = (entry.deadline_tokens - made for entry, made in entries if entry.passed is not None)
        # With lazy squash, later reviews matter only after another request has ended, which ends the plan anyway.
        return min((tokens for tokens in left if tokens > 0), default=float("inf"))

    # --- classes -------------------------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        """Compute classes and quotas from recent requests, and sort all requests into them (spec, sections 5.1, 6)."""
        assert self._first_arrival_s is not None
        self.due_s = now + self._options.refresh_s
        self._counts["refreshes"] += 1
        quotas, feasible, longest_run_s = self._class_stats.refresh(
            self._quotas.total_tokens, self.view.step_times, now - self._first_arrival_s, now
        )
        self._blocked.reset(longest_run_s)
        self._initial_class_of = None
        self._counts["infeasible"] += not feasible
        admitted = list(self._admitted.values())
        refresh_s = self._options.refresh_s
        self._suspended = {name: each for name, each in self._suspended.items() if now - each.left_s < refresh_s}
        for each, number in zip(admitted, self._class_stats.of([each.waiting.sizes for each in admitted]), strict=True):
            each.number = number
        self._quotas.divide(quotas, {name: each.number for name, each in self._admitted.items()})
        waiting = sorted(chain.from_iterable(self._waiting), key=lambda entry: entry.request.arrival_s)
        self._waiting = [[] for _ in quotas]
        for entry, number in zip(waiting, self._class_stats.of([entry.sizes for entry in waiting]), strict=True):
            self._waiting[number].append(entry)
        self._gaps.update_classes({number for number, queue in enumerate(self._waiting) if queue}, now)

    def _class_of(self, sizes: RequestSize) -> int:
        return self._class_stats.of([sizes])[0] if self._initial_class_of is None else self._initial_class_of(sizes)

    def _insert(self, entry: WaitingEntry, number: int, now: float) -> None:
        insort(self._waiting[number], entry, key=lambda other: other.request.arrival_s)
        self._gaps.begin(number, now)

    # --- statistics ----------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """Return waiting requests, quotas and held tokens by class, and counts of rare events."""
        waiting, held = tuple(map(len, self._waiting)), tuple(self._quotas.held)
        counts = {name: self._counts[name] for name in ("refreshes", "bypassed", "squashed", "joined")}
        return QueueStats(waiting, self._quotas.quotas, held, **counts)

    def state(self) -> QueueState:
        """Return a copy of the waiting and running requests and of what they hold."""
        return QueueState(
            tuple(tuple(replace(entry) for entry in queue) for queue in self._waiting),
            {name: replace(entry) for name, entry in self._admitted.items()},
            self._quotas.quotas,
            tuple(self._quotas.held),
            self._quotas.holders(),
            self._blocked.longest_run_s,
        )

    def figures(self) -> QueueFigures:
        """Return all statistics of the queue; gaps that have not ended count up to the last step."""
        return QueueFigures(
            **msgspec.structs.asdict(self.stats()),
            boundaries=self._class_stats.classes.boundaries,
            infeasible_refreshes=self._counts["infeasible"],
            admitted=self._counts["admitted"],
            longest_gap_s=self._gaps.longest_s(self._last_s),
            longest_run_s=dict(self._gaps.longest_run_s),
        )


def wait_in_steps(
    needed_tokens: int,
    free_tokens: int,
    running: Iterable[RunningRequest],
    expected_tokens: Mapping[RequestId, int],
    view: AdmissionView,
) -> float:
    """Return after how many steps enough tokens are free, if all running requests end as expected; infinite if never.

    A request frees its KV when it ends, and its adapter when it is the last one that uses it.

    Args:
        needed_tokens: tokens of KV that must be free.
        free_tokens: tokens that are free now.
        running: the running requests.
        expected_tokens: expected output tokens of each, in total.
        view: knows the sizes of adapters.
    """
    if needed_tokens <= free_tokens:
        return 0
    running = list(running)
    users = Counter(each.request.digest for each in running)
    left = [(max(1, expected_tokens[each.request.request_id] - each.output_tokens), each) for each in running]
    for steps, each in sorted(left, key=lambda pair: pair[0]):
        users[each.request.digest] -= 1
        free_tokens += each.kv_tokens
        free_tokens += 0 if users[each.request.digest] else view.adapter_tokens(each.request.adapter)
        if needed_tokens <= free_tokens:
            return steps
    return float("inf")


PATIENCE = 0.5
"""Share of the longest run of a class after which its head has waited for long: joining requests then leave it what it
waits for, and it is tried first in a step."""


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

    def note(self, number: int, entry: WaitingEntry, now: float, *, lacks_memory: bool = True) -> None:
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


class AdmissionGaps:
    """Times between admissions of each class while it has waiting requests.

    Attributes:
        longest_run_s: by class, the longest time from admission to the end, in seconds.
    """

    def __init__(self) -> None:
        self.longest_run_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}
        self._longest_s: dict[int, float] = {}

    def begin(self, number: int, now: float) -> None:
        """Start the gap of a class that has waiting requests, unless it has started."""
        self._since_s.setdefault(number, now)

    def end(self, number: int, now: float) -> None:
        """End the gap of a class, after an admission or when no request waits."""
        self._note(number, now - self._since_s.pop(number))

    def update_classes(self, numbers: Collection[int], now: float) -> None:
        """Continue with new classes, of which ``numbers`` have waiting requests."""
        for number in self._since_s.keys() - numbers:
            self.end(number, now)
        for number in numbers:
            self.begin(number, now)

    def ran(self, number: int, ran_s: float) -> None:
        """Record the run time of a finished request of a class."""
        self.longest_run_s[number] = max(self.longest_run_s.get(number, 0.0), ran_s)

    def longest_s(self, now: float) -> dict[int, float]:
        """Return the longest gap of each class, those that have not ended included."""
        for number, since_s in self._since_s.items():
            self._note(number, now - since_s)
        return dict(self._longest_s)

    def _note(self, number: int, gap_s: float) -> None:
        self._longest_s[number] = max(self._longest_s.get(number, 0.0), gap_s)
