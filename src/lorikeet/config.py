"""Settings: small frozen values per part, filled from a TOML file, the environment and flags.

Precedence: flags, then environment (``LORIKEET_<SECTION>__<KEY>``), then the file, then the defaults here.
Unknown keys are errors. The *row* fixes the policies along the axes of the design (idea 5).
"""

import os
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lorikeet.core.plan import KernelForm

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ConfigError(ValueError):
    """A setting is unknown or has a wrong value; the message names it and where it came from."""


class KvAfterFinish(StrEnum):
    """What becomes of a request's KV when it finishes."""

    KEPT = "kept"
    DROPPED = "dropped"


class MemorySplit(StrEnum):
    """How device memory is divided between adapters and KV."""

    UNIFIED = "unified"
    """Not at all: any block serves either."""
    STATIC = "static"
    """``adapter_share`` of it is for adapters, the rest for KV."""


class BatchingMode(StrEnum):
    """Whether an adapter is merged into the base weights."""

    UNMERGED = "unmerged"


class ColdStart(StrEnum):
    """What happens while a request's adapter is transferred."""

    WAIT = "wait"
    """Only requests of that adapter wait."""
    BLOCK = "block"
    """Everything waits until the transfer has ended."""


class ExecutorKind(StrEnum):
    """Who runs a server's plans."""

    TORCH = "torch"
    """Real arithmetic."""
    PACED = "paced"
    """None: steps take as long as a profile says, and answers mean nothing."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system: a choice on every axis. Policies are named as their tables name them.

    Attributes:
        kernel_form: how a batch of mixed ranks is computed.
        kv_after_finish: what becomes of a request's KV.
        host_kv: KV that leaves the device goes to the host tier; else it is gone.
        memory_split, adapter_share: how the device is divided.
        padded_slots: an adapter takes as much of the device as the largest known one.
        keep_adapters: an adapter stays after its last running request, while nobody needs its room.
        dependency_tree: KV leaves the device before its adapter does, and later KV before earlier. Else anything that
            no sequence needs may leave, and KV may stay behind without what it depends on.
        eviction: who leaves first.
        prefetch: what is brought before anybody waits for it.
        swap_interval_s: time between the swapper's ticks; 0 for none.
        prefetch_below: it prefetches while less than this share of the device is in use, and up to it.
        evict_to: share of the device in use that it leaves when it finds the device full.
        admission: order of the waiting requests.
        batching_mode: merged or not.
        cold_start: what happens while a request's adapter is transferred.
    """

    kernel_form: KernelForm = KernelForm.UNPADDED
    kv_after_finish: KvAfterFinish = KvAfterFinish.KEPT
    host_kv: bool = True
    memory_split: MemorySplit = MemorySplit.UNIFIED
    adapter_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.2
    padded_slots: bool = False
    keep_adapters: bool = True
    dependency_tree: bool = True
    eviction: str = "lru"
    prefetch: str = "none"
    swap_interval_s: Seconds = 0.0
    prefetch_below: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    evict_to: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    admission: str = "fifo"
    batching_mode: BatchingMode = BatchingMode.UNMERGED
    cold_start: ColdStart = ColdStart.WAIT


_ELORA = Row(eviction="elora", prefetch="best-first", swap_interval_s=0.1)
_CHAMELEON = Row(
    kv_after_finish=KvAfterFinish.DROPPED, eviction="chameleon", prefetch="queue", cold_start=ColdStart.BLOCK
)
_VLLM = Row(memory_split=MemorySplit.STATIC, padded_slots=True, dependency_tree=False)


def _but(row: Row, **axes: Any) -> Row:
    return msgspec.structs.replace(row, **axes)


