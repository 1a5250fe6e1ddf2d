"""Reads a PEFT LoRA folder, and checks that it fits the base model."""

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from lorikeet.adapters.chat import NO_OVERRIDES, AdapterChat, ChatOverrides
from lorikeet.adapters.chat_files import read_chat
from lorikeet.adapters.description import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    AdapterDescription,
    ExtraTensor,
    ModuleTensors,
    TensorEntry,
)
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.experts import check_parameters, describe_experts, parameter_of
from lorikeet.adapters.extra_tensors import LowRankTensors, Named, find_extras, is_of_vocabulary, named, summary
from lorikeet.adapters.folder_hints import inner_adapters, other_formats
from lorikeet.adapters.module_names import BaseModules
from lorikeet.adapters.numbers import DTYPES, KEPT_AS, fits, to_float32
from lorikeet.adapters.peft_config import (
    CONVERT,
    MAX_CONFIG_BYTES,
    LoraConfig,
    ModuleMatcher,
    ReadConfig,
    read_config,
    read_json,
)
from lorikeet.adapters.shared_memory import copy_shared, opened_shared
from lorikeet.adapters.task_files import split_score
from lorikeet.adapters.tensors import EXPONENTS, MAX_TENSORS, largest_bits, merged, merged_data, read_entries
from lorikeet.adapters.tower_tensors import split_tower
from lorikeet.core.geometry import DECODER_NAMES, SCORE, ModelGeometry

_CHUNK_BYTES = 2**20
_MAX_SHARDS = 1000
_MAX_MISSING = 10
"""Warnings about targets that the base model lacks."""
_MAX_PATHS = 12
"""Names of modules in an error about one on which LoRA is not supported."""
_ADVICE = ": answers may be wrong. If it is the same, name it with --base-alias"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")

PROJECTIONS = {path.modules[0]: path.path.removeprefix("layers.{}.") for path in DECODER_NAMES.paths[:7]}
"""Name of each of ``LORA_MODULES`` in Llama's checkpoints, below ``model.layers.N``."""

_KEY = re.compile(r"(?:base_model\.model\.)?([A-Za-z_][A-Za-z0-9_.]*)\.lora_([AB])(?:\.default)?\.weight")
_MAX_UNUSED = 3
"""Names in the warning about modules that text requests do not use."""


class ServedBase(msgspec.Struct, frozen=True):
    """The base model, for comparison with the name in an adapter's config.

    Attributes:
        names: hub ids, names and folders. Messages show the first.
        revision: the hub's commit; "" if it is not known.
        is_strict: whether adapters of another base model are refused.
    """

    names: tuple[str, ...]
    revision: str = ""
    is_strict: bool = False

    def is_called(self, name: str) -> bool:
        """Return whether a hub id or path may be one of the names. Only the last part counts, and case does not."""
        return _last_part(name) in {_last_part(own) for own in self.names}


def _last_part(name: str) -> str:
    return name.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].lower()


class AdapterChecks(msgspec.Struct, frozen=True):
    """The checks of an adapter that depend on the engine that will serve it.

    Attributes:
        dtype: dtype in which the adapter will be served, a key of ``KEPT_AS``. Weights that overflow it are refused. ""
            for any dtype.
        base: the base model to compare with the name in the adapter's config. None compares no names.
        only_low_rank: why only low-rank matrices on linear modules can be served; "" without this restriction.
        only_vectors: why whole weights and factors of inputs of linear modules cannot be served; "" if they can.
        only_own_products: why neither whole weights nor changes of the vocabulary can be served; "" if they can.
    """

    dtype: str = ""
    base: ServedBase | None = None
    only_low_rank: str = ""
    only_vectors: str = ""
    only_own_products: str = ""


NO_CHECKS = AdapterChecks()


