"""The contract between the scheduler and a batching mode: who may run in a step, and which adapter is merged for it.

A mode sees the requests of one replica as plain data, and never touches the memory. Before each plan it is asked to
choose; when its steps have run, all or some, it is told how long that took. Each mode has a name in the table of
``batching``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm


class LiveRequest(NamedTuple):
    """A request of the replica, waiting or running.

    Attributes:
        request_id: whose it is.
        adapter: its type; None: the base model, which is never merged.
        is_legal: its adapter is on the device, so it could be merged now.
        tokens: known so far: prompt and answer.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    is_legal: bool
    tokens: int


class BatchingChoice(NamedTuple):
    """Who may run.

    Attributes:
        merged: adapter that is merged into the base for them, None: none.
        requests: who may run; None: everybody.
    """

    merged: AdapterDigest | None
    requests: frozenset[RequestId] | None


ALL_REQUESTS = BatchingChoice(None, None)
"""No adapter is merged, and nobody is left out."""


class BatchWork(NamedTuple):
    """What a step computed.

    Attributes:
        prefills: sequences that prefilled.
        prefill_tokens: tokens of theirs.
        decodes: the other sequences, one token each.
        rows: tokens under each adapter, the merged one left out.
        types: adapters of all sequences, None for the base model.
        is_assisted: the host took part, so the step tells nothing of how long others take.
    """

    prefills: int
    prefill_tokens: int
    decodes: int
    rows: Mapping[AdapterDigest, int]
    types: Set[AdapterDigest | None] = frozenset()
    is_assisted: bool = False


class BatchingMode(ABC):
    """Decides step by step who may run, and which adapter is merged."""

    follows_requests = True
    """Whether it looks at the requests at all; if not, nobody need list them."""

    @abstractmethod
    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return who may run in the next plan.

        Args:
            live: all requests of the replica, in the order of arrival.
        """

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:  # noqa: B027  # most need not
        """Take in that steps of the last choice have run.

        Args:
            steps: how many identical steps.
            work: of one of them.
            step_s: seconds that one took on average, without the switch.
            switch_s: seconds in which another adapter, or none, was merged before the first; 0 if nothing changed.
        """

    def steps_until_review(self) -> float:
        """Return after how many steps of the last choice the mode may choose otherwise for the same requests."""
        return float("inf")


class BatchingSetup(NamedTuple):
    """What a mode may know of the replica.

    Attributes:
        max_batch: most sequences in a step.
        kernel_form: how mixed ranks are computed.
        rank: of an adapter.
        known_adapters: how many adapters the replica serves now.
        total_tokens: room of the whole pool, in tokens of KV.
    """

    max_batch: int
    kernel_form: KernelForm
    rank: Callable[[AdapterDigest], int]
    known_adapters: Callable[[], int]
    total_tokens: int


BatchingPolicy = Callable[[BatchingSetup], BatchingMode]
"""What a name in the table of modes stands for."""


class Unmerged(BatchingMode):
    """Any mix of adapters in one batch, none of them merged.

    Args:
        setup: of the replica.
    """

    follows_requests = False

    def __init__(self, setup: BatchingSetup) -> None:
        pass

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return everybody."""
        return ALL_REQUESTS


def allow(batch: Sequence[LiveRequest], live: Sequence[LiveRequest], merged: AdapterDigest | None) -> BatchingChoice:
    """Return the choice of ``batch`` among ``live``, of which it is a part."""
    if len(batch) == len(live):
        return BatchingChoice(merged, None)
    return BatchingChoice(merged, frozenset(request.request_id for request in batch))
