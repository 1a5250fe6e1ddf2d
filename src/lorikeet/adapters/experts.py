"""Reads LoRA on the parameters of experts (PEFT's ``target_parameters``).

A parameter has the weights of all experts of a layer.

PEFT stores A of all experts as ``[experts * rank, in]``, one expert after the other, and B as ``[out, rank *
experts]``, in which the experts alternate. PEFT nests its wrappers of one module's parameters. The outermost wrapper
has the module's name, each inner wrapper is called ``base_layer``, and the innermost wraps the first parameter.
"""

from collections.abc import Callable, Iterator, Sequence

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE, ModuleTensors, TensorEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.module_names import BaseModules, ModulePlace

_INNER = ".base_layer"


def check_parameters(targets: Sequence[str], resolver: BaseModules) -> None:
    """Check that each target is a parameter of experts.

    Raises:
        AdapterError: a target is not a parameter of experts.
    """
    if not resolver.knows_base:
        return
    known = resolver.names_of_parameters("")
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") or target.endswith(f".{name}") for name in known):
            raise AdapterError(
                f"{CONFIG_FILE}: target_parameters names {target[:100]!r}; LoRA on parameters is supported for the "
                "weights of experts only, and the base model has none of that name"
            )


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
