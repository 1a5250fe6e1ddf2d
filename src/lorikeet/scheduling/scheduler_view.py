"""Provides the scheduler's state to admission policies."""

import collections.abc

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.request import Request
from lorikeet.memory.memory import Memory
from lorikeet.memory.tree import NodeKind, NodeTransfer
from lorikeet.scheduling.admission import RunningRequest
from lorikeet.scheduling.selection import BatchSelector
from lorikeet.scheduling.state import SchedulerLimits, Sequence, StepTimeEstimator


class SchedulerView:
    """Implements ``AdmissionView`` with the state of the scheduler.

    Args:
        memory: the engine's memory.
        limits: limits of a plan.
        running: the scheduler's running sequences, read live.
        selector: selects the requests that may run.
        step_times: estimator of the duration of steps.
    """

    def __init__(
        self,
        memory: Memory,
        limits: SchedulerLimits,
        running: collections.abc.Sequence[Sequence],
        selector: BatchSelector,
        step_times: StepTimeEstimator,
    ) -> None:
        self._memory = memory
        self.max_model_len = limits.max_model_len
        self.max_running = limits.max_num_seqs
        self._running = running
        self._selector = selector
        self.step_times = step_times
        self.guards = memory.guards

    @property
    def total_tokens(self) -> int:
        """Size of the whole device memory, in tokens of KV."""
        return self._memory.total_blocks * self._memory.block_size

    def free_tokens(self) -> int:
        """Return the number of tokens of KV that could be leased now if all evictable nodes were evicted."""
        return self._memory.evictor.available(NodeKind.KV) * self._memory.block_size

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        """Return the size of an adapter in tokens of KV; 0 for the base model."""
        if adapter is None:
            return 0
        return self._memory.adapters.device_blocks(adapter) * self._memory.block_size

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        """Return whether an adapter is on the device or in flight to it. The base model is always resident."""
        tree = self._memory.tree
        node = tree.adapter(None if adapter is None else adapter.digest)
        return node is not None and bool(tree.on_device[node] or tree.moving[node] == NodeTransfer.IN)

    def may_run(self, request: Request) -> bool:
        """Return whether the batching mode lets a waiting request run now."""
        return self._selector.allows(request.request_id)

    def running(self) -> list[RunningRequest]:
        """Return the running requests that are not in the background. The last request is preempted first."""
        return self._running_requests(background=False)

    def background(self) -> list[RunningRequest]:
        """Return the running background requests. The last request is preempted first."""
        return self._running_requests(background=True)

    def free_slots(self) -> int:
        """Return the number of further sequences that may run."""
        return self.max_running - len(self._running)

    def _running_requests(self, *, background: bool) -> list[RunningRequest]:
        block_size = self._memory.block_size
        return [
            RunningRequest(s.request, len(s.token_ids) - s.prompt_tokens, len(s.lease.blocks) * block_size)
            for s in self._running
            if s.lease and s.request.background is background
        ]
