"""Computes with adapters: merges several into one, puts many on a joint basis, and compares two.

The functions work only on the adapters' matrices, without a base model or PEFT.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import LoraConfig
from lorikeet.convert.folder import LoraFolder, LowRank, check_free, copy_chat_files, read_lora, write_lora

T = TypeVar("T")
Weighted = tuple[LowRank, float]
"""The change of a module by an adapter, and the adapter's weight."""


def _core(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, R and P of ``b @ a = Q R Pᵀ``. Q and P have orthonormal columns, and R is ``[rank, rank]``."""
    q, left = torch.linalg.qr(b)
    p, right = torch.linalg.qr(a.T)
    return q, left @ right.T, p


# --- merge ------------------------------------------------------------------------------------------------------------


class Merged(NamedTuple):
    """A module of a merged adapter.

    Attributes:
        module: full name of the module.
        rank: rank of the result.
        error: Frobenius norm of the difference between the result and the weighted sum, divided by the norm of the sum.
    """

    module: str
    rank: int
    error: float


def merge(parts: Sequence[tuple[Path, float]], target: Path, method: str, rank: int = 0) -> list[Merged]:
    """Merge several LoRA adapters into one, like PEFT's ``add_weighted_adapter``.

    Args:
        parts: the adapters' folders, and their weights in the sum.
        target: a folder that must not exist.
        method: a key of :data:`METHODS`.
        rank: rank of the result of ``svd``; 0 for the largest rank of the adapters.

    Raises:
        AdapterError: an adapter cannot be read, has more than matrices of linear layers, or, for ``linear``, has
            another rank.
    """
    check_free(target)
    folders = [(read_lora(folder), weight) for folder, weight in parts]
    for (folder, _), (place, _) in zip(folders, parts, strict=True):
        if folder.others:
            raise AdapterError(f"{place}: tensor {min(folder.others)} is beside A and B, and cannot be mixed")
        if folder.kept_config.get("alora_invocation_tokens") != folders[0][0].kept_config.get(
            "alora_invocation_tokens"
        ):
            raise AdapterError(f"{place}: its alora_invocation_tokens are not those of {parts[0][0]}")
    names = dict.fromkeys(name for folder, _ in folders for name in folder.modules)
    rank = rank or max(each.rank for folder, _ in folders for each in folder.modules.values())
    modules = {}
    report = []
    for name in names:
        found = [(folder.modules[name], weight) for folder, weight in folders if name in folder.modules]
        try:
            made = METHODS[method](found, rank)
        except ValueError as error:
            raise AdapterError(f"{name}: {error}") from error
        modules[name] = made
        report.append(Merged(name, made.rank, 0.0 if method == "cat" else _distance(_cat(found, 0), made)))
    write_lora(target, modules, folders[0][0].kept_config)
    copy_chat_files(parts[0][0], target)
    return report


def _cat(parts: Sequence[Weighted], rank: int) -> LowRank:
    """Concatenate the matrices. The ranks add up, and the result is exact."""
    a = torch.cat([each.a for each, _ in parts])
    b = torch.cat([each.b * (each.scaling * weight) for each, weight in parts], dim=1)
    return LowRank(a, b)


def _svd(parts: Sequence[Weighted], rank: int) -> LowRank:
    """Approximate the sum by the nearest matrix of a given rank."""
    whole = _cat(parts, 0)
    q, core, p = _core(whole.b.double(), whole.a.double())
    left, values, right = torch.linalg.svd(core, full_matrices=False)
    roots = values[:rank].sqrt()
    return LowRank((roots[:, None] * right[:rank] @ p.T).float(), (q @ left[:, :rank] * roots).float())


def _linear(parts: Sequence[Weighted], rank: int) -> LowRank:
    """Add up all A, and all B. The result is rough, but the rank does not grow."""
    if len({each.rank for each, _ in parts}) > 1:
        raise ValueError(f"linear needs equal ranks, not {', '.join(str(each.rank) for each, _ in parts)}: use svd")
    factors = [weight * each.scaling for each, weight in parts]
    roots = [math.sqrt(abs(factor)) for factor in factors]
    a = sum(each.a * math.copysign(root, factor) for (each, _), root, factor in zip(parts, roots, factors, strict=True))
    b = sum(each.b * root for (each, _), root in zip(parts, roots, strict=True))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return LowRank(a, b)


METHODS: dict[str, Callable[[Sequence[Weighted], int], LowRank]] = {"cat": _cat, "svd": _svd, "linear": _linear}
"""By PEFT's names of ``combination_type``."""


# --- difference -------------------------------------------------------------------------------------------------------


class AdapterDifference(NamedTuple):
    """The difference of a module or another tensor between two adapters.

    Attributes:
        name: full name of the module, or name of the tensor.
        ranks: rank in each adapter, or number of elements of a tensor; 0 for an adapter without it.
        relative: norm of the difference, divided by the norm in the first adapter. None if only one adapter has it.
    """

    name: str
    ranks: tuple[int, int]
    relative: float | None


class Differences(NamedTuple):
    """The differences between two adapters.

    Attributes:
        config: keys whose values differ, with both values.
        modules: the modules that either adapter changes.
        tensors: the tensors besides A and B.
    """

    config: dict[str, tuple[Any, Any]]
    modules: list[AdapterDifference]
    tensors: list[AdapterDifference]


_COMPARED = sorted({*LoraConfig.__struct_fields__, "base_model_name_or_path", "revision"} - {"target_modules"})
"""Keys of a config that change answers; the effect of ``target_modules`` is in the modules."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(LoraConfig)}


def diff(first: Path, second: Path) -> Differences:
    """Compare two LoRA folders by the products of B and A of each module.

    Raises:
        AdapterError: an adapter cannot be read.
    """
    one = read_lora(first)
    two = read_lora(second)
    values = {key: (_value(one.config, key), _value(two.config, key)) for key in _COMPARED}
    config = {key: pair for key, pair in values.items() if pair[0] != pair[1]}
    modules = [
        AdapterDifference(name, (0 if a is None else a.rank, 0 if b is None else b.rank), _relative(a, b))
        for name, a, b in _both(one.modules, two.modules)
    ]
    tensors = [
        AdapterDifference(
            name, (0 if a is None else a.numel(), 0 if b is None else b.numel()), _relative_of_tensors(a, b)
        )
        for name, a, b in _both(one.others, two.others)
    ]
    return Differences(config, modules, tensors)


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key; None if it is empty or PEFT's default."""
    value = config.get(key)
    return None if not value or value == _DEFAULTS.get(key) else value


def _both(one: Mapping[str, T], two: Mapping[str, T]) -> list[tuple[str, T | None, T | None]]:
    return [(name, one.get(name), two.get(name)) for name in dict.fromkeys((*one, *two))]


def _relative(one: LowRank | None, two: LowRank | None) -> float | None:
    if one is None or two is None or (one.a.shape[1], len(one.b)) != (two.a.shape[1], len(two.b)):
        return None
    return _distance(one, two)


def _relative_of_tensors(one: Tensor | None, two: Tensor | None) -> float | None:
    if one is None or two is None or one.shape != two.shape:
        return None
    return _share(float((one.double() - two.double()).norm()), float(one.double().norm()))


def _distance(one: LowRank, two: LowRank) -> float:
    """Return the norm of the difference of two changes, divided by the norm of the first."""
    if one.scaling == two.scaling and torch.equal(one.a, two.a) and torch.equal(one.b, two.b):
        return 0.0
    b, a = one.factors()
    d, c = two.factors()
    _, whole, _ = _core(b, a)
    _, rest, _ = _core(torch.cat([b, -d], dim=1), torch.cat([a, c]))
    return _share(float(rest.norm()), float(whole.norm()))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


# --- compress ---------------------------------------------------------------------------------------------------------


class Compressed(NamedTuple):
    """An adapter that was compressed to a joint basis.

    Attributes:
        name: name of the adapter's folder.
        ranks: smallest and largest rank of the modules before.
        rank: largest rank of the modules now.
        error: norm of the error of all changes, divided by the norm of the changes.
        alone: the error if each module were cut to the rank without the other adapters.
    """

    name: str
    ranks: tuple[int, int]
    rank: int
    error: float
    alone: float


def compress(folders: Sequence[Path], target: Path, rank: int) -> list[Compressed]:
    """Write adapters that share one A for each module, the best joint basis of a given rank.

    The changes D_i of a module become B_i·V. The rows of V are the leading right singular vectors of all D_i, stacked,
    each divided by its norm, so that all have the same weight. B_i = D_i·Vᵀ is then the best choice. This is the
    one-sided form of the joint diagonalisation of https://arxiv.org/abs/2407.00066. Keeping a separate B for each
    adapter costs no more file space than sharing it, and loses less.

    Args:
        folders: folders of adapters of one base. Their names must differ.
        target: a folder that must not exist. It gets a subfolder for each adapter, with the adapter's name.
        rank: maximum rank of a basis. The rank is smaller if a module's changes together have fewer directions.

    Raises:
        AdapterError: an adapter cannot be read, or has more than matrices of linear layers.
    """
    check_free(target)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise AdapterError("two folders have the same name, and would be written to the same place")
    read = dict(zip(names, map(read_lora, folders), strict=True))
    for name, folder in read.items():
        if folder.others:
            raise AdapterError(f"{name}: tensor {min(folder.others)} is beside A and B, and has no joint basis")
    bases = {
        module: _joint_basis([each.modules[module] for each in read.values() if module in each.modules], rank)
        for module in dict.fromkeys(module for each in read.values() for module in each.modules)
    }
    report = []
    for (name, folder), source in zip(read.items(), folders, strict=True):
        made, found = _on_bases(name, folder, bases)
        write_lora(target / name, made, folder.kept_config)
        copy_chat_files(source, target / name)
        report.append(found)
    return report


def _joint_basis(changes: Sequence[LowRank], rank: int) -> Tensor:
    """Return orthonormal rows, fp64 ``[at most rank, in_features]``."""
    sides = {(each.a.shape[1], len(each.b)) for each in changes}
    if len(sides) > 1:
        raise AdapterError(f"the adapters are for different bases: a module has the sizes {sorted(sides)}")
    rows = []
    for each in changes:
        b, a = each.factors()
        part = torch.linalg.qr(b).R @ a  # These rows have the same lengths and angles as the rows of B·A.
        norm = float(part.norm())
        rows.append(part / norm if norm else part)
    basis: Tensor = torch.linalg.svd(torch.cat(rows), full_matrices=False).Vh
    return basis[:rank]


def _on_bases(name: str, folder: LoraFolder, bases: Mapping[str, Tensor]) -> tuple[dict[str, LowRank], Compressed]:
    made = dict[str, LowRank]()
    total = 0.0
    kept = 0.0
    best = 0.0
    for module, each in folder.modules.items():
        basis = bases[module]
        b, a = each.factors()
        new = b @ (a @ basis.T)
        made[module] = LowRank(basis.float(), new.float())
        squares = torch.linalg.svdvals(_core(b, a)[1]).square()
        total += float(squares.sum())
        best += float(squares[: len(basis)].sum())
        kept += float(new.square().sum())
    ranks = [each.rank for each in folder.modules.values()]
    error, alone = (math.sqrt(max(0.0, 1 - part / total)) if total else 0.0 for part in (kept, best))
    return made, Compressed(name, (min(ranks), max(ranks)), max(each.rank for each in made.values()), error, alone)
