"""Writes adapters with random weights in PEFT's format, for measurements and parity checks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorikeet.adapters.checkpoint import PROJECTIONS
from lorikeet.core.geometry import ModelGeometry
from lorikeet.workloads.synthetic import ATTENTION

_B_STD = 0.02
"""Standard deviation of B, large enough that greedy answers differ from the base model's, and small enough that answers
stay text."""


def write_random_adapter(
    folder: Path,
    geometry: ModelGeometry,
    rank: int,
    *,
    modules: Sequence[str] = ATTENTION,
    seed: int = 0,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    b_std: float = _B_STD,
    base_name: str = "",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an adapter with non-zero B and return ``folder``.

    Args:
        folder: created if missing.
        geometry: geometry of the whole base model.
        rank: rank of all modules that ``rank_pattern`` does not name.
        modules: some of ``LORA_MODULES``.
        seed: seed of the weights.
        rslora: whether to scale by alpha / sqrt(rank) instead of alpha / rank.
        rank_pattern: ranks of modules (such as ``q``) that differ from ``rank``.
        b_std: standard deviation of B. A is drawn as in PEFT, in proportion to 1 / sqrt(in_features).
        base_name: name of the base model in the config.
        dtype: dtype of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = {module: (rank_pattern or {}).get(module, rank) for module in modules}
    tensors = {}
    for layer in range(geometry.layers):
        for module in (module for module in modules if geometry.has_module(layer, module)):
            shape = geometry.modules[module]
            r = ranks[module]
            prefix = f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}"
            a = torch.randn(r, shape.in_features, generator=generator) / shape.in_features**0.5
            b = torch.randn(shape.out_features, r, generator=generator) * b_std
            tensors[f"{prefix}.lora_A.weight"] = a.to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": rslora,
        "target_modules": sorted(PROJECTIONS[module].split(".")[-1] for module in modules),
        "rank_pattern": {PROJECTIONS[module].split(".")[-1]: r for module, r in ranks.items() if r != rank},
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def spread_ranks(count: int, low: int = 8, high: int = 128) -> list[int]:
    """Return ``count`` ranks from ``low`` to ``high``, evenly spaced on a log scale, in multiples of 8."""
    if count < 2:
        return [low] * count
    return [round(low * (high / low) ** (i / (count - 1)) / 8) * 8 for i in range(count)]
