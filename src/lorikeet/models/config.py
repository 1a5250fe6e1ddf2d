"""What a checkpoint's ``config.json`` says, in Lorikeet's words. Free of torch, so that the API process can read it."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.models.checkpoint import ModelConfigError, Settings, read_eos_token_ids, read_settings
from lorikeet.models.rope import RopeScaling, read_rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Llama 2 and 3 and SmolLM2 share the first."""

ROW_PARALLEL = frozenset({"o", "down"})
"""Modules split by input under tensor parallelism (their outputs are partial sums); the others split by output."""

__all__ = ["ARCHITECTURES", "ROW_PARALLEL", "ModelConfig", "ModelConfigError", "ModuleShard", "read_model_config"]


class ModuleShard(NamedTuple):
    """The input and output features of one linear module that one rank holds."""

    inputs: slice
    outputs: slice


class ModelConfig(msgspec.Struct, frozen=True):
    """One decoder, as its checkpoint describes it.

    Attributes:
        architecture: one of ``ARCHITECTURES``.
        vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim: sizes.
        rms_norm_eps: added to the mean square.
        rope: base and scaling of the rotary embedding.
        tie_word_embeddings: the output layer is the embedding.
        qkv_bias, o_bias, mlp_bias: which linear modules have a bias.
        qk_norm: queries and keys are RMS-normalised per head before rotation (Qwen3).
        windows: for each layer the number of latest positions a token sees, its own included; None for all.
        context_tokens: longest sequence the model was made for.
        eos_token_ids: tokens that end an answer; empty if the checkpoint names none.
        dtype: the checkpoint's dtype, e.g. ``bfloat16``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeScaling
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    def module_shapes(self) -> dict[str, ModuleShape]:
        """Return the shape of each of ``LORA_MODULES`` in the whole model."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": ModuleShape(self.hidden_size, query),
            "k": ModuleShape(self.hidden_size, key_value),
            "v": ModuleShape(self.hidden_size, key_value),
            "o": ModuleShape(query, self.hidden_size),
            "gate": ModuleShape(self.hidden_size, self.intermediate_size),
            "up": ModuleShape(self.hidden_size, self.intermediate_size),
            "down": ModuleShape(self.intermediate_size, self.hidden_size),
        }

    def module_shard(self, module: str, rank: int, tensor_parallel: int) -> ModuleShard:
        """Return which features of ``module`` (one of ``LORA_MODULES``) rank ``rank`` of ``tensor_parallel`` holds.

        Where there are fewer KV heads than ranks, neighbouring ranks hold copies of the same head.

        Raises:
            ModelConfigError: the sizes do not divide by the number of ranks.
        """
        self.check_divides(tensor_parallel)
        shape = self.module_shapes()[module]
        if module in ("k", "v"):
            first = rank * self.kv_heads // tensor_parallel
            count = max(1, self.kv_heads // tensor_parallel)
            outputs = slice(first * self.head_dim, (first + count) * self.head_dim)
            return ModuleShard(slice(0, shape.in_features), outputs)
        if module in ROW_PARALLEL:
            share = shape.in_features // tensor_parallel
            return ModuleShard(slice(rank * share, (rank + 1) * share), slice(0, shape.out_features))
        share = shape.out_features // tensor_parallel
        return ModuleShard(slice(0, shape.in_features), slice(rank * share, (rank + 1) * share))

    def check_divides(self, tensor_parallel: int) -> None:
        """Do nothing if the model splits over ``tensor_parallel`` ranks.

        Raises:
            ModelConfigError: it does not; the message names the size.
        """
        if tensor_parallel < 1:
            raise ModelConfigError(f"tensor parallelism needs at least one rank, not {tensor_parallel}")
        over = f"cannot be split over {tensor_parallel} tensor-parallel ranks"
        if self.heads % tensor_parallel:
            raise ModelConfigError(f"{self.heads} attention heads {over}")
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise ModelConfigError(f"{self.kv_heads} key/value heads {over}, neither divided nor copied")
        if self.intermediate_size % tensor_parallel:
            raise ModelConfigError(f"the intermediate size {self.intermediate_size} {over}")

    def geometry(self, dtype_bytes: int, tensor_parallel: int = 1) -> ModelGeometry:
        """Return the sizes of one rank's share (the same for every rank).

        Args:
            dtype_bytes: bytes of one element of KV and adapter weights.
            tensor_parallel: number of ranks.

        Raises:
            ModelConfigError: the sizes do not divide by the number of ranks.
        """
        modules = {}
        for module in LORA_MODULES:
            inputs, outputs = self.module_shard(module, 0, tensor_parallel)
            modules[module] = ModuleShape(inputs.stop - inputs.start, outputs.stop - outputs.start)
        kv_heads = max(1, self.kv_heads // tensor_parallel)
        return ModelGeometry(self.layers, kv_heads, self.head_dim, modules, dtype_bytes)


def read_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for the end tokens) of a checkpoint.

    Both spellings of rope and dtype settings are understood: those of transformers 4 and 5.

    Raises:
        ModelConfigError: a file is missing or broken, or the model needs what Lorikeet lacks; names file and key.
    """
    settings = read_settings(folder / "config.json")
    architecture = _architecture(settings)
    for key in ("quantization_config", "compression_config"):
        if settings.get(key) is not None:
            raise settings.error(key, "quantised checkpoints are not supported")
    if settings.string("hidden_act", "silu") != "silu":
        raise settings.error("hidden_act", f"{settings.get('hidden_act')!r} is not supported, only 'silu'")
    hidden_size, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    kv_heads = settings.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise settings.error("num_key_value_heads", f"{heads} heads do not divide into groups of {kv_heads}")
    layers = settings.integer("num_hidden_layers")
    head_dim = settings.integer("head_dim", 128 if architecture.startswith("Qwen3") else hidden_size // heads)
    if head_dim % 2:
        raise settings.error("head_dim", f"must be even, since rotary embeddings turn pairs, not {head_dim}")
    biased = settings.flag("attention_bias") if architecture.startswith(("Llama", "Qwen3")) else False
    rope, context_tokens = read_rope(settings)
    return ModelConfig(
        architecture=architecture,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        qkv_bias=biased or architecture.startswith("Qwen2"),
        o_bias=biased,
        mlp_bias=architecture.startswith("Llama") and settings.flag("mlp_bias"),
        qk_norm=architecture.startswith("Qwen3"),
        windows=_windows(settings, architecture, layers),
        context_tokens=context_tokens,
        eos_token_ids=read_eos_token_ids(folder, settings),
        dtype=settings.string("dtype", settings.string("torch_dtype", "float32")),
    )


def _architecture(settings: Settings) -> str:
    named = settings.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise settings.error("architectures", f"{named!r} is not one of {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _windows(settings: Settings, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Mistral: every layer has the window. Qwen: the upper ones do, if it is switched on. Llama: none."""
    if architecture.startswith("Llama"):
        return (None,) * layers
    if architecture.startswith("Mistral"):
        # A missing key means 4,096 and null means no window, as in transformers.
        present = settings.get("sliding_window", 4096) is not None
        return (settings.integer("sliding_window", 4096) if present else None,) * layers
    if not settings.flag("use_sliding_window") or settings.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = settings.integer("sliding_window", 4096)
    kinds = settings.get("layer_types")
    if not kinds:
        full = settings.integer("max_window_layers", 28, least=0)
        kinds = ["full_attention"] * full + ["sliding_attention"] * layers
    by_kind = {"full_attention": None, "sliding_attention": window}
    unknown = sorted({str(kind) for kind in kinds} - set(by_kind))
    if unknown or len(kinds) < layers:
        raise settings.error("layer_types", f"{', '.join(unknown) or 'fewer entries than layers'}: not supported")
    return tuple(by_kind[kind] for kind in kinds[:layers])
