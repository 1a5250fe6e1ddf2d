"""Runs the modules of the transformers library as a decoder, with paged KV and LoRA computed by our kernels.

After loading, the decoder is probed, and checked against transformers' own attention (see ``docs/decisions/bases.md``).
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lorikeet.core.geometry import KvShape, ModelGeometry, ReplaceableWeights, split_layer
from lorikeet.core.messages import LOADING_WEIGHTS
from lorikeet.core.states import StateShape
from lorikeet.kernels.devices import to_device
from lorikeet.kernels.extras import prepare_vocabulary
from lorikeet.kernels.interface import Batch, HostMetadata, Kernels, StateTable
from lorikeet.kernels.lora import LoraBatch, LoraWeights
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.models.config import TransformersConfig, read_eos_token_ids
from lorikeet.models.gguf import GGUF_FILE, read_gguf, transformers_names
from lorikeet.models.gguf_weights import decode_gguf
from lorikeet.models.image_features import TowerError
from lorikeet.models.json_section import ModelConfigError, read_json_section
from lorikeet.models.layer_ops import Product
from lorikeet.models.loading import Progress, WeightError
from lorikeet.models.quantization_config import read_quantization
from lorikeet.models.towers import LAYER_EMBEDS, ROWS_OF_IMAGES, Tower
from lorikeet.models.transformers_attention import (
    PROBE,
    STEP,
    AttentionCall,
    AttentionProbe,
    LayerKv,
    Mask,
    PagedPass,
    UnsupportedAttention,
    handling,
    layer_views,
    pass_rotations,
    register,
    window_of,
)
from lorikeet.models.transformers_experts import (
    AdaptedExperts,
    add_experts,
    are_experts,
    experts_of,
    quantize_experts,
)
from lorikeet.models.transformers_gathered import (
    EAGER,
    CacheProbe,
    GatheredCache,
    GatheredPass,
    NotCausal,
    StoredTokens,
    Way,
    lora_of_keys,
    lora_of_rows,
    passes_of,
    pieces_of,
    register_masks,
)
from lorikeet.models.transformers_matrices import AdaptedMatrix, Matrix, MatrixProbe, adapt_matrices, add_matrices
from lorikeet.models.transformers_modules import (
    AdaptedEmbedding,
    AdaptedLinear,
    AdaptedVectors,
    FusedLinear,
    GatedMlp,
    Linear,
    LoraModules,
    OutputLayer,
    StepLora,
    find_modules,
    gate_of,
    is_linear,
    is_norm,
    linears_of,
    quantize_linears,
    replaceable_weights,
    rms_norm_of,
    take_weight,
)
from lorikeet.models.transformers_older import OLDER, replace_attention, restore_attention
from lorikeet.models.transformers_quantized import dequantised_weights
from lorikeet.models.transformers_recurrences import replace_gated_norm
from lorikeet.models.transformers_states import Mixer, SequenceCache, StateProbe, StepStates, adapt_mixers
from lorikeet.models.transformers_whole import WHOLE, WholeModel, logits_of_rows, run_whole

_PROBE_TOKENS = 11
"""Tokens of the probe: odd and prime, so that a product that sees other rows than the tokens shows."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Largest difference from eager attention at the start, relative to the logits.

An error of method is of order one;
in half precision random experts may differ a lot for another reason."""
_TOLERANCES_ANEW = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.02}
"""The same without a cache, where few products differ. Models that see later tokens must not pass."""
_CONTEXT = 2048
"""Context of a model whose config names none, or -1 as XLNet's."""
_STATEFUL = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent"})
"""Types of layers that keep more than keys and values."""
_CACHES = ("past_key_values", "cache_params")
"""Names of decoders' arguments that take a cache."""


def read_transformers_config(folder: Path) -> TransformersConfig:
    """Read a checkpoint's config like transformers, including its defaults.

    Raises:
        ModelConfigError: the config cannot be read, or transformers does not know the architecture.
    """
    settings = read_json_section(folder / "config.json")
    read_quantization(settings)  # This refuses unsupported methods before weights are read.
    config = _read_config(folder)
    text = config.get_text_config(decoder=True)
    architecture = _class_of(folder).__name__
    context = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 0
    dtype = settings.get("dtype") or settings.get("torch_dtype") or getattr(text, "dtype", None) or "float32"
    eos = read_eos_token_ids(folder, settings)
    if not eos:
        named = getattr(text, "eos_token_id", None)
        eos = () if named is None else tuple(named) if isinstance(named, list) else (int(named),)
    return TransformersConfig(
        architecture,
        int(text.vocab_size),
        int(context) if context > 0 else _CONTEXT,
        eos,
        str(dtype).removeprefix("torch."),
        transformers.__version__,
    )


