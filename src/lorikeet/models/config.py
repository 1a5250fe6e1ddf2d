"""Reads the JSON files of a checkpoint: model configuration, RoPE scaling and end-of-sequence tokens.

Every value is checked when it is read, and an error names the file and the key. Does not import torch, so that the API
process can use it.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lorikeet.config import ConfigError, Settings
from lorikeet.core.geometry import (
    DECODER_NAMES,
    PRODUCTS,
    ROW_PARALLEL,
    KvShape,
    ModelGeometry,
    ModulePath,
    ModuleShape,
    ReplaceableWeights,
)
from lorikeet.kernels.activation import Activation
from lorikeet.models.architectures import ARCHITECTURES, LLAMA_NORMS, Features
from lorikeet.models.json_section import JsonSection, ModelConfigError, UnsupportedFeature, read_json_section
from lorikeet.models.quantization_config import read_quantization
from lorikeet.models.recurrence import Recurrence
from lorikeet.models.rope import RopeScaling, read_rope


def read_eos_token_ids(folder: Path, settings: JsonSection) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of ``generation_config.json``, or else of ``config.json``.

    Raises:
        ModelConfigError: a value is not a token id.
    """
    generation = folder / "generation_config.json"
    sources = [read_json_section(generation)] if generation.is_file() else []
    for source in [*sources, settings]:
        named = source.get("eos_token_id")
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise source.error("eos_token_id", f"must be token ids, not {named!r}")
        return tuple(ids)
    return ()


class ModuleShard(NamedTuple):
    """The input and output features of one linear module that one rank holds."""

    inputs: slice
    outputs: slice


