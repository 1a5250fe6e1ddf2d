"""Where lines run rows of the default model on this machine: live, and by its profile."""

import tempfile
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.accept.disturbance import undisturbed
from benchmarks.accept.inprocess import THREADS
from benchmarks.accept.machine_profile import machine_profile, profile_part
from benchmarks.accept.machine_speed import MachineSpeed
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_bench import MemorySetting, Rig, live_rig, modelled_rig
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.replicas import live_replica
from lorikeet.bench.slices import PausableClock, in_slices
from lorikeet.config import Settings
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.stretch import stretched
from lorikeet.engine.modelled_build import transfer_model
from lorikeet.engine.recorded_times import Kind, compare_times
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import turns
from lorikeet.rows import resolve_row

SLICE_S = 1.0
"""How long a row goes on before another has its turn: some ten steps. See docs/decisions/acceptance.md."""

_DTYPE = "bfloat16"

Turns = Callable[[Rig, Settings], Generator[None, None, dict[str, Any]]]
"""Runs a row as far as the next turn each time, and returns figures in the end."""


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

    @property
    def profile_stolen(self) -> float:
        """What share of the processors' time others took of the profile's measurement."""
        return float(profile_part(self._runs, self._profile_part, quick=self._quick)["stolen"])

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

    def run_live(
        self, settings: Settings, run: Callable[[Rig, Settings], dict[str, Any]], slower: float = 0.0
    ) -> dict[str, Any]:
        """Run live, if it can be had with little disturbance by others on the hardware.

        Args:
            settings: of the replica.
            run: runs it.
            slower: by what share steps are known to take longer than the profile says.

        Returns:
            What ``run`` returned, ``stolen``, and ``drift``: by what share the steps took longer than that. See
            ``undisturbed``.
        """

        def measure() -> dict[str, Any]:
            made, longer = self._run_recorded(settings, run)
            return made | {"drift": (1 + longer) / (1 + slower) - 1}

        return undisturbed(measure)

    def run_in_slices(self, rows: Sequence[tuple[Settings, Turns]]) -> tuple[list[dict[str, Any]], float]:
        """Run rows live by turns, whatever others do, on clocks that go as fast as the machine does beside its profile.

        So the machine is always as fast as its profile says, by these clocks; transfers keep the real time.

        Args:
            rows: each with what runs it.

        Returns:
            What each returned, and by what share steps took longer than the profile says.
        """
        speed, runs = MachineSpeed(self.profile), []
        for settings, run in rows:
            clock = PausableClock()
            start = partial(live_replica, clock=clock, on_ran=speed.watch(settings.engine))
            runs.append((clock, run(self.live._replace(start=start), settings)))
        return in_slices(runs, SLICE_S, speed.rate), speed.slower

    def measure_slower(self, settings: Settings, run: Callable[[Rig, Settings], dict[str, Any]]) -> dict[str, Any]:
        """Return by what share steps take longer live than the profile says, as ``slower``, and ``stolen``."""
        return undisturbed(lambda: {"slower": self._run_recorded(settings, run)[1]})

    def _run_recorded(
        self, settings: Settings, run: Callable[[Rig, Settings], dict[str, Any]]
    ) -> tuple[dict[str, Any], float]:
        with tempfile.TemporaryDirectory(prefix="lorikeet-recording-") as folder:
            record = Path(folder) / "run"
            recorded = msgspec.structs.replace(settings.engine, record=str(record))
            made = run(self.live, msgspec.structs.replace(settings, engine=recorded))
            return made, self._drift(Recording(record))

    def _drift(self, recording: Recording) -> float:
        engine = recording.header.engine
        pairs = compare_times(turns(recording), resolve_row(engine.row)[1], transfer_model(engine, self.profile))
        steps = [pair for kind in (Kind.DECODE, Kind.PREFILL, Kind.MIXED) for pair in pairs[kind]]
        recorded_s, modelled_s = map(sum, zip(*steps, strict=True))
        return recorded_s / modelled_s - 1


def with_default_model(setting: MemorySetting) -> MemorySetting:
    """Return a setting as rows on these rigs need it."""
    model = str(default_model())
    return msgspec.structs.replace(setting, model=model, dtype=_DTYPE, threads=THREADS, touch_memory=True)
