"""What the engine knows of whoever runs its plans. Torch, scripted, modelled and paced executors fit it."""

from typing import Protocol

from lorikeet.core.plan import AdapterLoadDone, StepPlan, StepResult


class ExecutorError(RuntimeError):
    """A step could not be run; the message names the requests or the rank concerned."""


class Executor(Protocol):
    """Runs plans one after the other. Owns tensors; decides nothing.

    A plan's ``drops`` and ``evictions`` are applied first, then ``starts``, then ``loads`` are started (not
    awaited), then the sequences run ``repeat`` times. Blocks of a load are not reused before it is done.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and return its tokens.

        Raises:
            ExecutorError: the step failed; the engine cannot go on.
        """
        ...

    def completed_loads(self) -> list[AdapterLoadDone]:
        """Return the loads that every rank has finished since the last call. Does not block."""
        ...

    def wait_for_load(self, timeout_s: float | None) -> None:
        """Block until a load has completed or ``timeout_s`` is over (None: no limit)."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory. Loads in flight may be abandoned."""
        ...
