"""What a profile says of the steps and transfers of a recording, beside the times they took."""

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from lorikeet.core.plan import StepPlan, StepResult, Tier, Transfer
from lorikeet.costs.transfers import TransferModel
from lorikeet.engine.modelled import Times
from lorikeet.engine.modelled_times import ModelledTimes
from lorikeet.engine.replay import Turn
from lorikeet.presets import Preset


class Kind(StrEnum):
    """What a time was taken by."""

    DECODE = "decode"
    """A step in which every sequence computes one token."""
    PREFILL = "prefill"
    """A step in which none does."""
    MIXED = "mixed"
    LOAD = "load"
    """Reading an adapter's files, and copying it on if it goes to the device by way of the host."""
    FETCH = "fetch"
    """Copying from the host to the device."""
    STORE = "store"
    """Copying from the device to the host."""


def compare_times(turns: Iterable[Turn], preset: Preset, transfers: TransferModel) -> dict[Kind, list[tuple[float, float]]]:
    """Return pairs of recorded and modelled seconds, of each plan's mean step and of each transfer.

    Prefills that the host assists are left out: how their layers arrived is not recorded.

    Args:
        turns: of a recording from its begin.
        preset: the recorded one.
        transfers: what they cost an engine with the recorded settings, by the profile of the recorded machine and
            model.

    Raises:
        ProfileError: the profile lacks something that the recording needs.
    """
    times = ModelledTimes(transfers, preset, loop_each_step=False)
    under_way: dict[int, Transfer] = {}
    pairs: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in Kind}
    for turn in turns:
        for done in (done for taken in turn.transferred for done in taken.transfers):
            transfer = under_way.pop(done.transfer_id)
            if done.error is None and done.duration_s:
                pairs[_kind_of_transfer(transfer)].append((done.duration_s, transfers.course(transfer).alone_s))
        plan = turn.planned.plan
        under_way |= {transfer.transfer_id: transfer for transfer in plan.transfers}
        if turn.ran is None:
            times.note(plan)
            continue
        result = turn.ran.result
        modelled = modelled_as_run(times, plan, result)
        if modelled.steps:
            pairs[_kind(plan)].append((result.duration_s / modelled.steps, modelled.seconds / modelled.steps))
    return pairs


def modelled_as_run(times: ModelledTimes, plan: StepPlan, result: StepResult) -> Times:
    """Return what a plan takes by a cost model, for as many steps as ran; none if the host assisted it.

    Raises:
        ProfileError: the profile lacks something that the plan needs.
    """
    if plan.assisted:
        times.note(plan)
        return Times(0, 0.0, 0.0)
    return times.steps_s(msgspec.structs.replace(plan, repeat=result.steps_run), math.inf, lambda _: ())


def _kind_of_transfer(transfer: Transfer) -> Kind:
    if transfer.source is Tier.SOURCE:
        return Kind.LOAD
    return Kind.FETCH if transfer.target is Tier.DEVICE else Kind.STORE


def _kind(plan: StepPlan) -> Kind:
    decodes = sum(step.tokens == 1 and step.start > 0 for step in plan.sequences)
    return Kind.DECODE if decodes == len(plan.sequences) else Kind.MIXED if decodes else Kind.PREFILL
