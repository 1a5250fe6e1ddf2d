"""Finds the tensors of a weights file besides A and B: magnitudes, biases, whole weights, trained tokens."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE, ExtraTensor, TensorEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.module_names import BaseModules, ModulePlace
from lorikeet.adapters.peft_config import CONVERT, LoraConfig, ModuleMatcher
from lorikeet.adapters.task import SCORE_MODULES
from lorikeet.core.adapter import EMBEDDING, HEAD
from lorikeet.core.geometry import RECURRENCE_INPUTS, ModelGeometry, ReplaceableWeights, split_layer

_MAX_NAMED = 3
_SHARED_INPUTS = frozenset({"q", "k", "v", "gate", "up", *RECURRENCE_INPUTS})
"""Modules that share their input's product with others, so that it cannot be scaled for one of them."""

_OF_STATES = ("conv1d", "A_log", "dt_bias")
"""Names of modules and parameters that only layers with a state have."""

_NAME = r"(?:base_model\.model\.)?([A-Za-z_][A-Za-z0-9_.]*?)"
_FORMS = [
    (re.compile(_NAME + ending), kind)
    for ending, kind in (
        (r"\.lora_magnitude_vector(?:\.default)?(?:\.weight)?", "magnitude"),
        (r"\.lora_B(?:\.default)?\.bias", "lora_bias"),
        (r"\.lora_embedding_A(?:\.default)?", "a"),
        (r"\.lora_embedding_B(?:\.default)?", "b"),
        (r"\.(?:token_adapter\.)?trainable_tokens_delta(?:\.default)?", "rows"),
        (r"\.ia3_l(?:\.default)?", "ia3"),
        (r"(?:\.token_adapter)?\.base_layer\.weight", "base"),
        (r"\.base_layer\.bias", "bias"),
        (r"\.original_module\.(?:weight|bias)", "untrained"),
        (r"(?:\.(?:modules_to_save|ln_tuning_layers)(?:\.default)?)?\.weight", "weight"),
        (r"(?:\.(?:modules_to_save|ln_tuning_layers)(?:\.default)?)?\.bias", "bias"),
    )
]
"""Names of tensors in the files of PEFT; the first that matches counts."""
_PARAMETER = re.compile(_NAME + r"(?:\.modules_to_save(?:\.default)?)?\.(A_log|dt_bias)")
"""Names of parameters of a layer with a gated delta rule that is saved whole."""


class Named(NamedTuple):
    """A tensor of the file: full name of its module, its kind, and its entry in the file."""

    name: str
    kind: str
    entry: TensorEntry


class LowRankTensors(NamedTuple):
    """The two matrices of one module: ``a [rank, in_features]`` and ``b [out_features, rank]``.

    ``name`` is the module's full name in the adapter's spelling, which PEFT's patterns match.
    """

    name: str
    a: TensorEntry
    b: TensorEntry


class Extras(NamedTuple):
    """The extras of an adapter, and sentences about ignored tensors."""

    tensors: tuple[ExtraTensor, ...]
    warnings: list[str]


def named(entry: TensorEntry) -> Named | None:
    """Return module and kind of a tensor from its name; None if the name has no known form."""
    found = ((form.fullmatch(entry.name), kind) for form, kind in _FORMS)
    if parameter := _PARAMETER.fullmatch(entry.name):
        return Named(f"{parameter[1]}.{parameter[2]}", "weight", entry)
    return next((Named(match[1], kind, entry) for match, kind in found if match), None)


def is_of_vocabulary(name: str, resolver: BaseModules, geometry: ModelGeometry | None) -> bool:
    """Return whether a module is the embedding or the output layer."""
    return _vocabulary(name, resolver, geometry) is not None


def _vocabulary(name: str, resolver: BaseModules, geometry: ModelGeometry | None) -> str | None:
    usual = ReplaceableWeights("embed_tokens", "lm_head", 0, {})
    weights = usual if geometry is None else geometry.replaceable
    if weights is None:
        return None
    path = name.removeprefix(resolver.prefix_of(name)).removesuffix(".weight")
    return EMBEDDING if path == weights.embedding else HEAD if path == weights.head else None