ROWS: dict[str, Row] = {
    "lorikeet:plain": Row(),
    "lorikeet:plain-block": Row(cold_start=ColdStart.BLOCK),
    "lorikeet:plain-no-reuse": Row(kv_after_finish=KvAfterFinish.DROPPED),
    "lorikeet:plain-padded": Row(kernel_form=KernelForm.PADDED),
    "lorikeet:plain-einsum": Row(kernel_form=KernelForm.EINSUM),
    "elora": _ELORA,
    "elora:literal": _but(_ELORA, eviction="elora:literal"),
    "elora:tau-1": _but(_ELORA, eviction="elora:tau-1"),
    "elora:tau-10": _but(_ELORA, eviction="elora:tau-10"),
    "elora:tau-300": _but(_ELORA, eviction="elora:tau-300"),
    "elora:wom": _but(_ELORA, dependency_tree=False, prefetch="best-first:flat"),
    "elora:wos": _but(_ELORA, eviction="lru", prefetch="newest-first"),
    "elora:wol": _but(_ELORA, eviction="elora:wol"),
    "elora:woc": _but(_ELORA, eviction="elora:woc"),
    "elora:wov": _but(_ELORA, eviction="elora:wov"),
    "elora:wou": _but(_ELORA, eviction="elora:wou"),
    "elora:bfs": _but(_ELORA, eviction="bfs", prefetch="branches"),
    "elora:rrip": _but(_ELORA, eviction="rrip", prefetch="newest-first"),
    "elora:hawkeye": _but(_ELORA, eviction="hawkeye", prefetch="newest-first"),
    "elora:halp": _but(_ELORA, eviction="halp", prefetch="newest-first"),
    "elora:s-lora": Row(kv_after_finish=KvAfterFinish.DROPPED),
    "vllm-static": _VLLM,
    "vllm-static:discard": _but(_VLLM, host_kv=False),
    "chameleon:no-scheduler": _CHAMELEON,
    "chameleon:lru": _but(_CHAMELEON, eviction="chameleon:lru"),
    "chameleon:fairshare": _but(_CHAMELEON, eviction="chameleon:fairshare"),
    "chameleon:prefetch": _but(_CHAMELEON, prefetch="histogram"),
    "chameleon:s-lora": _but(_CHAMELEON, eviction="lru", keep_adapters=False),
}
"""Every system by name. A new policy is one file and one row here."""

AUTO_ROW = "lorikeet:plain"
"""What ``auto`` stands for today; the start-up log says it."""