class DescribeOptions(msgspec.Struct, frozen=True):
    """The options of an adapter's check, besides the checks that always apply.

    Attributes:
        geometry: sizes of the whole base model, and the names of its modules. None checks no sizes, and accepts any
            name.
        checks: the checks that depend on the engine.
        max_rank: maximum rank; 0 for no limit.
        max_bytes: maximum size of the weights in bytes; 0 for no limit.
        read_weights: whether to read the weights: to compute the digest, and to refuse NaN, infinity and overflow.
        merge: whether to write the weights file of a sharded adapter, and to delete its shards.
        shared: name of shared weights (``shared_memory``) that become the folder's weights file; empty for none.
        read_chat: whether to read the folder's chat template and tokenizer settings.
        overrides: settings that replace those in the folder.
        checks_fit: whether to check sizes. False uses only the names in the geometry.
    """

    geometry: ModelGeometry | None = None
    checks: AdapterChecks = NO_CHECKS
    max_rank: int = 0
    max_bytes: int = 0
    read_weights: bool = False
    merge: bool = False
    shared: str = ""
    read_chat: bool = False
    overrides: ChatOverrides = NO_OVERRIDES
    checks_fit: bool = True


def describe_folder(
    folder: Path,
    options: DescribeOptions,
    on_stage: Callable[[str], None] = lambda _: None,
    on_chunk: Callable[[], None] = lambda: None,
) -> AdapterDescription:
    """Read a PEFT LoRA folder, and check everything in it.

    Time and memory depend on the folder's content, so call the function in the reader process (``adapters.reader``).

    Args:
        folder: the folder.
        options: further checks.
        on_stage: function called with the name of the next part to read.
        on_chunk: function called after each chunk of weights.

    Raises:
        AdapterError: a file is missing, in the wrong format or not supported, a tensor is unknown, A or B of a module
            is missing, a rank differs from the config, or the adapter does not fit the model. The message names file
            and tensor.
        OSError: the merged weights cannot be written.
    """
    if not options.shared:
        _check_present(folder)
    on_stage(CONFIG_FILE)
    read = read_config(folder / CONFIG_FILE)
    base = options.checks.base
    problem = "" if base is None else _other_base(read, base)
    warnings = list(read.warnings)
    if base is not None and problem:
        warnings.append(problem if base.is_called(read.base_model) else problem + _ADVICE)
        if base.is_strict:
            raise AdapterError(warnings[-1])
    try:
        return _describe(folder, options, read.config, read.base_model, warnings, on_stage, on_chunk)
    except AdapterError as error:
        if not problem:
            raise
        raise AdapterError(f"{error}; {problem}") from error