def _read_config(folder: Path) -> Any:
    """Return a checkpoint's config without its quantisation."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for section in (config, config.get_text_config(decoder=True)):
            for key in ("quantization_config", "compression_config"):
                vars(section).pop(key, None)
        return config
    except Exception as error:  # transformers raises exceptions of many kinds for wrong values.
        raise ModelConfigError(f"{folder / 'config.json'}: transformers cannot read it: {error}") from error


def _class_of(folder: Path) -> type[PreTrainedModel]:
    settings = read_json_section(folder / "config.json")
    named = settings.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise settings.error("architectures", f"must name one class, not {named!r}")
    found = getattr(transformers, named[0], None)
    if not inspect.isclass(found) or not issubclass(found, PreTrainedModel):
        raise settings.error("architectures", f"transformers {transformers.__version__} has no {named[0]}")
    model_class: type[PreTrainedModel] = found
    return model_class


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and warnings of transformers off the terminal."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()


@contextmanager
def _without_notes_of_fallbacks() -> Iterator[None]:
    """Keep transformers' notes off the log that it computes recurrences and convolutions in torch.

    While a model is probed it does, but the kernels compute the steps.
    """
    logger = logging.getLogger("transformers.integrations.hub_kernels")

    def is_other(record: logging.LogRecord) -> bool:
        return "is falling back to its reference" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    change: Callable[[Any], None] = lambda config: None,
) -> PreTrainedModel:
    """Load a model of transformers with its eager attention.

    See ``loading.load_weights`` for the arguments. ``change`` changes the config first.

    Raises:
        ModelConfigError: transformers cannot build the model.
        WeightError: the weights are missing, broken, or belong to another model.
    """
    found = _class_of(folder)
    config = _read_config(folder)
    change(config)
    report = progress or (lambda stage, done, total: None)
    report(LOADING_WEIGHTS, 0, 1)
    if load_format not in ("auto", "dummy"):
        raise WeightError(f"load format {load_format!r} is not one of auto, dummy")
    with _quiet():
        try:
            if load_format == "dummy":
                torch.manual_seed(seed)
                model = found._from_config(config, dtype=dtype, attn_implementation="eager")
            else:
                weights = _decoded_weights(folder, dtype)
                model, info = found.from_pretrained(
                    folder if weights is None else None,
                    config=config,
                    state_dict=weights,
                    dtype=dtype,
                    attn_implementation="eager",
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
                if missing := sorted(info["missing_keys"]):
                    raise WeightError(f"{folder}: {', '.join(map(str, missing[:5]))}: missing")
        except WeightError:
            raise
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            raise WeightError(f"{folder}: transformers cannot load the weights: {error}") from error
        except Exception as error:
            raise ModelConfigError(f"{folder}: transformers cannot build the model: {error}") from error
    model = model.to(device).eval().requires_grad_(False)
    report(LOADING_WEIGHTS, 1, 1)
    return model


def _decoded_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Return a quantised checkpoint's dequantised weights by their names in transformers; None if not quantised."""
    if not (folder / GGUF_FILE).is_file():
        return dequantised_weights(folder, dtype)
    file = read_gguf(folder / GGUF_FILE)
    decoded = {name: decode_gguf(file, stored) for name, stored in transformers_names(file).items()}
    return {
        name: each.dequantized(dtype) if isinstance(each, QuantizedWeight) else each.to(dtype)
        for name, each in decoded.items()
    }


class _Found(NamedTuple):
    """The results of a probe.

    Attributes:
        calls: the attention calls of a pass; empty if transformers computes attention.
        kv: the keys and values of one token, in the order of the calls that store them.
        way: the first way of computing attention that may be right.
        layers: number of layers that store keys and values.
        qkv: features of queries, keys and values, by layer.
        rows: for each linear module, the numbers of rows in its calls.
        inputs: the last input of each linear module.
        norms: the norms that process every row, with the dimension of rows in their input.
        matrices: the matrices of other modules that multiply every row once.
        hidden_size: elements of a hidden state.
        mixers: the modules that carry state from token to token, if the kernels compute attention.
        states: the shapes of their states.
    """

    calls: list[AttentionCall]
    kv: list[KvShape]
    way: Way
    layers: int
    qkv: Mapping[int, tuple[int, ...]]
    rows: dict[nn.Module, set[int]]
    inputs: dict[nn.Module, Tensor]
    norms: dict[nn.Module, int]
    matrices: list[Matrix]
    hidden_size: int
    mixers: list[Mixer]
    states: tuple[StateShape, ...]


class _Hidden(nn.Module):
    """Stands for the part of a model below its output layer, and returns hidden states that were computed before.

    Args:
        inner: names of the parts on the path from this part to the decoder.
        replaced: the part that it replaces, whose plain attributes the output layer may read.
    """

    def __init__(self, inner: Sequence[str], replaced: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(replaced).items() if not name.startswith("_")})
        self.hidden: Tensor | None = None
        for name in inner:  # This object stands for each part on the path to the decoder.
            object.__setattr__(self, name, self)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the hidden states as a decoder's output."""
        return _Output(self.hidden)


