"""Settings: small frozen values per part, filled from a TOML file, the environment and flags.

Precedence: flags, then environment (``LORIKEET_<SECTION>__<KEY>``), then the file, then the defaults here.
Unknown keys are errors. Policies are chosen by the name of a preset (``presets``).
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ConfigError(ValueError):
    """A setting is unknown or has a wrong value; the message names it and where it came from."""


class ExecutorKind(StrEnum):
    """Who runs a server's plans."""

    TORCH = "torch"
    """Real arithmetic."""
    PACED = "paced"
    """None: steps take as long as a profile says, and answers mean nothing."""


class LengthPredictor(StrEnum):
    """Who predicts how many tokens an answer will have."""

    NONE = "none"
    HISTORY = "history"
    """The recent answers of the same adapter."""
    LEARNED = "learned"
    """What `lorikeet train-predictor` learned; where it does not answer in time, history."""
    AUTO = "auto"
    """``learned`` if there is a file, and it was better than history on what was held out; else ``history``."""


class ReplicaStart(StrEnum):
    """Who starts the engines of a cluster."""

    RAY = "ray"
    """Ray, on any of its machines."""
    LOCAL = "local"
    """The server itself, on its own machine, without Ray."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which base model, and how it is loaded.

    Attributes:
        model: local folder or hub id; empty for the default model, SmolLM2-135M-Instruct.
        served_names: names that clients may use; the first is reported. Empty: derived from ``model``.
        dtype: ``auto`` (the checkpoint's), ``bfloat16``, ``float16`` or ``float32``.
        load_format: ``auto`` (safetensors) or ``dummy`` (random weights of the right shapes).
        max_model_len: longest sequence; 0 for the model's own.
        chat_template: file with a Jinja template instead of the tokenizer's.
        cache_dir: where converted weights are kept; empty for the user's cache folder.
    """

    model: str = ""
    served_names: tuple[str, ...] = ()
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: Count = 0
    chat_template: str = ""
    cache_dir: str = ""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loop, its memory and its executor.

    Attributes:
        preset: name of the system (see ``presets.PRESETS``), or ``auto``.
        executor: ``torch``, or ``paced``: a replica without arithmetic, for rehearsals of everything else.
        profile: name or file of the profile by which a paced executor takes its time, and by which policies of a
            cluster decide that need one.
        memory_bytes: size of the device arena; 0 takes 40 % of a CPU's free memory, but no more than 4 GiB or the least
            that works, or what ``gpu_memory_utilization`` leaves of a GPU's.
        gpu_memory_utilization: of a GPU's memory, for weights, arena and steps together, whatever else is there
            included; what the largest step takes is measured at the start, and graphs are given as much again. Of no
            use with ``memory_bytes``, and on a CPU.
        host_memory_bytes: size of the host arena, where adapters and KV wait for room on the device; 0 for none.
        touch_memory: take all of both arenas from the system at the start, not as they fill. The start takes longer;
            requests do not wait for new memory, which a virtual machine can be slow to get.
        link_bytes_per_s: a declared link between host and device: what a copy may move per second in each direction,
            for the CPU backend, whose copies are faster than any link; 0 leaves copies as fast as they are.
        block_size: tokens of KV in a block.
        max_num_seqs: most sequences that hold blocks at once.
        max_num_batched_tokens: most tokens in one step; longer prompts are prefilled in chunks.
        num_scheduler_steps: most identical decode steps in one plan. On a GPU tokens are told after each of them, and a
            request that arrives ends the repeat; unless this is 1, plans for whom nobody waits hold up to 32 there.
        multi_step_limit_s: a repeat ends after this time, on a GPU if somebody waits.
        tensor_parallel: ranks.
        device: ``cpu`` or ``cuda``.
        kernels: ``native``, ``triton``, ``reference``, or ``auto``: native on a CPU and Triton on a GPU, where they are
            installed and fit dtype and device, there with FlashInfer's attention for bfloat16 and float16 where that is
            installed, in steps that are no graphs.
        enforce_eager: call every kernel of every step; else steps in which all decode are captured as graphs and
            replayed, on a GPU without tensor parallelism.
        threads: threads of one rank; 0 for ``OMP_NUM_THREADS``, or else a fair part of the cores beside other ranks.
        load_threads: adapters that are read at once on each rank; prefetches do not count against one that is awaited.
        host_lora_workers: processes that compute what adapters add to prefills while they are on their way from the
            host, for presets that have it so, on an x86-64 CPU and beside at most one GPU. Each is one thread, at work
            during such prefills alone; with ``threads``, and beside a GPU, it gets a core of its own where enough are
            left, else it shares them. 0 for none: requests then wait for their adapters.
        record: file for a recording of all that the engine does, prompts included; empty for none.
    """

    preset: str = "auto"
    executor: ExecutorKind = ExecutorKind.TORCH
    profile: str = ""
    memory_bytes: Count = 0
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    host_memory_bytes: Count = 0
    touch_memory: bool = False
    link_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    block_size: Positive = 16
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 512
    num_scheduler_steps: Positive = 8
    multi_step_limit_s: Seconds = 0.05
    tensor_parallel: Positive = 1
    device: str = "cpu"
    kernels: str = "auto"
    enforce_eager: bool = False
    threads: Count = 0
    load_threads: Positive = 1
    host_lora_workers: Count = 1
    record: str = ""

    @property
    def memory_ranks(self) -> int:
        """How many ranks have as much memory as an engine tells of, and as ``memory_bytes`` asks for.

        An engine speaks of one of its ranks, and each has its part of every adapter and of every token's KV. A paced
        one speaks of all, whatever its profile stands for.
        """
        return 1 if self.executor is ExecutorKind.PACED else self.tensor_parallel


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where adapters may come from, and where they are kept.

    Attributes:
        enabled: False serves the base model alone; adapters that are registered stay so.
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
        host: address to listen at.
        port: to listen at; 0 picks a free one.
        api_keys: bearer keys for all routes but health, ping, version, load and metrics; empty for open access.
        admin_keys: keys for the routes that change adapters; empty means the API keys do.
        allowed_origins: origins (``https://example.org``) whose web pages may use the server; ``*`` for any, empty for
            none.
        max_queued: sequences accepted and not finished, beyond which 429 is answered; a request has one for each prompt
            and choice.
        max_body_bytes: larger bodies get 413.
        request_timeout_s: a request ends with an error after this time; 0 for never.
        drain_timeout_s: how long accepted requests may go on after SIGTERM.
        metrics_adapters: adapters with metrics of their own; the rest share the label ``other``.
        tenant_header: header whose value names the tenant of a request, trusted as it comes; empty, or a request
            without it: the key that let it in.
        slo_ttft_s: target for a request's time to first token; 0 for none.
        slo_tpot_s: target for its mean time per token after that; 0 for none.
        adapter_slos: targets of single adapters, which go before the server's: ``name=ttft=0.5,tpot=0.1``, or one entry
            for each; 0 for none.
        shed: answer 429 at once to requests whose first token is predicted to come too late for their target.
        request_log: file for the request log; empty for none.
        request_log_text: also log prompts and answers.
        request_log_max_bytes: the log is rotated beyond this size.
        request_log_keep: rotated logs kept.
        length_predictor: who predicts how many tokens an answer will have, for policies that look at that: ``none``,
            ``history`` (of the adapter's recent answers), ``learned`` (from the prompt, by the file) or ``auto``:
            learned if there is a file that was better than history on requests held out, else history.
        length_predictor_file: of `lorikeet train-predictor`.
        length_predictor_timeout_s: a learned prediction that takes longer is made by history instead.
        log_level: of the server's own log.
        log_json: structured log lines as JSON.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queued: Positive = 1024
    max_body_bytes: Positive = 8 * 2**20
    request_timeout_s: Seconds = 600.0
    drain_timeout_s: Seconds = 120.0
    metrics_adapters: Count = 20
    tenant_header: str = ""
    slo_ttft_s: Seconds = 0.0
    slo_tpot_s: Seconds = 0.0
    adapter_slos: tuple[str, ...] = ()
    shed: bool = False
    request_log: str = ""
    request_log_text: bool = False
    request_log_max_bytes: Positive = 100 * 2**20
    request_log_keep: Count = 3
    length_predictor: LengthPredictor = LengthPredictor.AUTO
    length_predictor_file: str = ""
    length_predictor_timeout_s: Seconds = 0.1
    log_level: str = "info"
    log_json: bool = False


class ClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several engines behind one address. Which of them serves what is in the preset.

    Attributes:
        replicas: engines, each with the settings of ``[engine]``.
        start: who starts them: ``ray``, or ``local``: processes of this machine, without Ray.
        ray_address: of a Ray cluster to join; empty starts one here, which ends with the server.
        pool_dir: folder on each machine where its replicas keep their copies of adapters; empty for a temporary one.
        registry_url: SQLAlchemy URL of what several servers of one cluster share; empty for ``adapters.registry_url``.
        min_replicas: fewest, where the number of replicas follows the load.
        max_replicas: most, where it does; with 0 it stays as it is.
    """

    replicas: Positive = 1
    start: ReplicaStart = ReplicaStart.RAY
    ray_address: str = ""
    pool_dir: str = ""
    registry_url: str = ""
    min_replicas: Count = 0
    max_replicas: Count = 0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one server."""

    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    adapters: AdapterSettings = msgspec.field(default_factory=AdapterSettings)
    server: ServerSettings = msgspec.field(default_factory=ServerSettings)
    cluster: ClusterSettings = msgspec.field(default_factory=ClusterSettings)


ENVIRONMENT_PREFIX = "LORIKEET_"
_KEYS = ("api_keys", "admin_keys")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


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
        ConfigError: a file that cannot be read, an unknown key, or values that are wrong or do not go together.
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
    settings: Settings = convert(merged, Settings, "settings")
    _check_scaling(settings.cluster)
    if settings.adapters.preload and not settings.adapters.enabled:
        raise ConfigError(f"settings: [adapters]: {settings.adapters.preload[0]!r} is no adapter to serve without LoRA")
    check_keys((*settings.server.api_keys, *settings.server.admin_keys))
    check_origins(settings.server.allowed_origins)
    return settings


def check_keys(keys: Iterable[str]) -> None:
    """Check bearer keys. An empty one, as of a variable that is not set, would be held by whoever sends none.

    Raises:
        ConfigError: one is empty or blank.
    """
    if not all(map(str.strip, keys)):
        raise ConfigError("an API key or admin key is empty: is the variable set that it comes from?")


def check_origins(origins: Iterable[str]) -> None:
    """Check that a browser may call itself so: it compares origins letter by letter.

    Raises:
        ConfigError: one is none.
    """
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allowed origins: {origin!r} is neither * nor an origin such as https://example.org or "
                "http://localhost:3000"
            )


def _check_scaling(cluster: ClusterSettings) -> None:
    """Check what only all sources together tell.

    Raises:
        ConfigError: the limits exclude the number of replicas.
    """
    least, most = cluster.min_replicas, cluster.max_replicas
    if (least or most) and not least <= cluster.replicas <= most:
        raise ConfigError(
            f"settings: [cluster]: {cluster.replicas} replicas are not within min_replicas, {least}, and max_replicas, "
            f"{most}"
        )


def _merge(into: dict[str, dict[str, Any]], tables: Mapping[str, Any], source: str) -> None:
    """Check each table against its section, so that an error names its source, and merge it."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for section, values in tables.items():
        if section not in sections or not isinstance(values, Mapping):
            raise ConfigError(f"{source}: no section is called {section!r}; there are: {', '.join(sections)}")
        convert(dict(values), sections[section], f"{source}: [{section}]")
        into.setdefault(section, {}).update(values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    known = {
        section.name: {field.name: field.type for field in msgspec.structs.fields(section.type)}
        for section in msgspec.structs.fields(Settings)
    }
    # Not all that begins like them: Kubernetes tells of a service "lorikeet-server" in LORIKEET_SERVER_PORT=tcp://…
    misspelt = {f"{section}_{key}": f"{section}__{key}" for section, keys in known.items() for key in keys}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in misspelt and "://" not in text:
            meant = ENVIRONMENT_PREFIX + misspelt[name].upper()
            raise ConfigError(f"environment: {variable} is no setting; with two underscores it is: {meant}")
        if "__" not in name:
            continue
        section, key = name.split("__", 1)
        types = known.get(section, {})
        value: str | tuple[str, ...] = text
        if types.get(key) == tuple[str, ...]:
            value = tuple(filter(None, map(str.strip, text.split(","))))
            if not value and key in _KEYS:  # an empty list would open what the variable was to guard
                raise ConfigError(f"environment: {variable} is set, and holds no key")
        tables.setdefault(section, {})[key] = value
    return tables


def convert(values: Any, to: Any, where: str) -> Any:
    """Return ``values`` as a settings struct.

    Raises:
        ConfigError: they do not fit; the message begins with ``where``.
    """
    try:
        return msgspec.convert(values, to, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
