"""The tensors of one decoder, as one rank holds them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Linear weights are ``[out, in]``; ``None`` where the model has no such tensor.

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
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All of one rank's tensors.

    Attributes:
        embedding: ``[vocab, hidden]``, whole on every rank.
        layers: the decoder layers.
        final_norm: ``[hidden]``.
        lm_head: ``[vocab, hidden]``, whole on every rank; the embedding itself where they are tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
