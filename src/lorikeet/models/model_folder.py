"""Finds, converts or downloads the model that the settings name, and its tokenizer. Does not import torch."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lorikeet.config import ConfigError, ModelSettings
from lorikeet.models import default
from lorikeet.models.gguf_folder import prepare_gguf
from lorikeet.models.quantization_config import GGUF

_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
_TOKENIZER_FILES = ("*.json", "*.jinja")


class ModelFolder(NamedTuple):
    """A model on local disk.

    Attributes:
        path: folder with ``config.json``, ``tokenizer.json`` and safetensors or ``model.gguf``.
        identity: name of the base model in the adapter registry. It does not depend on the folder's location.
        names: the names that clients may use. Responses report the first name.
        aliases: further names that are accepted but not listed.
        revision: the hub's commit, if the model was downloaded.
    """

    path: Path
    identity: str
    names: tuple[str, ...]
    aliases: tuple[str, ...]
    revision: str = ""


def prepare_model(settings: ModelSettings, on_stage: Callable[[str], None]) -> ModelFolder:
    """Find, convert or download the model.

    Args:
        settings: the settings, which name the model.
        on_stage: function called with a few words before a conversion or download.

    Raises:
        ConfigError: the model does not exist, or it cannot be downloaded.
    """
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else default.default_cache_dir()
    local = Path(settings.model).expanduser()
    is_file = bool(settings.model) and local.is_file()
    of_default = not settings.model and settings.quantization == GGUF
    if settings.tokenizer and not (is_file or of_default):
        raise ConfigError("tokenizer: is for GGUF files; other models have a tokenizer in their folder")
    if not settings.model:
        path = _default_gguf(settings, cache_dir, on_stage) if of_default else _default(cache_dir, on_stage)
        return ModelFolder(path, default.NAME, settings.served_names or (default.NAME,), (default.NAME, str(path)))
    if is_file:
        if local.suffix != ".gguf":
            raise ConfigError(f"model {settings.model!r}: is a file, but not a .gguf file; name a folder, or a hub id")
        path = _of_gguf(local, settings, cache_dir, on_stage)
        return ModelFolder(path, local.stem, settings.served_names or (local.stem,), (settings.model, str(local)))
    if local.is_dir():
        path = local.resolve()
        return ModelFolder(path, path.name, settings.served_names or (path.name,), (settings.model, str(path)))
    if local.is_absolute() or settings.model.startswith((".", "~")) or settings.model.count("/") != 1:
        raise ConfigError(f"model {settings.model!r}: no such folder, and not a hub id (owner/name)")
    path = _download(settings.model, on_stage)
    names = settings.served_names or (settings.model,)
    # This is the name in the hub's cache.
    return ModelFolder(path, settings.model, names, (settings.model,), path.name)


def _default_gguf(settings: ModelSettings, cache_dir: Path, on_stage: Callable[[str], None]) -> Path:
    try:
        return _of_gguf(default.find_gguf(), settings, cache_dir, on_stage)
    except default.DefaultModelError as error:
        raise ConfigError(str(error)) from error


def _of_gguf(file: Path, settings: ModelSettings, cache_dir: Path, on_stage: Callable[[str], None]) -> Path:
    tokenizer = None
    if settings.tokenizer:
        local = Path(settings.tokenizer).expanduser()
        tokenizer = local if local.is_dir() else _download(settings.tokenizer, on_stage, _TOKENIZER_FILES)
    return prepare_gguf(file, cache_dir / "gguf", tokenizer, on_stage)


def _default(cache_dir: Path, on_stage: Callable[[str], None]) -> Path:
    target = cache_dir / default.NAME
    if target.is_dir():
        return target
    on_stage(f"converting {default.NAME} (once)")
    # The conversion imports torch, so it runs in another process.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(default.prepare_default_model, cache_dir).result()
        except default.DefaultModelError as error:
            raise ConfigError(str(error)) from error


def _download(hub_id: str, on_stage: Callable[[str], None], files: Sequence[str] = _HUB_FILES) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    on_stage(f"downloading {hub_id}")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{hub_id!r}: no such folder, and it cannot be downloaded from the hub: {error}") from error
