"""What the queue knows of a waiting and of an admitted request."""

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
    """A request that waits.

    Attributes:
        request: which.
        expected_tokens: of its answer, by now: whoever ran longer than predicted is expected to go on.
        sizes: by which it is classed.
        may_pass: whether it may be admitted before an older one of its class; not again after it was sent back.
        held_s: for which it has run before.
        left_s: when it gave its blocks back to go on later, here or elsewhere.
    """

    request: Request
    expected_tokens: int
    sizes: RequestSize
    may_pass: bool = True
    held_s: float = 0.0
    left_s: float = 0.0


@dataclass(eq=False)
class AdmittedEntry:
    """A request that runs.

    Attributes:
        waiting: as it waited.
        number: its class.
        admitted_s: when.
        passed: the request before which it was admitted, if it passed one: it must end by its prediction.
        deadline_tokens: of its answer: that prediction.
        reckoned_tokens: of its answer, that its holding pays for.
        adapter_tokens: that its holding pays for.
    """

    waiting: WaitingEntry
    number: int
    admitted_s: float
    passed: Request | None
    deadline_tokens: int
    reckoned_tokens: int
    adapter_tokens: int


class Start(NamedTuple):
    """Classes to start with, which hold until the queue finds its own.

    Attributes:
        quotas: tokens of each class; their sum is what there is to divide from then on.
        class_of: returns the class of a request of such sizes.
        longest_run_s: by class, in seconds: how long the requests that ended before ran at most.
    """

    quotas: tuple[int, ...]
    class_of: Callable[[RequestSize], int]
    longest_run_s: Mapping[int, float]


class QueueState(NamedTuple):
    """A copy of what the queue knows, for tests and debugging.

    Attributes:
        waiting: requests by class, the smallest class first, and by arrival.
        admitted: requests that run.
        quotas: tokens of each class.
        held_tokens: of each class's quota.
        held_by: tokens that each running request holds.
        longest_run_s: by class, in seconds, of requests that ended lately.
    """

    waiting: tuple[tuple[WaitingEntry, ...], ...]
    admitted: dict[RequestId, AdmittedEntry]
    quotas: tuple[int, ...]
    held_tokens: tuple[int, ...]
    held_by: dict[RequestId, int]
    longest_run_s: dict[int, float]


