"""The executor protocol: the interface between the engine loop and the part that runs its plans.

The torch, modelled, paced and scripted executors implement it.
"""

from collections.abc import Sequence
from typing import Protocol

from lorikeet.core.ids import BlockId
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import StepPlan, StepResult, TransferDone


class ExecutorError(RuntimeError):
    """Raised when a step could not be run. The message names the request, adapter or rank."""


class Executor(Protocol):
    """Runs plans one after the other.

    An executor owns tensors and makes no scheduling decisions.

    A plan's ``drops`` and ``evictions`` are applied first, then ``starts``, then ``transfers`` are started (not
    awaited), then the sequences run ``repeat`` times. Blocks of a transfer are not reused before the transfer is done.
    With async scheduling (``StepPlan.overlapped``) the executor returns after each step of a plan. While the device
    runs the next step, the engine handles tokens and new requests.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and return its tokens.

        Raises:
            ExecutorError: the step failed. The engine cannot continue.
        """
        ...

    def completed_transfers(self) -> list[TransferDone]:
        """Return, without blocking, the transfers that every rank has finished since the last call."""
        ...

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Block until a transfer has completed or ``timeout_s`` is over (None: no limit)."""
        ...

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return the bytes of host blocks, which no transfer may be writing. Tensor parallelism is not supported."""
        ...

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Write bytes from :meth:`read_host` of another executor to host blocks, which no transfer may be using."""
        ...

    def assist_counters(self) -> AssistCounters | None:
        """Return the counters of host workers; None without host workers."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory. Transfers in flight may be abandoned."""
        ...
