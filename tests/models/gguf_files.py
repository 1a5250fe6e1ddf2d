"""Writes tiny GGUF files with the library's own writer: models of ``make_checkpoint``, and tensors of random blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

Blocks = npt.NDArray[np.uint8]

SCALES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.IQ4_XS: [0],
}
"""Where a block of each type has float16 numbers, in bytes."""

MIXED = {
    "attn_q": Type.Q4_K,
    "attn_k": Type.Q4_K,
    "attn_v": Type.Q6_K,
    "attn_output": Type.Q5_K,
    "ffn_gate": Type.Q4_1,
    "ffn_up": Type.Q4_0,
    "ffn_down": Type.Q8_0,
    "token_embd": Type.Q6_K,
    "output": Type.F16,
}
"""Types of a model's tensors, as mixed as files are; of others F32."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_blocks(kind: Type, shape: tuple[int, int], seed: int, largest: float = 0.02) -> Blocks:
    """Return bytes ``[out, bytes of a row]`` in which everything is random, and scales are small."""
    random = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = random.uniform(0.2, 1, blocks.shape[:2]) * largest / 2 ** (6 if kind.name.endswith("_K") else 3)
        if kind in (Type.Q4_0, Type.Q8_0):
            scales *= random.choice([-1, 1], blocks.shape[:2])
        blocks[:, :, at : at + 2] = scales.astype(np.float16)[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_tensors(path: Path, tensors: Mapping[str, tuple[Type, Blocks]], metadata: Mapping[str, Any] = {}) -> Path:
    """Write a file of these tensors."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "qwen2")))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (kind, blocks) in tensors.items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path, model: PreTrainedModel, architecture: str, types: Mapping[str, Type] = MIXED, **more: Any
) -> Path:
    """Write the model as a file of this architecture. Quantised tensors get random blocks instead of its numbers."""
    config = model.config
    tensors = {}
    tied = config.tie_word_embeddings
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        module, end = name.rsplit(".", 1)
        if tied and module == "lm_head":
            continue
        parts = module.split(".", 3)
        in_layer = module.startswith("model.layers.")
        names = GEMMA_NAMES if architecture == "gemma3" else NAMES
        stored = names[parts[3] if in_layer else module]
        values = tensor.float().numpy()
        if architecture == "llama" and stored in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if stored == "attn_q" else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and stored.endswith("norm"):
            values = values + 1
        full = f"blk.{parts[2]}.{stored}.{end}" if in_layer else f"{stored}.{end}"
        kind = types.get(stored, Type.F32) if end == "weight" else Type.F32
        if kind in SCALES:
            tensors[full] = kind, random_blocks(kind, tensor.shape, seed)
        else:
            tensors[full] = kind, gguf.quants.quantize(np.ascontiguousarray(values), kind)
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.attention.key_length": model.model.layers[0].self_attn.head_dim,
        f"{architecture}.attention.value_length": model.model.layers[0].self_attn.head_dim,
        f"{architecture}.vocab_size": config.vocab_size,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }
    return write_tensors(path, tensors, metadata | more)