def wait_in_steps(
    needed_tokens: int,
    free_tokens: int,
    running: Iterable[RunningRequest],
    expected_tokens: Mapping[RequestId, int],
    view: AdmissionView,
) -> float:
    """Return after how many steps there will be room, if all running requests end as expected; infinite if never.

    Each frees its KV when it ends, and its adapter's room when it is the last under it.

    Args:
        needed_tokens: of room.
        free_tokens: that there are now.
        running: who runs.
        expected_tokens: of their whole answers.
        view: tells what adapters take.
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


class AdmissionGaps:
    """One under way for each class that has waiting requests.

    Attributes:
        longest_run_s: by class number, the longest time from admission to the end.
    """

    def __init__(self) -> None:
        self.longest_run_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}
        self._longest_s: dict[int, float] = {}

    def begin(self, number: int, now: float) -> None:
        """A class has waiting requests, perhaps as before."""
        self._since_s.setdefault(number, now)

    def end(self, number: int, now: float) -> None:
        """A class has had an admission, or has nobody waiting any more."""
        self._note(number, now - self._since_s.pop(number))

    def go_on(self, numbers: Collection[int], now: float) -> None:
        """Classes are others from now on: those of these numbers have waiting requests."""
        for number in self._since_s.keys() - numbers:
            self.end(number, now)
        for number in numbers:
            self.begin(number, now)

    def ran(self, number: int, ran_s: float) -> None:
        """A request of a class has ended after so long a time."""
        self.longest_run_s[number] = max(self.longest_run_s.get(number, 0.0), ran_s)

    def longest_s(self, now: float) -> dict[int, float]:
        """Return the longest of each class, those that go on included."""
        for number, since_s in self._since_s.items():
            self._note(number, now - since_s)
        return dict(self._longest_s)

    def _note(self, number: int, gap_s: float) -> None:
        self._longest_s[number] = max(self._longest_s.get(number, 0.0), gap_s)


PATIENCE = 0.5
"""Of the longest run of a class: so long those who join others may take what its head waits for, and full steps may
end before it is tried."""


class BlockedHead(NamedTuple):
    """The head of class ``number``, which has found no room or no tokens since ``since_s``; now it lacks the former."""

    number: int
    entry: WaitingEntry
    since_s: float
    lacks_room: bool


class BlockedHeads:
    """One head for each class at most."""

    def __init__(self) -> None:
        self._by_class: dict[int, BlockedHead] = {}
        self._untried_since_s: dict[int, float] = {}
        self._longest_run_s: dict[int, float] = {}

    @property
    def longest_run_s(self) -> dict[int, float]:
        """By class, the longest run of those that ended lately."""
        return dict(self._longest_run_s)

    def ran(self, number: int, ran_s: float) -> None:
        """A request of a class has ended after so long a time."""
        self._longest_run_s[number] = max(self._longest_run_s.get(number, 0.0), ran_s)

    def has_waited(self, head: BlockedHead, now: float) -> bool:
        """Whether a head has waited for half of what its class's longest request ran; so it starts within that time."""
        return now - head.since_s >= self._patience_s(head.number)

    def untried_for_long(self, numbers: Iterable[int], now: float) -> list[int]:
        """Of the classes with waiters, return those that were not tried for so long a time, the longest first.

        That all of them wait to be tried is noted.
        """
        since_s = {number: self._untried_since_s.get(number, now) for number in numbers}
        self._untried_since_s = since_s
        late = (number for number, at_s in since_s.items() if at_s < now and now - at_s >= self._patience_s(number))
        return sorted(late, key=lambda number: since_s[number])

    def tried(self, number: int) -> None:
        """The head of a class was tried, or needed not be: it lacks tokens or room."""
        self._untried_since_s.pop(number, None)

    def _patience_s(self, number: int) -> float:
        runs_s = self._longest_run_s
        return PATIENCE * runs_s.get(number, max(runs_s.values(), default=0.0))

    def note(self, number: int, entry: WaitingEntry, now: float, *, lacks_room: bool = True) -> None:
        """The head of a class could not be admitted, perhaps once more."""
        self.tried(number)
        before = self._by_class.get(number)
        since_s = before.since_s if before is not None and before.entry is entry else now
        self._by_class[number] = BlockedHead(number, entry, since_s, lacks_room)

    def forget(self, number: int, request: Request) -> None:
        """A request waits no more."""
        if number in self._by_class and self._by_class[number].entry.request is request:
            del self._by_class[number]

    def renew(self, longest_run_s: dict[int, float]) -> None:
        """Classes are others from now on; of each that of late had somebody end, the longest run is given."""
        self._by_class.clear()
        self._untried_since_s.clear()
        self._longest_run_s = longest_run_s

    def of(self, number: int) -> BlockedHead | None:
        """Return the head of a class, if it is stuck."""
        return self._by_class.get(number)

    def oldest_without_room(self) -> BlockedHead | None:
        """Return who of those that lack room arrived first."""
        without = (stuck for stuck in self._by_class.values() if stuck.lacks_room)
        return min(without, key=lambda stuck: stuck.entry.request.arrival_s, default=None)


_LOOK_PAST = 64
"""Most requests of a class that are looked at for some that may come before their turn."""

_DEFAULT = ChameleonOptions()


