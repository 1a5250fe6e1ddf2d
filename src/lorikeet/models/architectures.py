"""The architectures of our decoder.

Each architecture is a row that states its differences from Llama.

A new architecture is a row of ``ARCHITECTURES``, and a checkpoint in ``VARIANTS`` of ``tests/models/checkpoints.py``,
with which every test of the decoder then runs. Does not import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lorikeet.kernels.activation import Activation

LLAMA_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
"""Names of a layer's norms: before attention, of its output, before the MLP, of its output; "" where there is none."""
_NORMS_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NORMS_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_GLM_4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Features(NamedTuple):
    """The options in which an architecture of our decoder differs from Llama.

    Attributes:
        qkv_bias: whether q, k and v have a bias; None if ``attention_bias`` decides.
        o_bias: whether ``attention_bias`` also gives o a bias.
        mlp_bias: whether the key ``mlp_bias`` is read.
        qk_norm: whether queries and keys are RMS-normalised before rotation: ``none``, ``heads`` (each head separately)
            or ``whole`` (all heads of a token together).
        window: the layers with a sliding window: ``none``, ``all``, ``upper`` (see Qwen's keys), or ``typed`` (see
            ``layer_types``).
        full_every: n if every n-th layer has no window, for configs without ``layer_types``.
        multipliers: whether embeddings, residuals, attention scores and logits are scaled by keys of the config.
        no_rope: whether some layers have no rotary embedding.
        optional_rope: whether no layer has a rotary embedding, unless ``position_embedding_type`` is ``rope``.
        two_ropes: whether layers with a window have a different rotary embedding.
        partial_rope: whether a config may rotate only a part of each head.
        rope_axes: whether the positions of images have three axes, which the pairs of a head take turns to use.
        rotates_neighbours: whether a pair is two neighbouring elements, instead of an element of the first half and one
            of the second.
        norms: names of a layer's norms, in the order of ``LLAMA_NORMS``.
        norm_offset: number added to the weights of norms.
        activation: key of the activation function.
        inner: key of the number of inner features of the MLP.
        experts: key of the number of experts beside the MLP, which must be 0; "" if there are never any.
        is_gemma: whether embeddings are scaled by the root of their size, attention scores by
            ``query_pre_attn_scalar``, and scores and logits have soft caps.
        fused: the fused products that checkpoints store whole, with their module names in checkpoints.
        inside: the config's section with the decoder's keys, for models with other parts.
        recurrence: what some layers have in place of attention: ``none``, ``delta_rule`` or ``state_space``.
        gated_attention: whether q also has a gate for each element of the attention's output.
        defaults: values of missing keys that differ from Llama's.
    """

    qkv_bias: bool | None = False
    o_bias: bool = True
    mlp_bias: bool = False
    qk_norm: str = "none"
    window: str = "none"
    full_every: int = 0
    multipliers: bool = False
    no_rope: bool = False
    optional_rope: bool = False
    two_ropes: bool = False
    partial_rope: bool = False
    rope_axes: bool = False
    rotates_neighbours: bool = False
    norms: tuple[str, str, str, str] = LLAMA_NORMS
    norm_offset: float = 0.0
    activation: str = "hidden_act"
    inner: str = "intermediate_size"
    experts: str = ""
    is_gemma: bool = False
    fused: Mapping[str, str] = MappingProxyType({})
    inside: str = ""
    recurrence: str = "none"
    gated_attention: bool = False
    defaults: Mapping[str, Any] = MappingProxyType({})


_FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "max_position_embeddings": 8192,
}
_GEMMA_2: dict[str, Any] = {
    **_GEMMA,
    "hidden_activation": Activation.GELU_TANH,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_GEMMA_3: dict[str, Any] = {
    **_GEMMA_2,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
    "rope_theta": 1e6,
}
_GLM: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "head_dim": 128,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "eos_token_id": [151329, 151336, 151338],
}
_PHI: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_QWEN_3_5: dict[str, Any] = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
_GRANITE_HYBRID: dict[str, Any] = {
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
_OLMO: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}

_GEMMA_3_FEATURES = Features(
    qkv_bias=None,
    qk_norm="heads",
    window="typed",
    full_every=6,
    two_ropes=True,
    norms=_NORMS_AROUND,
    norm_offset=1.0,
    activation="hidden_activation",
    is_gemma=True,
    defaults=_GEMMA_3,
)
_QWEN_3_5_FEATURES = Features(
    qkv_bias=None,
    qk_norm="heads",
    partial_rope=True,
    rope_axes=True,
    norm_offset=1.0,
    recurrence="delta_rule",
    gated_attention=True,
    defaults=_QWEN_3_5,
)


ARCHITECTURES: dict[str, Features] = {
    "LlamaForCausalLM": Features(qkv_bias=None, mlp_bias=True),
    "MistralForCausalLM": Features(window="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Features(qkv_bias=True, window="upper"),
    "Qwen3ForCausalLM": Features(qkv_bias=None, qk_norm="heads", window="upper", defaults={"head_dim": 128}),
    "Qwen3_5ForCausalLM": _QWEN_3_5_FEATURES,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5_FEATURES._replace(inside="text_config"),
    "GraniteForCausalLM": Features(qkv_bias=None, mlp_bias=True, multipliers=True),
    "GraniteMoeHybridForCausalLM": Features(
        qkv_bias=None,
        multipliers=True,
        optional_rope=True,
        inner="shared_intermediate_size",
        experts="num_local_experts",
        fused={"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
        recurrence="state_space",
        defaults=_GRANITE_HYBRID,
    ),
    "SmolLM3ForCausalLM": Features(qkv_bias=None, mlp_bias=True, window="upper", no_rope=True),
    "Phi3ForCausalLM": Features(window="all", partial_rope=True, fused=_FUSED, defaults=_PHI),
    "GemmaForCausalLM": Features(
        qkv_bias=None, norm_offset=1.0, is_gemma=True, defaults=_GEMMA | {"hidden_act": Activation.GELU_TANH}
    ),
    "Gemma2ForCausalLM": Features(
        qkv_bias=None,
        window="typed",
        full_every=2,
        norms=_NORMS_AROUND,
        norm_offset=1.0,
        activation="hidden_activation",
        is_gemma=True,
        defaults=_GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _GEMMA_3_FEATURES,
    "Gemma3ForConditionalGeneration": _GEMMA_3_FEATURES._replace(inside="text_config"),
    "Olmo2ForCausalLM": Features(qkv_bias=None, qk_norm="whole", norms=_NORMS_AFTER, defaults=_OLMO),
    "Olmo3ForCausalLM": Features(
        qkv_bias=None,
        qk_norm="whole",
        window="typed",
        full_every=4,
        two_ropes=True,
        norms=_NORMS_AFTER,
        defaults=_OLMO | {"sliding_window": 4096, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0},
    ),
    "GlmForCausalLM": Features(
        qkv_bias=None,
        o_bias=False,
        partial_rope=True,
        rotates_neighbours=True,
        fused={"gate_up": _FUSED["gate_up"]},
        defaults=_GLM,
    ),
    "Glm4ForCausalLM": Features(
        qkv_bias=None,
        o_bias=False,
        partial_rope=True,
        rotates_neighbours=True,
        norms=_GLM_4_NORMS,
        fused={"gate_up": _FUSED["gate_up"]},
        defaults=_GLM,
    ),
}
"""The architectures by their class of transformers. Llama 2 and 3 and SmolLM2 all use the first."""
