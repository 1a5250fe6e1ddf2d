"""Loads cost profiles by name or from a file.

The named profiles are composed from measured tables and data sheets, so their devices need not be present.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lorikeet import __version__
from lorikeet.core.geometry import ModuleShape
from lorikeet.core.text import unknown_name
from lorikeet.costs.devices import (
    COPY_S,
    DEVICE_MEMORY_SHARE,
    DEVICES,
    DRIVE_S,
    DRIVE_SHARE,
    MODELS,
    Device,
    Model,
)
from lorikeet.costs.operators import (
    EMBEDDING,
    OPERATORS_OF_A_LAYER,
    SOURCE,
    RooflineShares,
    all_reduce,
    gemm_s,
    measured_shares,
    operator_medians,
    operator_ratio,
)
from lorikeet.costs.profile import (
    Constant,
    CostProfile,
    Curve,
    Link,
    ProfileError,
    StepCosts,
    Switching,
    Transfers,
    read_profile,
)
from lorikeet.costs.published_lora import MODULES, LoraPaper, Setting, host_lora, lora_costs

_NOT_MODELLED = "not modelled"
_MOST_ROWS = 4096


def profile_name(device: Device, model: Model, tensor_parallel: int) -> str:
    """Return the name of a profile, such as ``h100x8-llama-2-70b``."""
    degree = f"x{tensor_parallel}" if tensor_parallel > 1 else ""
    return f"{device.name}{degree}-{model.name}"


def pool_bytes(device: Device, model: Model, tensor_parallel: int) -> int:
    """Return the usable device memory without the weights, over all ranks; negative if the weights do not fit."""
    return int(tensor_parallel * device.memory_bytes * DEVICE_MEMORY_SHARE) - model.weight_bytes


def compose_profile(
    device: Device, model: Model, tensor_parallel: int, lora_paper: LoraPaper | None = None
) -> CostProfile:
    """Compose the profile of a device, a model and a tensor-parallel degree.

    Args:
        device: device of one rank.
        model: the base model.
        tensor_parallel: number of ranks.
        lora_paper: paper of the LoRA constants; None for the paper with the nearest setting.

    Raises:
        ProfileError: the weights do not fit.
    """
    name = profile_name(device, model, tensor_parallel)
    pool = pool_bytes(device, model, tensor_parallel)
    if pool <= 0:
        raise ProfileError(f"{name}: the weights do not fit, {-pool / 1e9:.1f} GB are missing")
    shares = measured_shares(DEVICES[device.measured], model, tensor_parallel)
    step = _step_costs(device, model, tensor_parallel, shares)
    setting = Setting(device, model, tensor_parallel, shares, _prefill_s(step), _interpolation(step.tokens))
    return CostProfile(
        name=f"{name}@{lora_paper}" if lora_paper else name,
        device=f"{tensor_parallel} × {device.full_name}" if tensor_parallel > 1 else device.full_name,
        model=model.full_name,
        tensor_parallel=tensor_parallel,
        origin=_origin(device, model),
        made=f"composed by lorikeet {__version__}",
        geometry=model.geometry,
        vocabulary=model.vocabulary,
        max_model_len=model.max_model_len,
        pool_bytes=pool,
        lora_modules=MODULES,
        step=step,
        lora=lora_costs(setting, lora_paper),
        transfers=_transfers(device, tensor_parallel),
        switching=_switching(device, model, tensor_parallel, shares),
        host_lora=host_lora(device, model),
        weight_bytes=model.weight_bytes,
        kernel_efficiency=_kernel_efficiency(device, shares),
    )


def token_curve(device: Device, model: Model, tensor_parallel: int) -> Curve:
    """Return the time of a step's token-wise operators, at every measured number of tokens.

    The time is layers × (operators of a layer + two all-reduces) + the embedding, the sum that Vidur uses.
    """
    reduce_s, reduce_source = all_reduce(device, tensor_parallel)
    operator_s = _operators(device, model, tensor_parallel)
    medians = operator_medians(device.measured, model.measured, tensor_parallel)
    points = []
    for tokens in medians:
        message_bytes = tokens * model.hidden * model.geometry.dtype_bytes
        layer_s = sum(operator_s(name, tokens) for name in OPERATORS_OF_A_LAYER) + 2 * reduce_s(message_bytes)
        points.append((tokens, model.geometry.layers * layer_s + operator_s(EMBEDDING, tokens)))
    others = _scaled_from(device, model)
    scaled = f" of {', '.join(others)}, scaled by rooflines of data sheets" if others else ""
    return Curve("tokens", tuple(points), source=f"{SOURCE}{scaled}; {reduce_source}")


def _operators(device: Device, model: Model, tensor_parallel: int) -> Callable[[str, int], float]:
    """Return the measured or scaled seconds by operator and number of tokens."""
    medians = operator_medians(device.measured, model.measured, tensor_parallel)
    return lambda name, tokens: medians[tokens][name] * operator_ratio(device, model, tensor_parallel, name, tokens)


def _step_costs(device: Device, model: Model, tensor_parallel: int, shares: RooflineShares) -> StepCosts:
    kv_bytes = model.geometry.kv_elements_per_token() * model.geometry.dtype_bytes / tensor_parallel
    # Two products over the query heads: queries with keys, and attention weights with values.
    pair_operations = 4 * model.query_features * model.geometry.layers / tensor_parallel
    peak = device.flops * device.prefill_attention.value
    nothing = Constant(0.0, "s", source=_NOT_MODELLED)
    return StepCosts(
        tokens=token_curve(device, model, tensor_parallel),
        sampled_rows=_head_curve(device, model, tensor_parallel, shares),
        decode_attention=Constant(
            kv_bytes / (device.bandwidth_bytes_per_s * shares.bandwidth),
            "s/token",
            source="bytes of KV over memory bandwidth, at the share that products reach at one token",
        ),
        decode_sequence=nothing,
        prefill_attention=Constant(
            pair_operations / peak, "s/pair", source=f"operations over peak; share: {device.prefill_attention.source}"
        ),
        prefill_sequence=nothing,
        loop=nothing,
        loop_sequence=nothing,
    )


def _head_curve(device: Device, model: Model, tensor_parallel: int, shares: RooflineShares) -> Curve:
    """Return the time of the output layer, as one product at the efficiency of the measured products.

    Sampling takes no time.
    """
    shape = ModuleShape(model.hidden, model.vocabulary // tensor_parallel)
    rows = [2**exponent for exponent in range(_MOST_ROWS.bit_length())]
    return Curve(
        "rows",
        tuple((count, gemm_s(device, shape, count, shares)) for count in rows),
        source="the head is not in the tables: larger of bytes over bandwidth and operations over peak, at the shares "
        "that products reach; sampling not modelled",
    )


def _interpolation(curve: Curve) -> Callable[[int], float]:
    counts, seconds = zip(*curve.points, strict=True)
    return lambda count: float(np.interp(count, counts, seconds))


def _prefill_s(step: StepCosts) -> Callable[[int], float]:
    """Return the time of a step with one sequence's whole prompt."""
    tokens_s = _interpolation(step.tokens)
    head_s = step.sampled_rows.points[0][1]
    return lambda count: tokens_s(count) + head_s + step.prefill_attention.value * count * (count + 1) / 2


