"""An engine in a few lines that admits requests, and a FIFO queue that records what it receives."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import Admission, AdmissionCandidate, AdmissionQueue, AdmissionView, RunningRequest
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.state import StepTimeEstimator

BLOCK = 4
"""Tokens of a block of an adapter in the builders' measure."""


@dataclass
class World:
    """An engine in a few lines: room in tokens, adapters that stay until their room is needed."""

    total_tokens: int = 1000
    held_back_tokens: int = 0
    max_model_len: int = 400
    step_times: StepTimeEstimator = field(default_factory=StepTimeEstimator)
    running_now: dict[RequestId, tuple[Request, int]] = field(default_factory=dict)
    resident: dict[str, AdapterRef] = field(default_factory=dict)
    out_of_turn: set[str] = field(default_factory=set)

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        return 0 if adapter is None else adapter.max_rank * BLOCK

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        return adapter is None or adapter.digest in self.resident

    def running(self) -> list[RunningRequest]:
        return [
            RunningRequest(request, made, len(request.prompt_token_ids) + made)
            for request, made in self.running_now.values()
        ]

    def may_run(self, request: Request) -> bool:
        return request.request_id not in self.out_of_turn

    def free_tokens(self) -> int:
        used = {request.digest for request, _ in self.running_now.values()}
        pinned = sum(self.adapter_tokens(ref) for digest, ref in self.resident.items() if digest in used)
        room = self.total_tokens - self.held_back_tokens
        return room - pinned - sum(each.kv_tokens for each in self.running())

    def try_admit(self, request: Request) -> WaitReason | None:
        if not self.may_run(request):
            return WaitReason.SLOT
        kv, free = len(request.prompt_token_ids) + len(request.output_token_ids), self.free_tokens()
        used = {each.digest for each, _ in self.running_now.values()}
        adapter = 0 if request.digest in used else self.adapter_tokens(request.adapter)
        if kv + adapter > free:
            return WaitReason.ADAPTER_BLOCKS if adapter and kv <= free else WaitReason.KV_BLOCKS
        if request.adapter is not None:
            self.resident[request.adapter.digest] = request.adapter
        self.running_now[request.request_id] = request, len(request.output_token_ids)
        room = self.total_tokens - self.held_back_tokens - sum(each.kv_tokens for each in self.running())
        over = sum(map(self.adapter_tokens, self.resident.values())) - room
        for digest in [digest for digest in self.resident if digest not in used and digest != request.digest]:
            if over > 0:
                over -= self.adapter_tokens(self.resident.pop(digest))
        return None


def admit(queue: AdmissionQueue, world: World, now: float = 0.0, slots: int = 1000) -> list[str]:
    """One step's admission, which ends when so many run; return who was admitted."""
    admitted: list[str] = []
    policy = queue.admit(now)
    try:
        candidate = next(policy)
        while True:
            if len(world.running_now) >= slots:
                policy.close()
                return admitted
            outcome = world.try_admit(candidate.request)
            if outcome is None:
                admitted.append(candidate.request.request_id)
            candidate = policy.send(outcome)
    except StopIteration:
        return admitted


class Telling(Fifo):
    """FIFO that remembers all it was told, sends requests back when asked to, and prefers high priorities."""

    def __init__(self, view: AdmissionView) -> None:
        super().__init__(view)
        self.outcomes: list[tuple[str, WaitReason | None]] = []
        self.ends: list[str] = []
        self.back: set[str] = set()
        self.review_at: int | None = None

    def admit(self, now: float) -> Admission:
        for one in tuple(self._waiting):
            outcome = yield AdmissionCandidate(one)
            self.outcomes.append((one.request_id, outcome))
            if outcome is None:
                self._waiting.remove(one)

    def ended(self, request: Request, now: float, *, will_resume: bool = False) -> None:
        self.ends.append(request.request_id)

    def review(self, now: float) -> list[Request]:
        found = [each.request for each in self.view.running() if each.request.request_id in self.back]
        self.back.clear()
        return found

    def tokens_until_review(self, running: Iterable[tuple[Request, int]]) -> float:
        return float("inf") if self.review_at is None else self.review_at - max(made for _, made in running)

    def precedence(self, request: Request) -> object:
        return request.priority, request.arrival_s
