"""The executor protocol: what the engine needs of the part that runs its plans.

The torch, modelled, paced and scripted executors implement it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lorikeet.core.assist_costs import AssistCosts
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import StepPlan, StepResult, TransferDone


class ExecutorError(RuntimeError):
    """A step could not be run; the message names the requests or the rank concerned."""


class Executor(Protocol):
    """Runs plans one after the other. Owns tensors; decides nothing.

    A plan's ``drops`` and ``evictions`` are applied first, then ``starts``, then ``transfers`` are started (not
    awaited), then the sequences run ``repeat`` times. Blocks of a transfer are not reused before it is done. Where
    device and host overlap, a plan returns after each of its steps (``StepPlan.overlapped``): tokens are told, and
    requests taken, while the next one runs.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and return its tokens.

        Raises:
            ExecutorError: the step failed; the engine cannot go on.
        """
        ...

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers that every rank has finished since the last call. Does not block."""
        ...

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Block until a transfer has completed or ``timeout_s`` is over (None: no limit)."""
        ...

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return what host blocks hold that no transfer writes. Not under tensor parallelism: each rank has a part."""
        ...

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Write host blocks that no transfer reads or writes, with what :meth:`read_host` gave elsewhere."""
        ...

    def assist_counters(self) -> AssistCounters | None:
        """Return what host workers have done so far; None if there are none."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory. Transfers in flight may be abandoned."""
        ...


class EngineSizes(NamedTuple):
    """What the engine and its clients must know of an executor.

    Attributes:
        geometry: sizes of the whole model.
        local_geometry: sizes of one rank's share; adapters are packed by it.
        total_blocks: blocks in the device arena of each rank.
        host_blocks: blocks in the host arena of each rank.
        block_size: tokens of KV in a block.
        max_model_len: longest sequence that it serves.
        max_adapter_blocks: largest adapter that leaves room for such a sequence.
        kernels: which kernel backend computes.
        assist: what prefills cost that host workers assist; None if there are none.
        async_scheduling: whether the device can run a decode step while the host is at the last one's tokens.
    """

    geometry: ModelGeometry
    local_geometry: ModelGeometry
    total_blocks: int
    host_blocks: int
    block_size: int
    max_model_len: int
    max_adapter_blocks: int
    kernels: str
    assist: AssistCosts | None = None
    async_scheduling: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on one rank."""
        return self.local_geometry.block_bytes(self.block_size)