def _describe(
    folder: Path,
    options: DescribeOptions,
    config: LoraConfig,
    base_model: str,
    warnings: list[str],
    on_stage: Callable[[str], None],
    on_chunk: Callable[[], None],
) -> AdapterDescription:
    copied = _digest_of_config(config)
    if options.shared:
        on_stage(WEIGHTS_FILE)
        with opened_shared(options.shared, options.max_bytes) as source:
            copy_shared(source, folder / WEIGHTS_FILE, copied, on_chunk)
    on_stage(f"the header of {WEIGHTS_FILE}")
    weights = _Weights(folder)
    if options.max_bytes and weights.size > options.max_bytes:
        raise AdapterError(f"{WEIGHTS_FILE}: {weights.size} bytes, at most {options.max_bytes} are allowed")
    entries, score = split_score(weights.entries, options.geometry)
    chat = AdapterChat()
    if options.read_chat:
        on_stage("the chat template and the tokenizer's settings")
        chat = read_chat(folder, options.overrides, sum(head.rank for head in score))
    invocation = tuple(config.alora_invocation_tokens or ())
    if invocation and options.geometry is not None and not options.geometry.adapts_rows:
        raise AdapterError(f"{CONFIG_FILE}: alora_invocation_tokens: adapters of this base act on all tokens")
    chat = msgspec.structs.replace(chat, task=msgspec.structs.replace(chat.task, invocation_token_ids=invocation))
    on_stage(f"the patterns of {CONFIG_FILE}")
    matcher = ModuleMatcher(config)
    tower, entries = split_tower(entries, matcher, None if options.geometry is None else options.geometry.tower)
    pairs, others = _pair_up(entries) if entries or not tower else ([], [])
    resolver = BaseModules(options.geometry)
    if config.target_parameters:
        warnings += check_parameters(config, resolver)
        pairs = [LowRankTensors(parameter_of(name, resolver, matcher.covers_parameter), a, b) for name, a, b in pairs]
    served, warnings_of_parts = _served(pairs, others, resolver, options.geometry)
    warnings += warnings_of_parts
    extras, warnings_of_extras = find_extras(
        others, served, config, matcher, resolver, options.geometry, {each.module for each in tower}
    )
    warnings += warnings_of_extras
    checks = options.checks
    if extras and checks.only_low_rank:
        raise AdapterError(f"{WEIGHTS_FILE}: {summary(extras)}: {checks.only_low_rank}")
    if checks.only_vectors and (split := [each for each in extras if each.is_split]):
        raise AdapterError(f"{WEIGHTS_FILE}: {summary(split)}: {checks.only_vectors}")
    if checks.only_own_products and (by_torch := [each for each in extras if each.is_product]):
        raise AdapterError(f"{WEIGHTS_FILE}: {summary(by_torch)}: {checks.only_own_products}")
    if extras and config.alora_invocation_tokens:  # These extras would change the KV before the invocation.
        raise AdapterError(f"{WEIGHTS_FILE}: {summary(extras)}: not supported with alora_invocation_tokens")
    of_head = [pair for pair in served if is_of_vocabulary(pair.name, resolver, options.geometry)]
    served = [pair for pair in served if pair not in of_head]
    if config.bias != "none" and not any(each.kind == "bias" for each in others):
        warnings.append(
            f"{CONFIG_FILE}: bias is {config.bias!r}, but {WEIGHTS_FILE} has no biases: those of the base are used"
        )
    modules = _in_order([each for pair in served for each in _described(pair, matcher, resolver)], resolver)
    if options.geometry is not None and options.checks_fit:
        for each in modules:
            _check_fit(each, options.geometry, options.max_rank)
        if served:
            warnings += _check_coverage(
                config,
                matcher,
                served,
                modules,
                resolver,
                {each.name for each in of_head + others} | {each.module for each in tower},
            )
    modules += score
    digest = ""
    largest = 0.0
    if options.read_weights:
        on_stage(WEIGHTS_FILE)
        largest = _check_weights(weights, modules, extras, checks.dtype, on_chunk)
        digest = copied.hexdigest() if options.shared else _digest(config, weights, on_chunk)
    shards = tuple(file.name for file in weights.shards)
    if options.merge and shards:
        weights.merge(on_chunk)
        shards = ()
    return AdapterDescription(
        base_model[:500], modules, weights.size, shards, digest, largest, tuple(warnings), chat, extras, tower
    )


def _other_base(read: ReadConfig, base: ServedBase) -> str:
    """Return how the base model of an adapter's config differs from the served base model; "" if it does not."""
    if read.base_model and not base.is_called(read.base_model):
        return (
            f"{CONFIG_FILE}: base_model_name_or_path is {read.base_model[:200]!r}, but the base model served is "
            f"{base.names[0]!r}"
        )
    if _COMMIT.fullmatch(read.revision) and base.revision and read.revision != base.revision:
        return f"{CONFIG_FILE}: revision is {read.revision}, but that of the base model served is {base.revision}"
    return ""


