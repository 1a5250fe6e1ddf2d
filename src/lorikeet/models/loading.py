"""Loads model weights into the tensors of one rank, or fills them with random values.

``WeightLayout`` maps every checkpoint tensor to the part of the rank's tensors that the checkpoint tensor fills.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorikeet.core.geometry import PREFIXES, PRODUCTS, RECURRENCE_INPUTS, RECURRENCE_OUT, ROW_PARALLEL, UNUSED_PARTS
from lorikeet.core.messages import LOADING_WEIGHTS
from lorikeet.core.text import format_size
from lorikeet.kernels.interface import LayerWeights, RecurrenceWeights, Weight
from lorikeet.kernels.quantized import GROUP, QuantizedWeight, QuantizedWeightError, quantize, stacked
from lorikeet.models.config import ModelConfig
from lorikeet.models.gguf import GGUF_FILE, GgufFile, read_gguf, transformers_names
from lorikeet.models.gguf_weights import decode_gguf
from lorikeet.models.json_section import read_json_section
from lorikeet.models.quantization_config import ALIASES, GGUF, ON_LOAD, QUANTIZATIONS, read_quantization
from lorikeet.models.quantized_formats import Decoded, StoredWeight, stored_weights
from lorikeet.models.weights import DecoderWeights

_WHOLE = slice(None)
_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_FINAL_NORM = "model.norm.weight"
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")

# Some checkpoints contain the rotary frequencies, which follow from the config.
# Layers that predict several tokens at once are not used.
_ALWAYS_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|mtp\..*")

_PATHS = {
    **{module: f"self_attn.{module}_proj" for module in ("q", "k", "v", "o")},
    **{module: f"mlp.{module}_proj" for module in ("gate", "up", "down")},
    **{module: f"{module}_proj" for module in (*RECURRENCE_INPUTS, RECURRENCE_OUT)},
}


class WeightTarget(NamedTuple):
    """The destination of a checkpoint tensor.

    Attributes:
        view: the tensor to which the checkpoint tensor is copied.
        shape: the tensor's shape in the checkpoint.
        part: the slice of the tensor that this rank holds.
    """

    view: Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...]


@dataclass
class LinearWeight:
    """A linear weight of one rank, which one or more checkpoint tensors fill.

    Attributes:
        tensor: the weight in the model's dtype.
        splits_inputs: whether other ranks hold other inputs.
        waiting: names of the checkpoint tensors that are still missing.
        parts: quantised parts by name.
        weight: the complete weight, once all parts are there.
    """

    tensor: Tensor
    splits_inputs: bool = False
    waiting: list[str] = field(default_factory=list)
    parts: dict[str, QuantizedWeight] = field(default_factory=dict)
    weight: Weight | None = None


class WeightLayout:
    """Uninitialised weights of one rank, and the destination of every checkpoint tensor.

    Args:
        config: configuration of the model, or of a pipeline stage.
        dtype: dtype of the weights.
        device: device of the weights.
        rank: tensor-parallel rank.
        tensor_parallel: number of tensor-parallel ranks.

    Attributes:
        weights: the weights, to be filled through ``targets``.
        targets: destinations by name in the checkpoint.
        linears: linear weights by the names of the tensors that fill them. A tied output layer has the embedding's
            name.
        copies: checkpoint tensors that are not loaded, each with the name of the tensor that it must equal.
        norm_offset: see ``ModelConfig``.
        fused: checkpoint tensors that hold the rows of several targets, with the targets' names in order.

    Raises:
        ModelConfigError: the model does not split over the ranks.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, rank: int, tensor_parallel: int
    ) -> None:
        self._config = config
        self._rank = rank
        self._ranks = tensor_parallel
        self._dtype = dtype
        self._device = device
        self._shapes = config.module_shapes()
        self.norm_offset = config.norm_offset
        self.targets: dict[str, WeightTarget] = {}
        self.linears: dict[str, LinearWeight] = {}
        self.fused: dict[str, tuple[str, ...]] = {}
        self._products: list[dict[str, LinearWeight]] = []
        self._recurrent_layers = () if config.recurrence is None else config.recurrence.layers
        config.check_divides(tensor_parallel)
        self.weights = self._decoder()
        head = _EMBEDDING if config.tie_word_embeddings else _LM_HEAD
        # Stages without an output layer have no such target.
        view = self.targets[head].view if config.is_last else self._empty(0, config.hidden_size)
        self._head = LinearWeight(view, waiting=[head])
        if config.is_last:
            self.linears[head] = self._head
        self.copies = {_LM_HEAD: _EMBEDDING} if config.tie_word_embeddings and _EMBEDDING in self.targets else {}

    def is_ignored(self, name: str) -> bool:
        """Return whether a checkpoint may hold a tensor ``name`` that this rank does not need."""
        if name in self.copies or _ALWAYS_IGNORED.fullmatch(name) is not None:
            return True
        return self._config.stages > 1 and self._is_elsewhere(name)

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor of the model belongs to another pipeline stage."""
        layer = _OF_LAYER.match(name)
        first = self._config.first_layer
        if layer is not None:
            return not first <= int(layer[1]) < first + self._config.layers
        return name in (_EMBEDDING, _LM_HEAD, _FINAL_NORM) and name not in self.targets

    def _decoder(self) -> DecoderWeights:
        config = self._config
        hidden = config.hidden_size
        tied = config.tie_word_embeddings
        nothing = self._empty(0, config.hidden_size)
        has_embedding = config.is_first or (config.is_last and tied)
        embedding = self._plain(_EMBEDDING, config.vocab_size, hidden) if has_embedding else nothing
        layers = tuple(
            self._layer(f"model.layers.{config.first_layer + layer}.", recurs=layer in self._recurrent_layers)
            for layer in range(config.layers)
        )
        if not config.is_last:
            return DecoderWeights(embedding, layers, self._empty(0), nothing)
        final_norm = self._plain(_FINAL_NORM, hidden)
        lm_head = embedding if tied else self._plain(_LM_HEAD, config.vocab_size, hidden)
        return DecoderWeights(embedding, layers, final_norm, lm_head)

    def _layer(self, prefix: str, *, recurs: bool) -> LayerWeights:
        config = self._config
        self._products.append({})
        mixer = self._recurrence(prefix) if recurs else self._attention(prefix)
        gate_up, gate_up_bias = self._fused(prefix, "gate_up", PRODUCTS["gate_up"], biased=config.mlp_bias)
        down, down_bias = self._fused(prefix, "down", PRODUCTS["down"], biased=config.mlp_bias)
        norms = [self._plain(f"{prefix}{name}.weight", config.hidden_size) if name else None for name in config.norms]
        return LayerWeights(
            input_norm=norms[0],
            attention_norm=norms[1],
            post_norm=norms[2],
            mlp_norm=norms[3],
            gate_up=gate_up,
            down=down,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            **mixer,
        )

    def _attention(self, prefix: str) -> dict[str, Any]:
        """Allocate the weights of attention, by their names in ``LayerWeights``."""
        config = self._config
        qkv, qkv_bias = self._fused(prefix, "qkv", PRODUCTS["qkv"], biased=config.qkv_bias)
        o, o_bias = self._fused(prefix, "o", PRODUCTS["o"], biased=config.o_bias)
        of_heads = {
            f"{side}_norm": self._plain(f"{prefix}self_attn.{side}_norm.weight", size)
            for side, size in config.qk_norm_sizes().items()
        }
        return {"qkv": qkv, "o": o, "qkv_bias": qkv_bias, "o_bias": o_bias, **of_heads}

    def _recurrence(self, prefix: str) -> dict[str, Any]:
        """Allocate the weights of a recurrence, by their names in ``LayerWeights``."""
        rule = self._config.recurrence
        assert rule is not None
        for linear in rule.paths():
            whole = f"{prefix}{linear.path.removeprefix('layers.{}.')}.weight"
            self.fused[whole] = tuple(f"{prefix}{_PATHS[module]}.weight" for module in linear.modules)
        qkv, _ = self._fused(prefix, "qkv", rule.inputs, biased=False)
        o, _ = self._fused(prefix, "o", (RECURRENCE_OUT,), biased=False)
        path = f"{prefix}{rule.module}."
        conv = self._conv(f"{path}conv1d", ".weight", (1, rule.taps))
        conv_bias = self._conv(f"{path}conv1d", ".bias", ()) if rule.has_conv_bias else None
        logarithms, bias, skip = torch.empty(3, rule.value_heads // self._ranks, device=self._device)
        of_heads = {"A_log": logarithms, "dt_bias": bias} | ({} if rule.is_delta else {"D": skip})
        for name, view in of_heads.items():
            part = self._share(rule.value_heads)
            self.targets[f"{path}{name}"] = WeightTarget(view, (rule.value_heads,), (part,))
        part = _WHOLE if rule.is_delta else self._share(rule.norm_size)
        norm = self._empty(rule.share(self._ranks).norm_size)
        self.targets[f"{path}norm.weight"] = WeightTarget(norm, (rule.norm_size,), (part,))
        own = RecurrenceWeights(conv, conv_bias, logarithms, bias, None if rule.is_delta else skip, norm)
        return {"qkv": qkv, "o": o, "recurrence": own}

    def _conv(self, name: str, end: str, rest: tuple[int, ...]) -> Tensor:
        """Allocate the weight or bias of a recurrence's convolution, ``[channels, *rest]``, in the order q, k, v."""
        rule = self._config.recurrence
        assert rule is not None
        sections = rule.conv_sections()
        self.fused[f"{name}{end}"] = tuple(f"{name}.{section.name}{end}" for section in sections)
        conv = self._empty(rule.share(self._ranks).channels, *rest)
        first = 0
        for section in sorted(sections, key=lambda section: "qkv".index(section.name)):
            count = section.features // self._ranks
            self.targets[f"{name}.{section.name}{end}"] = WeightTarget(
                conv[first : first + count],
                (section.features, *rest),
                (self._share(section.features), *(_WHOLE for _ in rest)),
            )
            first += count
        return conv

    def _share(self, features: int) -> slice:
        """Return this rank's equal share of features."""
        return slice(features * self._rank // self._ranks, features * (self._rank + 1) // self._ranks)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _plain(self, name: str, *shape: int) -> Tensor:
        """Allocate a tensor that every rank holds whole."""
        view = self._empty(*shape)
        self.targets[name] = WeightTarget(view, shape, (_WHOLE,) * len(shape))
        return view

    def _fused(
        self, prefix: str, product: str, modules: tuple[str, ...], *, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Allocate this rank's share of the stacked weight of ``modules``, and of their bias.

        ``product`` is the field of ``LayerWeights``.
        """
        shards = [self._config.module_shard(module, self._rank, self._ranks) for module in modules]
        rows = [shard.outputs.stop - shard.outputs.start for shard in shards]
        columns = shards[0].inputs.stop - shards[0].inputs.start
        weight = self._empty(sum(rows), columns)
        bias = self._empty(sum(rows)) if biased else None
        linear = LinearWeight(weight, columns < self._shapes[modules[0]].in_features)
        self._products[-1][product] = linear
        if product in self._config.fused:
            for end in ("weight", "bias") if biased else ("weight",):
                whole = f"{prefix}{self._config.fused[product]}.{end}"
                self.fused[whole] = tuple(f"{prefix}{_PATHS[module]}.{end}" for module in modules)
        holds_bias = self._rank == 0 or not ROW_PARALLEL.intersection(modules)
        for index, (module, shard) in enumerate(zip(modules, shards, strict=True)):
            place = slice(sum(rows[:index]), sum(rows[: index + 1]))
            shape = self._shapes[module]
            path = prefix + _PATHS[module]
            full = (shape.out_features, shape.in_features)
            self.targets[f"{path}.weight"] = WeightTarget(weight[place], full, (shard.outputs, shard.inputs))
            self.linears[f"{path}.weight"] = linear
            linear.waiting.append(f"{path}.weight")
            if bias is not None:
                self.targets[f"{path}.bias"] = WeightTarget(bias[place], (shape.out_features,), (shard.outputs,))
        return weight, bias if holds_bias else None

    def put(self, name: str, value: Decoded, bits: int = 0) -> None:
        """Fill a target with the rank's part of a checkpoint tensor.

        A linear weight that becomes complete is quantised.

        Args:
            name: name of the target.
            value: the rank's part.
            bits: number of bits to which weights are quantised; 0 leaves them unchanged.

        Raises:
            WeightError: groups of inputs do not divide among the ranks.
        """
        linear = self.linears.get(name)
        view = self.targets[name].view
        if isinstance(value, QuantizedWeight) and linear is not None:
            linear.parts[name] = value
            if name == _EMBEDDING:
                view.copy_(value.dequantized(view.dtype))
        else:
            view.copy_(value.dequantized(view.dtype) if isinstance(value, QuantizedWeight) else value)
        if linear is not None:
            linear.waiting.remove(name)
            if not linear.waiting:
                self._complete(linear, name, _HEAD_BITS if bits and linear is self._head else bits)

    def _complete(self, linear: LinearWeight, name: str, bits: int) -> None:
        names = [each for each, owner in self.linears.items() if owner is linear]
        if all(each in linear.parts for each in names):
            linear.weight = stacked([linear.parts[each] for each in names])
        else:
            for each, part in linear.parts.items():
                self.targets[each].view.copy_(part.dequantized(self._dtype))
            if bits and linear.splits_inputs and linear.tensor.shape[1] % GROUP:
                raise WeightError(
                    f"{name}: weights are quantised in groups of {GROUP} inputs, and a rank has "
                    f"{linear.tensor.shape[1]}: they cannot be split over {self._ranks} tensor-parallel ranks"
                )
            linear.weight = quantize(linear.tensor, bits) if bits else linear.tensor
        linear.parts.clear()
        if linear.weight is not linear.tensor and linear.tensor is not self.weights.embedding:
            linear.tensor.untyped_storage().resize_(0)

    def finished(self, device: torch.device) -> DecoderWeights:
        """Return the weights on a device. Every target must have been filled."""
        layers = []
        for layer, products in zip(self.weights.layers, self._products, strict=True):
            there: dict[str, Any] = {name: _on(linear.weight, device) for name, linear in products.items()}
            for name, tensor in vars(layer).items():
                if name not in there and name != "recurrence":
                    there[name] = None if tensor is None else tensor.to(device)
            if layer.recurrence is not None:
                there["recurrence"] = _recurrence_weights(layer.recurrence, device)
            layers.append(LayerWeights(**there))
        embedding = self.weights.embedding.to(device)
        head = self._head.weight if self.weights.holds_head else self.weights.lm_head
        tied = head is self.weights.embedding
        return DecoderWeights(
            embedding, tuple(layers), self.weights.final_norm.to(device), embedding if tied else _on(head, device)
        )


def _recurrence_weights(loaded: RecurrenceWeights, device: torch.device) -> RecurrenceWeights:
    """Return the weights of a recurrence, from those of a checkpoint: rates as logarithms, taps last."""
    conv = loaded.conv[:, 0].T.contiguous()
    made = loaded._replace(conv=conv, rates=-loaded.rates.exp())
    moved: dict[str, Any] = {name: None if each is None else each.to(device) for name, each in made._asdict().items()}
    return RecurrenceWeights(**moved)


def _on(weight: Weight | None, device: torch.device) -> Weight:
    assert isinstance(weight, Tensor | QuantizedWeight)
    return weight.to(device)


_HEAD_BITS = 8
"""Bits of the output layer, if weights are quantised when they are loaded."""


Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = ("BF16", "F16", "F32")
_CODES = ("I8", "U8", "I32", "I64", "F8_E4M3", *_FLOATS)
_DUMMY_STD = 0.02


class WeightError(ValueError):
    """Raised when a checkpoint's weights are broken or do not match its config. The message names file and tensor."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    tensor_parallel: int = 1,
    load_format: str = "auto",
    quantization: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Load the weights of one rank.

    If a split tensor is not quantised, only the rank's slice is read.

    Args:
        folder: a checkpoint with ``model.gguf`` or ``model.safetensors``, or with an index and shards. ``dummy`` does
            not read it.
        config: configuration of the checkpoint, or of a pipeline stage.
        dtype: dtype of the loaded weights.
        device: device of the loaded weights.
        rank, tensor_parallel: the tensor-parallel rank, and the number of ranks.
        load_format: ``auto`` for safetensors and GGUF, ``dummy`` for small random weights of the right shapes.
        quantization: ``auto`` keeps linear weights as they are stored, ``none`` dequantises all of them, ``int8`` and
            ``int4`` quantise them. The name of the checkpoint's own quantisation method means ``auto``.
        seed: seed of dummy weights. On one kind of device, all ranks get shares of the same model.
        progress: function called with (stage, tensors done, total tensors).

    Raises:
        WeightError: a tensor is missing, unknown, or of a wrong shape or dtype; a file is broken; there are only
            pickle files; ``load_format`` or ``quantization`` is unknown, or does not fit the checkpoint; or quantised
            weights cannot be split over the ranks.
        ModelConfigError: the model does not split over the ranks, or is quantised in a way that is not supported.
    """
    if load_format not in ("auto", "dummy"):
        raise WeightError(f"load format {load_format!r} is not one of auto, dummy")
    checkpoint = _open(folder, has_other_parts=config.has_other_parts) if load_format == "auto" else None
    method = checkpoint.method if checkpoint else ""
    bits = bits_on_load(quantization, method, folder)
    # Quantised weights are joined on the host, since the device may lack room for weights of 16 bits.
    place = torch.device("cpu" if bits or method else device)
    layout = WeightLayout(config, dtype, place, rank, tensor_parallel)
    report = progress or (lambda stage, done, total: None)
    if checkpoint is None:
        _fill_randomly(layout, seed, report, bits)
        kinds = Kinds()
    else:
        kinds = _fill_from(checkpoint, layout, report, bits, packs=quantization != "none")
    weights = layout.finished(torch.device(device))
    return replace(weights, stored=_in_words(weights, kinds, bits))


def bits_on_load(quantization: str, method: str, folder: Path) -> int:
    """Return the number of bits to which linear weights are quantised when they are loaded; 0 for no quantisation.

    Args:
        quantization: see :func:`load_weights`.
        method: the checkpoint's quantisation method; empty if it has none.
        folder: the checkpoint, for errors.

    Raises:
        WeightError: ``quantization`` is unknown, or does not fit the checkpoint.
    """
    quantization = ALIASES.get(quantization, quantization)
    if quantization not in QUANTIZATIONS:
        raise WeightError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    bits = ON_LOAD.get(quantization, 0)
    if bits and method:
        raise WeightError(
            f"quantization: {folder} is quantised already ({method}), so it cannot be served as {quantization}"
        )
    if not bits and quantization not in ("auto", "none", method):
        stored = f"quantised by {method}" if method else f"not quantised; {' and '.join(ON_LOAD)} quantise it"
        raise WeightError(f"quantization: {quantization} is not what {folder} has: it is {stored}")
    return bits


@dataclass
class Kinds:
    """The forms in which a checkpoint stores linear weights, by their names in the log."""

    packed: set[str] = field(default_factory=set)
    dequantised: set[str] = field(default_factory=set)


def _in_words(weights: DecoderWeights, kinds: Kinds, bits: int) -> str:
    """Return a description of the weights' form, for the log and for `/health`."""
    dtype = weights.embedding.dtype
    name = str(dtype).removeprefix("torch.")
    found = [getattr(layer, product) for layer in weights.layers for product in PRODUCTS]
    linear = [*found, *(() if weights.lm_head is weights.embedding or not weights.holds_head else (weights.lm_head,))]
    forms = [f"int{bits} in groups of {GROUP}, output layer int{_HEAD_BITS}, quantised from {name}"] if bits else []
    if kinds.packed:
        forms.append(", ".join(sorted(kinds.packed)))
    if kinds.dequantised:
        forms.append(f"{', '.join(sorted(kinds.dequantised))} dequantised to {name}")
    text = "; ".join(forms) or name
    if bits or kinds.packed:
        wide_bytes = sum(weight.shape.numel() for weight in linear) * dtype.itemsize
        text += f": {format_size(sum(weight.nbytes for weight in linear))} of {format_size(wide_bytes)}"
    return text


class Checkpoint(Protocol):
    """The files with the weights of a model."""

    method: str
    """The method of quantisation; empty if there is none."""

    def names(self, layout: WeightLayout) -> set[str]:
        """Return the names of the weights, see ``WeightLayout.targets``. Unknown weights keep the file's names."""
        ...

    def read(self, names: set[str], layout: WeightLayout, kinds: Kinds) -> Iterator[tuple[str, Decoded]]:
        """Yield this rank's part of each requested weight, and add the weight's form to ``kinds``."""
        ...

    def check_copies(self, layout: WeightLayout) -> None:
        """Check that tied tensors, which are not loaded, equal the tensors to which they are tied."""
        ...


def _open(folder: Path, *, has_other_parts: bool) -> Checkpoint:
    if (folder / GGUF_FILE).is_file():
        return _GgufCheckpoint(read_gguf(folder / GGUF_FILE))
    return _SafetensorsCheckpoint(folder, has_other_parts=has_other_parts)


def _fill_from(checkpoint: Checkpoint, layout: WeightLayout, progress: Progress, bits: int, *, packs: bool) -> Kinds:
    """Fill all targets. Quantised weights are dequantised unless ``packs`` is set."""
    kinds = Kinds()
    found = checkpoint.names(layout)
    if missing := sorted(layout.targets.keys() - found):
        raise WeightError(f"{checkpoint}: {_some(missing)} missing")
    if unknown := sorted(found - layout.targets.keys()):
        raise WeightError(f"{checkpoint}: {_some(unknown)} not part of the model that config.json describes")
    progress(LOADING_WEIGHTS, 0, len(found))
    for done, (name, value) in enumerate(checkpoint.read(found, layout, kinds)):
        kept = value if packs or isinstance(value, Tensor) else value.dequantized(torch.float32)
        layout.put(name, kept, bits)
        progress(LOADING_WEIGHTS, done + 1, len(found))
    checkpoint.check_copies(layout)
    return kinds if packs else Kinds(dequantised=kinds.packed | kinds.dequantised)


def _cut(value: Decoded, target: WeightTarget) -> Decoded:
    """Return the rank's part of a whole tensor."""
    if isinstance(value, Tensor):
        return value[target.part]
    outputs, inputs = target.part
    part = value if outputs == _WHOLE else value.rows(outputs)
    return part if inputs == _WHOLE else part.columns(inputs.start, inputs.stop)


class _GgufCheckpoint:
    """A GGUF file."""

    method = GGUF

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._names = transformers_names(file)

    def __str__(self) -> str:
        return str(self._file.path)

    def names(self, layout: WeightLayout) -> set[str]:
        return {name for name in self._names if not layout.is_ignored(name)}

    def read(self, names: set[str], layout: WeightLayout, kinds: Kinds) -> Iterator[tuple[str, Decoded]]:
        for name in sorted(names, key=lambda name: self._file.tensors[self._names[name]].start):
            stored = self._names[name]
            target = layout.targets[name]
            tensor = self._file.tensors[stored]
            if tensor.shape != target.shape:
                raise WeightError(f"{self}: {stored} has shape {list(tensor.shape)}, not {list(target.shape)}")
            try:
                value = decode_gguf(self._file, stored)
            except (QuantizedWeightError, OSError) as error:
                raise WeightError(f"{self}: {stored}: {error}") from error
            if name in layout.linears:
                kind = kinds.packed if isinstance(value, QuantizedWeight) else kinds.dequantised
                kind.add(f"GGUF {tensor.type.name}")
            yield name, _cut(value, target)

    def check_copies(self, layout: WeightLayout) -> None:
        """Do nothing, since a file that contains an output layer does not tie it."""


class _Stored(NamedTuple):
    """The location of a target in a checkpoint.

    Attributes:
        name: name of the tensor, see ``WeightLayout``.
        start: first row of the target in the tensor.
        shape: shape of the whole tensor.
        target: the target.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    target: WeightTarget


class _SafetensorsCheckpoint:
    """A folder with safetensors, which may be quantised.

    Args:
        folder: the folder.
        has_other_parts: whether the folder may hold more than the decoder. Other parts are not read.
    """

    def __init__(self, folder: Path, *, has_other_parts: bool) -> None:
        self._folder = folder
        self._where = {name: (file, name) for name, file in locate_tensors(folder).items()}
        if has_other_parts:
            self._where = {
                _decoder_name(name): place for name, place in self._where.items() if not name.startswith(UNUSED_PARTS)
            }
        config = read_quantization(read_json_section(folder / "config.json"))
        self.method = config.method if config else ""
        self._ways = stored_weights(config) if config else ()
        self._quantized: dict[str, tuple[StoredWeight, dict[str, str]]] = {}
        self._places: dict[str, _Stored] = {}

    def __str__(self) -> str:
        return str(self._folder)

    def names(self, layout: WeightLayout) -> set[str]:
        found = {name for name in self._where if not layout.is_ignored(name)}
        for name in [*layout.linears, *layout.fused]:
            module = name.removesuffix(".weight")
            for way in self._ways:
                if tensors := way.tensors(module, found):
                    if missing := sorted(set(tensors.values()) - found):
                        raise WeightError(f"{self}: {_some(missing)} missing")
                    self._quantized[name] = way, tensors
                    found -= {*tensors.values(), *(module + end for end in way.unused)}
                    found.add(name)
                    break
        if self._quantized:
            found -= {name for name in found - layout.targets.keys() if self._is_zero_bias(name)}
        for name in sorted(found):
            parts = layout.fused.get(name, (name,))
            targets = [layout.targets[part] for part in parts if part in layout.targets]
            rows = sum(target.shape[0] for target in targets)
            start = 0
            for part, target in zip(parts, targets, strict=False):
                self._places[part] = _Stored(name, start, (rows, *target.shape[1:]), target)
                start += target.shape[0]
            if name in layout.fused:
                found = (found - {name}) | set(parts)
        return found

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias that only the format (GPTQ) has and the model does not."""
        if f"{name.removesuffix('.bias')}.weight" not in self._quantized:
            return False
        file, stored = self._where[name]
        with safe_open(file, framework="pt") as tensors:
            return not bool(tensors.get_tensor(stored).any())

    def read(self, names: set[str], layout: WeightLayout, kinds: Kinds) -> Iterator[tuple[str, Decoded]]:
        by_file: dict[Path, list[str]] = {}
        quantized: dict[str, list[str]] = {}
        for name in sorted(names):
            stored = self._places[name].name
            if stored in self._quantized:
                quantized.setdefault(stored, []).append(name)
            else:
                by_file.setdefault(self._where[stored][0], []).append(name)
        for file, plain in by_file.items():
            places = {name: self._places[name] for name in plain}
            yield from _read(file, places, {place.name: self._where[place.name][1] for place in places.values()})
        for stored, parts in quantized.items():
            value = self._decoded(stored, self._places[parts[0]].shape, kinds)
            for name in parts:
                place = self._places[name]
                part = value if len(parts) == 1 else _rows(value, place.start, place.target.shape[0])
                try:
                    yield name, _cut(part, place.target)
                except QuantizedWeightError as error:
                    raise WeightError(f"{self}: {name}: {error}") from error

    def _decoded(self, name: str, shape: tuple[int, ...], kinds: Kinds) -> Decoded:
        """Return a whole quantised weight."""
        way, tensors = self._quantized[name]
        outputs, inputs = shape
        try:
            value = way.decode({end: self._whole(each) for end, each in tensors.items()}, (outputs, inputs))
        except (QuantizedWeightError, RuntimeError, KeyError, IndexError) as error:
            raise WeightError(f"{self}: {name}: is not a valid {way.label} weight: {error}") from error
        if tuple(value.shape) != shape:
            raise WeightError(f"{self}: {name} has shape {list(value.shape)}, not {list(shape)}")
        (kinds.packed if isinstance(value, QuantizedWeight) else kinds.dequantised).add(way.label)
        return value

    def _whole(self, name: str) -> Tensor:
        file, stored = self._where[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                kind = tensors.get_slice(stored).get_dtype()
                if kind not in _CODES:
                    raise WeightError(f"{file}: {stored} has dtype {kind}, not one of {', '.join(_CODES)}")
                return tensors.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: cannot be read: {error}") from error

    def check_copies(self, layout: WeightLayout) -> None:
        for name, other in layout.copies.items():
            if name in self._where:
                file, stored = self._where[name]
                _check_equal(file, stored, other, layout.targets[other])


def _decoder_name(name: str) -> str:
    """Return a tensor's name in a plain decoder, for a model in which the decoder is one of several parts."""
    for prefix in ("language_model.lm_head.", *PREFIXES[1:]):
        if name.startswith(prefix):
            kept = "lm_head." if prefix.endswith("lm_head.") else PREFIXES[0]
            return kept + name.removeprefix(prefix)
    return name


def _rows(value: Decoded, start: int, count: int) -> Decoded:
    rows = slice(start, start + count)
    return value[rows] if isinstance(value, Tensor) else value.rows(rows)


def _check_equal(file: Path, name: str, other: str, target: WeightTarget) -> None:
    """Check that a tensor which is not loaded equals the loaded tensor to which it is tied."""
    for _, tensor in _read(file, {name: _Stored(name, 0, target.shape, target)}, {name: name}):
        if not torch.equal(tensor.to(target.view), target.view):
            raise WeightError(
                f"{file}: {name} differs from {other}, to which config.json ties it: if it was trained separately, set "
                "tie_word_embeddings to false"
            )


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of the checkpoint."""
    if (folder / INDEX_FILE).is_file():
        index = read_json_section(folder / INDEX_FILE).get("weight_map")
        if not isinstance(index, dict):
            raise WeightError(f"{folder / INDEX_FILE}: weight_map: must be an object")
        outside = sorted({str(file) for file in index.values() if Path(str(file)).name != file})
        if outside:
            raise WeightError(f"{folder / INDEX_FILE}: weight_map: {outside[0]!r} is not a file of the folder")
        return {name: folder / file for name, file in index.items()}
    single = folder / SINGLE_FILE
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), single)
        except SafetensorError as error:
            raise WeightError(f"{single}: is not a valid safetensors file: {error}") from error
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise WeightError(f"{folder / pickles[0]}: pickle files are not loaded, convert the model to safetensors")
    raise WeightError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read(file: Path, places: dict[str, _Stored], stored_names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's slice of each target, after checking shape and dtype.

    Args:
        file: the file.
        places: the location of each target.
        stored_names: names in the file, by the names in ``WeightLayout``.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            present = set(tensors.keys())
            for name, place in places.items():
                stored = stored_names[place.name]
                if stored not in present:
                    raise WeightError(f"{file}: {stored} is missing, though the index names this file")
                tensor = tensors.get_slice(stored)
                shape = tuple(tensor.get_shape())
                kind = tensor.get_dtype()
                if shape != place.shape:
                    raise WeightError(f"{file}: {stored} has shape {list(shape)}, not {list(place.shape)}")
                if kind not in _FLOATS:
                    raise WeightError(f"{file}: {stored} has dtype {kind}, not one of {', '.join(_FLOATS)}")
                first, *others = place.target.part
                start, stop, _ = first.indices(place.target.shape[0])
                yield name, tensor[(slice(place.start + start, place.start + stop), *others)]
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file}: cannot be read: {error}") from error


def _fill_randomly(layout: WeightLayout, seed: int, progress: Progress, bits: int) -> None:
    for done, (name, target) in enumerate(layout.targets.items()):
        place = target.view.device
        if name.endswith("norm.weight"):
            one = 1.0 if name.endswith(("linear_attn.norm.weight", "mamba.norm.weight")) else 1.0 - layout.norm_offset
            layout.put(name, torch.full(target.shape, one, device=place))
        else:
            # Each tensor has its own generator and is filled before it is cut, so every number of ranks gives the same
            # model.
            generator = torch.Generator(place).manual_seed(zlib.crc32(name.encode(), seed))
            whole = torch.randn(target.shape, generator=generator, device=place)
            layout.put(name, whole[target.part] * _DUMMY_STD, bits)
        progress("making random weights", done + 1, len(layout.targets))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more tensors" if len(names) > 5 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
