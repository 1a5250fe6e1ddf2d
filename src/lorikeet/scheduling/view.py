"""What admission policies see of the scheduler and the memory."""

from collections.abc import Sequence as Many

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.request import Request
from lorikeet.memory.memory import Memory
from lorikeet.memory.tree import Kind, Moving
from lorikeet.scheduling.admission import Running
from lorikeet.scheduling.pace import Pace
from lorikeet.scheduling.selection import Selection
from lorikeet.scheduling.sequence import Sequence


class SchedulerView:
    """See ``admission.EngineView``.

    Args:
        memory: of the engine.
        max_model_len: longest sequence.
        running: the scheduler's list of them.
        selection: who may run.
        pace: of the steps.
    """

    def __init__(
        self, memory: Memory, max_model_len: int, running: Many[Sequence], selection: Selection, pace: Pace
    ) -> None:
        self._memory = memory
        self.max_model_len = max_model_len
        self._running = running
        self._selection = selection
        self.pace = pace

    @property
    def total_tokens(self) -> int:
        """Room of the whole pool."""
        return self._memory.total_blocks * self._memory.block_size

    def free_tokens(self) -> int:
        """Return the room that could be lent for KV now, if all left that may leave."""
        return self._memory.room.available(Kind.KV) * self._memory.block_size

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        """Return the room that an adapter takes; 0 for the base model."""
        return 0 if adapter is None else self._memory.adapters.device_blocks(adapter) * self._memory.block_size

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        """Whether it is on the device or on its way there. The base model is."""
        tree, node = self._memory.tree, self._memory.tree.adapter(None if adapter is None else adapter.digest)
        return node is not None and bool(tree.on_device[node] or tree.moving[node] == Moving.IN)

    def may_run(self, request: Request) -> bool:
        """Whether the batching mode lets a request run now that waits."""
        return self._selection.allows(request.request_id)

    def running(self) -> list[Running]:
        """Return the admitted requests, in the order in which they would keep their room."""
        block_size = self._memory.block_size
        return [
            Running(s.request, s.output_tokens, len(s.lease.blocks) * block_size) for s in self._running if s.lease
        ]
