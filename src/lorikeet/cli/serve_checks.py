"""Finds settings that cannot work before anything is downloaded, converted or loaded."""

import importlib.metadata
import os
import tempfile
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from lorikeet.adapters.description import CONFIG_FILE
from lorikeet.adapters.folder_hints import inner_adapters
from lorikeet.config import (
    DEVICES,
    DTYPES,
    KERNELS,
    LOAD_FORMATS,
    MEMORY_BITS,
    MODEL_IMPLS,
    ConfigError,
    EngineSettings,
    ExecutorKind,
    Settings,
)
from lorikeet.core.machine import gpu_models, memory_limit_bytes, usable_cores
from lorikeet.core.text import format_size, unknown_name
from lorikeet.models.quantization_config import ALIASES, ON_LOAD, QUANTIZATIONS
from lorikeet.observe.exporters import EXPORTERS
from lorikeet.policies import BATCHING, POLICIES
from lorikeet.presets import resolve_preset

_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version", "/sys/module/nvgpu")
"""One of them is there where CUDA works: on Linux, in WSL and on Jetson."""


def check_settings(settings: Settings) -> None:
    """Check the settings that need neither the model nor its weights.

    Raises:
        ConfigError: an option names something that does not exist, or more memory than the machine has.
    """
    check_policies(settings.engine.preset)
    _check_profile(settings.engine.profile)
    _check_names(settings)
    for name in settings.server.exporters:
        EXPORTERS[name]  # The look-up imports the exporter.
    _check_device(settings)
    _check_template(settings.model.chat_template)
    _check_generation_config(settings.model.generation_config)
    _check_folders(settings.adapters.preload)
    _check_memory_dtypes(settings)
    _check_merging(settings)
    _check_cores(settings)
    _check_rank_address(settings)
    if settings.batches.dir:
        _check_writable("dir", settings.batches.dir)
    if settings.engine.executor is ExecutorKind.TORCH and not settings.cluster.ray_address:
        _check_memory(settings, memory_limit_bytes())


def check_policies(name: str) -> None:
    """Check the policies named behind a preset, such as ``elora,eviction=lru``, and their parameters.

    Raises:
        ConfigError: the preset, an option, a policy or a parameter does not exist, or a value is wrong.
    """
    _, preset = resolve_preset(name)
    if "," not in name:
        return
    for option, registry in POLICIES.items():
        try:
            registry[getattr(preset, option)]  # The look-up imports the policy.
        except ConfigError as error:
            raise ConfigError(f"preset {name!r}: {error}") from error


def _check_profile(name: str) -> None:
    """Check the profile's name at the start, since many presets never read the profile."""
    if name:
        from lorikeet.costs.catalog import load_profile  # The import takes time, and few servers need it.
        from lorikeet.costs.profile import ProfileError

        try:
            load_profile(name)
        except ProfileError as error:
            raise ConfigError(str(error)) from error


def _check_names(settings: Settings) -> None:
    model = settings.model
    engine = settings.engine
    for kind, name, known in (
        ("dtype", model.dtype, DTYPES),
        ("load_format", model.load_format, LOAD_FORMATS),
        ("model_impl", model.model_impl, MODEL_IMPLS),
        ("quantization", ALIASES.get(model.quantization, model.quantization), QUANTIZATIONS),
        ("device", engine.device, DEVICES),
        ("kernels", engine.kernels, KERNELS),
        ("lora_dtype", engine.lora_dtype, tuple(MEMORY_BITS)),
        ("kv_cache_dtype", engine.kv_cache_dtype, tuple(MEMORY_BITS)),
    ):
        if name not in known:
            raise ConfigError(unknown_name(kind, name, known))


def _check_device(settings: Settings) -> None:
    """Check that the kernels fit the device, and that the installed torch supports it.

    This check does not import torch, which takes seconds. The machines of a Ray cluster may have another torch.
    """
    engine = settings.engine
    if engine.device == "cuda" and engine.executor is ExecutorKind.TORCH and not settings.cluster.ray_address:
        if (version := _torch_version()).endswith("+cpu"):
            raise ConfigError(
                f"device: cuda needs a torch with CUDA, which {version} lacks; install another, or use cpu"
            )
        if Path("/proc").is_dir() and not any(map(os.path.exists, _GPU_FILES)):
            raise ConfigError("device: this machine or container has no NVIDIA GPU; use cpu")
    if engine.kernels == "triton" and engine.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("kernels: triton runs on a GPU: add --device cuda, or leave --kernels out")
    if engine.kernels == "native" and engine.device == "cuda":
        raise ConfigError("kernels: native runs on a CPU: add --device cpu, or leave --kernels out")


def _check_memory_dtypes(settings: Settings) -> None:
    """Check that kernels can read adapters and KV in 8 bits."""
    engine = settings.engine
    for name, dtype in (("lora_dtype", engine.lora_dtype), ("kv_cache_dtype", engine.kv_cache_dtype)):
        if dtype != "int8":
            continue
        if engine.device != "cpu" or engine.kernels == "triton":
            flag = name.replace("_", "-")
            raise ConfigError(
                f"{name}: int8 needs the CPU kernels: use --device cpu without --kernels triton, or leave --{flag} out"
            )
        if engine.executor is not ExecutorKind.TORCH:
            raise ConfigError(f"{name}: the paced executor does not model int8: leave the option out")


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_merging(settings: Settings) -> None:
    """Check that a preset that merges adapters into the weights does not run with quantised weights."""
    name, preset = resolve_preset(settings.engine.preset)
    wanted = settings.model.quantization
    if wanted in ON_LOAD and BATCHING.load(preset.batching).merges:
        raise ConfigError(
            f"quantization: {wanted} weights cannot be changed, and preset {name} merges adapters into them: choose "
            "another preset, or leave the weights as they are"
        )


