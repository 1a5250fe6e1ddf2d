"""Reads and validates PEFT's ``adapter_config.json``, and matches its patterns as PEFT does.

Patterns come from users, so the time to match them is limited.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import regex  # type: ignore[import-untyped]

from lorikeet.adapters.errors import AdapterError

_MATCH_TIMEOUT_S = 1.0
_ALL_TIMEOUT_S = 10.0
"""Limit for all matches of one check together."""
_MAX_PATTERN_CHARS = 20_000
_NAME = re.compile(r"(\w+\.)*layers\.\d+\.\w+\.\w+")
"""Patterns of this form are plain module names: although a dot matches any character, they match only that name."""

T = TypeVar("T")


class _Limit(NamedTuple):
    """Deadline of all matches, and the file that contains the patterns."""

    file: str
    deadline_s: float


_NO_LIMIT = _Limit("an adapter's config", inf)
_limit: ContextVar[_Limit] = ContextVar("limit of all matches", default=_NO_LIMIT)


@contextmanager
def limited_matching(file: str) -> Iterator[None]:
    """Limit the total time of all matches in the block; the match that exceeds it raises AdapterError.

    Args:
        file: the file that contains the patterns, for the message.
    """
    token = _limit.set(_Limit(file, time.monotonic() + _ALL_TIMEOUT_S))
    try:
        yield
    finally:
        _limit.reset(token)


def first_of(values: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name, ``default`` if none does.

    Raises:
        AdapterError: a pattern takes too long, or is not a regular expression.
    """
    patterns = tuple(values)
    named, others = _split_patterns(patterns)
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    best = min((named[end] for end in ends if end in named), default=len(patterns))
    for place in others:
        if place > best:
            break
        if _match(compiled(ending(patterns[place])).match, patterns[place], name) is not None:
            return values[patterns[place]]
    return values[patterns[best]] if best < len(patterns) else default