def shard_names(folder: Path) -> list[str]:
    """Return the names of the files that the index of a sharded adapter lists.

    Raises:
        AdapterError: the index cannot be read, lists too many files, or names a file that is not a safetensors file in
            the folder.
    """
    places = read_json(folder / INDEX_FILE, MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise AdapterError(f"{INDEX_FILE}: weight_map does not map tensors to files")
    names = sorted(set(places.values()))
    if len(names) > _MAX_SHARDS:
        raise AdapterError(f"{INDEX_FILE}: it lists {len(names)} files, at most {_MAX_SHARDS} are read")
    for name in names:
        if not _SHARD.fullmatch(name) or name == WEIGHTS_FILE:
            raise AdapterError(f"{INDEX_FILE}: {name[:200]!r} cannot be the name of a file with weights")
    return names


class _Weights:
    """The weights file of a folder, or the shards that would be merged into a weights file.

    Attributes:
        entries: the tensors by name.
        size: size of the weights file in bytes.
        shards: the tensors of each shard; empty if there is one weights file.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / WEIGHTS_FILE
        self.shards: dict[Path, dict[str, TensorEntry]] = {}
        self._header = b""
        if self.file.is_file():
            self.entries = read_entries(self.file)
            self.size = self.file.stat().st_size
            return
        self.shards = {folder / name: read_entries(folder / name) for name in shard_names(folder)}
        listed = Counter(name for entries in self.shards.values() for name in entries)
        if listed.total() > MAX_TENSORS:
            raise AdapterError(f"{INDEX_FILE}: its files list more than {MAX_TENSORS} tensors")
        for name, times in listed.items():
            if times > 1:
                raise AdapterError(f"{INDEX_FILE}: tensor {name} is in {times} of its files")
        self._header, self.entries = merged(self.shards)
        self.size = max((entry.stop for entry in self.entries.values()), default=len(self._header))

    @property
    def parts(self) -> dict[Path, dict[str, TensorEntry]]:
        """The existing files, with the tensors of each."""
        return self.shards or {self.file: self.entries}

    def content(self) -> Iterator[bytes]:
        """Yield the content of the weights file in chunks."""
        if self.shards:
            yield self._header
            yield from merged_data(self.shards)
            return
        with self.file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def merge(self, on_chunk: Callable[[], None]) -> None:
        """Write the weights file, and delete the shards."""
        with self.file.open("wb") as target:
            for chunk in self.content():
                target.write(chunk)
                on_chunk()
            target.flush()
            os.fsync(target.fileno())
        for shard in self.shards:
            shard.unlink()
        (self.file.parent / INDEX_FILE).unlink()


def _check_present(folder: Path) -> None:
    if (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return
    if folder.is_dir() and (foreign := [*folder.glob("adapters.safetensors"), *folder.glob("*.gguf")]):
        raise AdapterError(f"{foreign[0].name}: this is not PEFT's format: {CONVERT}")
    hint = (other_formats(os.listdir(folder)) or inner_adapters(folder)) if folder.is_dir() else ""
    raise AdapterError(f"{WEIGHTS_FILE}: there is no such file in {folder}{hint}")


def _check_weights(
    weights: _Weights,
    modules: Sequence[ModuleTensors],
    extras: Sequence[ExtraTensor],
    dtype: str,
    on_chunk: Callable[[], None],
) -> float:
    """Check that no weight is NaN or infinite, and that none becomes infinite in ``dtype`` when scaled or multiplied.

    Returns:
        The largest magnitude of these numbers.
    """
    bits: dict[str, int] = {}
    for file, entries in weights.parts.items():
        bits |= largest_bits(file, entries.values(), on_chunk)
    largest = 0.0
    for each in modules:
        a, b = (_magnitude(entry, bits[entry.name]) for entry in (each.a, each.b))
        if each.module == SCORE:
            b = 0.0
        scaled = b * abs(each.scaling)
        # The last number bounds the elements of B·A.
        most = min(max(a, scaled, a * scaled * each.rank), sys.float_info.max)
        largest = max(largest, most)
        if dtype and not fits(most, dtype):
            raise AdapterError(
                f"{WEIGHTS_FILE}: {each.module} of layer {each.layer}: too large for {dtype} once scaled"
            )
    for extra in extras:
        if extra.entry is not None:
            most = min(_magnitude(extra.entry, bits[extra.entry.name]) * abs(extra.scaling), sys.float_info.max)
            largest = max(largest, most)
            if dtype and not fits(most, dtype):
                raise AdapterError(f"{WEIGHTS_FILE}: tensor {extra.entry.name}: too large for {dtype} once scaled")
    return largest


def _digest(config: LoraConfig, weights: _Weights, on_chunk: Callable[[], None]) -> str:
    """Return the hex SHA-256 of the settings that change the meaning of the weights, and of the weights file."""
    digest = _digest_of_config(config)
    for chunk in weights.content():
        digest.update(chunk)
        on_chunk()
    return digest.hexdigest()


def _digest_of_config(config: LoraConfig) -> "hashlib._Hash":
    fields = config.digest_fields()
    return hashlib.sha256(b"lorikeet adapter 1\n%d\n" % len(fields) + fields)


def begin_digest(config_file: Path) -> "hashlib._Hash":
    """Begin the digest of an adapter.

    After an update with the weights file it is the digest of the version.

    Raises:
        AdapterError: the config is not valid.
    """
    return _digest_of_config(read_config(config_file).config)


def _pair_up(entries: dict[str, TensorEntry]) -> tuple[list[LowRankTensors], list[Named]]:
    """Return the matrices of each linear layer in the file, and the file's other tensors."""
    others: list[Named] = []
    halves: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        match = _KEY.fullmatch(name)
        if match is None:
            other = named(entry)
            if other is None or entry.dtype not in EXPONENTS:
                raise _unsupported(name, None)
            others.append(other)
            continue
        if entry.dtype not in EXPONENTS or len(entry.shape) != 2:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {name} is {entry.dtype} {list(entry.shape)}; "
                f"expected a matrix of {', '.join(EXPONENTS)}"
            )
        sides = halves.setdefault(match[1], {})
        if match[2] in sides:
            raise AdapterError(f"{WEIGHTS_FILE}: tensors {sides[match[2]].name} and {name} are the same matrix")
        sides[match[2]] = entry
    if not halves and not others:
        raise AdapterError(f"{WEIGHTS_FILE}: it contains no tensors")
    for sides in halves.values():
        if len(sides) == 1:
            ((side, entry),) = sides.items()
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has no matching lora_{'B' if side == 'A' else 'A'}"
            )
    return [LowRankTensors(name, sides["A"], sides["B"]) for name, sides in halves.items()], others