def find_extras(
    tensors: Sequence[Named],
    low_rank: Sequence[LowRankTensors],
    config: LoraConfig,
    matcher: ModuleMatcher,
    resolver: BaseModules,
    geometry: ModelGeometry | None,
    elsewhere: Collection[str] = (),
) -> Extras:
    """Return the extras of an adapter, by kind and module and then by layer.

    Args:
        tensors: the file's tensors, except A and B.
        low_rank: A and B of embedding and output layer, and of the linear modules that text requests use.
        config: the adapter's config.
        matcher: matcher of the config's patterns.
        resolver: modules of the base.
        geometry: sizes of the base; if None, any name stands for a module.
        elsewhere: further modules of which the file has tensors.

    Raises:
        AdapterError: an extra cannot be served, or does not fit the config or the base.
    """
    tensors = _without_copies(tensors)
    finder = _Finder(config, matcher, resolver, geometry)
    finder.note_vocabulary(tensors)
    found: list[ExtraTensor] = []
    for pair in low_rank:
        if is_of_vocabulary(pair.name, resolver, geometry):
            found += finder.head(pair)
    for each in tensors:
        if not resolver.is_unused(each.name):
            found += finder.of(each)
    by_place: dict[tuple[str, str, int], ExtraTensor] = {}
    for extra in found:
        if by_place.setdefault((extra.kind, extra.module, extra.layer), extra) is not extra:
            raise AdapterError(f"{WEIGHTS_FILE}: there are two tensors for {extra.kind} of {extra.module}")
    _check_complete(by_place, config, matcher, tensors, low_rank, elsewhere)
    ordered = sorted([*found, *_computed(found)], key=lambda extra: (extra.kind, extra.module, extra.layer))
    return Extras(tuple(ordered), finder.warnings)


