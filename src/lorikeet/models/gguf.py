"""Reads GGUF files: the metadata, the table of tensors, and a ``config.json`` made from them.

Does not import torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from lorikeet.models.json_section import JsonSection, ModelConfigError

GGUF_FILE = "model.gguf"
"""The file, or a link to it, in a prepared folder."""


class BlockType(NamedTuple):
    """A type of tensor data: single values, or blocks of consecutive values of a row.

    Attributes:
        name: GGML's.
        values: number of values of a block.
        size_bytes: bytes of a block.
    """

    name: str
    values: int
    size_bytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
}
"""Types by number."""


class GgufTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        shape: sizes in torch's order, ``[out, in]``.
        type: type of the data.
        start, size_bytes: position and size of the data in the file.
    """

    shape: tuple[int, ...]
    type: BlockType
    start: int
    size_bytes: int


class GgufFile(NamedTuple):
    """The content of a file.

    Attributes:
        path: path of the file.
        metadata: values by key. A list of strings is replaced by its length.
        tensors: tensors by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def section(self) -> JsonSection:
        """The metadata as a section whose values are checked when they are read."""
        return JsonSection(self.metadata, str(self.path))


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and the table of tensors, but not the tensors' data.

    Raises:
        ModelConfigError: the file is not GGUF of version 2 or 3, is cut off, or has tensors of an unknown type.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(path, content)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (struct.error, IndexError) as error:
        raise ModelConfigError(f"{path}: is cut off") from error


def _read(path: Path, content: mmap.mmap) -> GgufFile:
    if content[:4] != b"GGUF":
        raise ModelConfigError(f"{path}: is not a GGUF file")
    reader = _Reader(content, 4)
    version = reader.number("<I")
    if version not in (2, 3):
        raise ModelConfigError(f"{path}: GGUF version {version} is not supported, only 2 and 3")
    tensor_count = reader.number("<Q")
    value_count = reader.number("<Q")
    metadata = {}
    for _ in range(value_count):
        key = reader.string()
        metadata[key] = reader.value(reader.number("<I"))
    rows = []
    for _ in range(tensor_count):
        name = reader.string()
        sizes = tuple(reader.number("<Q") for _ in range(reader.number("<I")))
        rows.append((name, sizes[::-1], reader.number("<I"), reader.number("<Q")))
    alignment = int(metadata.get("general.alignment", 32))
    first = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in rows:
        if number not in TYPES:
            raise ModelConfigError(f"{path}: tensor {name} has the unknown type {number}")
        kind = TYPES[number]
        count = 1
        for size in shape:
            count *= size
        if (shape[-1] if shape else 1) % kind.values:
            raise ModelConfigError(f"{path}: tensor {name} of type {kind.name} has rows of {shape[-1]} values")
        tensor = GgufTensor(shape, kind, first + offset, count // kind.values * kind.size_bytes)
        if tensor.start + tensor.size_bytes > len(content):
            raise ModelConfigError(f"{path}: is cut off inside of tensor {name}")
        tensors[name] = tensor
    return GgufFile(path, metadata, tensors)


_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9


class _Reader:
    """Reads values in order."""

    def __init__(self, content: mmap.mmap, at: int) -> None:
        self._content = content
        self.at = at

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._content, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.number("<Q")
        start = self.at
        self.at = self.at + length
        if self.at > len(self._content):
            raise IndexError
        return self._content[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata have the unknown type {kind}")
        element = self.number("<I")
        count = self.number("<Q")
        if element == _STRING:
            for _ in range(count):
                length = self.number("<Q")
                self.at += length
            return count
        return [self.value(element) for _ in range(count)]


# --- config.json ----------------------------------------------------------------------------------------------------


class _Model(NamedTuple):
    """The names that transformers uses for an architecture.

    Attributes:
        architecture, model_type: values for ``config.json``.
        more: function that returns further keys of ``config.json`` from the metadata.
    """

    architecture: str
    model_type: str
    more: Callable[[JsonSection, str], dict[str, Any]]


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the ``config.json`` of the model in a file.

    Raises:
        ModelConfigError: its architecture is not supported, or a value is missing.
    """
    settings = file.section
    name = settings.string("general.architecture", "")
    if name not in _MODELS:
        raise settings.error("general.architecture", f"{name!r} is not supported, only {', '.join(sorted(_MODELS))}")
    model = _MODELS[name]
    heads = settings.integer(f"{name}.attention.head_count")
    hidden_size = settings.integer(f"{name}.embedding_length")
    vocabulary = file.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise settings.error("token_embd.weight", "this tensor is missing")
    head_dim = settings.integer(f"{name}.attention.key_length", hidden_size // heads)
    if settings.integer(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise settings.error(f"{name}.rope.dimension_count", f"only whole heads of {head_dim} can be rotated")
    config: dict[str, Any] = {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "vocab_size": vocabulary.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": settings.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": settings.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.integer(f"{name}.context_length"),
        "rms_norm_eps": _shortest(settings.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(settings.number(f"{name}.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
    }
    for key in ("bos_token_id", "eos_token_id"):
        if (token := settings.get(f"tokenizer.ggml.{key}")) is not None:
            config[key] = token
    scaling = _scaling(settings, name) or _llama3_scaling(file, config["rope_theta"], head_dim)
    return config | ({"rope_scaling": scaling} if scaling else {}) | model.more(settings, name)


def _shortest(value: float) -> float:
    """Return the shortest decimal number for a float32, such as 1e-05 for 9.99999974738e-06 in the file."""
    return float(f"{value:.7g}")


def _scaling(settings: JsonSection, name: str) -> dict[str, Any] | None:
    kind = settings.string(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = settings.number(f"{name}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = settings.integer(f"{name}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise settings.error(f"{name}.rope.scaling.type", f"{kind!r} is not supported, only linear and yarn")


_LLAMA3_TOKENS = 8192
_LLAMA3_LOW = 1.0
_LLAMA3_HIGH = 4.0
"""Context before scaling, and the band of rotations over it, of Llama 3.1 to 3.3."""


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return Llama 3's scaling if the file has a tensor of frequency divisors.

    Raises:
        ModelConfigError: the divisors are not Llama 3's.
    """
    tensor = file.tensors.get(_FREQUENCIES)
    if tensor is None:
        return None
    with file.path.open("rb") as content:
        content.seek(tensor.start)
        divisors = struct.unpack(f"<{tensor.size_bytes // 4}f", content.read(tensor.size_bytes // 4 * 4))
    factor = float(round(max(divisors, default=1.0), 3))

    def divisor(pair: int) -> float:
        rotations = _LLAMA3_TOKENS / (2 * math.pi * theta ** (2 * pair / head_dim))
        kept = min(max((rotations - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        return 1 / ((1 - kept) / factor + kept)

    wanted = [divisor(pair) for pair in range(head_dim // 2)]
    if tensor.type.name != "F32" or len(divisors) != len(wanted):
        raise file.section.error(_FREQUENCIES, f"must be {len(wanted)} numbers of type F32")
    if any(abs(found / right - 1) > 1e-3 for found, right in zip(divisors, wanted, strict=True)):
        raise file.section.error(_FREQUENCIES, "only the scaling of Llama 3 is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_TOKENS,
    }


def _no_more(settings: JsonSection, name: str) -> dict[str, Any]:
    return {}


def _llama(settings: JsonSection, name: str) -> dict[str, Any]:
    return {"attention_bias": False, "mlp_bias": False}


def _gemma3(settings: JsonSection, name: str) -> dict[str, Any]:
    """Return Gemma 3's keys.

    Every sixth layer sees the whole context. Other layers have a window and a different rotation.
    """
    layers = settings.integer(f"{name}.block_count")
    pattern = settings.integer(f"{name}.attention.sliding_window_pattern", 6)
    kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": settings.integer(f"{name}.attention.sliding_window"),
        "layer_types": kinds,
        "query_pre_attn_scalar": settings.integer(f"{name}.attention.key_length"),
        "rope_local_base_freq": _shortest(settings.number(f"{name}.rope.freq_base_swa", 10_000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": settings.get(f"{name}.final_logit_softcapping"),
    }


_MODELS = {
    "llama": _Model("LlamaForCausalLM", "llama", _llama),
    "qwen2": _Model("Qwen2ForCausalLM", "qwen2", _no_more),
    "qwen3": _Model("Qwen3ForCausalLM", "qwen3", _no_more),
    "gemma3": _Model("Gemma3ForCausalLM", "gemma3_text", _gemma3),
}
"""Models by ``general.architecture``, which is ``llama`` in Mistral's files."""


# --- names ------------------------------------------------------------------------------------------------------------

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FREQUENCIES = "rope_freqs.weight"
"""What :func:`gguf_config` reads."""


def transformers_names(file: GgufFile) -> dict[str, str]:
    """Return a map from transformers' name of each tensor to its name in the file. Unknown tensors keep their names."""
    layer_names = _LAYER_NAMES
    if file.metadata.get("general.architecture") == "gemma3":
        layer_names = _LAYER_NAMES | _GEMMA_NORMS
    found = {}
    for name in file.tensors:
        module, _, end = name.rpartition(".")
        parts = module.split(".")
        if name == _FREQUENCIES:
            continue
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in layer_names:
            module = f"model.layers.{parts[1]}.{layer_names[parts[2]]}"
        elif module in _NAMES:
            module = _NAMES[module]
        found[f"{module}.{end}"] = name
    return found


def norms_are_one_more(file: GgufFile) -> bool:
    """Return whether the file stores each norm's weight plus one, where transformers adds the one itself (Gemma)."""
    return str(file.metadata.get("general.architecture", "")).startswith("gemma")


def interleaved_heads(file: GgufFile, names: Collection[str] = ("attn_q", "attn_k")) -> dict[str, int]:
    """Return the number of heads of each tensor whose rotated pairs are neighbours, by ``names``.

    Transformers pairs a head's first half with the second. Llama's files have the rows of q and k reordered for this.
    """
    if file.metadata.get("general.architecture") != "llama":
        return {}
    heads = file.section.integer("llama.attention.head_count")
    counts = {"attn_q": heads, "attn_k": file.section.integer("llama.attention.head_count_kv", heads)}
    return {name: counts[name] for name in names}
