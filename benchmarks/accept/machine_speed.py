"""How fast the machine is at the moment, beside its profile."""

import math
from functools import partial

from lorikeet.config import EngineSettings
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.modelled_build import transfer_model
from lorikeet.engine.modelled_times import ModelledTimes
from lorikeet.engine.recorded_times import modelled_as_run
from lorikeet.rows import resolve_row

_MEMORY_S = 20.0
"""How long a step counts: its weight falls to 1/e in steps of so many seconds. Many slices of each row."""


class MachineSpeed:
    """Sees the steps of engines here.

    Args:
        profile: of this machine.

    Attributes:
        slower: by what share all steps so far took longer than the profile says.
    """

    def __init__(self, profile: CostProfile) -> None:
        self._profile = profile
        self._lately_s = self._modelled_lately_s = 0.0
        self._all_s = self._modelled_s = 0.0

    @property
    def slower(self) -> float:
        """See the class; 0 before the first step."""
        return self._all_s / self._modelled_s - 1 if self._modelled_s else 0.0

    def rate(self) -> float:
        """Return by how much faster than the profile says steps were lately; 1 before the first."""
        return self._modelled_lately_s / self._lately_s if self._lately_s else 1.0

    def watch(self, engine: EngineSettings) -> "partial[None]":
        """Return what is to be called with every plan of an engine and its result."""
        _, row = resolve_row(engine.row)
        return partial(self._ran, ModelledTimes(transfer_model(engine, self._profile), row, loop_each_step=False))

    def _ran(self, times: ModelledTimes, plan: StepPlan, result: StepResult) -> None:
        modelled = modelled_as_run(times, plan, result)
        if modelled.steps:
            fading = math.exp(-result.duration_s / _MEMORY_S)
            self._lately_s = self._lately_s * fading + result.duration_s
            self._modelled_lately_s = self._modelled_lately_s * fading + modelled.seconds
            self._all_s += result.duration_s
            self._modelled_s += modelled.seconds
