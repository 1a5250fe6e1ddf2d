"""Provides LoRA costs on the device and on host cores, as the papers print them for their settings.

See docs/decisions/published-lora-costs.md. Host costs come from TOPPINGS, scaled to other models by their sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.plan import KernelForm
from lorikeet.costs.assist_costs import UNIT_MODULES
from lorikeet.costs.devices import DEVICES, MODELS, Device, Model
from lorikeet.costs.operators import RooflineShares
from lorikeet.costs.profile import Constant, HostLora, LoraCosts

MODULES = ("q", "k", "v", "o")
"""Modules over which one rank is defined.

Chameleon and LoRAServe adapt all of these modules, TOPPINGS all but the last.
"""


class LoraPaper(StrEnum):
    """Names the papers with LoRA constants. Constants of ``einsum`` always come from dLoRA."""

    CHAMELEON = "chameleon"
    LORASERVE = "loraserve"
    TOPPINGS = "toppings"


@dataclass(frozen=True)
class Setting:
    """Describes the setting on which a profile's LoRA constants depend.

    Attributes:
        device: device of the profile.
        model: the base model.
        tensor_parallel: number of ranks; each rank holds a part of an adapter.
        shares: shares of the device's limits that the products reach.
        prefill_s: returns the time of one sequence's prefill without adapters, by tokens.
        tokens_s: returns the time of the token-wise operators, by tokens.
    """

    device: Device
    model: Model
    tensor_parallel: int
    shares: RooflineShares
    prefill_s: Callable[[int], float]
    tokens_s: Callable[[int], float]

    @property
    def rank_bytes(self) -> float:
        """Number of bytes that one device reads for one rank over :data:`MODULES` and all layers."""
        return _rank_elements(self.model, MODULES) * 2 / self.tensor_parallel


def _rank_elements(model: Model, modules: tuple[str, ...]) -> int:
    shapes = (model.geometry.modules[module] for module in modules)
    return model.geometry.layers * sum(shape.in_features + shape.out_features for shape in shapes)


_NEAREST = {"a40": LoraPaper.CHAMELEON, "a10": LoraPaper.CHAMELEON}
"""Paper with the nearest setting to a device; LoRAServe for all other devices."""


def lora_costs(setting: Setting, paper: LoraPaper | None) -> dict[KernelForm, LoraCosts]:
    """Return the costs of each kernel form.

    Args:
        setting: setting of the profile.
        paper: source of the constants. None for decode by TOPPINGS and prefill by the paper with the nearest device.
    """
    prefill_paper = paper or _NEAREST.get(setting.device.name, LoraPaper.LORASERVE)
    prefill = _PREFILL[prefill_paper](setting)
    decode = _decode_of_toppings if paper in (None, LoraPaper.TOPPINGS) else _decode_by_limits
    costs = {form: decode(setting, form, prefill) for form in (KernelForm.UNPADDED, KernelForm.PADDED)}
    return costs | {KernelForm.EINSUM: _einsum_of_dlora(setting)}


_TOPPINGS_RANK_BYTES = _rank_elements(MODELS["llama-2-7b"], ("q", "k", "v")) * 2
_TOPPINGS_DECODE_S = {KernelForm.UNPADDED: (2.34e-6, 0.39e-6), KernelForm.PADDED: (3.54e-6, 0.2e-6)}
"""Seconds per rank of a row, and the error that the printed digits allow.

Figure 6: 24 rows of rank 32 and 16 rows of rank 64 take 35.3 and 35.9 ms unpadded, 34.8 and 35.8 ms padded. For the
padded kernel the example is only consistent if the exact value is between 3.52 and 3.91 µs.
"""
_TOPPINGS_CALL_S = 1.37e-3 / (32 * 3)
"""Seconds by which the intercept of the unpadded kernel's line is higher, per layer and adapted module."""


