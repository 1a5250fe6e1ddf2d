"""The executor protocol: the interface between the engine loop and the part that runs its plans.

The torch, modelled, paced and scripted executors implement it.
"""

from collections.abc import Sequence
from typing import Protocol

from lorikeet.core.ids import BlockId
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import StepPlan, StepResult, TransferDone


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
