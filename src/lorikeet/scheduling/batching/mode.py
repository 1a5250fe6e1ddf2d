"""Defines the interface of batching modes, which choose the requests of a step and the adapter merged for it.

A mode receives the requests of one replica as plain data, and never touches the memory. The scheduler calls ``choose``
before each plan, and ``ran`` after steps of the plan. ``policies.BATCHING`` lists the modes by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import ClassVar, NamedTuple

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import KernelForm
from lorikeet.costs.iteration_costs import IterationCosts


class LiveRequest(NamedTuple):
    """Describes a waiting or running request of the replica.

    Attributes:
        request_id: id of the request.
        adapter: adapter version of the request; None for the base model, which is never merged.
        is_legal: whether the adapter is on the device, so that it could be merged now.
        tokens: number of tokens of the prompt and the output so far.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    is_legal: bool
    tokens: int


class BatchingChoice(NamedTuple):
    """Holds the requests that may run, and the merged adapter.

    Attributes:
        merged: adapter that is merged into the base weights for these requests; None for none.
        requests: requests that may run; None for all.
    """

    merged: AdapterDigest | None
    requests: frozenset[RequestId] | None


ALL_REQUESTS = BatchingChoice(None, None)
"""All requests may run, and no adapter is merged."""


class BatchWork(NamedTuple):
    """Describes the work of one step.

    Attributes:
        prefills: number of sequences that prefilled.
        prefill_tokens: number of prefilled tokens.
        decodes: number of sequences that decoded one token.
        rows: number of tokens by adapter, without the merged adapter.
        types: adapters of all sequences; None for the base model.
        is_assisted: whether host cores assisted, so that the step's duration does not apply to other steps.
    """

    prefills: int
    prefill_tokens: int
    decodes: int
    rows: Mapping[AdapterDigest, int]
    types: Set[AdapterDigest | None] = frozenset()
    is_assisted: bool = False


class BatchingMode(ABC):
    """Chooses the requests that may run in each plan, and the merged adapter.

    Attributes:
        follows_requests: whether ``choose`` reads the requests. If not, the scheduler does not list them.
        merges: whether the mode may merge an adapter into the base weights. Only if so do tensor-parallel ranks keep an
            unmerged copy.
        needs: names of fields of :class:`BatchingSetup` that are expensive to fill: ``iterations``.
    """

    follows_requests: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return the requests that may run in the next plan.

        Args:
            live: all requests of the replica, in order of arrival or of the admission queue's ``urgency``.
        """

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:  # noqa: B027  # optional
        """Handle the end of steps that ran by the last choice.

        Args:
            steps: number of identical steps.
            work: work of each step.
            step_s: mean seconds of a step, without the switch.
            switch_s: seconds to change the merged adapter before the first step; 0 if it did not change.
        """

    def steps_until_review(self) -> float:
        """Return the number of steps after which the mode may choose differently for the same requests."""
        return float("inf")


class BatchingSetup(NamedTuple):
    """Holds the facts about the replica that a mode may use.

    Attributes:
        max_batch: largest number of sequences in a step.
        kernel_form: form in which kernels compute mixed ranks.
        rank: returns the largest rank of an adapter.
        known_adapters: returns the number of adapters that the replica serves now.
        total_tokens: size of the whole device memory, in tokens of KV.
        iterations: profiled times of the replica's iterations; None without a profile, or if the mode does not need
            them.
    """

    max_batch: int
    kernel_form: KernelForm
    rank: Callable[[AdapterDigest], int]
    known_adapters: Callable[[], int]
    total_tokens: int
    iterations: IterationCosts | None = None


BatchingPolicy = Callable[[BatchingSetup], BatchingMode]
"""Creates a batching mode."""


class Unmerged(BatchingMode):
    """Runs any mix of adapters in one batch, without merging.

    Args:
        setup: limits and costs of the replica.
    """

    follows_requests = False

    def __init__(self, setup: BatchingSetup) -> None:
        pass

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Allow all requests."""
        return ALL_REQUESTS


def allow(batch: Sequence[LiveRequest], live: Sequence[LiveRequest], merged: AdapterDigest | None) -> BatchingChoice:
    """Return the choice that lets ``batch`` run, a subset of ``live``."""
    if len(batch) == len(live):
        return BatchingChoice(merged, None)
    return BatchingChoice(merged, frozenset(request.request_id for request in batch))
