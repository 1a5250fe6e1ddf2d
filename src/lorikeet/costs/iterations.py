"""Computes from a profile the times by which a batching mode compares merged and unmerged iterations."""

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.plan import KernelForm
from lorikeet.costs.iteration_costs import IterationCosts
from lorikeet.costs.model import CostModel, StepWork
from lorikeet.costs.transfers import MergeModel, TransferModel
from lorikeet.policies import BATCHING
from lorikeet.presets import Preset

_REQUESTS = tuple(2**exponent for exponent in range(12))
"""Sizes of the iterations whose times are computed; others are between them."""
_TYPICAL_RANK = 8
"""Rank of the adapter whose merge is timed: that of the paper. Other ranks take nearly as long."""


def iteration_costs(transfers: TransferModel, preset: Preset) -> IterationCosts | None:
    """Return the times of decode iterations and merges by a profile.

    None if the preset's batching mode does not need them, or the profile lacks merges or the preset's kernel form.

    Args:
        transfers: costs of transfers; its profile has the other constants.
        preset: of the replica.
    """
    profile = transfers.profile
    lora = profile.lora.get(preset.kernel_form)
    if profile.switching is None or lora is None or "iterations" not in BATCHING.load(preset.batching).needs:
        return None
    model, merging = CostModel(profile, preset.kernel_form), MergeModel(profile, preset.merge_by, transfers)
    average, per_adapter = model.average, 0.0 if lora.adapter is None else lora.adapter.value
    ranks = dict.fromkeys(profile.lora_modules, (_TYPICAL_RANK,) * profile.geometry.layers)
    adapter = AdapterRef(AdapterName("typical"), AdapterDigest("typical"), "", ranks, 0)
    # Unpadded and padded kernels count the ranks of distinct adapters; an einsum all of them with every row.
    by_rank = 0.0 if preset.kernel_form is KernelForm.EINSUM else lora.adapter_rank.value * _TYPICAL_RANK
    return IterationCosts(
        requests_s=tuple((n, model.step_s(StepWork(n, n, n, 0, 0, 0, None)) + model.loop_s(n)) for n in _REQUESTS),
        context_token_s=average * profile.step.decode_attention.value,
        lora_s=average * lora.fixed.value,
        lora_row_s=0.0 if lora.row is None else average * lora.row.value,
        lora_work_s=average * lora.decode_row_rank.value,
        lora_adapter_s=average * (per_adapter + by_rank),
        merge_s=merging.switch_s(None, adapter),
        unmerge_s=merging.switch_s(adapter, None),
    )