def _transfers(device: Device, tensor_parallel: int) -> Transfers:
    host = _link(
        COPY_S,
        device.host_bytes_per_s * tensor_parallel,
        device.host_share,
        "16 lanes of PCI Express by data sheet, every rank its part",
    )
    source = _link(
        DRIVE_S, device.drive_bytes_per_s, DRIVE_SHARE, "an NVMe drive on four lanes of PCI Express by data sheet"
    )
    return Transfers(source_to_device=source, source_to_host=source, host_to_device=host, device_to_host=host)


def _switching(device: Device, model: Model, tensor_parallel: int, shares: RooflineShares) -> Switching:
    """Return the costs of merging an adapter and of restoring the base weights.

    A merge reads the original weights, multiplies A and B, and writes new weights. A restore only copies. dLoRA
    describes a switch (section 2), and prints no time for it.
    """
    shapes = [model.geometry.modules[module] for module in MODULES]
    weights = model.geometry.layers * sum(shape.in_features * shape.out_features for shape in shapes) / tensor_parallel
    moved_s = 2 * weights * model.geometry.dtype_bytes / (device.bandwidth_bytes_per_s * shares.bandwidth)
    source = "weights read and written, over the bandwidth that products reach"
    return Switching(
        merge=Constant(moved_s, "s", source=source),
        merge_rank=Constant(
            2 * weights / (device.flops * shares.flops), "s/rank", source="operations of A·B over the reached peak"
        ),
        restore=Constant(moved_s, "s", source=source),
    )


def _link(fixed: Constant, bytes_per_s: float, share: Constant, source: str) -> Link:
    """Return a link that reaches a share of its nominal bandwidth."""
    reached = Constant(
        bytes_per_s * share.value, "bytes/s", source=f"{source}; {share.value:.1%} of it: {share.source}"
    )
    return Link(fixed, reached)


def _kernel_efficiency(device: Device, shares: RooflineShares) -> dict[str, Constant]:
    measured = f"largest product of a layer in the tables of {device.measured}"
    return {
        "gemm_bandwidth": Constant(shares.bandwidth, "share of bandwidth", source=f"{measured}, fewest tokens"),
        "gemm_flops": Constant(shares.flops, "share of peak", source=f"{measured}, most tokens"),
        "prefill_attention": device.prefill_attention,
    }


def _origin(device: Device, model: Model) -> str:
    others = _scaled_from(device, model)
    return f"scaled from {', '.join(others)} by data sheets" if others else "Vidur's tables, data sheet, papers"


def _scaled_from(device: Device, model: Model) -> list[str]:
    """Return the measured device and model whose tables stand in for the given ones."""
    return [each.measured for each in (device, model) if each.measured != each.name]


def _composed() -> dict[str, tuple[Device, Model, int]]:
    """Return every (device, model, degree) with enough memory for the weights, by name."""
    return {
        profile_name(device, model, degree): (device, model, degree)
        for device in DEVICES.values()
        for model in MODELS.values()
        for degree in device.degrees
        if pool_bytes(device, model, degree) > 0
    }


def profile_names() -> list[str]:
    """Return the names of all composed profiles."""
    return list(_composed())


def load_profile(name_or_path: str | Path) -> CostProfile:
    """Return a profile.

    Args:
        name_or_path: a name of :func:`profile_names`, optionally with ``@`` and the paper whose LoRA constants to use
            (``a100-80-llama-2-7b@loraserve``), or a path that ends in ``.toml``.

    Raises:
        ProfileError: unknown name, or the file cannot be read.
    """
    text = str(name_or_path)
    if text.endswith(".toml"):
        return read_profile(Path(text))
    name, has_paper, paper = text.partition("@")
    composed = _composed()
    if name not in composed:
        raise ProfileError(unknown_name("profile", name, list(composed)))
    if has_paper and paper not in list(LoraPaper):
        raise ProfileError(f"{text}: no LoRA constants of {paper!r}; choose one of {', '.join(LoraPaper)}")
    return compose_profile(*composed[name], LoraPaper(paper) if has_paper else None)