class ChameleonQueue(AdmissionQueue):
    """See the module, and docs/decisions/chameleon-queues.md for what the paper leaves open.

    Every step each class admits from the front of its queue what its quota allows; what classes without waiters have
    left then goes to the others, smallest class first (Algorithm 1). A request whose adapter lacks room may be passed
    by younger ones that will have ended by the time that it can start; one that has not ended by then is sent back.
    Before all that come those who join running requests under an adapter that is large beside themselves.

    Args:
        view: of the engine.
        options: what is left open.
        start: classes to start with; without them there is one, which has all tokens.
    """

    def __init__(self, view: AdmissionView, options: ChameleonOptions = _DEFAULT, start: Start | None = None) -> None:
        super().__init__(view)
        self._options = options
        self._class_stats = ClassStats(options, view.max_model_len)
        self._quotas = QuotaAccounting(int(options.overcommit * view.total_tokens))
        self._waiting: list[list[WaitingEntry]] = [[]]
        self._admitted: dict[RequestId, AdmittedEntry] = {}
        self._users: Counter[str | None] = Counter()
        self._before: dict[RequestId, WaitingEntry] = {}
        self._blocked = BlockedHeads()
        self._began_s: float | None = None
        self._counts: Counter[str] = Counter()
        self._gaps = AdmissionGaps()
        self._last_s = 0.0
        self._class_by: Callable[[RequestSize], int] | None = None
        if start is not None:
            self._quotas = QuotaAccounting(sum(start.quotas))
            self._quotas.divide(start.quotas, {})
            self._waiting = [[] for _ in start.quotas]
            self._blocked.renew(dict(start.longest_run_s))
            self._class_by = start.class_of

    # --- requests ------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Class a request and insert it by arrival; one that comes back keeps its place, and may not pass again."""
        if self._began_s is None:
            self._began_s, self.due_s = now, now + self._options.refresh_s
        before = self._before.pop(request.request_id, None)
        least = before.expected_tokens if before is not None else 0
        expected = max(request.expected_tokens, len(request.output_token_ids) + 1, least)
        sizes = RequestSize(len(request.prompt_token_ids), expected, self.view.adapter_tokens(request.adapter))
        if not request.is_resumed:
            self._class_stats.arrived(sizes, now)
        early = self.view.step_times.is_known and self._class_stats.knows_more(
            now
        )  # limits and durations come from the step times
        # One that comes back may do so while others are being admitted, from queues that must stay as they are.
        if not request.is_resumed and (now >= self.due_s or early):
            self._refresh(now)
        number = self._class_of(sizes)
        entry = WaitingEntry(request, expected, sizes)
        if before is not None:
            entry.may_pass, entry.held_s = before.may_pass, before.held_s
        self._insert(entry, number, now)

    def remove(self, request: Request, now: float) -> None:
        """Take it out."""
        for number, queue in enumerate(self._waiting):
            for place, entry in enumerate(queue):
                if entry.request.request_id == request.request_id:
                    del queue[place]
                    self._blocked.forget(number, request)
                    if not queue:
                        self._gaps.end(number, now)
                    return
        raise KeyError(request.request_id)

    def ended(self, request: Request, now: float, *, goes_on: bool = False) -> None:
        """Return what it held to the classes that lent it; how long it ran counts once it has ended for good."""
        entry = self._admitted.pop(request.request_id)
        self._quotas.give_back(request.request_id)
        self._users -= Counter((request.digest,))  # which leaves no zeros behind
        if self._options.charge is AdapterCharge.SHARED and entry.adapter_tokens and self._users[request.digest]:
            heir = next(each for each in self._admitted.values() if each.waiting.request.digest == request.digest)
            heir.adapter_tokens = entry.adapter_tokens
            self._quotas.hold(heir.waiting.request.request_id, heir.number, heir.adapter_tokens)
        ran_s = entry.waiting.held_s + now - entry.admitted_s
        if goes_on:
            entry.waiting.held_s, entry.waiting.left_s = ran_s, now
            self._before[request.request_id] = entry.waiting
            return
        self._class_stats.ended(entry.waiting.sizes, ran_s, now)
        self._blocked.ran(entry.number, ran_s)
        self._gaps.ran(entry.number, ran_s)

    def waiting(self) -> Iterable[Request]:
        """Return them by class, the smallest first, and by arrival."""
        return [entry.request for entry in chain.from_iterable(self._waiting)]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._waiting))

    # --- admission -----------------------------------------------------------------------------------

    def admit(self, now: float) -> Admission:
        """Those who join; then two phases (Algorithm 1): by each class's quota, then by what empty ones have left.

        Before all come classes that full steps have kept from being tried for long, the longest first.
        """
        if now >= self.due_s and len(self):
            self._refresh(now)
        self._last_s = now
        blocked: set[int] = set()
        refused: set[RequestId] = set()
        left: dict[int, int] = {}
        for number in self._blocked.untried_for_long((n for n, queue in enumerate(self._waiting) if queue), now):
            yield from self._put_batch(number, self._own(number), blocked, refused, now)
        for number in range(len(self._waiting)):
            yield from self._join(number, refused, now)
        for number, queue in enumerate(self._waiting):
            own = self._own(number)
            if queue and number not in blocked:
                yield from self._put_batch(number, own, blocked, refused, now)
            if not queue:
                left |= own
        for number, queue in enumerate(self._waiting):
            if not any(left.values()):
                return
            if queue and number not in blocked:
                yield from self._put_batch(number, left, blocked, refused, now)

    def _own(self, number: int) -> dict[int, int]:
        return {number: max(0, self._quotas.available(number))}

    def _join(self, number: int, refused: set[RequestId], now: float) -> Admission:
        """Admit those of a class, by its own quota, who share the adapter of running requests and save much by that.

        Once the head of the class has waited for long, they leave it its tokens.
        """
        lenders, head = self._own(number), self._blocked.of(number)
        kept = self._need(head.entry) if head is not None and self._blocked.has_waited(head, now) else 0
        for entry in self._waiting[number][:_LOOK_PAST]:
            is_saving = entry.sizes.adapter_tokens >= self._options.join_from * self._tokens(entry)
            if not is_saving or not self._users[entry.request.digest]:
                continue
            need = self._need(entry)
            if need > lenders[number] - kept or tokens_needed(entry.request, self.view) > self.view.free_tokens():
                continue
            if self._must_leave_room(entry, number, now, joins=True):
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
        """Admit from the front of a class while the lenders' tokens suffice; what they lend leaves ``lenders``."""
        queue, place = self._waiting[number], 0
        while place < len(queue):
            entry = queue[place]
            if entry.request.request_id in refused:
                place += 1
                continue
            need = self._need(entry)
            if not self._can_pay(need, number, lenders):
                self._blocked.note(number, entry, now, lacks_room=False)
                return
            if self._must_leave_room(entry, number, now):
                self._blocked.note(number, entry, now)
                return
            outcome = yield entry.request
            self._blocked.tried(number)
            match outcome:
                case None:
                    self._take(entry, number, need, lenders, now)
                case WaitReason.TRANSFER | WaitReason.SLOT:  # neither is room that others take from it
                    refused.add(entry.request.request_id)
                    place += 1
                case WaitReason.ROOM:
                    blocked.add(number)
                    self._blocked.note(number, entry, now)
                    return
                case _:
                    blocked.add(number)
                    self._blocked.note(number, entry, now)
                    if self._options.bypass:
                        yield from self._pass_by(entry, number, place, lenders, now)
                    return

    def _pass_by(self, head: WaitingEntry, number: int, place: int, lenders: dict[int, int], now: float) -> Admission:
        """Admit younger ones that fit now and will have ended when the adapter of the head has room."""
        view, queue = self.view, self._waiting[number]
        running = view.running()
        expected = {name: entry.waiting.expected_tokens for name, entry in self._admitted.items()}
        needed = tokens_needed(head.request, view)
        steps = wait_in_steps(needed, view.free_tokens(), running, expected, view)
        for entry in queue[place + 1 : place + 1 + _LOOK_PAST]:
            need, remaining = self._need(entry), entry.expected_tokens - len(entry.request.output_token_ids)
            if not entry.may_pass or remaining > steps or need > sum(lenders.values()):
                continue
            if tokens_needed(entry.request, view) <= view.free_tokens() and (yield entry.request) is None:
                self._take(entry, number, need, lenders, now, passed=head.request)

    def _must_leave_room(self, entry: WaitingEntry, number: int, now: float, *, joins: bool = False) -> bool:
        """Whether a request would take room that the oldest of the heads without room waits for.

        Where more tokens are lent than there is room for, small classes could otherwise go on taking whatever becomes
        free. Those who join others may take it until the head has waited for long.
        """
        head, view = self._blocked.oldest_without_room(), self.view
        if head is None or head.entry is entry or (head.number == number and not joins):
            return False
        if joins and not self._blocked.has_waited(head, now):
            return False
        if not view.may_run(head.entry.request):  # its turn comes after that of others, who may be waiting here
            return False
        return view.free_tokens() - tokens_needed(entry.request, view) < tokens_needed(head.entry.request, view)

    def _can_pay(self, need: int, number: int, lenders: dict[int, int]) -> bool:
        """Whether the tokens suffice; who needs more than a whole quota is admitted when nobody holds any of it.

        Otherwise it would wait for ever, or until quotas change.
        """
        ledger = self._quotas
        return need <= sum(lenders.values()) or (need > ledger.quotas[number] and ledger.held[number] <= 0)

    def _take(
        self,
        entry: WaitingEntry,
        number: int,
        need: int,
        lenders: dict[int, int],
        now: float,
        passed: Request | None = None,
    ) -> None:
        """Note that a request was admitted: the first lender pays as much as it has, then the next."""
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
        if need:  # more than a whole quota
            self._quotas.hold(request.request_id, number, need)
        self._users[request.digest] += 1
        self._counts["admitted"] += 1
        self._counts["bypassed"] += passed is not None
        self._gaps.end(number, now)
        if self._waiting[number]:
            self._gaps.begin(number, now)

    def _need(self, entry: WaitingEntry) -> int:
        """Return the tokens that a request holds while it runs: input, expected output, adapter (section 3)."""
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

    # --- those that run ------------------------------------------------------------------------------

    def review(self, now: float) -> list[Request]:
        """Let those that run longer than predicted hold more; send those back that passed somebody and did not end."""
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
        """Whether the request that was passed still waits, and only if this one left would find room."""
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
        """Return how far the nearest of those that passed somebody is from its prediction."""
        entries = ((self._admitted[request.request_id], made) for request, made in running)
        left = (entry.deadline_tokens - made for entry, made in entries if entry.passed is not None)
        # Later a lazy one is sent back when the first in line could start, for which somebody must have ended.
        return min((tokens for tokens in left if tokens > 0), default=float("inf"))

    # --- classes -------------------------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        """Find classes and quotas anew by what arrived lately, and class everybody again (sections 5.1 and 6)."""
        assert self._began_s is not None
        self.due_s = now + self._options.refresh_s
        self._counts["refreshes"] += 1
        quotas, feasible, longest_run_s = self._class_stats.renew(
            self._quotas.total_tokens, self.view.step_times, now - self._began_s, now
        )
        self._blocked.renew(longest_run_s)
        self._class_by = None
        self._counts["infeasible"] += not feasible
        admitted = list(self._admitted.values())
        refresh_s = self._options.refresh_s
        self._before = {name: each for name, each in self._before.items() if now - each.left_s < refresh_s}
        for each, number in zip(admitted, self._class_stats.of([each.waiting.sizes for each in admitted]), strict=True):
            each.number = number
        self._quotas.divide(quotas, {name: each.number for name, each in self._admitted.items()})
        waiting = sorted(chain.from_iterable(self._waiting), key=lambda entry: entry.request.arrival_s)
        self._waiting = [[] for _ in quotas]
        for entry, number in zip(waiting, self._class_stats.of([entry.sizes for entry in waiting]), strict=True):
            self._waiting[number].append(entry)
        self._gaps.go_on({number for number, queue in enumerate(self._waiting) if queue}, now)

    def _class_of(self, sizes: RequestSize) -> int:
        return self._class_stats.of([sizes])[0] if self._class_by is None else self._class_by(sizes)

    def _insert(self, entry: WaitingEntry, number: int, now: float) -> None:
        insort(self._waiting[number], entry, key=lambda other: other.request.arrival_s)
        self._gaps.begin(number, now)

    # --- figures -------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """See ``AdmissionQueue``."""
        waiting, held = tuple(map(len, self._waiting)), tuple(self._quotas.held)
        counts = {name: self._counts[name] for name in ("refreshes", "bypassed", "squashed", "joined")}
        return QueueStats(waiting, self._quotas.quotas, held, **counts)

    def state(self) -> QueueState:
        """Return a copy of what waits, runs and is held."""
        return QueueState(
            tuple(tuple(replace(entry) for entry in queue) for queue in self._waiting),
            {name: replace(entry) for name, entry in self._admitted.items()},
            self._quotas.quotas,
            tuple(self._quotas.held),
            self._quotas.holders(),
            self._blocked.longest_run_s,
        )

    def figures(self) -> QueueFigures:
        """Return what there is to tell, gaps that go on included."""
        return QueueFigures(
            **msgspec.structs.asdict(self.stats()),
            boundaries=self._class_stats.classes.boundaries,
            infeasible_refreshes=self._counts["infeasible"],
            admitted=self._counts["admitted"],
            longest_gap_s=self._gaps.longest_s(self._last_s),
            longest_run_s=dict(self._gaps.longest_run_s),
        )
