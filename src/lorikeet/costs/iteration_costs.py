"""Provides profiled times of decode iterations and merges, to compare merged and unmerged iterations."""

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.interpolation import interpolate
from lorikeet.core.plan import KernelForm
from lorikeet.costs.model import CostModel, StepWork
from lorikeet.costs.transfer_model import MergeModel, TransferModel
from lorikeet.policies import BATCHING
from lorikeet.presets import Preset

_REQUESTS = tuple(2**exponent for exponent in range(12))
"""Numbers of requests whose iteration times are computed. Times of other numbers are interpolated."""
_TYPICAL_RANK = 8
"""Rank of the adapter whose merge is timed, as in the paper. Other ranks take about as long."""


class IterationCosts(msgspec.Struct, frozen=True):
    """Holds the times, in seconds, of the parts of a replica's iteration in which every request decodes.

    Attributes:
        requests_s: (requests, seconds) of an iteration of the base model, without reading the context.
        context_token_s: time per token of the requests' contexts.
        lora_s: fixed time if any request has an adapter that is not merged.
        lora_row_s: time per request with such an adapter.
        lora_work_s: time per rank of such a request, as the kernel form counts ranks (``mode_times.lora_work``).
        lora_adapter_s: time per distinct adapter that is not merged.
        merge_s: time to merge an adapter.
        unmerge_s: time to restore the base weights.
    """

    requests_s: tuple[tuple[int, float], ...]
    context_token_s: float
    lora_s: float
    lora_row_s: float
    lora_work_s: float
    lora_adapter_s: float
    merge_s: float
    unmerge_s: float

    def base_s(self, requests: int, context_tokens: int) -> float:
        """Return the seconds of an iteration of the base model, or on merged weights."""
        return interpolate(self.requests_s, requests) + self.context_token_s * context_tokens

    def lora_part_s(self, rows: int, work: float, adapters: int) -> float:
        """Return the seconds that adapters add to an iteration."""
        if not rows:
            return 0.0
        rows_s = self.lora_row_s * rows + self.lora_work_s * work
        return self.lora_s + rows_s + self.lora_adapter_s * adapters


def iteration_costs(transfers: TransferModel, preset: Preset) -> IterationCosts | None:
    """Compute the times of decode iterations and merges from a profile.

    Args:
        transfers: costs of transfers; its profile has the other constants.
        preset: preset of the replica.

    Returns:
        The times; None if the preset's batching mode does not need them, or the profile lacks merges or the preset's
        kernel form.
    """
    profile = transfers.profile
    lora = profile.lora.get(preset.kernel_form)
    if profile.switching is None or lora is None or "iterations" not in BATCHING.load(preset.batching).needs:
        return None
    model = CostModel(profile, preset.kernel_form)
    merging = MergeModel(profile, preset.merge_by, transfers)
    average = model.average
    per_adapter = 0.0 if lora.adapter is None else lora.adapter.value
    ranks = dict.fromkeys(profile.lora_modules, (_TYPICAL_RANK,) * profile.geometry.layers)
    adapter = AdapterRef(AdapterName("typical"), AdapterDigest("typical"), "", ranks, 0)
    # Unpadded and padded kernels count the ranks of distinct adapters once. An einsum counts all ranks for every row.
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
