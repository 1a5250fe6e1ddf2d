"""How near parts of a step come to what the machine allows."""

from collections.abc import Sequence

from lorikeet.bench.ceilings import PREFILL_ROWS, adapters_limit_s, decode_limit_tok_s, model_cost, prefill_limit_tok_s
from lorikeet.bench.limits import MachineLimits, median_limits
from lorikeet.core.plan import KernelForm
from lorikeet.costs.model import CostModel, LoraWork, StepWork, lora_s
from lorikeet.costs.profile import CostProfile, Figure
from lorikeet.models.config import ModelConfig

_UNIT = "of the limit"
_LORA_RANKS = (8, 8, 16, 24, 40, 56, 88, 128)


def kernel_efficiency(profile: CostProfile, config: ModelConfig, seen: Sequence[MachineLimits]) -> dict[str, Figure]:
    """Return the share of the machine's limit that products of a step and adapters reach, by part.

    ``decode``: one row through all products and norms, beside reading the weights once. ``prefill``: 512 rows, beside
    multiplying them. ``lora``: eight decodes under eight adapters, beside reading these once; left out if the fit of
    adapters came out as nothing, which on a model of few weights the noise can do.

    Args:
        profile: of the model on this machine.
        config: of the model.
        seen: what the machine could do each time that it was measured; errors are half of the whole range.
    """
    of_each = [_shares(profile, config, limits) for limits in seen]
    middle = _shares(profile, config, median_limits(seen))
    return {
        part: Figure(share, _UNIT, (max(each[part] for each in of_each) - min(each[part] for each in of_each)) / 2)
        for part, share in middle.items()
    }


def _shares(profile: CostProfile, config: ModelConfig, limits: MachineLimits) -> dict[str, float]:
    model = CostModel(profile, KernelForm.UNPADDED)
    bytes_each = profile.geometry.dtype_bytes
    base = model_cost(config, bytes_each)
    adapted = model_cost(config, bytes_each, _LORA_RANKS, profile.lora_modules)
    decode_s = model.step_s(StepWork(1, 1, 0, 0, 0, 0, None))
    prefill_s = model.step_s(StepWork(PREFILL_ROWS, 0, 0, 0, 0, 0, None))
    ranks = float(sum(_LORA_RANKS))
    adapters_s = lora_s(profile.lora_costs(KernelForm.UNPADDED), LoraWork(ranks, 0.0, ranks))
    shares = {
        "decode": 1 / decode_limit_tok_s(base, limits, 1) / decode_s,
        "prefill": PREFILL_ROWS / prefill_limit_tok_s(base, limits) / prefill_s,
    }
    if adapters_s:
        shares["lora"] = adapters_limit_s(adapted, limits, len(_LORA_RANKS)) / adapters_s
    return shares