class _Output:
    """A decoder's output that has only hidden states."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersDecoder:
    """A model of transformers with the interface of ``Decoder``.

    Args:
        model: a model from :func:`load_model`, which is changed.
        kernels: the kernel backend.
        longest_tokens: number of tokens of the longest sequence.
        bits: number of bits to which linear weights are quantised; 0 leaves them unchanged.

    Attributes:
        geometry: sizes and names of its modules.
        vocab_size: number of logits.
        way: the way in which attention is computed.
        tower: the part that computes images; None if they are refused.
        images_refused: why images are refused; empty if they are not.

    Raises:
        UnsupportedAttention: the model needs attention that is not supported. The message names the reason.
    """

    fits_graphs = False

    def __init__(self, model: PreTrainedModel, kernels: Kernels, longest_tokens: int, bits: int = 0) -> None:
        register()
        register_masks()
        whole = model
        model = _causal_part(model)
        self._model = model
        self._kernels = kernels
        self._decoder = decoder_of(model)
        self._has_states = has_states(model)
        self._block_size = 0
        self._views: tuple[Tensor, int, list[LayerKv]] | None = None
        parameter = next(self._decoder.parameters())
        self._device = parameter.device
        self._dtype = parameter.dtype
        try:
            embedding = model.get_input_embeddings()
        except NotImplementedError as error:
            raise UnsupportedAttention("its embedding of tokens is not found") from error
        if not isinstance(embedding, nn.Embedding):
            raise UnsupportedAttention("its input is not a row of tokens")
        self._embedding = embedding
        self.tower: Tower | None = None
        self.images_refused = ""
        try:
            tower = Tower.of(whole, self._decoder)
        except TowerError as error:
            tower = None
            self.images_refused = str(error)
        ids = torch.arange(_PROBE_TOKENS, device=self._device) * 37 % (embedding.num_embeddings - 1) + 1
        with torch.inference_mode(), _without_notes_of_fallbacks():
            self._quantize(bits)
            is_whole = type(model).__name__ in WHOLE
            try:
                if is_whole:
                    expected = logits_of_rows(model, ids).float()
                else:
                    expected = model(input_ids=ids[None], use_cache=False).logits[0].float()
            except Exception as error:  # The exception may be of any kind, since it comes from the model's code.
                raise UnsupportedAttention(f"it does not run on tokens alone: {error}") from error
            self.vocab_size = expected.shape[-1]
            self._accepted, self._takes_positions = _accepted(self._decoder)
            self._heads = 1 if is_whole else _query_heads(model)
            self.way = Way.KERNELS
            found, self._calls = (self._probe_whole(ids), []) if is_whole else self._find(ids, longest_tokens)
            self.way = found.way
            modules = self._take_linears(found)
            self._step = modules.step
            self.geometry = self._geometry(modules.lora, found)
            self._set_kv(found.kv)
            if not is_whole:
                self._adapt_norms_and_embedding(found)
            self._states = StepStates(found.states, self._step, self._kernels)
            adapt_mixers(found.mixers, self._states)
            if found.states:
                for module in self._decoder.modules():
                    replace_gated_norm(module, self._kernels)
            self._cut_output_layer()
            self._settle(ids, expected, found)
        if tower is not None:
            self._take_tower(tower, type(whole).__name__)

    def _take_tower(self, tower: Tower, name: str) -> None:
        """Take the tower of a model by its name, unless images do not work with this way of computing attention."""
        sees_later = tower.sees_whole_images or tower.sees_whole_prompt
        if self.way in (Way.ANEW, Way.WHOLE) or (sees_later and self.way is not Way.KERNELS):
            self.images_refused = f"{name} runs by transformers{self.way.value}"
            return
        types = getattr(self._model.config.get_text_config(decoder=True), "layer_types", None) or ()
        if sees_later and tower.blind_layers:
            self._calls = [
                replace(call, is_causal=types[call.module.layer_idx] in tower.blind_layers)  # type: ignore[index]
                for call in self._calls
            ]
        self.tower = tower
        tower.select_attention()

    def _find(self, ids: Tensor, longest_tokens: int) -> tuple[_Found, list[AttentionCall]]:
        """Probe the model, first for attention by kernels, then by transformers.

        Returns:
            The result of the probe, and the attention calls with their windows.

        Raises:
            UnsupportedAttention: neither computes the model. The reason is that of the kernels.
        """
        reasons: list[UnsupportedAttention] = []
        # Linear layers that read the same input are computed as one, unless the model cannot read their outputs.
        for as_parts in (True, False):
            try:
                found = self._probe(ids, as_parts=as_parts)
                calls = [
                    replace(call, window=None if call.mask is None else window_of(call.mask, longest_tokens))
                    for call in found.calls
                ]
                return found, calls
            except UnsupportedAttention as error:
                reasons.append(error)
        for has_cache in (True, False):
            for as_parts in (True, False):
                try:
                    return self._probe_eager(ids, as_parts=as_parts, has_cache=has_cache), []
                except NotCausal:
                    raise
                except UnsupportedAttention as error:
                    reasons.append(error)
        raise reasons[1]

    def _probe_whole(self, ids: Tensor) -> _Found:
        """Run the whole model, and record its linear layers."""

        def run() -> int:
            run_whole(self._model, ids)
            embedding = self._model.get_input_embeddings()
            assert isinstance(embedding, nn.Embedding)
            return embedding.embedding_dim

        found, _ = self._observe(run, as_parts=True)
        kv = [StoredTokens.shape(found.hidden_size)]
        return found._replace(kv=kv, way=Way.WHOLE, norms={}, matrices=[])

    def _settle(self, ids: Tensor, expected: Tensor, found: _Found) -> None:
        """Choose the first way of computing attention that agrees with transformers' own.

        Raises:
            UnsupportedAttention: none agrees. The reason is that of the first.
        """
        reason: UnsupportedAttention | None = None
        ways = [way for way in Way if (way is Way.WHOLE) == (self.way is Way.WHOLE)]
        for way in ways[ways.index(self.way) :]:
            try:
                if way is not self.way:
                    found = self._changed(found, way, ids)
                    if ways.index(found.way) > ways.index(way):
                        continue
                    self.way = way
                    self._calls = []
                    self._set_kv(found.kv)
                elif found.states and self._settle_states(ids, expected):
                    return
                self._check(ids, expected)
                return
            except UnsupportedAttention as error:
                reason = reason or error
        assert reason is not None
        raise reason

    def _settle_states(self, ids: Tensor, expected: Tensor) -> bool:
        """Choose the fastest way of computing states that agrees with transformers' own, and return whether one does.

        If none does, modules compute tokens one at a time, which is not checked yet.
        """
        for by_kernels in (True, False) if self._states.fit_kernels else (False,):
            self._states.by_kernels = by_kernels
            try:
                self._check(ids, expected)
            except UnsupportedAttention:
                continue
            return True
        self._states.by_token = True
        return False

    def _changed(self, found: _Found, way: Way, ids: Tensor) -> _Found:
        """Return the result of a probe with the keys and values that another way stores."""
        found = found._replace(mixers=[], states=())
        self.geometry = msgspec.structs.replace(self.geometry, states=())
        if way is Way.ANEW:
            return found._replace(calls=[], kv=[StoredTokens.shape(found.hidden_size)], way=way)
        if not found.calls or self._has_states:
            return found
        self._attend_by(EAGER)
        cached = self._run_for_cache(ids)
        return found._replace(calls=[], kv=cached.shapes, way=cached.way)

    def view_kv(self, arena: Tensor, block_size: int) -> Tensor:
        """Return the arena itself, ``[blocks, elements]``, for :meth:`hidden`."""
        self._block_size = block_size
        return arena

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute one step, and return the logits ``[S, vocab]`` of its sample rows."""
        return self.head(self.hidden(batch, kv), batch.head_lora)

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute the layers of one step, and store keys and values.

        Args:
            batch: the step, with copies on the host.
            kv: the arena, which is changed in place.

        Returns:
            Input of the output layer, ``[S, hidden]``, for ``batch.sample_rows``.
        """
        assert batch.assist is None, "host LoRA needs the own decoder"
        views = self._layers(kv)
        try:
            if self.way is Way.KERNELS:
                self._step.begin(batch.lora, len(batch.token_ids))
                attention = PagedPass(self._calls, views, batch, self._kernels)
                with handling(attention), self._states.handling(kv, batch, attention.only):
                    found = self._run_rows(batch, slice(None))
            elif self.way is Way.WHOLE:
                return self._run_whole(batch, StoredTokens(views[0]))
            elif self.way is Way.ANEW:
                found = self._run_anew(batch, StoredTokens(views[0]))
            else:
                found = self._run_gathered(batch, views)
        finally:
            self._step.end()
        return found[batch.sample_rows]

    def _run_gathered(self, batch: Batch, views: Sequence[LayerKv]) -> Tensor:
        """Return the hidden states of a step, by transformers' attention over gathered keys and values."""
        found = []
        adapter_starts = None if batch.host is None else batch.host.adapter_starts
        for pieces in passes_of(pieces_of(batch), self.way, self._heads):
            one = GatheredPass(views, batch, pieces)
            lora = lora_of_rows(batch.lora, one.start, one.stop)
            of_keys = lora_of_keys(batch.lora, pieces, adapter_starts)
            self._step.begin(lora, one.rows, of_keys, one.keys)
            with handling(one):
                cache = GatheredCache(one, self._cache_layers)
                found.append(self._run_rows(batch, slice(one.start, one.stop), cache))
        return torch.cat(found)

    def _run_rows(self, batch: Batch, rows: slice, cache: GatheredCache | None = None) -> Tensor:
        """Return the hidden states of some rows of a step."""
        token_ids = batch.token_ids[rows]
        positions = batch.positions[rows] if batch.axes is None else batch.axes[:, None, rows]
        return self._run(token_ids, positions, cache, given=self._replaced(batch, rows, token_ids))

    def _replaced(self, batch: Batch, rows: slice, token_ids: Tensor) -> Mapping[str, Any]:
        """Return the decoder's arguments for rows whose embeddings are given; empty without such rows."""
        if batch.embeds is None:
            return {}
        start, stop, _ = rows.indices(len(batch.token_ids))
        at, embeds = batch.embeds
        layers = batch.layer_embeds
        if (start, stop) != (0, len(batch.token_ids)):
            inside = ((at >= start) & (at < stop)).nonzero()[:, 0]
            if not len(inside):
                return {}
            at = at[inside] - start
            embeds = embeds[inside]
            layers = tuple(each[inside] for each in layers)
        x = self._model_embedding(token_ids)
        x[at] = embeds.to(x.dtype)
        given: dict[str, Any] = {"input_ids": None, "inputs_embeds": x[None]}
        if getattr(self._decoder, "hidden_size_per_layer_input", 0):  # Gemma 4 embeds tokens again for each layer.
            padded = token_ids.clone()
            padded[at] = self._model.config.get_text_config(decoder=True).pad_token_id or 0
            given["per_layer_inputs"] = self._decoder.get_per_layer_inputs(padded[None])  # type: ignore[operator]
        if layers:
            order = at.argsort()
            is_image = torch.zeros(1, len(token_ids), dtype=torch.bool, device=x.device)
            is_image[0, at] = True
            given[ROWS_OF_IMAGES] = is_image
            given[LAYER_EMBEDS] = [each[order] for each in layers]
        return given

    def _model_embedding(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings ``[T, hidden]`` of a step's rows, which the caller may change."""
        found: Tensor = self._embedding(token_ids[None])[0]
        return found.clone()

    def _run_anew(self, batch: Batch, tokens: StoredTokens) -> Tensor:
        """Return the hidden states of a step, computed from the first token of each sequence."""
        assert batch.host is not None
        tokens.store(batch)
        found = []
        for piece in pieces_of(batch):
            ids = tokens.read(batch, piece)
            self._step.begin(lora_of_keys(batch.lora, [piece], batch.host.adapter_starts), len(ids))
            hidden = self._run(ids, torch.arange(len(ids), device=ids.device))
            found.append(hidden[piece.start - piece.stop :])
        return torch.cat(found)

    def _run_whole(self, batch: Batch, tokens: StoredTokens) -> Tensor:
        """Return the hidden states of the sample rows, each computed by the whole model."""
        assert batch.host is not None
        assert self._whole is not None
        tokens.store(batch)
        pieces = pieces_of(batch)
        rows = batch.host.sample_rows.tolist()
        found = self._embedding.weight.new_empty(len(rows), self.geometry.hidden_size)
        for number, row in enumerate(rows):
            piece = next(each for each in pieces if each.start <= row < each.stop)
            self._step.begin_whole(lora_of_rows(batch.lora, row, row + 1))
            ids = tokens.read(batch, piece)
            found[number] = self._whole.hidden(ids[: len(ids) - (piece.stop - 1 - row)])
        return found

    @torch.inference_mode()
    def prepare(self, adapter: LoraWeights) -> None:
        """Compute the extras of a newly loaded adapter that depend on the base, and write them to its blocks."""
        for linear in self._linears:
            linear.prepare(adapter)
        output = self._output
        kernels = self._kernels
        if output is not None:
            weight = output.weight
            embedding = self._embedding.weight
            prepare_vocabulary(
                adapter, embedding, lambda x: kernels.logits(x, weight), lambda: kernels.row_norms(weight)
            )

    @torch.inference_mode()
    def head(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Return the logits ``[S, vocab]`` for rows of :meth:`hidden`.

        ``lora`` has the rows' adapters, if any has extras.
        """
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        self._step.head_lora = lora
        if self._whole is not None:
            try:
                return self._whole.project(hidden)
            finally:
                self._step.head_lora = None
        self._below.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            logits = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._below.hidden = self._step.head_lora = None
        assert isinstance(logits, Tensor)
        return logits

    def _layers(self, arena: Tensor) -> list[LayerKv]:
        """Return views of the arena. The views of the latest arena are cached."""
        key = arena.data_ptr()
        if self._views is None or self._views[1] != key or self._views[0].shape != arena.shape:
            # Blocks may be larger than their keys and values.
            block_size = self._block_size or arena.shape[1] // self.geometry.kv_elements_per_token()
            self._views = arena, key, layer_views(arena, self._shapes, block_size)
        return self._views[2]

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: GatheredCache | None = None,
        states: SequenceCache | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        """Return the hidden states ``[T, hidden]`` of packed tokens.

        Args:
            token_ids: the tokens, int64 ``[T]``.
            positions: their positions, ``[T]``, or on several axes ``[axes, 1, T]``.
            cache, states: caches for the decoder.
            given: further arguments of the decoder, which replace others.
        """
        arguments = {"input_ids": token_ids[None], **self._accepted, **given}
        if states is not None:
            arguments |= {name: states for name in _CACHES if name in arguments}
        if self._takes_positions and self.way in (Way.KERNELS, Way.PACKED):
            arguments["position_ids"] = positions[None] if positions.dim() == 1 else positions
        if cache is not None:
            arguments |= {"past_key_values": cache, "use_cache": True}
        output = self._decoder(**arguments)
        found = output.last_hidden_state[0]
        assert isinstance(found, Tensor)
        return found

    def _run_for_cache(self, ids: Tensor) -> CacheProbe:
        """Run a few tokens, and return what transformers caches.

        Raises:
            UnsupportedAttention: the modules cache other things than keys and values of tokens, or nothing.
        """
        probe = CacheProbe(len(ids))
        cache = GatheredCache(probe, self._cache_layers)
        try:
            with handling(probe):
                probe.hidden_size = self._run(ids, torch.arange(len(ids), device=ids.device), cache).shape[-1]
        except UnsupportedAttention:
            raise
        except Exception as error:  # The error comes from modules that expect another cache.
            raise UnsupportedAttention(f"its modules fail: {error}") from error
        probe.check()
        return probe

    @property
    def _cache_layers(self) -> int:
        """Number of layers of a cache, which may be more than those that use it."""
        lists = (len(module) for module in self._decoder.modules() if isinstance(module, nn.ModuleList))
        return 2 * max(lists, default=0) + 1

    def _probe(self, ids: Tensor, *, as_parts: bool) -> _Found:
        """Run a few tokens, and record the attention calls and modules.

        Args:
            ids: the tokens.
            as_parts: whether linear layers return views of wider rows, like layers that are computed as one.

        Raises:
            UnsupportedAttention: the model's attention cannot be replaced.
        """
        name = type(self._model).__name__
        if not (self._model._supports_attention_backend or self._has_states or name in OLDER):
            raise UnsupportedAttention("its attention cannot be replaced")
        if not (self._takes_positions or self._has_states):
            raise UnsupportedAttention("its decoder takes no position ids")
        probe = AttentionProbe()
        states = StateProbe(self._decoder)
        if name in OLDER:
            replace_attention(self._model)
        self._attend_by(PROBE)
        pass_rotations(self._decoder)

        def run() -> int:
            positions = torch.arange(len(ids), device=ids.device)
            with handling(probe), ExitStack() as hooks:
                if not self._has_states:
                    return self._run(ids, positions).shape[-1]
                states.begin(hooks)
                return self._run(ids, positions, states=states.cache).shape[-1]

        found, ran = self._observe(run, as_parts=as_parts)
        self._attend_by(STEP)
        mixers, shapes = states.found()
        if not shapes:
            self._check_layers(probe.calls, ran)
        for mixer in mixers:
            for inner, module in mixer.module.named_modules():
                if is_linear(module) and found.rows.get(module, {_PROBE_TOKENS}) != {_PROBE_TOKENS}:
                    raise UnsupportedAttention(f"{inner} in a layer with state computes other rows than the step's")
        names = {module: name for name, module in self._decoder.named_modules()}
        qkv: dict[int, tuple[int, ...]] = {}
        for call in probe.calls:
            shape = call.shape
            layer = split_layer(names[call.module])[1]
            qkv[layer] = (call.heads * shape.key_dim, shape.heads * shape.key_dim, shape.heads * shape.value_dim)
        kv = [call.shape for call in probe.calls if call.stores]
        layers = max(qkv, default=-1) + 1
        return found._replace(calls=probe.calls, kv=kv, layers=layers, qkv=qkv, mixers=mixers, states=shapes)

    def _probe_eager(self, ids: Tensor, *, as_parts: bool, has_cache: bool) -> _Found:
        """Run a few tokens by transformers' own attention, and record its modules and what it caches.

        Args:
            ids, as_parts: see :meth:`_probe`.
            has_cache: whether to record the cache. Without one each step computes sequences from their first token.
        """
        if type(self._model).__name__ in OLDER:
            restore_attention(self._model)
        self._attend_by(EAGER)
        cached: list[CacheProbe] = []

        def run() -> int:
            if not has_cache:
                return self._run(ids, torch.arange(len(ids), device=ids.device)).shape[-1]
            cached.append(self._run_for_cache(ids))
            return cached[0].hidden_size

        found, _ = self._observe(run, as_parts=as_parts)
        if not has_cache:
            return found._replace(kv=[StoredTokens.shape(found.hidden_size)], way=Way.ANEW)
        (probe,) = cached
        qkv = {
            layer: (self._heads * shape.key_dim, shape.heads * shape.key_dim, shape.heads * shape.value_dim)
            for layer, shape in zip(probe.layers, probe.shapes, strict=True)
        }
        return found._replace(kv=probe.shapes, way=probe.way, layers=max(qkv) + 1, qkv=qkv)

    def _observe(self, run: Callable[[], int], *, as_parts: bool) -> tuple[_Found, set[str]]:
        """Record modules while a few tokens are computed.

        Args:
            run: computes the tokens, and returns the size of a hidden state.
            as_parts: see :meth:`_probe`.

        Returns:
            What was found besides attention, and the names of the members of lists of modules that ran.
        """
        rows: dict[nn.Module, set[int]] = {}
        inputs: dict[nn.Module, Tensor] = {}
        norms: dict[nn.Module, int] = {}
        ran: set[str] = set()

        def see_norm(module: nn.Module, given: tuple[Tensor, ...], _: Any) -> None:
            at = [index for index, size in enumerate(given[0].shape[:-1]) if size == _PROBE_TOKENS]
            if len(at) == 1 and norms.setdefault(module, at[0]) == at[0] and len(given) == 1:
                return
            norms[module] = -1

        def see_rows(module: nn.Module, given: tuple[Tensor, ...], output: Any) -> Any:
            if given:
                rows.setdefault(module, set()).add(given[0].numel() // given[0].shape[-1])
                inputs[module] = given[0]
            # Layers that are computed as one return views of wider rows.
            is_part = as_parts and is_linear(module)
            return torch.cat((output, output), dim=-1)[..., : output.shape[-1]] if is_part else output

        def see_layer(name: str) -> Callable[..., None]:
            return lambda *_: ran.add(name)

        matrices = MatrixProbe(self._decoder)
        with ExitStack() as hooks:
            matrices.begin(hooks)
            for name, module in self._decoder.named_modules():
                if is_linear(module) or are_experts(module):
                    hooks.callback(module.register_forward_hook(see_rows).remove)
                if is_norm(module):
                    hooks.callback(module.register_forward_hook(see_norm).remove)
                if isinstance(module, nn.ModuleList):
                    for inner, child in module.named_children():
                        hooks.callback(child.register_forward_hook(see_layer(f"{name}.{inner}")).remove)
            try:
                hidden = run()
            except UnsupportedAttention:
                raise
            # The error comes from modules that expect inputs that we do not pass, such as masks.
            except Exception as error:
                edits = f"'{Mask.__name__}' object" in str(error)
                why = "its attention is sparse: it edits its masks" if edits else f"its modules fail: {error}"
                raise UnsupportedAttention(why) from error
        found = _Found(
            [],
            [],
            Way.KERNELS,
            0,
            {},
            rows,
            inputs if as_parts else {},
            {module: at for module, at in norms.items() if at >= 0},
            matrices.found(linears_of(self._model, self._decoder)[0], _PROBE_TOKENS),
            hidden,
            [],
            (),
        )
        return found, ran

    def _attend_by(self, name: str) -> None:
        """Select the attention function and its masks."""
        if type(self._model).__name__ in OLDER:
            self._model.config._attn_implementation = name
        elif self._model._supports_attention_backend or self._has_states:
            self._model.set_attn_implementation(name)

    def _check_layers(self, calls: Sequence[AttentionCall], ran: set[str]) -> None:
        """Check that every layer has called the attention function."""
        names = {module: name for name, module in self._decoder.named_modules()}
        callers = {names[call.module] for call in calls}
        lists = {split_layer(name)[0].partition(".{}")[0] for name in callers}
        if not calls:
            raise UnsupportedAttention("it calls no attention that transformers can replace")
        for name in sorted(ran):
            if name.rpartition(".")[0] in lists and not any(caller.startswith(f"{name}.") for caller in callers):
                raise UnsupportedAttention(
                    f"layer {name} has no attention that transformers can replace (but a state space, a convolution or "
                    "linear attention, perhaps)"
                )

    def _quantize(self, bits: int) -> None:
        """Quantise the linear layers of the decoder, and its experts, before it is probed."""
        self._embeddings = {id(each.weight) for each in self._model.modules() if isinstance(each, nn.Embedding)}
        self._quantized: dict[nn.Module, QuantizedWeight] = {}
        self._quantized_experts: dict[nn.Module, dict[tuple[str, int], QuantizedWeight]] = {}
        if bits:
            prefix, linears = linears_of(self._model, self._decoder)
            own = (each for each in linears if id(each.module.weight) not in self._embeddings)
            self._quantized = quantize_linears(own, bits)
            for each in experts_of(prefix, self._decoder):
                self._quantized_experts[each.module] = quantize_experts(each, bits)

    def _take_linears(self, found: _Found) -> "_Taken":
        """Make the kernels compute the linear layers."""
        prefix, linears = linears_of(self._model, self._decoder)
        self._linears: list[AdaptedLinear | AdaptedMatrix] = []
        # BigBird pools a vector for other tasks than text.
        used = {each.name for each in linears if each.module in found.rows and "pooler" not in each.name.split(".")}
        idle = [each.name for each in linears if each.name not in used and "expert" not in each.name]
        linears = [each for each in linears if each.name in used]
        experts = [each for each in experts_of(prefix, self._decoder) if found.rows.get(each.module) == {_PROBE_TOKENS}]
        is_whole = found.way is Way.WHOLE
        seen = [linear for linear in linears if is_whole or found.rows[linear.module] == {_PROBE_TOKENS}]
        lora = find_modules(seen, prefix, found.layers, found.qkv, idle)
        add_matrices(lora, found.matrices, self._model)
        add_experts(lora, experts, self._model)
        step = StepLora()
        for group in self._read_together(linears, found, lora):
            modules = [linear.module for linear in group]
            outputs = [len(linear.weight) for linear in group]
            mlp = self._model.get_submodule(group[0].name.rpartition(".")[0])
            gated = gate_of(mlp, group, self._kernels)
            biases = [module.bias for module in modules if isinstance(module.bias, Tensor)]
            weight = take_weight(
                group,
                self._kernels,
                [self._quantized.pop(module) for module in modules if module in self._quantized],
                keep=id(modules[0].weight) in self._embeddings,
            )
            bias = torch.cat(biases) if biases else None
            targets = lora.targets(*(linear.name for linear in group))
            adapted = AdaptedLinear(Product(weight, bias, group[0].layer, targets), self._kernels, step)
            fused = FusedLinear(adapted, outputs)
            for number, module in enumerate(modules):
                module.forward = adapted if len(group) == 1 else fused.forward(number)
            if gated is not None:
                mlp.forward = GatedMlp(adapted, *gated)
            self._linears.append(adapted)
        for each in experts:
            quantized_experts = self._quantized_experts.pop(each.module, {})
            each.module.forward = of_experts = AdaptedExperts(each, self._kernels, step, lora, quantized_experts)
            self._linears += of_experts.linears
        self._linears += adapt_matrices(found.matrices, lora, self._kernels, step)
        for module in self._decoder.modules():
            if norm := rms_norm_of(module, self._kernels):
                module.forward = norm
        return _Taken(lora, step)

    def _read_together(self, linears: Sequence[Linear], found: _Found, lora: LoraModules) -> list[list[Linear]]:
        """Return groups of neighbouring linear layers that read the same input. Each group is computed as one layer."""
        groups: list[list[Linear]] = []
        for linear in linears:
            before = groups[-1][-1] if groups else linear
            read = found.inputs.get(linear.module)
            is_alike = (
                bool(groups)
                and read is not None
                and read is found.inputs.get(before.module)
                and linear.layer == before.layer
                and linear.name.rpartition(".")[0] == before.name.rpartition(".")[0]
                and type(linear.module) is type(before.module) is nn.Linear
                and (linear.module.bias is None) == (before.module.bias is None)
                and linear.module.weight.dtype == before.module.weight.dtype
                and self._embeddings.isdisjoint((id(linear.module.weight), id(before.module.weight)))
                and all(lora.targets(each.name) for each in (before, linear))
            )
            if is_alike:
                groups[-1].append(linear)
            else:
                groups.append([linear])
        return groups

    def _adapt_norms_and_embedding(self, found: _Found) -> None:
        """Make norms and the embedding use the tensors of adapters."""
        names = {module: name for name, module in self._decoder.named_modules()}
        for module, rows_at in found.norms.items():
            path, layer = split_layer(names[module])
            module.forward = AdaptedVectors(module, self._step, path, layer, rows_at)
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        embedding.forward = AdaptedEmbedding(embedding, self._step)  # type: ignore[method-assign, assignment]

    def _geometry(self, lora: LoraModules, found: _Found) -> ModelGeometry:
        assert lora.names is not None
        return ModelGeometry(
            layers=lora.layers,
            kv_heads=0,
            head_dim=0,
            modules=lora.shapes,
            dtype_bytes=self._dtype.itemsize,
            module_layers=lora.module_layers,
            names=lora.names,
            replaceable=self._replaceable(lora.names.prefixes[0], found),
            hidden_size=found.hidden_size,
            states=found.states,
            adapts_rows=found.way is not Way.WHOLE,
        )

    def _replaceable(self, prefix: str, found: _Found) -> ReplaceableWeights:
        if found.way is Way.WHOLE:
            return ReplaceableWeights("", "", 0, {})
        return replaceable_weights(self._model, prefix, found.norms, found.hidden_size)

    def _set_kv(self, stored: Sequence[KvShape]) -> None:
        """Set the keys and values of one token, in the order of the calls that store them."""
        first = stored[0] if stored else KvShape(0, 0, 0)
        is_plain = set(stored) == {KvShape(first.heads, first.key_dim, first.key_dim)}
        self.geometry = msgspec.structs.replace(
            self.geometry,
            kv_heads=first.heads,
            head_dim=first.key_dim,
            has_kv=bool(stored),
            kv_layers=() if is_plain and len(stored) == self.geometry.layers else tuple(stored),
        )
        self._shapes = self.geometry.kv_shapes()
        self._views = None

    def _cut_output_layer(self) -> None:
        """Divide the model into the decoder and the part that computes logits from hidden states. Free the rest."""
        output = self._model.get_output_embeddings()
        embedding = self._model.get_input_embeddings()
        self._output: OutputLayer | None = None
        if output is not None and is_linear(output) and output.bias is None:
            is_tied = output.weight is embedding.weight
            packed = self._kernels.pack(output.weight.detach())
            if packed is not output.weight and output.weight is not embedding.weight:
                empty = torch.full((1,), torch.nan, dtype=output.weight.dtype, device=output.weight.device)
                output.weight = nn.Parameter(empty.expand(output.weight.shape), requires_grad=False)
            self._output = output.forward = OutputLayer(packed, self._kernels, self._step, is_tied=is_tied)
        self._whole: WholeModel | None = None
        if self.way is Way.WHOLE:
            assert output is not None
            self._whole = WholeModel(self._model, output, output.forward)
            return
        name = next(name for name, module in self._model.named_modules() if module is self._decoder)
        top, *inner = name.split(".")
        self._below = _Hidden(inner, getattr(self._model, top))
        setattr(self._model, top, self._below)

    def _check(self, ids: Tensor, expected: Tensor) -> None:
        """Compare the logits with those of eager attention.

        The tokens run in two chunks, beside another sequence.

        Raises:
            UnsupportedAttention: the logits differ.
        """
        blocks = 8
        block_size = 4
        self._block_size = block_size
        elements = self.geometry.block_elements(block_size)
        state_blocks = self.geometry.state_blocks(block_size)
        arena = torch.zeros(blocks + 2 * state_blocks, elements, dtype=self._dtype, device=self._device)
        one = [5, 1, 6]
        other = [2, 7]
        states = {5: list(range(blocks, blocks + state_blocks)), 2: list(range(blocks + state_blocks, len(arena)))}
        last = len(ids) - 1
        parts = [[(0, 6, one)], [(0, 5, other), (6, last, one)], [(last, len(ids), one), (5, 6, other)]]
        differences: list[float] = []
        for rows in parts:
            try:
                of_rows = [states[table[0]] for _, _, table in rows]
                logits = self.forward(_check_batch(ids, rows, block_size, of_rows), arena).float()
            except Exception as error:
                if self.way is Way.KERNELS:
                    raise
                raise UnsupportedAttention(f"its modules fail: {error}") from error
            wanted = torch.cat([expected[start:stop] for start, stop, _ in rows])
            differences += ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).tolist()
        self._views = None
        self._block_size = 0
        worst = max(differences)
        if not worst <= (_TOLERANCES_ANEW if self.way in (Way.ANEW, Way.WHOLE) else _TOLERANCES)[self._dtype]:
            raise UnsupportedAttention(
                f"over a cache its logits differ from transformers' own by {worst:.2g} of their size: it may carry "
                "state from token to token beside keys and values"
            )


def _causal_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a vision model that has decoder and output layer, if it is a model itself (Llama 4)."""
    inner = getattr(model, "language_model", None)
    is_whole = not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None
    return model if is_whole or hasattr(model, "model") else inner


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the decoder of a model with an output layer. For a vision model this is the language tower."""
    model = _causal_part(model)
    found = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if not isinstance(found, nn.Module):
        raise UnsupportedAttention("its decoder is not found")
    for name in ("language_model", "text_model", "decoder"):
        inner = getattr(found, name, None)
        if isinstance(inner, PreTrainedModel):
            return inner
    return found


class _Taken(NamedTuple):
    lora: LoraModules
    step: StepLora


def has_states(model: PreTrainedModel) -> bool:
    """Return whether layers of a model may carry state from token to token beside keys and values."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or not _STATEFUL.isdisjoint(types)


def _accepted(decoder: nn.Module) -> tuple[Mapping[str, Any], bool]:
    """Return the additional arguments for a decoder, and whether it takes position ids."""
    parameters = inspect.signature(decoder.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    wanted = {"use_cache": False, "past_key_values": None, "attention_mask": None, "return_dict": True}
    accepted: dict[str, Any] = {name: value for name, value in wanted.items() if takes_any or name in parameters}
    if "cache_params" in parameters:
        accepted.pop("past_key_values", None)
        accepted["cache_params"] = None
    if "logits_to_keep" in parameters:
        accepted["logits_to_keep"] = slice(None)  # A number would make the decoder drop rows.
    return accepted, "position_ids" in parameters


def _query_heads(model: PreTrainedModel) -> int:
    """Return the largest number of query heads of a layer."""
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "per_layer_config", None) or [config]
    return max((getattr(each, "num_attention_heads", None) or 1 for each in layers), default=1)


def _check_batch(
    ids: Tensor, rows: Sequence[tuple[int, int, list[int]]], block_size: int, state_blocks: Sequence[list[int]] = ()
) -> Batch:
    """Return a batch with tokens ``start`` to ``stop`` of one sequence, once for each block table.

    ``state_blocks`` has the blocks of each sequence's state.
    """
    positions = [position for start, stop, _ in rows for position in range(start, stop)]
    slots = [table[position // block_size] for start, stop, table in rows for position in range(start, stop)]
    starts = [0]
    for start, stop, _ in rows:
        starts.append(starts[-1] + stop - start)
    width = max(len(table) for _, _, table in rows)
    host = HostMetadata(
        row_starts=torch.tensor(starts),
        contexts=torch.tensor([stop for _, stop, _ in rows]),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for _, _, table in rows]),
        sample_rows=torch.arange(len(positions)),
    )
    at = torch.tensor(positions)
    resumed = torch.tensor([int(start > 0) for start, _, _ in rows])

    def there(tensor: Tensor) -> Tensor:
        return to_device(tensor, ids.device)

    return Batch(
        token_ids=ids[there(at)],
        positions=there(at),
        slot_blocks=there(torch.tensor(slots)),
        slot_offsets=there(at % block_size),
        row_starts=there(host.row_starts),
        contexts=there(host.contexts),
        block_tables=there(host.block_tables),
        sample_rows=there(host.sample_rows),
        host=host,
        states=StateTable(there(torch.tensor(state_blocks)), there(resumed), resumed) if any(state_blocks) else None,
    )