class _Finder:
    def __init__(
        self, config: LoraConfig, matcher: ModuleMatcher, resolver: BaseModules, geometry: ModelGeometry | None
    ) -> None:
        self._config = config
        self._matcher = matcher
        self._resolver = resolver
        self._geometry = geometry
        self._rows: dict[str, int] = {}
        self.warnings: list[str] = []

    def note_vocabulary(self, tensors: Iterable[Named]) -> None:
        """Record the number of tokens of the whole embedding and output layer in the file."""
        for each in tensors:
            module = _vocabulary(each.name, self._resolver, self._geometry)
            if module is not None and each.kind in ("weight", "base") and len(each.entry.shape) == 2:
                self._rows[module] = each.entry.shape[0]

    def head(self, pair: LowRankTensors) -> list[ExtraTensor]:
        """Return A and B of the output layer, or of the embedding's parameter."""
        module = _vocabulary(pair.name, self._resolver, self._geometry)
        rank, scaling = self._matcher.rank_and_scaling(pair.name)
        _, hidden = self._sizes(0, pair.a.shape[1])
        if module == EMBEDDING:
            if not pair.name.endswith(".weight"):
                raise _refusal(pair.a, "is a linear module's, but belongs to the embedding")
            # As a parameter, the embedding has a row for each token, so that B takes the place of PEFT's A.
            self._check_tokens(pair.b, EMBEDDING, pair.b.shape[0])
            tokens = self._extra("a", EMBEDDING, 0, pair.b, pair.b.shape[0], rank)
            return [tokens, self._extra("b", EMBEDDING, 0, pair.a, rank, hidden, scaling)]
        self._check_tokens(pair.b, HEAD, pair.b.shape[0])
        b = self._kept(pair.b)
        a = self._extra("a", HEAD, 0, pair.a, rank, hidden)
        return [a, self._extra("b", HEAD, 0, b, b.shape[0], rank, scaling)]

    def of(self, each: Named) -> list[ExtraTensor]:
        """Return the extras for a tensor."""
        module = _vocabulary(each.name, self._resolver, self._geometry)
        if module is not None:
            return self._vocabulary_extra(each, module)
        if each.kind in ("weight", "bias") and (vector := self._vector(each)) is not None:
            return [vector]
        if each.name.rpartition(".")[2] in _OF_STATES:
            raise _refusal(each.entry, "belongs to a layer with a state, of which this base takes only linear modules")
        place = self._resolver.place(each.name)
        if place is None or each.kind in ("a", "b", "rows"):
            raise _refusal(each.entry, "belongs to a module on which LoRA is not supported")
        if each.kind == "base":
            raise _refusal(each.entry, "is a weight of the base that was changed")
        return list(self._linear(each, place))

    def _vector(self, each: Named) -> ExtraTensor | None:
        """Return the extra for a vector of the base, such as a norm's weight."""
        if self._geometry is None:
            if len(each.entry.shape) != 1 or each.kind == "bias":
                return None
            path, layer = split_layer(each.name)
            return self._extra("vector", f"{path}.{each.kind}", layer, each.entry, 1, each.entry.shape[0])
        if self._geometry.replaceable is None:
            return None
        path, layer = split_layer(each.name.removeprefix(self._resolver.prefix_of(each.name)))
        path = f"{path}.{each.kind}"
        size = self._geometry.replaceable.vectors.get(path)
        if size is None:
            return None
        if layer >= self._geometry.layers:
            raise _refusal(each.entry, f"is of a layer that the base model lacks: it has {self._geometry.layers}")
        return self._extra("vector", path, layer, each.entry, 1, size)

    def _linear(self, each: Named, place: ModulePlace) -> Iterator[ExtraTensor]:
        """Yield the extras of a linear layer's modules. The tensor of a fused layer is cut."""
        kind = each.kind
        entry = each.entry
        scaling = 1.0
        if kind == "lora_bias":
            scaling = self._matcher.rank_and_scaling(each.name)[1]
        if kind == "ia3":
            kind = "input" if len(entry.shape) == 2 and entry.shape[0] == 1 < entry.shape[1] else "output"
        if self._geometry is not None and place.layer >= self._geometry.layers:
            raise _refusal(entry, f"is of a layer that the base model lacks: it has {self._geometry.layers}")
        if kind == "input" and len(place.modules) == 1 and place.modules[0] in _SHARED_INPUTS:
            raise _refusal(entry, f"scales the input of a product with others: {CONVERT}")
        is_transposed = kind == "weight" and self._config.fan_in_fan_out
        if kind == "weight" and len(entry.shape) != 2:
            raise _refusal(entry, f"has shape {list(entry.shape)}; a matrix was expected")
        if self._geometry is None:
            outputs = entry.shape[1 if is_transposed else 0] if kind == "weight" else prod(entry.shape)
            columns = entry.shape[0 if is_transposed else 1] if kind == "weight" else outputs
            rows = outputs if kind == "weight" else 1
            yield self._extra(
                kind, place.modules[0], place.layer, entry, rows, columns, scaling, is_transposed=is_transposed
            )
            return
        if len(place.modules) > 1 and (kind == "input" or is_transposed):
            raise _refusal(entry, f"cannot be split over {', '.join(place.modules)}: {CONVERT}")
        all_rows = self._resolver.rows(place)
        inputs = self._geometry.modules[place.modules[0]].in_features
        per_row = inputs if kind == "weight" else 1
        size = inputs if kind == "input" else sum(all_rows) * per_row
        if prod(entry.shape) != size or (
            kind == "weight" and entry.shape[0] != (inputs if is_transposed else sum(all_rows))
        ):
            needs = [sum(all_rows), inputs] if kind == "weight" else [size]
            raise _refusal(entry, f"has shape {list(entry.shape)}; the base model needs {needs}")
        if kind == "input":
            yield self._extra(kind, place.modules[0], place.layer, entry, 1, inputs)
            return
        whole = entry.shaped(sum(all_rows), per_row)
        first = 0
        for module, rows in zip(place.modules, all_rows, strict=True):
            part = whole.row_range(first, rows)
            matrix = (rows, inputs) if kind == "weight" else (1, rows)
            yield self._extra(kind, module, place.layer, part, *matrix, scaling, is_transposed=is_transposed)
            first += rows

    def _vocabulary_extra(self, each: Named, module: str) -> list[ExtraTensor]:
        kind = each.kind
        entry = each.entry
        shape = each.entry.shape
        rank, scaling = self._matcher.rank_and_scaling(each.name)
        if kind in ("weight", "base") and len(shape) == 2:
            base = self._geometry.replaceable if self._geometry is not None else None
            if kind == "base" and (base is None or shape[0] == base.vocab_size):
                return []  # PEFT saves the base's weight together with LoRA on it.
            _, hidden = self._sizes(0, shape[1])
            # DoRA divides by norms over all rows of an embedding, even of tokens that the base lacks.
            needs_all = module == EMBEDDING and self._config.use_dora
            kept = entry if needs_all else self._kept(entry)
            return [self._extra("weight", module, 0, kept, kept.shape[0], hidden)]
        if kind == "rows" and len(shape) == 2:
            return self._trained_rows(each, module)
        if kind == "a" and len(shape) == 2 and module == EMBEDDING:
            self._check_tokens(entry, module, shape[1])
            return [self._extra("a", module, 0, entry, shape[1], rank, is_transposed=True)]
        if kind == "b" and len(shape) == 2 and module == EMBEDDING:
            return [self._extra("b", module, 0, entry, rank, self._sizes(0, shape[0])[1], scaling, is_transposed=True)]
        if kind == "magnitude":
            if module == EMBEDDING:
                return [self._extra(kind, module, 0, entry, 1, self._sizes(0, prod(shape))[1])]
            return [self._head_vector(each)]
        if kind in ("bias", "lora_bias") and module == HEAD:
            return [self._head_vector(each, scaling if kind == "lora_bias" else 1.0)]
        raise _refusal(entry, f"is {kind} of the {module}, which is not supported")

    def _trained_rows(self, each: Named, module: str) -> list[ExtraTensor]:
        """Return the trained tokens of a module, without those beyond the base if the file resizes the vocabulary."""
        entry = each.entry
        tokens = tuple(self._config.tokens_of(each.name, is_tied=module == HEAD))
        if len(tokens) != entry.shape[0]:
            raise _refusal(entry, f"has {entry.shape[0]} rows; {CONFIG_FILE} names {len(tokens)} trained tokens")
        vocabulary, hidden = self._sizes(0, entry.shape[1])
        below = tuple(token for token in tokens if token < vocabulary or not vocabulary)
        is_resized = self._rows.get(module, 0) > max(tokens, default=0)
        if min(tokens, default=0) < 0 or (below != tokens and not is_resized):
            raise _refusal(entry, f"{CONFIG_FILE} names tokens beyond the {vocabulary} of the base model")
        if below != tokens:
            if below != tokens[: len(below)]:
                raise _refusal(entry, f"has tokens of the base model after others, which it lacks: it has {vocabulary}")
            self.warnings.append(
                f"{WEIGHTS_FILE}: tensor {entry.name} has {len(tokens) - len(below)} tokens that are not used: "
                f"the base model has tokens below {vocabulary} only"
            )
            entry = entry.row_range(0, len(below))
        return [self._extra("rows", module, 0, entry, len(below), hidden, tokens=below)] if below else []

    def _head_vector(self, each: Named, scaling: float = 1.0) -> ExtraTensor:
        """Return the extra for a vector with an element for each token."""
        tokens = prod(each.entry.shape)
        self._check_tokens(each.entry, HEAD, tokens)
        kept = self._kept(each.entry.shaped(tokens))
        return self._extra(each.kind, HEAD, 0, kept, kept.shape[0], 1, scaling)

    def _check_tokens(self, entry: TensorEntry, module: str, tokens: int) -> None:
        """Check that a tensor has as many tokens as its module in the base, or as the whole weight in the file."""
        needed = self._rows.get(module, self._sizes(tokens, 0)[0])
        if tokens != needed:
            owner = "the file" if module in self._rows else "the base model"
            raise _refusal(
                entry,
                f"is for {tokens} tokens, but the {module} of {owner} has {needed}: a resized vocabulary needs its "
                "whole embedding and output layers, which PEFT saves with save_embedding_layers=True",
            )

    def _kept(self, entry: TensorEntry) -> TensorEntry:
        """Return the rows of a tensor for tokens that are in the base's vocabulary."""
        rows = entry.shape[0]
        base = self._geometry.replaceable if self._geometry is not None else None
        if base is None or rows <= base.vocab_size:
            return entry
        self.warnings.append(
            f"{WEIGHTS_FILE}: tensor {entry.name} has {rows} rows; those from {base.vocab_size} on are not used: "
            f"the base model has tokens below {base.vocab_size} only"
        )
        return entry.row_range(0, base.vocab_size)

    def _sizes(self, vocabulary: int, hidden: int) -> tuple[int, int]:
        """Return the sizes of vocabulary and hidden state: the base's, or the tensor's if the base is unknown."""
        if self._geometry is None or self._geometry.replaceable is None:
            return vocabulary, hidden
        return self._geometry.replaceable.vocab_size, self._geometry.hidden_size

    def _extra(
        self,
        kind: str,
        module: str,
        layer: int,
        entry: TensorEntry,
        rows: int,
        columns: int,
        scaling: float = 1.0,
        tokens: tuple[int, ...] = (),
        *,
        is_transposed: bool = False,
    ) -> ExtraTensor:
        if prod(entry.shape) != rows * columns:
            raise _refusal(entry, f"has shape {list(entry.shape)}; {rows * columns} elements were expected")
        return ExtraTensor(kind, module, layer, rows, columns, entry, scaling, tokens, is_transposed)


