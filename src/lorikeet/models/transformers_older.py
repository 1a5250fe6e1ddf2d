"""Replaces the attention of models for which transformers has no hook."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lorikeet.models.transformers_attention import UnsupportedAttention, call_attention

OLDER = frozenset({"CodeGenForCausalLM", "FalconForCausalLM"})
"""Classes of models that :func:`replace_attention` changes."""


def replace_attention(model: PreTrainedModel) -> None:
    """Replace the attention of a model in :data:`OLDER` by the functions of ``transformers_attention``."""
    for module in model.modules():
        if type(module).__name__ == "CodeGenAttention":
            _set(module, "_attn", _codegen)
        elif type(module).__name__ == "FalconAttention":
            _set(module, "forward", _falcon)


def restore_attention(model: PreTrainedModel) -> None:
    """Undo :func:`replace_attention`."""
    for module in model.modules():
        for name in ("_attn", "forward"):
            if isinstance(vars(module).get(name), partial):
                object.__delattr__(module, name)


def _set(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    object.__setattr__(module, name, partial(function, module))


def _codegen(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
    """Return the attention ``[1, heads, T, dim]`` for queries, keys and values of the same shape."""
    kind = value.dtype  # Queries and keys are fp32 after their rotation.
    out, _ = call_attention(module, query.to(kind), key.to(kind), value, attention_mask, scaling=1 / module.scale_attn)
    return out.transpose(1, 2), None


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute ``FalconAttention.forward`` without repeating the heads of keys and values."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    if alibi is not None or position_embeddings is None:
        raise UnsupportedAttention("its positions are biases of the scores (alibi)")
    qkv = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:
        grouped = qkv.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
        q = grouped[..., :-2, :].flatten(2, 3)
        k = grouped[..., -2, :]
        v = grouped[..., -1, :]
    else:
        q, k, v = module._split_heads(qkv)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = call_attention(module, q, k, v, attention_mask, scaling=module.inv_norm_factor)[0]
    return module.dense(out.flatten(2)), None