def matches_whole(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` matches the whole name of a module; raises as :func:`first_of`."""
    return _match(compiled(pattern).fullmatch, pattern, name) is not None


def layer_index(pattern: str, name: str) -> int | None:
    """Return the layer number that follows a match of ``pattern`` in a module's name; raises as :func:`first_of`."""
    match = _match(compiled(before_index(pattern)).match, pattern, name)
    return None if match is None else int(match["idx"])


def ending(pattern: str) -> str:
    """Return the regular expression for names that end with a match of ``pattern``."""
    return rf"(.*\.)?({pattern})$"


def before_index(pattern: str) -> str:
    """Return the regular expression for names in which a number follows a match of ``pattern``."""
    return rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> "regex.Pattern[str]":
    """Compile with ``regex``, which can time out.

    Raises:
        AdapterError: it is not a regular expression, or too long.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise AdapterError(f"a pattern of {len(pattern)} characters is too long")
    try:
        re.compile(pattern)  # PEFT uses re, so only its syntax is accepted
        return regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{pattern!r} is not a regular expression: {error}") from error


@lru_cache(maxsize=16)
def _split_patterns(patterns: tuple[str, ...]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the positions of patterns that are plain module names, which are looked up, and of the other ones."""
    named = {pattern: place for place, pattern in reversed(list(enumerate(patterns))) if _NAME.fullmatch(pattern)}
    return named, tuple(place for place, pattern in enumerate(patterns) if pattern not in named)


def _match(match: "Callable[..., regex.Match[str] | None]", pattern: str, name: str) -> "regex.Match[str] | None":
    limit = _limit.get()
    left_s = limit.deadline_s - time.monotonic()
    try:
        if left_s <= 0:
            raise TimeoutError
        return match(name, timeout=min(_MATCH_TIMEOUT_S, left_s), concurrent=True)
    except TimeoutError as error:
        which = f"the pattern {pattern!r} takes" if left_s > _MATCH_TIMEOUT_S else "the patterns all together take"
        raise AdapterError(f"{limit.file}: {which} too long to match {name!r}") from error


CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
_MAX_PATTERNS = 2048
"""Most patterns of one adapter, since each is matched against every module; a model of 126 layers has 882."""

_REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "fully trained modules are not supported",
    "lora_bias": "biases of LoRA modules are not supported",
    "trainable_token_indices": "trained token embeddings are not supported",
    "alora_invocation_tokens": "aLoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "loftq_config": "LoftQ changes the base weights",
    "megatron_config": "Megatron layers are not supported",
    "layer_replication": "replicated layers are not supported",
    "target_parameters": "LoRA on bare parameters is not supported",
}
_HARMLESS = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "init_lora_weights", "bias", "megatron_core", "qalora_group_size", "runtime_config",
    "eva_config", "corda_config", "lora_ga_config", "velora_config", "ensure_weight_tying", "fan_in_fan_out",
}  # fmt: skip
"""Keys that are read elsewhere or have no effect on inference. ``*_config`` of initialisers matter only through
``init_lora_weights``, and ``fan_in_fan_out`` only for modules that are not linear, on which LoRA is not supported."""
_KEEPS_BASE = {"gaussian", "eva", "mica", "orthogonal"}
"""Initialisers that do not change the base weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of initialisers that do."""


class LoraConfig(msgspec.Struct, frozen=True):
    """The keys that define which modules a LoRA changes and how it is scaled, named as in PEFT."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def rank(self, name: str) -> int:
        """Return the rank of a module, by its full name (``model.layers.0.self_attn.q_proj``)."""
        return first_of(self.rank_pattern, name, self.r)

    def scaling(self, name: str) -> float:
        """Return the factor of B·A: alpha / r, or alpha / √r with rsLoRA (https://arxiv.org/abs/2312.03732)."""
        alpha, rank = first_of(self.alpha_pattern, name, self.lora_alpha), self.rank(name)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def covers(self, name: str) -> bool:
        """Whether the LoRA changes a module, by its full name."""
        if self.exclude_modules and _in_list_or_regex(name, self.exclude_modules):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or matches_whole(self.target_modules, name)
        if name in self.target_modules:
            return True
        return _in_list_or_regex(name, self.target_modules) and self._covers_layer(name)

    def _covers_layer(self, name: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        for pattern in self.patterns_of_layers:
            index = layer_index(pattern, name)
            if index is not None:
                return index in ([wanted] if isinstance(wanted, int) else wanted)
        return False

    @property
    def patterns_of_layers(self) -> list[str]:
        """Patterns of the module name before the layer number."""
        given = self.layers_pattern or [r"[^.]*"]
        return [given] if isinstance(given, str) else given

    def digest_fields(self) -> bytes:
        """Return the keys that change the meaning of the weights, in a canonical form. The order of patterns counts."""
        return msgspec.json.encode(
            {
                "alpha_pattern": [(key, float(value)) for key, value in self.alpha_pattern.items()],
                "lora_alpha": float(self.lora_alpha),
                "r": self.r,
                "rank_pattern": list(self.rank_pattern.items()),
                "use_rslora": self.use_rslora,
            },
            order="sorted",
        )


def read_config(file: Path) -> tuple[LoraConfig, str]:
    """Read and check an ``adapter_config.json``.

    Returns:
        The settings, and the base model named in the file ("" if none).

    Raises:
        AdapterError: the file is not valid JSON, has another PEFT type, or a key that is not supported; the message
            names the key.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise AdapterError(f"{file.name}: larger than {MAX_CONFIG_BYTES} bytes")
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except OSError as error:
        raise AdapterError(f"{file.name}: cannot be read: {error.strerror} ({file.parent})") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise AdapterError(f"{file.name}: {error}") from error
    try:
        _check_supported(raw)
        config = msgspec.convert(_without_nulls(raw), LoraConfig)
        _check_values(config)
    except (msgspec.ValidationError, AdapterError) as error:
        raise AdapterError(f"{file.name}: {error}") from error
    return config, str(raw.get("base_model_name_or_path") or "")


def _check_supported(raw: dict[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {raw.get('peft_type')!r}; only 'LORA' is supported")
    for key, value in raw.items():
        if key in _REFUSED and value:
            raise AdapterError(f"{key} is set: {_REFUSED[key]}")
        if value and key not in _HARMLESS and key not in _REFUSED and key not in LoraConfig.__struct_fields__:
            raise AdapterError(f"{key} is set, which is an unknown key")
    if raw.get("bias", "none") not in ("none", None):
        raise AdapterError(f"bias is {raw['bias']!r}: trained biases are not supported")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init not in _KEEPS_BASE:
        if init.startswith(_CHANGES_BASE):
            why = "which changes the base weights; convert it with PEFT first"
        else:
            why = f"which is unknown; known are {', '.join(sorted(_KEEPS_BASE))}"
        raise AdapterError(f"init_lora_weights is {init!r}, {why}")
    if isinstance(raw.get("target_modules"), list):
        for target in raw["target_modules"]:
            if str(target).rsplit(".")[-1] in ("lm_head", "embed_tokens"):
                raise AdapterError(f"target_modules names {target!r}: LoRA on embeddings or head is not supported")


def _check_values(config: LoraConfig) -> None:
    if config.r < 1 or any(rank < 1 for rank in config.rank_pattern.values()):
        raise AdapterError("r and the values of rank_pattern must be at least 1")
    if not all(math.isfinite(alpha) for alpha in (config.lora_alpha, *config.alpha_pattern.values())):
        raise AdapterError("lora_alpha and the values of alpha_pattern must be finite")
    if not config.target_modules:
        raise AdapterError("target_modules is empty")
    for listing in (config.target_modules, config.exclude_modules):
        if isinstance(listing, str):
            compiled(listing)
    layers = config.patterns_of_layers
    if len(config.rank_pattern) + len(config.alpha_pattern) + len(layers) > _MAX_PATTERNS:
        raise AdapterError(f"rank_pattern, alpha_pattern and layers_pattern have more than {_MAX_PATTERNS} entries")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        compiled(ending(pattern))
    for pattern in layers:
        compiled(before_index(pattern))


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _in_list_or_regex(name: str, names: list[str] | str) -> bool:
    if isinstance(names, str):
        return matches_whole(names, name)
    return any(name == ending or name.endswith(f".{ending}") for ending in names)
