"""Reads a PEFT LoRA folder, and checks that it fits the base model."""

import re
from pathlib import Path
from typing import NamedTuple

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import CONFIG_FILE, LoraConfig, limited_matching, read_config
from lorikeet.adapters.tensors import EXPONENTS, TensorEntry, check_finite, read_entries
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry

WEIGHTS_FILE = "adapter_model.safetensors"

PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Name of each of ``LORA_MODULES`` in checkpoints, below ``model.layers.N``."""

_MODULES = {projection: module for module, projection in PROJECTIONS.items()}
_KEY = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(0|[1-9][0-9]{0,5})\.([a-z_.]+)\.lora_([AB])(?:\.default)?\.weight"
)


def module_name(layer: int, module: str) -> str:
    """Return the full name of a module, which PEFT's patterns match, e.g. ``model.layers.0.self_attn.q_proj``."""
    return f"model.layers.{layer}.{PROJECTIONS[module]}"


class LoraPair(NamedTuple):
    """The two matrices of one module: ``a [rank, in_features]`` and ``b [out_features, rank]``."""

    a: TensorEntry
    b: TensorEntry

    @property
    def rank(self) -> int:
        """Rank, from the shape of A."""
        return self.a.shape[0]


class AdapterCheckpoint(NamedTuple):
    """Config and tensor headers of an adapter folder.

    Attributes:
        folder: the folder.
        config: the LoRA settings.
        base_model: base model named in the config, "" if none.
        pairs: tensor headers by (layer, module), in packing order.
        weight_bytes: size of the weights file.
    """

    folder: Path
    config: LoraConfig
    base_model: str
    pairs: dict[tuple[int, str], LoraPair]
    weight_bytes: int

    def scaling(self, layer: int, module: str) -> float:
        """Return the factor of B·A for one module, with rsLoRA and patterns applied."""
        return self.config.scaling(module_name(layer, module))

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(rank * (pair.a.shape[1] + pair.b.shape[0]) for pair in self.pairs.values() for rank in (pair.rank,))


