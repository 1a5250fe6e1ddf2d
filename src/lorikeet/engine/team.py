"""The threads that a rank computes with: how many, and where they run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from lorikeet.core.plan import KernelForm, StepPlan
from lorikeet.engine.cores import CoreShare
from lorikeet.kernels.base import Kernels

PAUSE_S = 0.03
"""How long a rank must have computed nothing for its threads to be told where to run; telling takes time, too."""


class Team:
    """One rank's threads, which are those of its kernels.

    Linux tends to wake threads that have slept for a while on one core, where they stay until a step is over. So a
    rank that has every core gives each thread one of them while the first plan after a pause runs
    (``docs/decisions/threads.md``). It does not keep them there: processes started later would be held to one core.

    Args:
        kernels: whose threads they are.
        cores: the rank's part of the machine's.
        clock: monotonic, in seconds.
    """

    def __init__(self, kernels: Kernels, cores: CoreShare, clock: Callable[[], float] = time.monotonic) -> None:
        self._kernels = kernels
        self._cores = cores
        self._clock = clock
        self._computed_s = clock()

    def resize(self) -> None:
        """Take the rank's part of the cores; to be called before every plan."""
        threads = self._cores.threads(self._clock())
        if threads != self._kernels.threads:
            self._kernels.threads = threads

    @contextmanager
    def at_work(self, plan: StepPlan) -> Iterator[None]:
        """Place the threads while the steps of a plan run."""
        paused = self._clock() - self._computed_s > PAUSE_S
        with self._kernels.apart(self._cores.all) if paused and self._has_all_for(plan) else nullcontext():
            yield
        if plan.sequences:
            self._computed_s = self._clock()

    def _has_all_for(self, plan: StepPlan) -> bool:
        """Return whether each core has a thread, which the plan needs and which lives as long.

        Torch's own products may take fewer threads; new ones would begin on the core of the thread that makes them.
        """
        every_core = 1 < self._kernels.threads == len(self._cores.all)
        return every_core and bool(plan.sequences) and plan.kernel_form is not KernelForm.EINSUM