def _check_cores(settings: Settings) -> None:
    """Check that this machine has a core or a GPU for each rank. The machines of a Ray cluster are unknown here.

    Replicas may share cores. The ranks of a replica wait for each other at every layer, so more ranks than cores would
    be very slow.
    """
    engine = settings.engine
    cluster = settings.cluster
    if engine.executor is not ExecutorKind.TORCH or cluster.ray_address:
        return
    if engine.device == "cuda":
        gpus = len(gpu_models())
        replicas = max(cluster.replicas, cluster.max_replicas)
        if gpus and engine.local_ranks * replicas > gpus:
            times = f" × {replicas} replicas" if replicas > 1 else ""
            raise ConfigError(f"{_parallel(engine)}{times} needs more GPUs than this machine has: {gpus}")
    elif engine.local_ranks > (cores := len(usable_cores())):
        raise ConfigError(f"{_parallel(engine)} ranks need as many cores, and this machine has {cores}")


def _parallel(engine: EngineSettings) -> str:
    """Return the settings that determine the number of ranks, with the number."""
    if engine.pipeline_parallel == 1:
        return f"tensor_parallel: {engine.tensor_parallel}"
    if engine.tensor_parallel == 1:
        return f"pipeline_parallel: {engine.pipeline_parallel}"
    return f"tensor_parallel × pipeline_parallel: {engine.ranks}"


def _check_rank_address(settings: Settings) -> None:
    """Check that the engine has remote ranks and a key for them."""
    engine = settings.engine
    cluster = settings.cluster
    if not engine.rank_address:
        return
    from lorikeet.worker.remote_ranks import RemoteRankError, parse_address, read_key  # Few servers need these modules.

    if engine.ranks == 1:
        raise ConfigError("rank_address: the engine has only one rank; set tensor_parallel or pipeline_parallel")
    if not engine.rank_key_file:
        raise ConfigError("rank_address: ranks on other machines need a key: set rank_key_file")
    if cluster.replicas > 1 or cluster.max_replicas or cluster.ray_address:
        raise ConfigError("rank_address: only one replica can have ranks on other machines")
    setting = "rank_address"
    try:
        parse_address(engine.rank_address)
        setting = "rank_key_file"
        read_key(engine.rank_key_file)
    except RemoteRankError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _check_writable(setting: str, name: str) -> None:
    """Check that a folder exists or can be created, and is writable."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{setting}: {name!r} cannot be used: {error.strerror or error}") from error


def _check_template(file: str) -> None:
    """Check that the given chat template compiles."""
    if not file:
        return
    from lorikeet.core.chat_template import ChatTemplate, TemplateError  # The import takes time.

    try:
        ChatTemplate(Path(file).read_text(encoding="utf-8"), {})
    except (OSError, TemplateError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"chat_template: {file}: {getattr(error, 'strerror', None) or error}") from error


def _check_generation_config(source: str) -> None:
    """Check that another folder has sampling defaults; without them it was named by mistake.

    Raises:
        ConfigError: there is no such file.
    """
    if source not in ("auto", "vllm") and not (Path(source).expanduser() / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config: {source!r} is neither auto, vllm nor a folder with generation_config.json"
        )


def _check_folders(preload: Iterable[str]) -> None:
    """Check that the local folders of adapters exist and contain adapters."""
    for pair in preload:
        name, _, source = pair.partition("=")
        scheme, separator, rest = source.partition("://")
        if separator and scheme.lower() not in ("file", "local"):
            continue
        try:
            folder = Path(rest if separator else source).expanduser()
            if not folder.is_dir():
                similar = _similar_folder(folder)
                hint = f"; did you mean {similar}?" if similar else ""
                raise ConfigError(f"adapter {name!r}: there is no folder {source!r}{hint}")
            if not (folder / CONFIG_FILE).is_file():
                raise ConfigError(f"adapter {name!r}: folder {source!r} has no {CONFIG_FILE}{inner_adapters(folder)}")
        except (
            OSError,
            RuntimeError,
        ) as error:  # The folder is not readable, or is the home folder of an unknown user.
            raise ConfigError(f"adapter {name!r}: {source!r}: {error}") from error


def _similar_folder(folder: Path) -> Path | None:
    """Return an existing folder with a name similar to ``folder``, or to its first missing parent."""
    parents = (folder, *folder.parents)
    missing = next((part for part in parents if part.parent.is_dir()), None)
    if missing is None:
        return None
    names = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    close = get_close_matches(missing.name, names, 1)
    if not close:
        return None
    whole = missing.with_name(close[0]) / folder.relative_to(missing)
    return whole if whole.is_dir() else missing.with_name(close[0])


def _check_memory(settings: Settings, limit_bytes: int) -> None:
    """Check that the memory sizes in the settings fit into this machine, for all ranks and replicas together."""
    engine = settings.engine
    wanted = {"host_memory_bytes": engine.host_memory_bytes or 0}
    if engine.device == "cpu":
        wanted["memory_bytes"] = engine.memory_bytes
    processes = engine.local_ranks * settings.cluster.replicas
    if sum(wanted.values()) * processes <= limit_bytes:
        return
    key, size_bytes = max(wanted.items(), key=lambda item: item[1])
    times = f" for each of {processes} ranks" if processes > 1 else ""
    available = f"this machine or container has {format_size(limit_bytes)}"
    raise ConfigError(f"{key}: {format_size(size_bytes)}{times} is too much: {available}")