def _unsupported(tensor: str, resolver: BaseModules | None) -> AdapterError:
    """Return the error for a tensor of a module on which LoRA is not supported, with the modules on which it is."""
    paths = () if resolver is None else resolver.paths
    more = ", ..." if len(paths) > _MAX_PATHS else ""
    supported = f": the base model's are {', '.join(paths[:_MAX_PATHS])}{more}" if paths else ""
    return AdapterError(
        f"{WEIGHTS_FILE}: tensor {tensor} belongs to a module on which LoRA is not supported{supported}"
    )


def _served(
    pairs: Sequence[LowRankTensors], others: Sequence[Named], resolver: BaseModules, geometry: ModelGeometry | None
) -> tuple[list[LowRankTensors], list[str]]:
    """Return the modules with A and B that text requests use, and a warning if the file has other modules.

    Raises:
        AdapterError: LoRA on one of the modules is not supported, or no module is left.
    """
    served = []
    unused = []
    for pair in pairs:
        if resolver.is_unused(pair.name):
            unused.append(pair.name)
        elif resolver.place(pair.name) is None and not is_of_vocabulary(pair.name, resolver, geometry):
            raise _unsupported(pair.a.name, resolver)
        else:
            served.append(pair)
    if not unused:
        return served, []
    shown = ", ".join(unused[:_MAX_UNUSED])
    if not served and all(resolver.is_unused(each.name) for each in others):
        raise AdapterError(f"{WEIGHTS_FILE}: {shown}: it changes no module that text requests use")
    return served, [
        f"{WEIGHTS_FILE}: LoRA of {len(unused)} modules that text requests do not use is ignored, such as {shown}"
    ]


def _described(pair: LowRankTensors, matcher: ModuleMatcher, resolver: BaseModules) -> Iterator[ModuleTensors]:
    """Yield the LoRA of each module of a linear layer. A fused layer has several modules, which share A."""
    rank, scaling = matcher.rank_and_scaling(pair.name)
    place = resolver.place(pair.name)
    assert place is not None
    if place.experts:
        yield from describe_experts(place, resolver.rows(place), rank, scaling, pair.a, pair.b)
        return
    if matcher.has_parameters and not resolver.knows_base and pair.a.shape[0] % rank == 0:
        rank = pair.a.shape[0]  # The columns may be those of several experts.
    for entry, found in ((pair.a, pair.a.shape[0]), (pair.b, pair.b.shape[1])):
        if found != rank:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has shape {list(entry.shape)}, so rank {found}; "
                f"{CONFIG_FILE} says {rank}"
            )
    if resolver.is_transposed(pair.name):
        # PEFT adds B·A to the parameter, so that the transposed B multiplies the inputs.
        (module,) = place.modules
        yield ModuleTensors(place.layer, module, rank, scaling, pair.b, pair.a, are_turned=True)
        return
    if len(place.modules) == 1:
        yield ModuleTensors(place.layer, place.modules[0], rank, scaling, pair.a, pair.b)
        return
    rows = resolver.rows(place)
    if pair.b.shape[0] != sum(rows):
        raise AdapterError(
            f"{WEIGHTS_FILE}: tensor {pair.b.name} has shape {list(pair.b.shape)}; "
            f"the base model needs {[sum(rows), rank]}"
        )
    first = 0
    for module, count in zip(place.modules, rows, strict=True):
        yield ModuleTensors(place.layer, module, rank, scaling, pair.a, pair.b.row_range(first, count))
        first += count


