"""Reads and validates PEFT's ``adapter_config.json``, and matches its patterns as PEFT does.

Patterns come from users, and Python's ``re``, which PEFT uses, has no limits of time. So this module runs in the reader
process (see ``adapters.reader``), which has limits.
"""

import codecs
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from lorikeet.adapters.description import CONFIG_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.tensors import LFS_POINTER_TEXT, is_lfs_pointer

T = TypeVar("T")

ALL_LINEAR = "all-linear"
"""A value of ``target_modules``: every linear module."""
MAX_CONFIG_BYTES = 2**20
_MAX_PATTERNS = 2048
"""Most patterns of one adapter, since each is matched against every module; a model of 126 layers has 882."""
_MAX_PATTERN_CHARS = 20_000
_MAX_RANK = 2**20
_NAME = re.compile(r"(\w+\.)*layers\.\d+\.\w+\.\w+")
"""Patterns of this form are plain module names: although a dot matches any character, they match only that name."""

_REFUSED = {
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "loftq_config": "LoftQ changes the base weights: serve the base that it has written, with init_lora_weights true",
    "megatron_config": "Megatron layers are not supported",
    "layer_replication": "it copies layers of the base: merge the adapter, and serve the larger model as a base",
}
_IGNORED = {
    "created_at", "created_by", "_commit_hash", "description", "library_name", "license", "merge_weights", "model_name",
    "_name_or_path", "tags", "transformers_version",
}  # fmt: skip
"""Keys that other tools and old versions of PEFT write, and that PEFT ignores.

``merge_weights`` decides whether to merge
at loading, which does not change the result. An adapter with another unknown key is refused, since it may change it."""
_HARMLESS = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "init_lora_weights", "megatron_core", "qalora_group_size", "runtime_config",
    "eva_config", "corda_config", "lora_ga_config", "velora_config", "ensure_weight_tying", "init_ia3_weights",
    "init_weights", "token_indices",
}  # fmt: skip
"""Keys that are read elsewhere or have no effect on inference. ``*_config`` of initialisers matter only through
``init_lora_weights``."""
SERVED_TYPES = ("LORA", "IA3", "LN_TUNING", "TRAINABLE_TOKENS")
"""Types of PEFT that are served as they are."""
CONVERTED_TYPES = {
    "ADALORA", "ADAMSS", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA",
    "HRA", "LOHA", "LOKR", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING",
    "TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT",
}  # fmt: skip
"""Types that are made of linear maps, but not stored as low-rank matrices."""
_PER_INPUT = "what it adds depends on the input, so that no matrix is it; train a LoRA instead"
REFUSED_TYPES = {
    **dict.fromkeys(("LILY", "SHADOW", "XLORA"), _PER_INPUT),
    "POLY": "it mixes its matrices by a task id that requests do not have; train a LoRA for each task instead",
    **dict.fromkeys(
        ("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING",
         "PROMPT_TUNING"),
        "it learns a prompt; train a LoRA instead",
    ),
}  # fmt: skip
"""Types that are not linear maps, so that they cannot be converted either, each with an alternative."""
CONVERT = "convert it with `lorikeet adapters convert FOLDER OUT --base BASE`"
_KEEPS_BASE = {"gaussian", "eva", "mica", "orthogonal"}
"""Initialisers that do not change the base weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of initialisers that do."""


class LoraConfig(msgspec.Struct, frozen=True):
    """The keys that define which modules a LoRA changes and how it is scaled, named as in PEFT."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str = []
    target_parameters: list[str] = []
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: dict[str, list[int]] | list[int] | None = None
    feedforward_modules: list[str] | str | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    alora_invocation_tokens: list[int] | None = None

    @property
    def patterns_of_layers(self) -> list[str]:
        """Patterns for the part of a module's name before the layer number."""
        given = self.layers_pattern or [r"[^.]*"]
        return [given] if isinstance(given, str) else given

    def tokens_of(self, name: str, *, is_tied: bool = False) -> list[int]:
        """Return the tokens whose rows are trained, for an embedding with this full name.

        Args:
            name: the full name of the module.
            is_tied: whether the module may be an output layer that is trained with the embedding, which is named alone.
        """
        trained = self.trainable_token_indices or {}
        if isinstance(trained, list):
            return trained
        found = next((tokens for ending, tokens in trained.items() if _is_in(name, [ending])), None)
        if found is None and is_tied and len(trained) == 1:
            (found,) = trained.values()
        return found or []

    def digest_fields(self) -> bytes:
        """Return the keys that change the meaning of the weights, in a canonical form. The order of patterns counts."""
        others = {
            "fan_in_fan_out": self.fan_in_fan_out and bool(self.modules_to_save),
            # These keys do not follow from the names of tensors.
            "target_parameters": sorted(self.target_parameters),
            "peft_type": "" if self.peft_type == "LORA" else self.peft_type,
            "trainable_token_indices": self.trainable_token_indices,
            "use_dora": self.use_dora,
        }
        return msgspec.json.encode(
            {
                **{key: value for key, value in others.items() if value},
                "alpha_pattern": [(key, float(value)) for key, value in self.alpha_pattern.items()],
                "lora_alpha": float(self.lora_alpha),
                "r": self.r,
                "rank_pattern": list(self.rank_pattern.items()),
                "use_rslora": self.use_rslora,
            },
            order="sorted",
        )