class ModelConfig(msgspec.Struct, frozen=True):
    """The configuration of a decoder, as in its checkpoint.

    Attributes:
        architecture: one of ``ARCHITECTURES``.
        vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim: sizes.
        rms_norm_eps: epsilon added to the mean square.
        ropes: base and scaling of each rotary embedding.
        rotations: for each layer, the index of the rotary embedding in ``ropes``; -1 for none.
        tie_word_embeddings: whether the output layer shares the weights of the embedding.
        qkv_bias, o_bias, mlp_bias: which linear modules have a bias.
        qk_norm: whether queries and keys are RMS-normalised before rotation, see :class:`Features`.
        windows: sliding window of each layer in tokens, the token itself included; None for full attention.
        context_tokens: number of tokens of the longest sequence that the model supports.
        eos_token_ids: end-of-sequence tokens; empty if the checkpoint has none.
        dtype: the checkpoint's dtype, e.g. ``bfloat16``.
        embedding_multiplier: factor of embeddings.
        residual_multiplier: factor of the outputs of attention and MLP before they are added.
        attention_multiplier: factor of attention scores; None: ``head_dim ** -0.5``.
        logits_scaling: divisor of logits.
        embedding_scale: factor of the embeddings of tokens, rounded to their dtype.
        rotary_dim: number of elements that are rotated, at the beginning of each head.
        rotates_neighbours: whether a pair is two neighbouring elements, instead of an element of the first half and one
            of the second.
        rope_axes: axis of each rotated pair, if positions of images have several axes.
        norms: names of the norms of a layer, in the order of ``LLAMA_NORMS``.
        norm_offset: number added to the weights of norms.
        activation: the function that gates the MLP.
        attention_softcap, logits_softcap: scores and logits become ``cap * tanh(value / cap)``; 0 for no cap.
        fused: the fused products that the checkpoint stores whole, with their module names in the checkpoint.
        has_other_parts: whether the checkpoint holds more than the decoder, such as a vision tower.
        has_gated_attention: whether q also has a gate for each element of the attention's output.
        recurrence: the recurrence of some layers; None if all layers have attention.
        first_layer, stages: see ``ModelGeometry``. In a pipeline stage, ``layers`` is the stage's number of layers.
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
    ropes: tuple[RopeScaling, ...]
    rotations: tuple[int, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: str
    windows: tuple[int | None, ...]
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    embedding_scale: float = 1.0
    rotary_dim: int = 0
    rotates_neighbours: bool = False
    rope_axes: tuple[int, ...] = ()
    norms: tuple[str, str, str, str] = LLAMA_NORMS
    norm_offset: float = 0.0
    activation: Activation = Activation.SILU
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    fused: dict[str, str] = {}
    has_other_parts: bool = False
    has_gated_attention: bool = False
    recurrence: Recurrence | None = None
    first_layer: int = 0
    stages: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the final norm and the output layer."""
        return self.first_layer + self.layers == self.layers * self.stages

    def stage(self, number: int, stages: int) -> "ModelConfig":
        """Return the configuration of one of several pipeline stages, which have the same number of layers.

        Raises:
            ModelConfigError: the layers do not divide by the number of stages.
        """
        self.check_divides(1, stages)
        layers = self.layers // stages
        own = slice(number * layers, (number + 1) * layers)
        return msgspec.structs.replace(
            self,
            layers=layers,
            windows=self.windows[own],
            rotations=self.rotations[own],
            first_layer=own.start,
            stages=stages,
        )

    def for_lengths(self, longest_tokens: int) -> "ModelConfig":
        """Return the config for sequences of up to ``longest_tokens`` tokens.

        If a rotary embedding depends on the length (longrope), all sequences use the embedding of the longest sequence,
        since keys stay in the cache while a sequence grows, and sequences share keys.
        """
        ropes = tuple(
            msgspec.structs.replace(rope, divisors=rope.long_divisors)
            if rope.kind == "longrope" and longest_tokens > rope.original_tokens
            else rope
            for rope in self.ropes
        )
        return msgspec.structs.replace(self, ropes=ropes)

    def qk_norm_sizes(self) -> dict[str, int]:
        """Return the sizes of the norms of queries ``q`` and keys ``k``; empty without such norms."""
        if self.qk_norm == "none":
            return {}
        heads = (self.heads, self.kv_heads) if self.qk_norm == "whole" else (1, 1)
        return {side: number * self.head_dim for side, number in zip("qk", heads, strict=True)}

    def module_shapes(self) -> dict[str, ModuleShape]:
        """Return the shape of each linear module in the whole model, in packing order."""
        query = self.heads * self.head_dim
        key_value = self.kv_heads * self.head_dim
        shapes = {
            "q": ModuleShape(self.hidden_size, 2 * query if self.has_gated_attention else query),
            "k": ModuleShape(self.hidden_size, key_value),
            "v": ModuleShape(self.hidden_size, key_value),
            "o": ModuleShape(query, self.hidden_size),
            "gate": ModuleShape(self.hidden_size, self.intermediate_size),
            "up": ModuleShape(self.hidden_size, self.intermediate_size),
            "down": ModuleShape(self.intermediate_size, self.hidden_size),
        }
        return shapes if self.recurrence is None else shapes | self.recurrence.module_shapes(self.hidden_size)

    def module_shard(self, module: str, rank: int, tensor_parallel: int) -> ModuleShard:
        """Return the features of a module of :meth:`module_shapes` that rank ``rank`` of ``tensor_parallel`` holds.

        If there are fewer KV heads than ranks, neighbouring ranks hold copies of the same head.

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

    def check_divides(self, tensor_parallel: int, pipeline_parallel: int = 1) -> None:
        """Check that the model can be split into pipeline stages and, in each stage, over tensor-parallel ranks.

        Raises:
            ModelConfigError: the model cannot be split. The message names the size.
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
        if self.layers % pipeline_parallel:
            raise ModelConfigError(f"{self.layers} layers do not divide by {pipeline_parallel} pipeline stages")
        if tensor_parallel > 1 and self.qk_norm == "whole":
            raise ModelConfigError(f"{self.architecture}: the norms of queries and keys span all heads, which {over}")
        if self.recurrence is None:
            return
        if self.recurrence.key_heads % tensor_parallel:
            what = "heads of linear attention" if self.recurrence.is_delta else "groups of a state space"
            raise ModelConfigError(f"{self.recurrence.key_heads} {what} {over}")
        if pipeline_parallel > 1:
            raise ModelConfigError(f"{self.architecture}: its layers differ, so they cannot be pipeline stages")

    def geometry(self, dtype_bytes: int, tensor_parallel: int = 1) -> ModelGeometry:
        """Return the sizes of one rank's share, which are the same for every rank.

        Args:
            dtype_bytes: bytes of one element of KV and adapter weights.
            tensor_parallel: number of ranks.

        Raises:
            ModelConfigError: the sizes do not divide by the number of ranks.
        """
        modules = {}
        for module in self.module_shapes():
            inputs, outputs = self.module_shard(module, 0, tensor_parallel)
            modules[module] = ModuleShape(inputs.stop - inputs.start, outputs.stop - outputs.start)
        kv_heads = max(1, self.kv_heads // tensor_parallel)
        geometry = ModelGeometry(
            self.layers,
            kv_heads,
            self.head_dim,
            modules,
            dtype_bytes,
            replaceable=self.replaceable_weights(),
            hidden_size=self.hidden_size,
            first_layer=self.first_layer,
            stages=self.stages,
        )
        own = self._fused_paths()
        if self.recurrence is None:
            return msgspec.structs.replace(geometry, names=DECODER_NAMES.with_paths(own)) if own else geometry
        attention = tuple(layer for layer, is_on in enumerate(self.recurrence.on) if not is_on)
        of_recurrence = self.recurrence.module_shapes(self.hidden_size)
        return msgspec.structs.replace(
            geometry,
            kv_layers=(KvShape(kv_heads, self.head_dim, self.head_dim),) * len(attention),
            module_layers=dict.fromkeys(("q", "k", "v", "o"), attention)
            | dict.fromkeys(of_recurrence, self.recurrence.layers),
            names=DECODER_NAMES.with_paths((*self.recurrence.paths(), *own)),
            states=self.recurrence.share(tensor_parallel).states(),
        )

    def _fused_paths(self) -> tuple[ModulePath, ...]:
        """Return the products that the checkpoint stores whole, by names that are not those of other architectures."""
        known = {path.path for path in DECODER_NAMES.paths}
        paths = {f"layers.{{}}.{name}": PRODUCTS[product] for product, name in self.fused.items()}
        return tuple(ModulePath(path, modules) for path, modules in paths.items() if path not in known)

    def replaceable_weights(self) -> ReplaceableWeights:
        """Return the weights besides linear modules that adapters may replace."""
        vectors = {"norm.weight": self.hidden_size}
        vectors |= {f"layers.{{}}.{name}.weight": self.hidden_size for name in self.norms if name}
        vectors |= {f"layers.{{}}.self_attn.{side}_norm.weight": size for side, size in self.qk_norm_sizes().items()}
        vectors |= {} if self.recurrence is None else self.recurrence.vectors()
        return ReplaceableWeights("embed_tokens", "lm_head", self.vocab_size, vectors)


class TransformersConfig(msgspec.Struct, frozen=True):
    """The needed part of the config of a base that the modules of transformers run.

    Attributes:
        architecture: name of a class of transformers.
        vocab_size, context_tokens, eos_token_ids, dtype: see ``ModelConfig``.
        version: version of transformers.
    """

    architecture: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    version: str

    def check_divides(self, tensor_parallel: int, pipeline_parallel: int = 1) -> None:
        """Check that there is one rank.

        Raises:
            ModelConfigError: there are more.
        """
        if tensor_parallel * pipeline_parallel != 1:
            raise ModelConfigError(
                f"{self.architecture} runs by transformers' modules, which are not split: several ranks need one of "
                f"{', '.join(ARCHITECTURES)}"
            )


BaseConfig = ModelConfig | TransformersConfig


def wants_own_decoder(folder: Path, model_impl: str) -> bool:
    """Return whether our decoder runs a checkpoint.

    Otherwise the modules of transformers run it.

    Args:
        folder: the checkpoint.
        model_impl: one of ``config.MODEL_IMPLS``; ``auto`` uses our decoder for every model that it supports.

    Raises:
        ModelConfigError: a file is missing or broken, or the settings demand our decoder and it does not support the
            model.
    """
    if model_impl == "transformers":
        return False
    try:
        read_model_config(folder)
    except UnsupportedFeature:
        if model_impl == "lorikeet":
            raise
        return False
    return True


def read_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a checkpoint, and ``generation_config.json`` for the end-of-sequence tokens.

    RoPE and dtype settings are read in the forms of transformers 4 and 5.

    Raises:
        ModelConfigError: a file is missing or broken, or the model needs a feature that is not supported.
    """
    whole = read_json_section(folder / "config.json")
    architecture = _architecture(whole)
    read_quantization(whole)  # This refuses unsupported methods before weights are read.
    features = ARCHITECTURES[architecture]
    settings = _decoder_section(whole, features)
    activation = _activation(settings, features)
    hidden_size = settings.integer("hidden_size")
    heads = settings.integer("num_attention_heads")
    kv_heads = settings.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise settings.error("num_key_value_heads", f"{heads} heads do not divide into groups of {kv_heads}")
    layers = settings.integer("num_hidden_layers")
    head_dim = settings.integer("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise settings.error("head_dim", f"must be even, since rotary embeddings rotate pairs, not {head_dim}")
    biased = settings.flag("attention_bias") if features.qkv_bias is None else False
    if features.no_rope and all(settings.get(key) is None for key in ("rope_theta", "rope_parameters")):
        raise settings.error("rope_theta", "is missing")  # The default differs from Llama's.
    windows = _windows(settings, features, layers)
    ropes, context_tokens = _ropes(settings, features)
    rotations: tuple[int, ...] = (0,) * layers
    if features.two_ropes:
        rotations = tuple(0 if window is None else 1 for window in windows)
    if features.no_rope:
        rotations = tuple(0 if rotates else -1 for rotates in _rope_layers(settings, layers))
    if features.optional_rope and settings.get("position_embedding_type") != "rope":
        rotations = (-1,) * layers
    if features.experts and settings.integer(features.experts, 0, least=0):
        raise settings.unsupported(features.experts, "mixtures of experts are not supported")
    rotary_dim = _rotary_dim(settings, features, head_dim)
    for rope in ropes:
        for divisors in (rope.divisors, rope.long_divisors) if rope.kind == "longrope" else ():
            if len(divisors) != rotary_dim // 2:
                raise settings.error("rope_scaling", f"needs {rotary_dim // 2} factors, not {len(divisors)}")
    more: dict[str, Any] = _multipliers(settings) if features.multipliers else {}
    if features.is_gemma:
        more |= _gemma_scales(settings, head_dim, hidden_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer(features.inner),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        ropes=ropes,
        rotations=rotations,
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        qkv_bias=biased or features.qkv_bias is True,
        o_bias=biased and features.o_bias,
        mlp_bias=features.mlp_bias and settings.flag("mlp_bias"),
        qk_norm=features.qk_norm,
        windows=windows,
        context_tokens=context_tokens,
        eos_token_ids=read_eos_token_ids(folder, settings),
        dtype=settings.string("dtype", settings.string("torch_dtype", "float32")),
        rotary_dim=rotary_dim,
        rotates_neighbours=features.rotates_neighbours,
        rope_axes=_rope_axes(settings, rotary_dim) if features.rope_axes else (),
        norms=features.norms,
        norm_offset=features.norm_offset,
        activation=activation,
        fused=dict(features.fused),
        has_other_parts=bool(features.inside),
        has_gated_attention=features.gated_attention,
        recurrence=_recurrence(settings, features, layers, hidden_size),
        **more,
    )


def _recurrence(settings: JsonSection, features: Features, layers: int, hidden_size: int) -> Recurrence | None:
    """Return the recurrence of a model's layers."""
    if features.recurrence == "none":
        return None
    kinds = settings.get("layer_types", settings.get("layers_block_type"))
    if kinds is None:
        every = settings.integer("full_attention_interval", 4)
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if isinstance(kinds, list):
        kinds = [_LAYER_KINDS.get(str(kind), str(kind)) for kind in kinds[:layers]]
    known = {"linear_attention", "full_attention"}
    if features.recurrence == "state_space" and kinds == ["full_attention"] * layers:
        return None
    if not isinstance(kinds, list) or len(kinds) < layers or set(kinds) != known:
        raise settings.unsupported("layer_types", f"must have both of {', '.join(sorted(known))}, and no others")
    on = tuple(kind == "linear_attention" for kind in kinds)
    return (_delta_rule if features.recurrence == "delta_rule" else _state_space)(settings, on, hidden_size)


_LAYER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of kinds of layers."""


def _state_space(settings: JsonSection, on: tuple[bool, ...], hidden_size: int) -> Recurrence:
    """Return the state space of layers."""
    heads = settings.integer("mamba_n_heads", 128)
    groups = settings.integer("mamba_n_groups", 1)
    values = settings.integer("mamba_expand", 2) * hidden_size
    if values % heads or heads % groups:
        raise settings.error("mamba_n_heads", f"{heads} heads do not divide {values} values, or {groups} groups them")
    if settings.flag("mamba_proj_bias"):
        raise settings.unsupported("mamba_proj_bias", "biases of projections are not supported")
    if settings.string("hidden_act", Activation.SILU) != Activation.SILU:
        raise settings.unsupported("hidden_act", f"state spaces are supported with {Activation.SILU.value} only")
    has_bias = settings.get("mamba_conv_bias")
    return Recurrence(
        is_delta=False,
        on=on,
        key_heads=groups,
        value_heads=heads,
        key_dim=settings.integer("mamba_d_state", 256),
        value_dim=values // heads,
        taps=settings.integer("mamba_d_conv", 4, least=2),
        has_conv_bias=has_bias is None or bool(has_bias),
        step_limits=_step_limits(settings),
    )


def _step_limits(settings: JsonSection) -> tuple[float, float]:
    """Return the least and the largest step of a state space. transformers writes infinity as ``{"__float__": …}``."""
    given = settings.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    try:
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in given)
    except (KeyError, TypeError, ValueError) as error:
        raise settings.error("time_step_limit", f"must be two numbers, not {given!r}") from error
    return least, most


def _delta_rule(settings: JsonSection, on: tuple[bool, ...], hidden_size: int) -> Recurrence:
    """Return the gated delta rule of layers."""
    heads = {side: settings.integer(f"linear_num_{side}_heads", default) for side, default in _DELTA_HEADS.items()}
    if heads["value"] % heads["key"]:
        raise settings.error("linear_num_value_heads", f"{heads['value']} do not divide among {heads['key']} key heads")
    return Recurrence(
        is_delta=True,
        on=on,
        key_heads=heads["key"],
        value_heads=heads["value"],
        key_dim=settings.integer("linear_key_head_dim", 128),
        value_dim=settings.integer("linear_value_head_dim", 128),
        taps=settings.integer("linear_conv_kernel_dim", 4, least=2),
    )


_DELTA_HEADS = {"key": 16, "value": 32}
"""Numbers of heads of linear attention in a config without them."""


def _decoder_section(whole: JsonSection, features: Features) -> JsonSection:
    """Return the keys of the decoder, with defaults of the architecture."""
    settings = whole
    if features.inside:
        inner = whole.section(features.inside)
        if inner is None:
            raise whole.error(features.inside, "is missing")
        shared = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
        settings = inner.replaced({key: whole.get(key) for key in shared if whole.get(key) is not None})
    if settings.get("use_bidirectional_attention"):
        raise settings.unsupported("use_bidirectional_attention", "only causal attention is supported")
    return settings.with_defaults(features.defaults)


def _activation(settings: JsonSection, features: Features) -> Activation:
    found = settings.string(features.activation, Activation.SILU)
    if features.is_gemma and found == "gelu":
        return Activation.GELU_TANH  # The first checkpoints of Gemma call this function "gelu".
    if found not in tuple(Activation):
        supported = " and ".join(repr(each.value) for each in Activation)
        raise settings.unsupported(features.activation, f"{found!r} is not supported, only {supported}")
    return Activation(found)


def _gemma_scales(settings: JsonSection, head_dim: int, hidden_size: int) -> dict[str, float]:
    """Return the factors and soft caps of Gemma."""
    caps = {
        f"{name}_softcap": settings.number(key, 0.0)
        for name, key in (("attention", "attn_logit_softcapping"), ("logits", "final_logit_softcapping"))
    }
    scalar = settings.number("query_pre_attn_scalar", head_dim)
    return {"embedding_scale": hidden_size**0.5, "attention_multiplier": scalar**-0.5, **caps}


def _ropes(settings: JsonSection, features: Features) -> tuple[tuple[RopeScaling, ...], int]:
    """Return the rotary embeddings, starting with the one of layers without a window, and the context in tokens."""
    if not features.two_ropes:
        rope, context_tokens = read_rope(settings)
        return (rope,), context_tokens
    given = settings.section("rope_parameters")
    by_type = {kind: given.get(kind) if given else None for kind in ("full_attention", "sliding_attention")}
    if given is not None and not any(by_type.values()):
        by_type["full_attention"] = settings.get("rope_parameters")
    rope, context_tokens = read_rope(settings.replaced({"rope_parameters": by_type["full_attention"]}))
    local = {"rope_parameters": by_type["sliding_attention"], "rope_scaling": None}
    local |= {"rope_theta": settings.number("rope_local_base_freq", 10_000.0)}
    return (rope, read_rope(settings.replaced(local))[0]), context_tokens


def _rope_axes(settings: JsonSection, rotary_dim: int) -> tuple[int, ...]:
    """Return the axis of each rotated pair: time, height or width in turn, until an axis has its number of pairs."""
    given = settings.section("rope_parameters")
    sections = (None if given is None else given.get("mrope_section")) or [11, 11, 10]
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(each, int) for each in sections):
        raise settings.error("rope_parameters.mrope_section", f"must be three numbers of pairs, not {sections!r}")
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(rotary_dim // 2))


def _rotary_dim(settings: JsonSection, features: Features, head_dim: int) -> int:
    """Return the number of elements of a head that are rotated."""
    factor = settings.number("partial_rotary_factor", 1.0)
    for name in ("rope_scaling", "rope_parameters"):
        section = settings.section(name)
        factor = factor if section is None else section.number("partial_rotary_factor", factor)
    found = int(head_dim * factor)
    if (found != head_dim and not features.partial_rope) or found % 2 or not 0 < found <= head_dim:
        raise settings.unsupported("partial_rotary_factor", f"only 1.0 is supported, not {factor:g}")
    return found


def _architecture(settings: JsonSection) -> str:
    named = settings.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise settings.unsupported("architectures", f"{named!r} is not one of {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _multipliers(settings: JsonSection) -> dict[str, float]:
    """Return Granite's multipliers. A missing multiplier is 1, like in transformers."""
    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {key: settings.number(key, 1.0) for key in keys}


def _rope_layers(settings: JsonSection, layers: int) -> tuple[bool, ...]:
    """Return SmolLM3's layers with a rotary embedding: those in the config's list, or all but every n-th layer."""
    listed = settings.get("no_rope_layers")
    if listed is None:
        interval = settings.integer("no_rope_layer_interval", 4)
        return tuple(bool((layer + 1) % interval) for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or not all(each in (0, 1) for each in listed):
        raise settings.error("no_rope_layers", "must have 0 or 1 for each layer")
    return tuple(bool(each) for each in listed[:layers])


def _windows(settings: JsonSection, features: Features, layers: int) -> tuple[int | None, ...]:
    """Return the sliding windows."""
    window = features.window
    # Null means no window, like in transformers; the meaning of a missing key differs.
    if window == "none" or settings.get("sliding_window", 4096 if window == "upper" else None) is None:
        return (None,) * layers
    if window == "upper" and not settings.flag("use_sliding_window"):
        return (None,) * layers
    size = settings.integer("sliding_window", 4096)
    if window == "all":
        return (size,) * layers
    kinds = settings.get("layer_types")
    if not kinds and window == "typed":
        every = settings.integer("sliding_window_pattern", features.full_every)
        kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    elif not kinds:
        full = settings.integer("max_window_layers", 28, least=0)
        kinds = ["full_attention"] * full + ["sliding_attention"] * layers
    by_kind = {"full_attention": None, "sliding_attention": size}
    unknown = sorted({str(kind) for kind in kinds} - set(by_kind))
    if unknown or len(kinds) < layers:
        raise settings.unsupported("layer_types", f"{', '.join(unknown) or 'fewer entries than layers'}: not supported")
    return tuple(by_kind[kind] for kind in kinds[:layers])


def max_model_len(settings: Settings, config: BaseConfig) -> int:
    """Return the longest sequence to serve, in tokens.

    Raises:
        ConfigError: the setting exceeds the model's context length.
    """
    requested = settings.model.max_model_len
    if requested > config.context_tokens:
        raise ConfigError(f"max_model_len: {requested} is more than the model's {config.context_tokens}")
    return requested or config.context_tokens
