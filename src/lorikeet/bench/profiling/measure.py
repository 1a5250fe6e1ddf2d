"""Measuring steps in rounds, each in an order of its own, so that a machine that drifts wrongs none of them."""

import random
import statistics
from collections.abc import Callable, Sequence

import msgspec

from lorikeet.bench.profiling.rig import Rig
from lorikeet.bench.profiling.sweeps import Step, without_adapters
from lorikeet.core.plan import KernelForm
from lorikeet.costs.lora_fit import LoraMeasurement
from lorikeet.costs.model import LoraWork, StepWork, step_work
from lorikeet.costs.step_fit import StepMeasurement

Tick = Callable[[], None]
"""Called after each part, for the progress bar."""

_GROUPS = ((KernelForm.UNPADDED, KernelForm.PADDED), (KernelForm.EINSUM,))
"""Forms that are measured between two runs of the base model, once in a round; disturbances outlast them."""
_LEAST_ROUNDS, _MOST_S = 8, 90.0
"""Rounds in which every step with adapters is measured, however sure its addition, and seconds after which one is not
measured again, however unsure: on a slow machine all rounds of the longest chunks would take an hour."""


class StepSweep:
    """Times steps without adapters, in as many sittings as one likes: a machine may be faster for minutes.

    Each has been run once that is not kept.

    Args:
        rig: runs them.
        steps: without adapters.
        num_scheduler_steps, multi_step_limit_s: decodes are repeated as an engine with these settings does.
        tick: called once for each step, and again in each round.
    """

    def __init__(self, rig: Rig, steps: Sequence[Step], num_scheduler_steps: int, multi_step_limit_s: float, tick: Tick) -> None:
        self._rig = rig
        self._steps = steps
        self._tick = tick
        self._order = random.Random(0)
        self._prepared, self._repeats = {}, {}
        for step in self._order.sample(steps, len(steps)):
            self._prepared[step] = rig.prepare(step)
            repeat = num_scheduler_steps if all(sequence.tokens == 1 and sequence.start > 0 for sequence in step) else 1
            self._repeats[step] = rig.run(self._prepared[step], repeat=repeat, limit_s=multi_step_limit_s).steps
            tick()
        self._seconds: dict[Step, list[float]] = {step: [] for step in steps}

    def measure(self, rounds: int) -> None:
        """Time each step so often."""
        for _ in range(rounds):
            for step in self._order.sample(self._steps, len(self._steps)):
                self._seconds[step].append(self._rig.run(self._prepared[step], repeat=self._repeats[step]).seconds)
                self._tick()

    def measurements(self) -> list[StepMeasurement]:
        """Return all times so far, in the order of the steps."""
        return [StepMeasurement(_work(step, self._repeats[step]), tuple(self._seconds[step])) for step in self._steps]


def measure_lora(rig: Rig, steps: Sequence[Step], rounds: int, tick: Tick) -> dict[KernelForm, list[LoraMeasurement]]:
    """Time each step in every kernel form, in turns with the same step without adapters, until its addition is sure.

    Ranks that are all the same have nothing to pad: then unpadded and padded are one computation, and the mean of both
    times counts for each.

    Args:
        rig: runs them; it has loaded the adapters.
        steps: with adapters.
        rounds: at least one; steps whose additions are sure are left out of the last.
        tick: called ``len(steps) * rounds`` times.
    """
    order = random.Random(0)
    points = {(form, step): LoraMeasurement(_lora_work(step, form), [], []) for form in KernelForm for step in steps}
    prepared = {step: (rig.prepare(without_adapters(step)), rig.prepare(step)) for step in steps}
    for number in range(rounds):
        for step in order.sample(steps, len(steps)):
            tick()
            groups = [
                group
                for group in order.sample(_GROUPS, len(_GROUPS))
                if number < _LEAST_ROUNDS or not _is_enough([points[form, step] for form in group])
            ]
            if not groups:
                continue
            base, adapted = prepared[step]
            rig.run(adapted)  # not kept: the step before it was another
            before_s = rig.run(base).seconds
            for group in groups:
                with_s = {form: rig.run(adapted, form).seconds for form in order.sample(group, len(group))}
                after_s = rig.run(base).seconds
                if len({sequence.rank for sequence in step if sequence.adapter is not None}) == 1:
                    with_s = dict.fromkeys(with_s, statistics.mean(with_s.values()))
                for form, seconds in with_s.items():
                    points[form, step].with_s.append(seconds)
                    points[form, step].base_s.append((before_s + after_s) / 2)
                before_s = after_s
    return {form: [points[form, step] for step in steps] for form in KernelForm}


def _is_enough(points: Sequence[LoraMeasurement]) -> bool:
    return all(point.is_sure for point in points) or sum(point.total_s for point in points) >= _MOST_S


def _work(step: Step, repeat: int) -> StepWork:
    """Count the work of a step in the middle of its repeats, whose context grows."""
    middle = (repeat - 1) // 2
    grown = [msgspec.structs.replace(sequence, start=sequence.start + middle) for sequence in step]
    return step_work(grown, KernelForm.UNPADDED)


def _lora_work(step: Step, form: KernelForm) -> LoraWork:
    work = step_work(step, form).lora
    assert work is not None
    return work
