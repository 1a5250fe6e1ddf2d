"""What LoRA on host cores costs as TOPPINGS prints it, carried to other models by their sizes.

It prints whole prefills of Llama-2-7B on an A100 whose LoRA part is all computed by the host (section 7.3), and
prefills without it (Fig. 4); their difference, over the layers, is what the host adds to a layer. Each process has 16
tokens there (Fig. 12), so what grows with the prompt is not computation: it is counted by the row that is handed over.
"""

from lorikeet.core.geometry import ModelGeometry
from lorikeet.costs.devices import DEVICES, MODELS, Device, Model
from lorikeet.costs.profile import Figure, HostLora
from lorikeet.scheduling.coldstart.costs import ASSISTED_MODULES

_HOST_S = {64: 0.061, 256: 0.126}
"""Seconds of a prefill with the host's part on every layer, by tokens (section 7.3, without explicit waits)."""
_DEVICE_S = {256: 0.044, 1000: 0.090}
"""Of one without (Fig. 4); that of 64 tokens is not printed and lies on the line through these."""
_RANK, _CORE_TOKENS, _CORES = 64, 16, 16
"""The rank is not printed there; 64 is that of most of the paper's settings."""

_MODEL = MODELS["llama-2-7b"]


def host_lora(device: Device, model: Model) -> HostLora | None:
    """Return what host cores add to a layer; None beside devices that nobody measured it on.

    Args:
        device: A100s alone: the rows go over its link, and the host is that of such machines.
        model: rows are carried over by their bytes, computation by its operations. Under tensor parallelism one rank
            exports the rows and each reads its columns, so the degree does not matter.
    """
    if device.measured != DEVICES["a100-80"].name:
        return None
    few, many = _HOST_S
    added = {tokens: (seconds - _device_s(tokens)) / _MODEL.geometry.layers for tokens, seconds in _HOST_S.items()}
    token_s = (added[many] - added[few]) / (many - few)
    once_s = added[few] - few * token_s
    own, theirs = model.geometry, _MODEL.geometry
    source = (
        "TOPPINGS, section 7.3 and Fig. 4 (Llama-2-7B, A100, 64 and 256 tokens, 16 of them for a core): added to a "
        "prefill, over its layers"
    )
    return HostLora(
        fixed=Figure(0.0, "s", source="not known apart from token_rank"),
        token=Figure(token_s * _row_elements(own) / _row_elements(theirs), "s/token", source=f"{source}, by bytes"),
        token_rank=Figure(
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
    """Elements of a row on its way to the host, and of q, k and v on theirs back."""
    shapes = [geometry.modules[module] for module in ASSISTED_MODULES]
    return shapes[0].in_features + sum(shape.out_features for shape in shapes)


def _rank_operations(geometry: ModelGeometry) -> int:
    """Multiplications of one token and rank."""
    shapes = [geometry.modules[module] for module in ASSISTED_MODULES]
    return sum(shape.in_features + shape.out_features for shape in shapes)
