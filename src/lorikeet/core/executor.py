"""The executor protocol: the interface between the engine loop and the part that runs its plans.

The torch, modelled, paced and scripted executors implement it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.core.messages import AssistCounters, BaseInfo
from lorikeet.core.plan import StepPlan, StepResult, TransferDone

if TYPE_CHECKING:
    from lorikeet.costs.assist_costs import AssistCosts
    from lorikeet.costs.iteration_costs import IterationCosts


class ExecutorError(RuntimeError):
    """A step could not be run; the message names the request, adapter or rank concerned."""


class Executor(Protocol):
    """Runs plans one after the other. It owns tensors and makes no scheduling decisions.

    A plan's ``drops`` and ``evictions`` are applied first, then ``starts``, then ``transfers`` are started (not
    awaited), then the sequences run ``repeat`` times. Blocks of a transfer are not reused before it is done. With async
    scheduling (``StepPlan.overlapped``) a plan returns after each of its steps, while the device runs the next one:
    the engine handles tokens and new requests meanwhile.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and return its tokens.

        Raises:
            ExecutorError: the step failed; the engine cannot continue.
        """
        ...

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers that every rank has finished since the last call. Does not block."""
        ...

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Block until a transfer has completed or ``timeout_s`` is over (None: no limit)."""
        ...

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return the bytes of host blocks that no transfer writes. Not with tensor parallelism: ranks have parts."""
        ...

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Write host blocks that no transfer uses, with bytes that :meth:`read_host` returned on another executor."""
        ...

    def assist_counters(self) -> AssistCounters | None:
        """Return the counters of host workers; None if there are none."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory. Transfers in flight may be abandoned."""
        ...


class EngineSizes(NamedTuple):
    """Sizes and abilities of an executor, for the engine and its clients.

    Attributes:
        geometry: sizes of the whole model.
        local_geometry: sizes of one rank's share. Adapters are packed with these.
        total_blocks: blocks in the device arena of each rank.
        host_blocks: blocks in the host arena of each rank.
        block_size: tokens of KV in a block.
        max_model_len: longest sequence that it serves.
        max_adapter_blocks: largest adapter that leaves enough blocks for such a sequence.
        kernels: name of the kernel backend.
        assist: costs of prefills assisted by host workers; None if there are no workers.
        async_scheduling: whether the device can run a decode step while the host handles the previous step's tokens.
        iterations: profiled times of iterations and merges; None without a profile of them.
        weights: in what form the linear weights are, in words; empty if nothing is computed.
        base: the model; None for an executor that computes none.
        can_merge: whether an adapter can be merged into the base weights.
    """

    geometry: ModelGeometry
    local_geometry: ModelGeometry
    total_blocks: int
    host_blocks: int
    block_size: int
    max_model_len: int
    max_adapter_blocks: int
    kernels: str
    assist: "AssistCosts | None" = None
    async_scheduling: bool = False
    iterations: "IterationCosts | None" = None
    weights: str = ""
    base: BaseInfo | None = None
    can_merge: bool = True

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on one rank."""
        return self.local_geometry.block_bytes(self.block_size)