class ModuleMatcher:
    """Resolves a config for single modules, by full names such as ``model.layers.0.self_attn.q_proj``.

    Raises:
        AdapterError: a pattern is not a regular expression, or too long.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._ranks = _Patterns(config.rank_pattern, config.r)
        self._alphas = _Patterns(config.alpha_pattern, config.lora_alpha)
        self._targets = _list_or_regex(config.target_modules)
        self._excluded = _list_or_regex(config.exclude_modules or [])
        self._layers = [_compiled(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.") for pattern in config.patterns_of_layers]

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Return the rank of a module, and its factor of B·A.

        The factor is alpha / r, or alpha / √r with rsLoRA (https://arxiv.org/abs/2312.03732).
        """
        rank = self._ranks.first_of(name)
        alpha = self._alphas.first_of(name)
        return rank, alpha / math.sqrt(rank) if self._config.use_rslora else alpha / rank

    def covers(self, name: str) -> bool:
        """Return whether the LoRA changes a module."""
        if _is_in(name, self._excluded):
            return False
        targets = self._config.target_modules
        if isinstance(targets, str):
            return targets.lower() == ALL_LINEAR or _is_in(name, self._targets)
        return name in targets or (_is_in(name, self._targets) and self._covers_layer(name))

    @property
    def has_parameters(self) -> bool:
        """Return whether the LoRA changes any parameter by name."""
        return bool(self._config.target_parameters)

    def covers_parameter(self, name: str) -> bool:
        """Return whether the LoRA changes a parameter, by its full name."""
        return _is_in(name, self._config.target_parameters)

    def _covers_layer(self, name: str) -> bool:
        wanted = self._config.layers_to_transform
        if wanted is None or wanted == []:
            return True
        match = next(filter(None, (pattern.match(name) for pattern in self._layers)), None)
        if match is None or match["idx"] is None:
            return False
        return int(match["idx"]) in ([wanted] if isinstance(wanted, int) else wanted)


class _Patterns(Generic[T]):
    """The patterns of ``rank_pattern`` or ``alpha_pattern``.

    The first match counts, like in PEFT's ``get_pattern_key``.
    """

    def __init__(self, values: Mapping[str, T], default: T) -> None:
        self._values = list(values.values())
        self._default = default
        # Most patterns are plain names, which are looked up.
        self._named = {name: place for place, name in reversed(list(enumerate(values))) if _NAME.fullmatch(name)}
        self._others = [
            (place, _compiled(rf"(.*\.)?({key})$")) for place, key in enumerate(values) if key not in self._named
        ]

    def first_of(self, name: str) -> T:
        """Return the value of the first pattern that matches the end of a module's name, else the default."""
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        best = min((self._named[end] for end in ends if end in self._named), default=len(self._values))
        for place, pattern in self._others:
            if place > best:
                break
            if pattern.match(name):
                return self._values[place]
        return self._values[best] if best < len(self._values) else self._default


def _list_or_regex(given: list[str] | str) -> "list[str] | re.Pattern[str]":
    return given if isinstance(given, list) else _compiled(given)


def _is_in(name: str, listing: "list[str] | re.Pattern[str]") -> bool:
    if isinstance(listing, list):
        return any(name == ending or name.endswith(f".{ending}") for ending in listing)
    return listing.fullmatch(name) is not None


