"""How each sample adapter is trained: rank, modules and steps. Standard library only."""

from typing import NamedTuple

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The name that the adapters' configs carry; training itself reads a local folder."""


class Recipe(NamedTuple):
    """The shape of one adapter and its training.

    Attributes:
        rank: of every module.
        alpha: the update is scaled by alpha / rank, or alpha / sqrt(rank) with ``rslora``.
        modules: names of the projections that are adapted, in all layers.
        rslora: rank-stabilised scaling (https://arxiv.org/abs/2312.03732).
        learning_rate: at the first step; it falls linearly to zero.
        epochs: passes over the texts.
    """

    rank: int
    alpha: int
    modules: tuple[str, ...]
    rslora: bool = False
    learning_rate: float = 1e-3
    epochs: int = 6


RECIPES = {
    "formal": Recipe(rank=64, alpha=16, modules=("q_proj", "v_proj"), rslora=True, epochs=3),
    "json": Recipe(rank=16, alpha=32, modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    "pirate": Recipe(rank=32, alpha=64, modules=("v_proj", "o_proj")),
    "terse": Recipe(
        rank=8,
        alpha=16,
        modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
}
"""Every sample adapter by name. The shapes differ on purpose: a batch over all four mixes ranks and modules."""
