"""Makes adapters without files, with a name, rank and size, for executors that do not compute."""

import hashlib
from collections.abc import Sequence

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.core.ids import AdapterDigest, AdapterName

PAPER_RANKS = (8, 16, 32, 64, 128)
"""Ranks of the adapters in Chameleon (section 5.1) and LoRAServe (section V-E), with equal numbers of adapters."""

ATTENTION = ("q", "k", "v", "o")
"""Target modules of adapters in the papers unless a paper names others."""


def adapter_names(count: int) -> list[str]:
    """Return ``count`` names, ``adapter-0000``, ``adapter-0001`` and so on, in the order of popularity rules."""
    return [f"adapter-{index:04d}" for index in range(count)]


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ranks to spread over adapters: ``32``, ``8,16,64``, or ``8-128`` for all doublings from 8 to 128.

    Raises:
        ValueError: the text has none of these forms.
    """
    try:
        low, dash, high = text.partition("-")
        ranks = tuple(int(low) << i for i in range(64) if int(low) << i <= int(high)) if dash else ()
        ranks = ranks or tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise ValueError(f"{text!r} is not a rank, a list of ranks such as 8,16,64, or a range such as 8-128")
    return ranks


def parse_modules(text: str) -> tuple[str, ...]:
    """Parse target modules, such as ``q,k,v``.

    Raises:
        ValueError: a module is unknown, or is named twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(LORA_MODULES):
        raise ValueError(f"modules {text!r}: choose from {', '.join(LORA_MODULES)}, each once")
    return names


def spread(ranks: Sequence[int], count: int) -> list[int]:
    """Return the rank of each of ``count`` adapters: ``ranks`` in turn.

    So the ranks' numbers of adapters differ by at most 1.
    """
    return [ranks[index % len(ranks)] for index in range(count)]


def synthetic_adapters(
    count: int,
    ranks: Sequence[int],
    geometry: ModelGeometry,
    *,
    modules: Sequence[str] = ATTENTION,
    seed: int = 0,
) -> list[AdapterRef]:
    """Return ``count`` adapters without files, named by ``adapter_names``.

    Args:
        count: number of adapters.
        ranks: ranks that are assigned in turn (see ``spread``), equal on all layers and modules of an adapter.
        geometry: geometry of the base model: layers, shapes and the bytes of an element.
        modules: target modules, some of ``LORA_MODULES``.
        seed: seed of the digests. Different seeds give different digests, as if all adapters had been trained again.
    """
    shapes = [geometry.modules[module] for module in modules]
    rank_bytes = (
        geometry.layers * geometry.dtype_bytes * sum(shape.in_features + shape.out_features for shape in shapes)
    )
    return [
        AdapterRef(
            AdapterName(name),
            AdapterDigest(hashlib.sha256(f"synthetic {seed} {name} {rank} {','.join(modules)}".encode()).hexdigest()),
            "",
            dict.fromkeys(modules, (rank,) * geometry.layers),
            rank * rank_bytes,
        )
        for name, rank in zip(adapter_names(count), spread(ranks, count), strict=True)
    ]


def adapters_by_name(
    names: Sequence[str], ranks: Sequence[int], geometry: ModelGeometry, *, modules: Sequence[str] = ATTENTION
) -> dict[str, AdapterRef]:
    """Return adapters without files with these names, by name. See :func:`synthetic_adapters` for the arguments."""
    made = synthetic_adapters(len(names), ranks, geometry, modules=modules)
    return {name: msgspec.structs.replace(ref, name=AdapterName(name)) for name, ref in zip(names, made, strict=True)}
