"""What a profile says of the steps and transfers of a recording, beside the times they took."""

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.plan import KernelForm, StepPlan
from lorikeet.costs.model import CostModel
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.modelled import ModelledTimes
from lorikeet.engine.replay import Turn


class Kind(StrEnum):
    """What a time was taken by."""

    DECODE = "decode"
    """A step in which every sequence computes one token."""
    PREFILL = "prefill"
    """A step in which none does."""
    MIXED = "mixed"
    LOAD = "load"
    """Reading and copying an adapter."""


def compare_times(
    turns: Iterable[Turn], profile: CostProfile, form: KernelForm
) -> dict[Kind, list[tuple[float, float]]]:
    """Return pairs of recorded and modelled seconds, of each plan's mean step and of each transfer.

    Args:
        turns: of a recording from its begin.
        profile: of the recorded machine and model.
        form: kernel form of the recorded row.

    Raises:
        ProfileError: the profile lacks something that the recording needs.
    """
    times, model = ModelledTimes(profile, form, loop_each_step=False), CostModel(profile, form)
    loading: dict[int, AdapterRef] = {}
    pairs: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in Kind}
    for turn in turns:
        for done in (done for loaded in turn.loads for done in loaded.loads):
            ref = loading.pop(done.generation)
            if done.error is None and done.duration_s:
                pairs[Kind.LOAD].append((done.duration_s, model.load_s(ref)))
        plan = turn.planned.plan
        loading |= {load.generation: load.adapter for load in plan.loads}
        if turn.ran is None:
            continue
        result = turn.ran.result
        whole = msgspec.structs.replace(plan, repeat=result.steps_run)
        ran, modelled_s, _ = times.steps_s(whole, math.inf)
        if ran:
            pairs[_kind(plan)].append((result.duration_s / ran, modelled_s / ran))
    return pairs


def _kind(plan: StepPlan) -> Kind:
    decodes = sum(step.tokens == 1 and step.start > 0 for step in plan.sequences)
    return Kind.DECODE if decodes == len(plan.sequences) else Kind.MIXED if decodes else Kind.PREFILL