def _decode_of_toppings(setting: Setting, form: KernelForm, prefill: Constant) -> LoraCosts:
    """Scale TOPPINGS' decode to a device: its kernels are bound by memory bandwidth (section 5)."""
    value, error = _TOPPINGS_DECODE_S[form]
    a100 = DEVICES["a100-80"]
    slower = a100.bandwidth_bytes_per_s / setting.device.bandwidth_bytes_per_s
    scale = setting.rank_bytes / _TOPPINGS_RANK_BYTES * slower
    source = "TOPPINGS, Fig. 6 (Llama-2-7B, A100, q, k, v), in proportion to bytes of a rank over bandwidth"
    if form is KernelForm.UNPADDED:
        calls = setting.model.geometry.layers * len(MODULES)
        fixed = Constant(_TOPPINGS_CALL_S * calls, "s", source="TOPPINGS, Fig. 6: beyond padded, by layer and module")
    else:
        fixed = Constant(0.0, "s", source="not known apart from the step in TOPPINGS, Fig. 6")
    return LoraCosts(
        fixed=fixed,
        decode_row_rank=Constant(value * scale, "s/rank", error * scale, source),
        prefill_token_rank=prefill,
        adapter_rank=Constant(0.0, "s/rank", source="in decode_row_rank, as TOPPINGS counts"),
    )


def _decode_by_limits(setting: Setting, _form: KernelForm, prefill: Constant) -> LoraCosts:
    """Return the decode costs by the roofline.

    Each adapter is read once per step, and rows run at the efficiency of products.
    """
    bandwidth = setting.device.bandwidth_bytes_per_s * setting.shares.bandwidth
    return LoraCosts(
        fixed=Constant(0.0, "s", source="not printed"),
        decode_row_rank=Constant(_operations_s(setting), "s/rank", source="operations over the reached peak"),
        prefill_token_rank=prefill,
        adapter_rank=Constant(setting.rank_bytes / bandwidth, "s/rank", source="bytes over the reached bandwidth"),
    )


def _operations_s(setting: Setting) -> float:
    """Return the seconds of one token's multiplications and additions with one rank."""
    return setting.rank_bytes / (setting.device.flops * setting.shares.flops)


def _prefill_of_toppings(setting: Setting) -> Constant:
    source = "TOPPINGS prints none: operations over the reached peak"
    return Constant(_operations_s(setting), "s/(token·rank)", source=source)


_LORASERVE_RATIOS = {"llama-2-7b": ((1, 2.7), (8, 1.2)), "llama-2-70b": ((8, 1.45),)}
"""Prefill of 2,000 tokens with rank 128 over the same with rank 8, by tensor-parallel degree (Figs. 3 to 5).

The degree of the first is not printed; 1 is assumed.
"""


def _prefill_of_loraserve(setting: Setting) -> Constant:
    """Return the prefill costs by LoRAServe's ratios.

    A prefill with rank r takes 1 + c r times the base's, so (1 + 128 c) / (1 + 8 c) is the printed ratio.
    """
    growth = {tp: (ratio - 1) / (128 - 8 * ratio) for tp, ratio in _LORASERVE_RATIOS[setting.model.measured]}
    per_rank = _between(growth, setting.tensor_parallel)
    source = "LoRAServe, Figs. 3 to 5 (A100, q, k, v, o, 2,000 tokens; rank 128 beside 8), times this base's prefill"
    return Constant(per_rank * setting.prefill_s(2000) / 2000, "s/(token·rank)", source=source)


def _between(values: dict[int, float], degree: int) -> float:
    """Return the value at a degree: a power law between two printed degrees, otherwise the nearest value."""
    low = min(values)
    high = max(values)
    if not low < degree < high:
        return values[low if degree <= low else high]
    exponent = math.log(values[high] / values[low]) / math.log(high / low)
    return values[low] * math.pow(degree / low, exponent)


_CHAMELEON_COMPUTE = 0.60 - 0.175
_CHAMELEON_BASE = 0.40
"""Shares of the TTFT of one request of rank 128 (Fig.

2): loading and computing LoRA take 60 %, loading up to 17.5 %.
"""


def _prefill_of_chameleon(setting: Setting) -> Constant:
    per_rank = _CHAMELEON_COMPUTE / _CHAMELEON_BASE / 128
    source = (
        "Chameleon, Fig. 2 (Llama-7B, A40, q, k, v, o, rank 128, a medium input, taken as 1,024 tokens), "
        "times this base's prefill"
    )
    return Constant(per_rank * setting.prefill_s(1024) / 1024, "s/(token·rank)", source=source)


_PREFILL: dict[LoraPaper, Callable[[Setting], Constant]] = {
    LoraPaper.CHAMELEON: _prefill_of_chameleon,
    LoraPaper.LORASERVE: _prefill_of_loraserve,
    LoraPaper.TOPPINGS: _prefill_of_toppings,
}