def _in_order(modules: Sequence[ModuleTensors], resolver: BaseModules) -> tuple[ModuleTensors, ...]:
    """Return modules in packing order.

    Raises:
        AdapterError: the file has a module twice, under two names.
    """
    by_place: dict[tuple[int, str], ModuleTensors] = {}
    for each in modules:
        other = by_place.setdefault((each.layer, each.module), each)
        if other is not each:
            raise AdapterError(f"{WEIGHTS_FILE}: tensors {other.a.name} and {each.a.name} are the same matrix")
    return tuple(by_place[key] for key in sorted(by_place, key=lambda key: (key[0], resolver.number(key[1]), key[1])))


def _check_fit(each: ModuleTensors, geometry: ModelGeometry, max_rank: int) -> None:
    name = f"{WEIGHTS_FILE}: tensor {each.a.name}"
    if each.layer >= geometry.layers:
        raise AdapterError(f"{name}: the base model has only {geometry.layers} layers")
    if max_rank and each.rank > max_rank:
        raise AdapterError(f"{name} has rank {each.rank}, at most {max_rank} is allowed")
    shape = geometry.modules[each.module]
    for entry, found, expected in (
        (each.a, each.a_shape, (each.rank, shape.in_features)),
        (each.b, each.b_shape, (shape.out_features, each.rank)),
    ):
        if found != expected:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {entry.name} has shape {list(found)}; the base model needs {list(expected)}"
            )


def _check_coverage(
    config: LoraConfig,
    matcher: ModuleMatcher,
    pairs: Sequence[LowRankTensors],
    modules: Sequence[ModuleTensors],
    resolver: BaseModules,
    others: set[str],
) -> list[str]:
    """Check that exactly the modules that the config targets have A and B. ``others`` are modules with other tensors.

    Returns:
        Warnings about targets that the base model does not have, which PEFT ignores.
    """
    prefix = resolver.prefix_of(pairs[0].name)
    parameters = resolver.names_of_parameters(prefix)
    experts = resolver.names_of_experts(prefix)
    matrices = resolver.names_of_matrices(prefix)
    for pair in pairs:
        if not (matcher.covers_parameter(pair.name) if pair.name in parameters else matcher.covers(pair.name)):
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {pair.a.name} is of a module that {CONFIG_FILE} does not target"
            )
    present = {(each.layer, each.module) for each in modules}
    names = resolver.names(prefix)
    # If experts and routers of a base are parameters, the base has no linear layers for them, so their names in older
    # checkpoints match nothing.
    wanted = names
    for others_of_base in (experts, matrices):
        if any(pair.name in others_of_base for pair in pairs):
            wanted = wanted | others_of_base
    for places, covers in ((wanted, matcher.covers), (parameters, matcher.covers_parameter)):
        for name, place in places.items():
            if any((place.layer, module) not in present for module in place.modules) and covers(name):
                raise AdapterError(f"{CONFIG_FILE} targets {name}, but {WEIGHTS_FILE} has no tensors for it")
    for name in resolver.vocabulary_names(prefix):
        if isinstance(config.target_modules, list) and matcher.covers(name) and name not in others:
            raise AdapterError(f"{CONFIG_FILE} targets {name}, but {WEIGHTS_FILE} has no tensors for it")
    names |= wanted
    targets = config.target_modules
    endings = {name[start:] for name in (*names, *others) for start in _starts(name)}
    missing = [target for target in targets if target not in endings] if isinstance(targets, list) else []
    return [
        f"{CONFIG_FILE}: target_modules names {target[:100]!r}, but the base model has no such module on which LoRA is "
        "supported"
        for target in missing[:_MAX_MISSING]
    ]


def _starts(name: str) -> Iterator[int]:
    """Yield the positions at which the parts of a module's name begin."""
    yield 0
    for match in re.finditer(r"\.", name):
        yield match.end()


def _magnitude(entry: TensorEntry, bits: int) -> float:
    """Return the number that these bits mean in a tensor's dtype."""
    dtype = DTYPES[entry.dtype]
    return float(to_float32(np.array([bits], EXPONENTS[entry.dtype][0]).view(KEPT_AS[dtype]), dtype)[0])
