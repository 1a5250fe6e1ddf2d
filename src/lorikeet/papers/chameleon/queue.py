"""Implements Chameleon's admission queue: a queue of waiting requests per size class, each with a quota of tokens.

``ChameleonQueue`` is the policy as the paper prints it (§4.2). ``ClassStats`` finds the classes and their quotas, and
``QuotaAccounting`` counts the tokens of the quotas that running requests hold. See docs/decisions/chameleon-queues.md
for our reading where the paper is ambiguous.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import msgspec

from lorikeet.core.ids import RequestId
from lorikeet.core.messages import QueueStats
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.papers.chameleon.class_stats import ClassStats
from lorikeet.papers.chameleon.options import MultilevelOptions, QueueFigures
from lorikeet.papers.chameleon.quotas import QuotaAccounting
from lorikeet.papers.chameleon.size_classes import OUTPUT_ONLY_WEIGHTS, RequestSize
from lorikeet.scheduling.admission import (
    Admission,
    AdmissionCandidate,
    AdmissionQueue,
    AdmissionView,
    RunningRequest,
    tokens_needed,
)


@dataclass(eq=False)
class WaitingEntry:
    """A waiting request.

    Attributes:
        request: the request.
        expected_tokens: expected number of output tokens, raised for a request that has run longer than predicted.
        sizes: sizes that determine the request's class.
        may_pass: whether the request may be admitted before an older request of its class (bypass); False after it was
            squashed.
        held_s: seconds that the request ran before it was preempted.
        left_s: time of the last preemption or export.
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
        waiting: entry of the request while it waited.
        number: number of the request's class.
        admitted_s: time of the admission.
        passed: older request that this request bypassed; None for no bypass. A request that bypassed another must end
            by its prediction.
        reckoned_tokens: number of output tokens that the held quota covers, initially the prediction.
        adapter_tokens: number of tokens for the adapter that the held quota covers.
    """

    waiting: WaitingEntry
    number: int
    admitted_s: float
    passed: Request | None
    reckoned_tokens: int
    adapter_tokens: int


class InitialClasses(NamedTuple):
    """Holds the initial classes, until the queue finds classes.

    Attributes:
        quotas: tokens of each class, smallest requests first. Their sum is the total to divide from then on.
        class_of: returns the class of a request of the given sizes.
        longest_run_s: longest time from admission to the end so far by class, in seconds.
    """

    quotas: tuple[int, ...]
    class_of: Callable[[RequestSize], int]
    longest_run_s: Mapping[int, float]


class QueueState(NamedTuple):
    """Holds a copy of the queue's state, for tests and debugging.

    Attributes:
        waiting: waiting requests by class, the smallest class first, in order of arrival.
        admitted: running requests.
        quotas: tokens of each class.
        held_tokens: number of tokens held of each quota.
        held_by: number of tokens held by each running request.
    """

    waiting: tuple[tuple[WaitingEntry, ...], ...]
    admitted: dict[RequestId, AdmittedEntry]
    quotas: tuple[int, ...]
    held_tokens: tuple[int, ...]
    held_by: dict[RequestId, int]


LOOK_AHEAD = 64
"""Largest number of requests of a class that are considered for admission before their turn."""

PRINTED = MultilevelOptions()


class ChameleonQueue(AdmissionQueue):
    """Admits requests by size class and token quota, as Chameleon prints it (§4.2 and Algorithm 1).

    In every step each class admits requests from the front of its queue as far as its quota allows. Then other classes
    use the unused quota of classes without waiting requests, smallest class first. Younger requests may bypass a
    request whose adapter does not fit, if they are expected to end before that request can start. A bypassing request
    that has not ended by then is squashed: it is preempted, loses its output, and runs again later. A request
    holds tokens for its input, its expected output and its adapter until it ends, and all quotas together are the
    memory of the device.

    Source: Iliakopoulou et al., "Chameleon: Adaptive Caching and Scheduling for Many-Adapter LLM Inference
    Environments".

    Args:
        view: state of the engine.
        options: options for computing sizes, classes and quotas.
        initial: initial classes; None for one class with all tokens.
    """

    overcommit = 1.0
    """Sum of all quotas, as a multiple of the device memory in tokens."""
    restarts_squashed = True

    def __init__(
        self,
        view: AdmissionView,
        options: MultilevelOptions = PRINTED,
        initial: InitialClasses | None = None,
        *,
        output_only: bool = False,
    ) -> None:
        super().__init__(view)
        options = replace(options, weights=OUTPUT_ONLY_WEIGHTS) if output_only else options
        self._options = options
        self._class_stats = ClassStats(options, view.max_model_len)
        self._quotas = QuotaAccounting(int(self.overcommit * view.total_tokens))
        self._waiting: list[list[WaitingEntry]] = [[]]
        self._admitted: dict[RequestId, AdmittedEntry] = {}
        self._users: Counter[str | None] = Counter()  # running requests by adapter version
        self._suspended: dict[RequestId, WaitingEntry] = {}
        self._first_arrival_s: float | None = None
        self._counts: Counter[str] = Counter()
        self._initial_class_of: Callable[[RequestSize], int] | None = None
        if initial is not None:
            self._quotas = QuotaAccounting(sum(initial.quotas))
            self._quotas.divide(initial.quotas, {})
            self._waiting = [[] for _ in initial.quotas]
            self._initial_class_of = initial.class_of
            self._on_new_classes(dict(initial.longest_run_s))

    # --- requests ------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Insert a request into its class by arrival. A squashed request may not bypass another again."""
        if self._first_arrival_s is None:
            self._first_arrival_s, self.due_s = now, now + self._options.refresh_s
        before = self._suspended.pop(request.request_id, None)
        least = before.expected_tokens if before is not None else 0
        expected = max(request.expected_tokens, len(request.output_token_ids) + 1, least)
        sizes = RequestSize(len(request.prompt_token_ids), expected, self.view.adapter_tokens(request.adapter))
        if not request.is_resumed:
            self._class_stats.arrived(sizes, now)
        # Limits and durations come from the step times, so no classes are computed before step times are known.
        early = self.view.step_times.is_known and self._class_stats.has_more_samples(now)
        # A preempted request may return in the middle of ``admit``, which iterates over the queues.
        if not request.is_resumed and (now >= self.due_s or early):
            self._refresh(now)
        number = self._class_of(sizes)
        entry = WaitingEntry(request, expected, sizes)
        if before is not None:
            entry.may_pass, entry.held_s = before.may_pass, before.held_s
        insort(self._waiting[number], entry, key=lambda other: other.request.arrival_s)

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        for number, queue in enumerate(self._waiting):
            for place, entry in enumerate(queue):
                if entry.request.request_id == request.request_id:
                    del queue[place]
                    self._on_left(number, request)
                    return
        raise KeyError(request.request_id)

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        """Return a request's tokens to the classes that lent them. Its run time counts only if it has finished."""
        entry = self._admitted.pop(request.request_id)
        self._quotas.give_back(request.request_id)
        self._users -= Counter((request.digest,))  # removes entries of 0
        ran_s = entry.waiting.held_s + now - entry.admitted_s
        if will_resume:
            entry.waiting.held_s, entry.waiting.left_s = ran_s, now
            self._suspended[request.request_id] = entry.waiting
        else:
            self._class_stats.ended(entry.waiting.sizes, ran_s, now)
        if entry.adapter_tokens and self._users[request.digest]:
            self._move_adapter_tokens(entry)
        self._on_ended(entry, ran_s, will_resume=will_resume)

    def waiting(self) -> Iterable[Request]:
        """Return the waiting requests by class, the smallest first, and by arrival."""
        return [entry.request for entry in chain.from_iterable(self._waiting)]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._waiting))

    # --- admission -----------------------------------------------------------------------------------

    def admit(self, now: float) -> Admission:
        """Yield requests in the two phases of Algorithm 1.

        Phase 1 uses the quota of each class, phase 2 the unused quota of classes without waiting requests.
        """
        if now >= self.due_s and len(self):
            self._refresh(now)
        blocked: set[int] = set()
        refused: set[RequestId] = set()
        left: dict[int, int] = {}
        yield from self._before_phases(blocked, refused, now)
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

    def _put_batch(
        self, number: int, lenders: dict[int, int], blocked: set[int], refused: set[RequestId], now: float
    ) -> Admission:
        """Admit requests from the front of a class while the lenders' tokens suffice.

        ``lenders`` are classes with their tokens, which are reduced.
        """
        queue, place = self._waiting[number], 0
        while place < len(queue):
            entry = queue[place]
            if entry.request.request_id in refused:
                place += 1
                continue
            need = self._need(entry)
            if not self._can_pay(need, number, lenders):
                self._on_blocked(number, entry, now, lacks_memory=False)
                return
            if self._leaves_memory_to_another(entry, number, now):
                self._on_blocked(number, entry, now, lacks_memory=True)
                return
            outcome = yield AdmissionCandidate(entry.request)
            self._on_tried(number)
            match outcome:
                case None:
                    self._take(entry, number, need, lenders, now)
                case WaitReason.TRANSFER | WaitReason.SLOT:  # admitting other requests does not delay this request
                    refused.add(entry.request.request_id)
                    place += 1
                case why:
                    blocked.add(number)
                    self._on_blocked(number, entry, now, lacks_memory=True)
                    if why is WaitReason.ADAPTER_BLOCKS:
                        yield from self._bypass(entry, number, place, lenders, now)
                    return

    def _bypass(self, head: WaitingEntry, number: int, place: int, lenders: dict[int, int], now: float) -> Admission:
        """Admit younger requests that fit now and are expected to end before the head's adapter fits."""
        view, queue = self.view, self._waiting[number]
        running = view.running()
        expected = {name: entry.waiting.expected_tokens for name, entry in self._admitted.items()}
        needed = tokens_needed(head.request, view)
        steps = wait_in_steps(needed, view.free_tokens(), running, expected, view)
        for entry in queue[place + 1 : place + 1 + LOOK_AHEAD]:
            need, remaining = self._need(entry), entry.expected_tokens - len(entry.request.output_token_ids)
            if not entry.may_pass or remaining > steps or need > sum(lenders.values()):
                continue
            if (
                tokens_needed(entry.request, view) <= view.free_tokens()
                and (yield AdmissionCandidate(entry.request)) is None
            ):
                self._take(entry, number, need, lenders, now, passed=head.request)

    def _can_pay(self, need: int, number: int, lenders: dict[int, int]) -> bool:
        """Return whether the lenders' tokens suffice.

        A request larger than its class's quota is admitted when no token of the quota is held.

        Otherwise such a request would wait forever, or until quotas change.
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
        """Record an admission, and take its tokens from the lenders.

        Each lender gives as many tokens as it has, in order of class, until the need is covered.
        """
        request = entry.request
        self._waiting[number].remove(entry)
        self._on_left(number, request)
        expected, adapter = entry.expected_tokens, need - self._tokens(entry)
        self._admitted[request.request_id] = AdmittedEntry(entry, number, now, passed, expected, adapter)
        for lender in sorted(lenders):
            part = min(need, lenders[lender])
            self._quotas.hold(request.request_id, lender, part)
            need -= part
            lenders[lender] -= part
        if need:  # the request is larger than the whole quota
            self._quotas.hold(request.request_id, number, need)
        self._users[request.digest] += 1
        self._counts["admitted"] += 1
        self._counts["bypassed"] += passed is not None

    def _move_adapter_tokens(self, ended: AdmittedEntry) -> None:
        """Let another request that uses the adapter of an ended one hold its tokens."""
        digest = ended.waiting.request.digest
        user = next(each for each in self._admitted.values() if each.waiting.request.digest == digest)
        user.adapter_tokens = ended.adapter_tokens
        self._quotas.hold(user.waiting.request.request_id, user.number, user.adapter_tokens)

    def _need(self, entry: WaitingEntry) -> int:
        """Return the number of tokens that a request holds while it runs: input, expected output, adapter."""
        return self._tokens(entry) + self._adapter_charge(entry)

    def _adapter_charge(self, entry: WaitingEntry) -> int:
        """Return the number of tokens that a request holds for its adapter: 0 if a running request uses the adapter.

        A quota includes "the memory required for the corresponding adapter" (4.3), and an adapter that is in use
        requires no memory again. S-LoRA, on which Chameleon is built, counts each adapter of a batch once, too.
        """
        return 0 if self._users[entry.request.digest] else int(entry.sizes.adapter_tokens)

    @staticmethod
    def _tokens(entry: WaitingEntry) -> int:
        return len(entry.request.prompt_token_ids) + entry.expected_tokens

    # --- running requests ----------------------------------------------------------------------------

    def review(self, now: float) -> list[Request]:
        """Return the requests to squash, and increase the held tokens of others that exceed their prediction.

        A request is squashed if it has bypassed another request and has not ended by its prediction.
        """
        back = []
        for each in self.view.running():
            request, output_tokens = each.request, each.output_tokens
            entry = self._admitted[request.request_id]
            if output_tokens < entry.reckoned_tokens:
                continue
            expected = max(entry.waiting.expected_tokens, output_tokens + 1)
            if entry.passed is not None:
                entry.waiting.may_pass, entry.waiting.expected_tokens = False, expected
                self._counts["squashed"] += 1
                back.append(request)
                continue
            self._quotas.hold(request.request_id, entry.number, output_tokens + 1 - entry.reckoned_tokens)
            entry.reckoned_tokens = entry.waiting.expected_tokens = expected
        return back

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        """Return the smallest number of tokens until a request that has bypassed another reaches its prediction."""
        entries = ((self._admitted[request.request_id], made) for request, made in running)
        left = (entry.reckoned_tokens - made for entry, made in entries if entry.passed is not None)
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
        self._on_new_classes(longest_run_s)
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

    def _class_of(self, sizes: RequestSize) -> int:
        return self._class_stats.of([sizes])[0] if self._initial_class_of is None else self._initial_class_of(sizes)

    # --- for subclasses ------------------------------------------------------------------------------

    def _before_phases(self, blocked: set[int], refused: set[RequestId], now: float) -> Admission:
        """Yield requests that are tried before the two phases.

        Classes and requests that must wait are added to the sets.
        """
        yield from ()

    def _leaves_memory_to_another(self, entry: WaitingEntry, number: int, now: float) -> bool:
        """Return whether a request must wait because another class waits for memory."""
        return False

    def _on_blocked(self, number: int, entry: WaitingEntry, now: float, *, lacks_memory: bool) -> None:
        """Handle that the head of a class lacks memory, or tokens of the quota."""

    def _on_tried(self, number: int) -> None:
        """Handle that the head of a class was tried."""

    def _on_left(self, number: int, request: Request) -> None:
        """Handle that a request no longer waits."""

    def _on_ended(self, entry: AdmittedEntry, ran_s: float, *, will_resume: bool) -> None:
        """Handle the end or preemption of a running request, which ran for ``ran_s`` seconds in total."""

    def _on_new_classes(self, longest_run_s: dict[int, float]) -> None:
        """Handle new classes; ``longest_run_s`` is the longest recent run of each class, in seconds."""

    # --- statistics ----------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """Return waiting requests, quotas and held tokens by class, and counts of rare events."""
        waiting, held = tuple(map(len, self._waiting)), tuple(self._quotas.held)
        counts = {name: self._counts[name] for name in ("refreshes", "bypassed", "squashed", "joined")}
        return QueueStats(waiting, self._quotas.quotas, held, **counts)

    def state(self) -> QueueState:
        """Return a copy of the waiting and running requests and of their held tokens."""
        return QueueState(
            tuple(tuple(replace(entry) for entry in queue) for queue in self._waiting),
            {name: replace(entry) for name, entry in self._admitted.items()},
            self._quotas.quotas,
            tuple(self._quotas.held),
            self._quotas.holders(),
        )

    def figures(self) -> QueueFigures:
        """Return all statistics of the queue."""
        return QueueFigures(
            **msgspec.structs.asdict(self.stats()),
            boundaries=self._class_stats.classes.boundaries,
            infeasible_refreshes=self._counts["infeasible"],
            admitted=self._counts["admitted"],
        )


def wait_in_steps(
    needed_tokens: int,
    free_tokens: int,
    running: Iterable[RunningRequest],
    expected_tokens: Mapping[RequestId, int],
    view: AdmissionView,
) -> float:
    """Return the number of steps until enough tokens are free; infinite if never.

    All running requests are assumed to end as expected.

    A request frees its KV when it ends, and its adapter if no other running request uses it.

    Args:
        needed_tokens: number of tokens of KV that must be free.
        free_tokens: number of tokens that are free now.
        running: the running requests.
        expected_tokens: expected total number of output tokens of each request.
        view: provides the sizes of adapters.
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