def _computed(found: Iterable[ExtraTensor]) -> Iterator[ExtraTensor]:
    """Yield the matrices that are computed on the device: factors and summands of outputs."""
    wanted: dict[tuple[str, str, int], tuple[int, int]] = {}
    replaced = {(each.module, each.layer) for each in found if each.kind == "weight"}
    for each in found:
        size = each.rows, each.columns
        if each.kind in ("magnitude", "output"):
            wanted["scale", each.module, each.layer] = size
        if each.module in (EMBEDDING, HEAD) or (each.module, each.layer) in replaced:
            continue
        if each.kind in ("magnitude", "bias", "lora_bias"):
            wanted["shift", each.module, each.layer] = size
    for (kind, module, layer), (rows, columns) in wanted.items():
        yield ExtraTensor(kind, module, layer, rows, columns)


def _without_copies(tensors: Sequence[Named]) -> list[Named]:
    """Return the tensors without the copies that PEFT saves beside the layers of a resized vocabulary.

    PEFT loads ``X.weight``, and saves ``X.modules_to_save.weight`` with the same values and the untrained
    ``X.original_module.weight`` beside it.

    Raises:
        AdapterError: a file has only the untrained copy of a module.
    """
    trained = {each.name for each in tensors if each.kind in ("weight", "bias")}
    plain = {(each.name, each.kind) for each in tensors if not _is_copy(each)}
    kept = []
    for each in tensors:
        if each.kind == "untrained":
            if each.name not in trained:
                raise _refusal(each.entry, "is an untrained copy of a module; the file lacks the trained one")
        elif not (_is_copy(each) and (each.name, each.kind) in plain):
            kept.append(each)
    return kept


