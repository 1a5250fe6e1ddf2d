"""Where lines run rows of the default model on this machine: live, and by its profile."""

from functools import cached_property
from pathlib import Path

import msgspec

from benchmarks.accept.inprocess import THREADS
from benchmarks.accept.machine_profile import machine_profile
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_bench import MemorySetting, Rig, live_rig, modelled_rig
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.stretch import stretched

_DTYPE = "bfloat16"


class MachineRigs:
    """The rigs; the live one, and the one by the profile as it is, are made when they are first asked for.

    Args:
        runs: the parts of the line that keeps the profile.
        work: a workload; its adapters are those of the rigs.
        ranks: of the adapters in turn.
        scratch: an empty folder, for adapters.
        profile_part: which of the parts is the profile.
        quick: the profile is the command's quick one, enough for a rate to run at.
    """

    def __init__(
        self,
        runs: StoredRuns,
        work: MemoryWork,
        ranks: tuple[int, ...],
        scratch: Path,
        *,
        profile_part: str = "profile",
        quick: bool = False,
    ) -> None:
        self._runs = runs
        self._work = work
        self._options = WorkOptions(source="", ranks=ranks)
        self._scratch = scratch
        self._profile_part = profile_part
        self._quick = quick

    @cached_property
    def profile(self) -> CostProfile:
        """This machine's."""
        return machine_profile(self._runs, self._profile_part, quick=self._quick)

    @cached_property
    def live(self) -> Rig:
        """Of real arithmetic on the real clock."""
        return live_rig(default_model(), _DTYPE, self._work, self._options, self._scratch)

    @cached_property
    def modelled(self) -> Rig:
        """By the profile."""
        return self.drifted(0.0)

    def drifted(self, drift: float) -> Rig:
        """Return one by the profile as it is on a machine that has become slower by so large a share."""
        return modelled_rig(stretched(self.profile, 1 + drift), self._work, self._options)


def with_default_model(setting: MemorySetting) -> MemorySetting:
    """Return a setting as rows on these rigs need it."""
    model = str(default_model())
    return msgspec.structs.replace(setting, model=model, dtype=_DTYPE, threads=THREADS, touch_memory=True)
