"""Reads LoRA on parameters (PEFT's ``target_parameters``), such as those of experts.

A parameter of two dimensions has A and B like a linear layer. One of three has the weights of all experts of a layer:
PEFT stores A of all experts as ``[experts * rank, in]``, one expert after the other, and B as ``[out, rank *
experts]``, in which the experts alternate. PEFT nests its wrappers of one module's parameters. The outermost wrapper
has the module's name, each inner wrapper is called ``base_layer``, and the innermost wraps the first parameter.
"""

from collections.abc import Callable, Iterator

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE, ModuleTensors, TensorEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.module_names import BaseModules, ModulePlace
from lorikeet.adapters.peft_config import LoraConfig

_INNER = ".base_layer"


_UNDEFINED = ("use_dora", "lora_bias", "fan_in_fan_out")
"""Keys that PEFT refuses together with ``target_parameters``."""
_MAX_MISSING = 10
"""Warnings about targets that the base model lacks."""


def check_parameters(config: LoraConfig, resolver: BaseModules) -> list[str]:
    """Check the config of an adapter that changes parameters.

    Returns:
        Warnings about targets that the base model does not have, which PEFT ignores.

    Raises:
        AdapterError: PEFT defines no such adapter, or all targets are missing.
    """
    for key in _UNDEFINED:
        if getattr(config, key):
            raise AdapterError(
                f"{CONFIG_FILE}: {key} is set together with target_parameters, which PEFT does not allow"
            )
    if not resolver.knows_base:
        return []
    known = resolver.names_of_parameters("").keys() | {f"{name}.weight" for name in resolver.vocabulary_names("")}
    missing = [
        f"{CONFIG_FILE}: target_parameters names {target[:100]!r}, but the base model has no such parameter on which "
        "LoRA is supported: these are the weights of linear layers, embeddings, routers and experts"
        for target in config.target_parameters
        if not any(f".{name}".endswith(f".{target}") or target.endswith(f".{name}") for name in known)
    ]
    if len(missing) == len(config.target_parameters):
        raise AdapterError(missing[0])
    return missing[:_MAX_MISSING]


def parameter_of(name: str, resolver: BaseModules, is_targeted: Callable[[str], bool]) -> str:
    """Return the full name of the parameter that a module's tensors change, or the module's name if it has none.

    Args:
        name: name of the module in the adapter, such as ``model.layers.0.mlp.experts.base_layer``.
        resolver: modules and parameters of the base.
        is_targeted: whether the adapter changes a parameter.
    """
    module = name
    while module.endswith(_INNER):
        module = module.removesuffix(_INNER)
    depth = (len(name) - len(module)) // len(_INNER)
    wrapped = [parameter for parameter in resolver.parameters(module) if is_targeted(parameter)]
    return wrapped[-1 - depth] if depth < len(wrapped) else name


def describe_experts(
    place: ModulePlace, rows: tuple[int, ...], rank: int, scaling: float, a: TensorEntry, b: TensorEntry
) -> Iterator[ModuleTensors]:
    """Yield the LoRA of each module of a layer's experts.

    Args:
        place: place of the parameter.
        rows: number of output features of each module.
        rank: the rank of one expert.
        scaling: see ``ModuleTensors``.
        a, b: the tensors of all experts.

    Raises:
        AdapterError: the tensors have other shapes.
    """
    parts = len(place.modules) // place.experts
    for entry, expected in (
        (a, (rank * place.experts, a.shape[1])),
        (b, (sum(rows[:parts]), rank * place.experts)),
    ):
        if entry.shape != expected:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has shape {list(entry.shape)}; {place.experts} experts of rank "
                f"{rank} need {list(expected)}"
            )
    for number, module in enumerate(place.modules):
        expert, part = divmod(number, parts)
        before = sum(rows[:part])
        yield ModuleTensors(
            place.layer,
            module,
            rank,
            scaling,
            a.row_range(expert * rank, rank),
            b.row_range(before, rows[part]),
            (expert, place.experts),
        )