def inspect_adapter(folder: Path) -> AdapterCheckpoint:
    """Read config and tensor headers of a PEFT LoRA folder, but no weights.

    Raises:
        AdapterError: a file is missing, in the wrong format or not supported, a tensor is unknown, A or B of a module
            is missing, or a rank differs from the config. The message names file and tensor.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        others = [file.name for file in folder.glob("adapter_model.*")] if folder.is_dir() else []
        found = f"; {', '.join(sorted(others))} is ignored, since only safetensors is supported" if others else ""
        raise AdapterError(f"{WEIGHTS_FILE}: there is no such file in {folder}{found}")
    config, base_model = read_config(folder / CONFIG_FILE)
    pairs = _pair_up(read_entries(folder / WEIGHTS_FILE))
    with limited_matching(CONFIG_FILE):
        for (layer, module), pair in pairs.items():
            _check_rank(pair, config.rank(module_name(layer, module)))
    return AdapterCheckpoint(folder, config, base_model, pairs, (folder / WEIGHTS_FILE).stat().st_size)


def validate(
    checkpoint: AdapterCheckpoint, geometry: ModelGeometry, max_rank: int = 0, max_bytes: int = 0
) -> dict[str, tuple[int, ...]]:
    """Check an adapter against the base model, weights included.

    Args:
        checkpoint: the adapter.
        geometry: sizes of the whole model.
        max_rank: larger ranks are refused; 0 for no limit.
        max_bytes: larger weights files are refused; 0 for no limit.

    Returns:
        For each module that it changes, the rank on every layer, as in ``AdapterRef.ranks``.

    Raises:
        AdapterError: it does not fit the model, is too large, or contains NaN or infinity.
    """
    if max_bytes and checkpoint.weight_bytes > max_bytes:
        raise AdapterError(f"{WEIGHTS_FILE}: {checkpoint.weight_bytes} bytes, at most {max_bytes} are allowed")
    for (layer, module), pair in checkpoint.pairs.items():
        _check_fit(layer, module, pair, geometry, max_rank)
    with limited_matching(CONFIG_FILE):
        _check_coverage(checkpoint, geometry)
    check_finite(
        checkpoint.folder / WEIGHTS_FILE, [entry for pair in checkpoint.pairs.values() for entry in (pair.a, pair.b)]
    )
    ranks = {
        module: tuple(
            checkpoint.pairs[layer, module].rank if (layer, module) in checkpoint.pairs else 0
            for layer in range(geometry.layers)
        )
        for module in LORA_MODULES
    }
    return {module: by_layer for module, by_layer in ranks.items() if any(by_layer)}


def _pair_up(entries: dict[str, TensorEntry]) -> dict[tuple[int, str], LoraPair]:
    halves: dict[tuple[int, str], dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        match = _KEY.fullmatch(name)
        if match is None or match[2] not in _MODULES:
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name} belongs to a module on which LoRA is not supported")
        if entry.dtype not in EXPONENTS or len(entry.shape) != 2:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {name} is {entry.dtype} {list(entry.shape)}; "
                f"expected a matrix of {', '.join(EXPONENTS)}"
            )
        sides = halves.setdefault((int(match[1]), _MODULES[match[2]]), {})
        if match[3] in sides:
            raise AdapterError(f"{WEIGHTS_FILE}: tensors {sides[match[3]].name} and {name} are the same matrix")
        sides[match[3]] = entry
    if not halves:
        raise AdapterError(f"{WEIGHTS_FILE}: it contains no tensors")
    for sides in halves.values():
        if len(sides) == 1:
            ((side, entry),) = sides.items()
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has no matching lora_{'B' if side == 'A' else 'A'}"
            )
    order = sorted(halves, key=lambda key: (key[0], LORA_MODULES.index(key[1])))
    return {key: LoraPair(halves[key]["A"], halves[key]["B"]) for key in order}


def _check_rank(pair: LoraPair, expected: int) -> None:
    for entry, found in ((pair.a, pair.a.shape[0]), (pair.b, pair.b.shape[1])):
        if found != expected:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has shape {list(entry.shape)}, so rank {found}; "
                f"{CONFIG_FILE} says {expected}"
            )


def _check_fit(layer: int, module: str, pair: LoraPair, geometry: ModelGeometry, max_rank: int) -> None:
    if layer >= geometry.layers:
        raise AdapterError(f"{WEIGHTS_FILE}: tensor {pair.a.name}: the base model has only {geometry.layers} layers")
    if max_rank and pair.rank > max_rank:
        raise AdapterError(f"{WEIGHTS_FILE}: tensor {pair.a.name} has rank {pair.rank}, at most {max_rank} is allowed")
    shape = geometry.modules[module]
    for entry, expected in ((pair.a, (pair.rank, shape.in_features)), (pair.b, (shape.out_features, pair.rank))):
        if entry.shape != expected:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has shape {list(entry.shape)}; "
                f"the base model needs {list(expected)}"
            )


def _check_coverage(checkpoint: AdapterCheckpoint, geometry: ModelGeometry) -> None:
    """Check that the tensors are exactly those of the modules that the config targets."""
    names = {module_name(layer, m): (layer, m) for layer in range(geometry.layers) for m in LORA_MODULES}
    for name, key in names.items():
        covered = checkpoint.config.covers(name)
        if covered and key not in checkpoint.pairs:
            raise AdapterError(f"{CONFIG_FILE} targets {name}, but {WEIGHTS_FILE} has no tensors for it")
        if not covered and key in checkpoint.pairs:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {checkpoint.pairs[key].a.name} is of a module "
                f"that {CONFIG_FILE} does not target"
            )
    targets = checkpoint.config.target_modules
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise AdapterError(
                f"{CONFIG_FILE}: target_modules names {target!r}, but the base model has no such module on which LoRA "
                "is supported"
            )