def resolve_row(name: str) -> tuple[str, Row]:
    """Return the full name and the row for ``name`` (``auto`` included).

    Axes may be set otherwise behind the name: ``vllm-static,adapter_share=0.35``.

    Raises:
        ConfigError: there is no such row or axis, or a wrong value; the message lists what there is.
    """
    base, *changes = (part.strip() for part in name.split(","))
    full = AUTO_ROW if base == "auto" else base
    if full not in ROWS:
        raise ConfigError(f"no row is called {base!r}; there are: auto, {', '.join(ROWS)}")
    if not changes:
        return full, ROWS[full]
    axes = msgspec.to_builtins(ROWS[full])
    for change in changes:
        axis, _, value = change.partition("=")
        if axis not in axes:
            raise ConfigError(f"row {name!r}: no axis is called {axis!r}; there are: {', '.join(axes)}")
        axes[axis] = value
    return ",".join([full, *changes]), _convert(axes, Row, f"row {name!r}")


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which base model, and how it is loaded.

    Attributes:
        model: local folder or hub id; empty for the default model, SmolLM2-135M-Instruct.
        served_names: names that clients may use; the first is reported. Empty: derived from ``model``.
        dtype: ``auto`` (the checkpoint's), ``bfloat16``, ``float16`` or ``float32``.
        load_format: ``auto`` (safetensors) or ``dummy`` (random weights of the right shapes).
        max_model_tokens: longest sequence; 0 for the model's own.
        chat_template: file with a Jinja template instead of the tokenizer's.
        cache_dir: where converted weights are kept; empty for the user's cache folder.
    """

    model: str = ""
    served_names: tuple[str, ...] = ()
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_tokens: Count = 0
    chat_template: str = ""
    cache_dir: str = ""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loop, its memory and its executor.

    Attributes:
        row: name of the system (see ``ROWS``), or ``auto``.
        executor: ``torch``, or ``paced``: a replica without arithmetic, for rehearsals of everything else.
        profile: name or file of the profile by which a paced executor takes its time.
        memory_bytes: size of the device arena; 0 takes a share of what is free.
        host_memory_bytes: size of the host arena, where adapters and KV wait for room on the device; 0 for none.
        link_bytes_per_s: a declared link between host and device: what a copy may move per second in each direction,
            for the CPU backend, whose copies are faster than any link; 0 leaves copies as fast as they are.
        block_tokens: tokens of KV in a block.
        max_running: most sequences that hold blocks at once.
        max_step_tokens: most tokens in one step; longer prompts are prefilled in chunks.
        max_repeat: most identical decode steps in one plan.
        repeat_limit_s: a repeat ends after this time.
        tensor_parallel: ranks.
        device: ``cpu`` or ``cuda``.
        kernels: ``native``, ``reference``, or ``auto``: native where it was built and fits dtype and device.
        threads: threads of one rank; 0 for ``OMP_NUM_THREADS``, or else a fair part of the cores beside other ranks.
        load_threads: adapters that are read at once on each rank; prefetches do not count against one that is awaited.
        record: file for a recording of all that the engine does, prompts included; empty for none.
    """

    row: str = "auto"
    executor: ExecutorKind = ExecutorKind.TORCH
    profile: str = ""
    memory_bytes: Count = 0
    host_memory_bytes: Count = 0
    link_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    block_tokens: Positive = 16
    max_running: Positive = 64
    max_step_tokens: Positive = 512
    max_repeat: Positive = 8
    repeat_limit_s: Seconds = 0.05
    tensor_parallel: Positive = 1
    device: str = "cpu"
    kernels: str = "auto"
    threads: Count = 0
    load_threads: Positive = 1
    record: str = ""


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where adapters may come from, and where they are kept.

    Attributes:
        enabled: False answers adapter routes with a clear error.
        preload: ``name=source`` pairs, registered at start-up.
        adapter_dir: the only folder that local paths may lie in; empty allows none at run time.
        allowed_sources: URL prefixes (``s3://bucket/team/``, ``hf://org/``) that may be loaded from.
        store_dir: where the content of registered adapters is kept; empty for the user's data folder.
        registry_url: SQLAlchemy URL; empty for SQLite in ``store_dir``.
        max_rank: larger ranks are refused; 0 for no limit.
        max_bytes: larger weight files are refused.
    """

    enabled: bool = True
    preload: tuple[str, ...] = ()
    adapter_dir: str = ""
    allowed_sources: tuple[str, ...] = ()
    store_dir: str = ""
    registry_url: str = ""
    max_rank: Count = 0
    max_bytes: Positive = 4 * 2**30


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP side.

    Attributes:
        host, port: where to listen; port 0 picks a free one.
        api_keys: bearer keys for all routes but health, ping, version, load and metrics; empty for open access.
        admin_keys: keys for the routes that change adapters; empty means the API keys do.
        max_queued: requests accepted and not finished, beyond which 429 is answered.
        max_body_bytes: larger bodies get 413.
        request_timeout_s: a request ends with an error after this time; 0 for never.
        drain_timeout_s: how long accepted requests may go on after SIGTERM.
        metrics_adapters: adapters with metrics of their own; the rest share the label ``other``.
        request_log: file for the request log; empty for none.
        request_log_text: also log prompts and answers.
        request_log_max_bytes: the log is rotated beyond this size.
        request_log_keep: rotated logs kept.
        log_level: of the server's own log.
        log_json: structured log lines as JSON.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    max_queued: Positive = 1024
    max_body_bytes: Positive = 8 * 2**20
    request_timeout_s: Seconds = 600.0
    drain_timeout_s: Seconds = 120.0
    metrics_adapters: Count = 20
    request_log: str = ""
    request_log_text: bool = False
    request_log_max_bytes: Positive = 100 * 2**20
    request_log_keep: Count = 3
    log_level: str = "info"
    log_json: bool = False


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one server."""

    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    adapters: AdapterSettings = msgspec.field(default_factory=AdapterSettings)
    server: ServerSettings = msgspec.field(default_factory=ServerSettings)


ENVIRONMENT_PREFIX = "LORIKEET_"


def load_settings(
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Merge defaults, file, environment and flags.

    Args:
        flags: section → key → value; values of None count as not given.
        file: a TOML file with a table per section.
        environment: defaults to the process's environment.

    Raises:
        ConfigError: a file that cannot be read, an unknown key or a wrong value.
    """
    merged: dict[str, dict[str, Any]] = {}
    if file is not None:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # not readable, not UTF-8, not TOML
            raise ConfigError(f"{file}: {error}") from error
        _merge(merged, tables, str(file))
    _merge(merged, _from_environment(os.environ if environment is None else environment), "environment")
    given = {s: {k: v for k, v in values.items() if v is not None} for s, values in (flags or {}).items()}
    _merge(merged, given, "flags")
    settings: Settings = _convert(merged, Settings, "settings")
    return settings


def _merge(into: dict[str, dict[str, Any]], tables: Mapping[str, Any], source: str) -> None:
    """Check each table against its section, so that an error names its source, and merge it."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for section, values in tables.items():
        if section not in sections or not isinstance(values, Mapping):
            raise ConfigError(f"{source}: no section is called {section!r}; there are: {', '.join(sections)}")
        _convert(dict(values), sections[section], f"{source}: [{section}]")
        into.setdefault(section, {}).update(values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or "__" not in variable:
            continue
        section, key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__", 1)
        struct = {field.name: field.type for field in msgspec.structs.fields(Settings)}.get(section)
        types = {f.name: f.type for f in msgspec.structs.fields(struct)} if struct else {}
        is_list = types.get(key) == tuple[str, ...]
        tables.setdefault(section, {})[key] = tuple(filter(None, map(str.strip, text.split(",")))) if is_list else text
    return tables


def _convert(values: Any, to: Any, where: str) -> Any:
    try:
        return msgspec.convert(values, to, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