def _is_copy(each: Named) -> bool:
    return ".modules_to_save." in each.entry.name


def _check_complete(
    by_place: dict[tuple[str, str, int], ExtraTensor],
    config: LoraConfig,
    matcher: ModuleMatcher,
    tensors: Sequence[Named],
    low_rank: Sequence[LowRankTensors],
    elsewhere: Collection[str],
) -> None:
    """Check that the file has exactly the tensors that the config announces.

    Raises:
        AdapterError: a tensor is missing or not announced.
    """
    names = {kind: {each.name for each in tensors if each.kind == kind} for _, kind in _FORMS}
    adapted = {each.name for each in low_rank} | names["a"]
    for flag, kind in (("use_dora", "magnitude"), ("lora_bias", "lora_bias")):
        is_set = getattr(config, flag)
        lacking = adapted - names[kind]
        extra = names[kind] if not is_set else names[kind] - adapted
        if is_set and lacking:
            raise AdapterError(f"{CONFIG_FILE}: {flag} is set, but {WEIGHTS_FILE} has no {kind} for {min(lacking)}")
        if extra:
            raise AdapterError(
                f"{WEIGHTS_FILE}: it has a {kind} for {min(extra)}, which {CONFIG_FILE} does not announce"
            )
    if names["a"] != names["b"]:
        raise AdapterError(f"{WEIGHTS_FILE}: {min(names['a'] ^ names['b'])} has only one of lora_embedding_A and _B")
    saved = [each for each in config.modules_to_save or [] if each not in SCORE_MODULES]
    tuned: set[str] = set()
    if config.peft_type == "LN_TUNING":  # The targets of this type are whole modules.
        tuned = {name for name in names["weight"] | names["bias"] if any(map(matcher.covers, _and_parents(name)))}
        if not tuned:
            raise AdapterError(f"{WEIGHTS_FILE}: it has no weights for the targets of {CONFIG_FILE}")
    for name in sorted((names["weight"] | (names["bias"] if config.bias == "none" else set())) - tuned):
        # PEFT saves these modules if they were resized.
        is_vocabulary = name.rpartition(".")[2] in ("embed_tokens", "lm_head")
        if not is_vocabulary and not any(_is_below(name, each) for each in saved):
            raise AdapterError(
                f"{WEIGHTS_FILE}: a whole weight of {name} belongs to a module that modules_to_save of "
                f"{CONFIG_FILE} does not name"
            )
    present = {*elsewhere, *(name for kind in names.values() for name in kind)}
    unsaved = [each for each in saved if not any(_is_below(name, each) for name in present)]
    if unsaved:
        raise AdapterError(
            f"{CONFIG_FILE}: modules_to_save names {unsaved[0]!r}, but {WEIGHTS_FILE} has no weights of it"
        )
    if config.peft_type == "IA3" and not names["ia3"]:
        raise AdapterError(f"{WEIGHTS_FILE}: it has no ia3_l")
    if config.peft_type != "IA3" and names["ia3"]:
        raise AdapterError(f"{WEIGHTS_FILE}: it has ia3_l, but peft_type is {config.peft_type!r}")
    of_tokens = "token_indices" if config.peft_type == "TRAINABLE_TOKENS" else "trainable_token_indices"
    if (config.trainable_token_indices or of_tokens == "token_indices") and not names["rows"]:
        raise AdapterError(f"{CONFIG_FILE}: {of_tokens} is set, but {WEIGHTS_FILE} has no trained tokens")
    if config.peft_type not in ("LORA", "IA3") and low_rank:
        raise AdapterError(f"{WEIGHTS_FILE}: tensor {low_rank[0].a.name} does not belong to {config.peft_type}")
    if {("weight", EMBEDDING, 0), ("rows", EMBEDDING, 0)} <= by_place.keys() and names["weight"] & names["rows"]:
        raise AdapterError(f"{WEIGHTS_FILE}: the embedding is replaced and has trained rows; only one can be served")


def _is_below(name: str, module: str) -> bool:
    """Return whether a module is one of ``modules_to_save`` or inside one.

    Like in PEFT, the ends of names are compared.
    """
    return any(each.endswith(module) for each in _and_parents(name))


def _and_parents(name: str) -> list[str]:
    """Return the names of a module and of the modules that contain it."""
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]


def _refusal(entry: TensorEntry, why: str) -> AdapterError:
    return AdapterError(f"{WEIGHTS_FILE}: tensor {entry.name} {why}")


def summary(extras: Iterable[ExtraTensor]) -> str:
    """Return a text that lists the kinds of some extras."""
    kinds = dict.fromkeys(f"{each.kind} of {each.module}" for each in extras if each.entry is not None)
    shown = list(kinds)[:_MAX_NAMED]
    return ", ".join(shown) + (f" and {len(kinds) - len(shown)} more" if len(kinds) > len(shown) else "")
