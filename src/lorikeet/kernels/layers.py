"""The layers of a decoder, as a backend sees them that computes all of them in one call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.base import Batch, LoraTargets, Weight


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; ``None`` where the model has no such tensor.

    Linear weights are ``[out, in]``, plain as they are loaded or packed by ``Kernels.pack``.

    Attributes:
        input_norm, post_norm: ``[hidden]``, before attention and before the MLP.
        qkv, qkv_bias: queries, keys and values, one below the other.
        q_norm, k_norm: ``[head_dim]``.
        o, o_bias: split by input; the bias is held by rank 0 alone, since partial products are summed.
        gate_up, gate_up_bias: gate, and up below it.
        down, down_bias: as ``o``.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class LayersShape(NamedTuple):
    """What the weights of layers do not tell.

    Attributes:
        heads, kv_heads, head_dim: of attention.
        eps: of all norms.
        scale: of attention's scores.
        windows: of each layer; None where a token sees all before it.
        targets: what adapters change, of q, k and v, of o, of gate and up, and of down.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    windows: tuple[int | None, ...]
    targets: tuple[LoraTargets, ...]


Layers = Callable[[Tensor, Tensor, Tensor, Tensor, Batch], tuple[Tensor, Tensor]]
"""Computes the layers of a batch that :func:`fits_one_call`.

Arguments are x ``[T, hidden]``, changed, cos and sin ``[T, head_dim]``, the arena as ``kernels.base.kv_view`` shows it,
changed, and the batch. Of its sample rows it returns x before the last layer's MLP is added, and what that adds, both
``[S, hidden]``.
"""


def fits_one_call(batch: Batch) -> bool:
    """Whether nothing in the batch has to be done between kernels."""
    return batch.assist is None and (batch.lora is None or batch.lora.form is not KernelForm.EINSUM)
