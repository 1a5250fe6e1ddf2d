"""The activation functions of gated MLPs. Does not import torch."""

from enum import StrEnum


class Activation(StrEnum):
    """The function that gates an MLP. The values are those in a ``config.json``."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    """GELU, approximated by tanh."""
