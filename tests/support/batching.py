"""Requests as strings, and steps that run as batching modes choose."""

from collections import Counter
from collections.abc import Sequence

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchingMode, BatchingSetup, BatchWork, LiveRequest

A, B, C = (AdapterDigest(name) for name in "ABC")
RANK = 8


def live_of(types: str, illegal: str = "", tokens: int = 10) -> list[LiveRequest]:
    """Return requests in the order of arrival: a letter is an adapter, - the base model; ids are A1, B1, A2 ..."""
    seen = Counter[str]()
    requests = []
    for letter in types:
        seen[letter] += 1
        name = RequestId(f"{letter}{seen[letter]}")
        adapter = None if letter == "-" else AdapterDigest(letter)
        requests.append(LiveRequest(name, adapter, letter not in illegal, tokens))
    return requests


def setup_of(max_batch: int = 4, form: KernelForm = KernelForm.UNPADDED, known: int = 4) -> BatchingSetup:
    """Return a replica with adapters of rank 8."""
    return BatchingSetup(max_batch, form, lambda _: RANK, lambda: known, total_tokens=400)


def ids(requests: Sequence[LiveRequest]) -> list[str]:
    """Return the ids."""
    return [request.request_id for request in requests]


def batch_of(choice: BatchingChoice, live: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Return who runs, in the order of arrival."""
    return [request for request in live if choice.requests is None or request.request_id in choice.requests]


def work_of(choice: BatchingChoice, live: Sequence[LiveRequest]) -> BatchWork:
    """Return the work of a step in which all who may run decode."""
    batch = batch_of(choice, live)
    adapters = (request.adapter for request in batch)
    rows = Counter(adapter for adapter in adapters if adapter is not None and adapter != choice.merged)
    return BatchWork(0, 0, len(batch), rows, {request.adapter for request in batch})


def run(mode: BatchingMode, live: Sequence[LiveRequest], steps: int = 1, step_s: float = 0.05) -> BatchingChoice:
    """Let a mode choose, and run ``steps`` steps of it."""
    choice = mode.choose(live)
    mode.ran(steps, work_of(choice, live), step_s, 0.0)
    return choice