def _compiled(pattern: str) -> "re.Pattern[str]":
    """Compile a pattern of a config.

    Raises:
        AdapterError: the pattern is not a regular expression, or too long.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise AdapterError(f"{CONFIG_FILE}: a pattern of {len(pattern)} characters is too long")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RuntimeError) as error:
        raise AdapterError(f"{CONFIG_FILE}: {pattern!r} is not a regular expression: {error}") from error


def read_json(file: Path, limit_bytes: int) -> dict[str, Any]:
    """Read a file that must contain a JSON object.

    Raises:
        AdapterError: the file cannot be read, is too large, not UTF-8, or not a JSON object.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(limit_bytes + 1)
    except OSError as error:
        raise AdapterError(f"{file.name}: cannot be read: {error.strerror} ({file.parent})") from error
    if len(content) > limit_bytes:
        raise AdapterError(f"{file.name}: larger than {limit_bytes} bytes")
    if is_lfs_pointer(content):
        raise AdapterError(f"{file.name}: {LFS_POINTER_TEXT}")
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            raise AdapterError(f"{file.name}: is {encoding}; it must be UTF-8 without a byte order mark")
    try:
        return msgspec.json.decode(content.decode(), type=dict[str, Any])
    except UnicodeDecodeError as error:
        raise AdapterError(
            f"{file.name}: is not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}"
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise AdapterError(f"{file.name}: {error}") from error


_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class ReadConfig(NamedTuple):
    """The content of an ``adapter_config.json``.

    Attributes:
        config: the settings.
        base_model, revision: name and revision of the base model in the config; "" if there are none.
        warnings: sentences about keys that are ignored.
    """

    config: LoraConfig
    base_model: str
    revision: str
    warnings: list[str]


def read_config(file: Path) -> ReadConfig:
    """Read and check an ``adapter_config.json``.

    Raises:
        AdapterError: the file is not valid JSON, or has a PEFT type or key that is not supported. The message names the
            key.
    """
    raw = read_json(file, MAX_CONFIG_BYTES)
    try:
        warnings = _check_supported(raw)
        given = _without_nulls(raw)
        if given["peft_type"] != "LORA":
            given = {"r": 1, "lora_alpha": 1, **given}
        if "token_indices" in given:
            given["trainable_token_indices"] = given.pop("token_indices")
        config = msgspec.convert(given, LoraConfig)
        _check_values(config)
    except (msgspec.ValidationError, AdapterError) as error:
        raise AdapterError(f"{file.name}: {error}") from error
    base_model, revision = (str(raw.get(key) or "") for key in ("base_model_name_or_path", "revision"))
    return ReadConfig(config, base_model, revision, warnings)


def _check_supported(raw: dict[str, Any]) -> list[str]:
    """Check the keys of a config, and return warnings about ignored keys."""
    kind = raw.get("peft_type")
    if kind in CONVERTED_TYPES:
        raise AdapterError(f"peft_type is {kind!r}: {CONVERT}")
    _check_linear(kind)
    if kind not in SERVED_TYPES:
        raise AdapterError(f"peft_type is {kind!r}, which is unknown; served are {', '.join(SERVED_TYPES)}")
    known = _HARMLESS | _IGNORED | {*_REFUSED, *LoraConfig.__struct_fields__}
    for key, value in raw.items():
        if key in _REFUSED and value:
            raise AdapterError(f"{key} is set: {_REFUSED[key]}")
        if value and key not in known:
            raise AdapterError(f"{key} is set, which is an unknown key")
    _check_init(raw.get("init_lora_weights", True))
    warnings = [f"{CONFIG_FILE}: {key} is ignored" for key in sorted(_IGNORED & raw.keys()) if raw[key]]
    bias = raw.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise AdapterError(f"bias is {bias!r}; known are 'none', 'all' and 'lora_only'")
    return warnings


def check_convertible(file: Path) -> str:
    """Check that PEFT can merge the type of an ``adapter_config.json`` into linear layers; return the type.

    Raises:
        AdapterError: PEFT cannot merge the type, or the file cannot be read.
    """
    kind = read_json(file, MAX_CONFIG_BYTES).get("peft_type")
    try:
        _check_linear(kind)
    except AdapterError as error:
        raise AdapterError(f"{file.name}: {error}") from error
    return str(kind)


def _check_linear(kind: Any) -> None:
    if isinstance(kind, str) and kind in REFUSED_TYPES:
        raise AdapterError(f"peft_type is {kind!r}, which is neither served nor converted: {REFUSED_TYPES[kind]}")


def _check_init(init: Any) -> None:
    if not isinstance(init, str) or init in _KEEPS_BASE:
        return
    if init.startswith(_CHANGES_BASE):
        why = f"which changes the base weights when it is loaded: {CONVERT}"
    else:
        why = f"which is unknown; known are {', '.join(sorted(_KEEPS_BASE))}"
    raise AdapterError(f"init_lora_weights is {init!r}, {why}")


def _check_values(config: LoraConfig) -> None:
    if not all(1 <= rank <= _MAX_RANK for rank in (config.r, *config.rank_pattern.values())):
        raise AdapterError(f"r and the values of rank_pattern must be at least 1, and at most {_MAX_RANK}")
    if not all(math.isfinite(alpha) for alpha in (config.lora_alpha, *config.alpha_pattern.values())):
        raise AdapterError("lora_alpha and the values of alpha_pattern must be finite")
    if not config.target_modules and not config.target_parameters:
        raise AdapterError("target_modules is empty")
    patterns = len(config.rank_pattern) + len(config.alpha_pattern) + len(config.patterns_of_layers)
    if patterns > _MAX_PATTERNS:
        raise AdapterError(f"rank_pattern, alpha_pattern and layers_pattern have more than {_MAX_PATTERNS} entries")
    for listing in (config.target_modules, config.exclude_modules, config.target_parameters):
        if isinstance(listing, list) and len(listing) > _MAX_PATTERNS:
            raise AdapterError(
                f"target_modules, exclude_modules or target_parameters has more than {_MAX_PATTERNS} entries"
            )


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}
