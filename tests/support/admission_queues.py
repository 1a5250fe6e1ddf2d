"""An engine and requests for tests of admission queues."""

from collections.abc import Mapping, Sequence

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.guard import Guards
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.policies import ADMISSION
from lorikeet.scheduling.admission import AdmissionQueue, RunningRequest
from lorikeet.scheduling.state import StepTimeEstimator
from tests.support.scripted import request


class View:
    """An engine that runs what a test says."""

    total_tokens = 1_000
    max_model_len = 1_000
    max_running = 1_000
    step_times = StepTimeEstimator()
    guards = Guards()

    def __init__(self) -> None:
        self.answers: dict[str, tuple[Request, int]] = {}
        self.free = self.total_tokens

    def free_tokens(self) -> int:
        return self.free

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        return 0

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        return True

    def may_run(self, request: Request) -> bool:
        return True

    def running(self) -> Sequence[RunningRequest]:
        return [RunningRequest(request, tokens, 0) for request, tokens in self.answers.values()]


def made(
    name: str, arrival_s: float = 0.0, *, prompt_tokens: int = 1, answer_tokens: int = 1, **more: object
) -> Request:
    """A request that differs from others only in what matters here."""
    plain = request(name, [1] * prompt_tokens, arrival_s, max_tokens=answer_tokens)
    return msgspec.structs.replace(plain, **more)


def admitted(queue: AdmissionQueue, outcomes: Mapping[str, WaitReason] | None = None, most: int = 1_000) -> list[str]:
    """Let a queue name whom it wants until it is done, or ``most`` are in; return who was admitted."""
    found: list[str] = []
    policy = queue.admit(0.0)
    candidate = next(policy, None)
    while candidate is not None and len(found) < most:
        named = candidate.request
        outcome = (outcomes or {}).get(named.request_id)
        if outcome is None:
            found.append(named.request_id)
            if isinstance(queue.view, View):
                queue.view.answers[named.request_id] = named, len(named.output_token_ids)
        try:
            candidate = policy.send(outcome)
        except StopIteration:
            break
    policy.close()
    return found


def filled(queue: AdmissionQueue, requests: Sequence[Request]) -> AdmissionQueue:
    """Add them all."""
    for each in requests:
        queue.add(each, each.arrival_s)
    return queue


def order(name: str, requests: Sequence[Request]) -> list[str]:
    """Return in which order a policy admits requests that are all there."""
    return admitted(filled(ADMISSION[name](View()), requests))