_DLORA_SHARE = 0.389
_MOST_TOKENS = 4096


def _einsum_of_dlora(setting: Setting) -> LoraCosts:
    """Return the costs of an einsum: adapters take 38.9 % of the base model's computation (section 4.1).

    The batch sizes are not printed. The share is assumed to hold at every number of tokens and for any adapters. In
    addition, each row is multiplied with each adapter, at the efficiency of products. If the share applied to every
    adapter, a step of TOPPINGS' setting S3 would take seconds under dLoRA. TOPPINGS measures 58 % more time per token
    there than with kernels for mixed adapters.
    """
    once_s = setting.tokens_s(1)
    token_s = (setting.tokens_s(_MOST_TOKENS) - once_s) / (_MOST_TOKENS - 1)
    source = "dLoRA, section 4.1 (rank 8, A800): 38.9 % of this base's operators"
    multiplied = "operations over the reached peak, each row with each adapter"
    return LoraCosts(
        fixed=Constant(_DLORA_SHARE * once_s, "s", source=source),
        row=Constant(_DLORA_SHARE * token_s, "s/token", source=source),
        decode_row_rank=Constant(_operations_s(setting), "s/rank", source=multiplied),
        prefill_token_rank=Constant(_operations_s(setting), "s/(token·rank)", source=multiplied),
        adapter_rank=Constant(0.0, "s/rank", source="in the others"),
    )


_HOST_S = {64: 0.061, 256: 0.126}
"""Seconds of a prefill with LoRA on the host on every layer, by tokens (section 7.3, without explicit waits)."""
_DEVICE_S = {256: 0.044, 1000: 0.090}
"""Seconds of a prefill without LoRA (Fig. 4).

The value for 64 tokens is not printed and lies on the line through these values.
"""
_RANK = 64
_CORE_TOKENS = 16
_CORES = 16
"""Number of cores and rank. The rank is not printed; 64 is the rank of most of the paper's settings."""

_MODEL = MODELS["llama-2-7b"]


def host_lora(device: Device, model: Model) -> HostLora | None:
    """Return the time that host cores add to a layer; None for devices without measurements.

    Args:
        device: device of the rank. Only A100s were measured: the rows are sent over the A100's link, and the host is
            the host of such a machine.
        model: the base model. Rows are scaled by their bytes, and computation by its operations. Under tensor
            parallelism one rank exports the rows and each reads its columns, so the degree does not matter.
    """
    if device.measured != DEVICES["a100-80"].name:
        return None
    few, many = _HOST_S
    added = {tokens: (seconds - _device_s(tokens)) / _MODEL.geometry.layers for tokens, seconds in _HOST_S.items()}
    token_s = (added[many] - added[few]) / (many - few)
    once_s = added[few] - few * token_s
    own = model.geometry
    theirs = _MODEL.geometry
    source = (
        "TOPPINGS, section 7.3 and Fig. 4 (Llama-2-7B, A100, 64 and 256 tokens, 16 of them for a core): added to a "
        "prefill, over its layers"
    )
    return HostLora(
        fixed=Constant(0.0, "s", source="not known apart from token_rank"),
        token=Constant(token_s * _row_elements(own) / _row_elements(theirs), "s/token", source=f"{source}, by bytes"),
        token_rank=Constant(
            once_s / (_CORE_TOKENS * _RANK) * _rank_operations(own) / _rank_operations(theirs),
            "s/(token·rank)",
            source=f"{source}; rank {_RANK} assumed, by operations",
        ),
        cores=_CORES,
        core_tokens=_CORE_TOKENS,
    )


def _device_s(tokens: int) -> float:
    (few, few_s), (many, many_s) = _DEVICE_S.items()
    return few_s + (many_s - few_s) * (tokens - few) / (many - few)


def _row_elements(geometry: ModelGeometry) -> int:
    """Return the number of elements of a row sent to the host, and of q, k and v sent back."""
    shapes = [geometry.modules[module] for module in UNIT_MODULES]
    return shapes[0].in_features + sum(shape.out_features for shape in shapes)


def _rank_operations(geometry: ModelGeometry) -> int:
    """Return the number of multiplications of one token and rank."""
    shapes = [geometry.modules[module] for module in UNIT_MODULES]
    return sum(shape.in_features + shape.out_features for shape in shapes)
