"""Finds, converts or downloads the model that the settings name. Does not import torch."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lorikeet.config import ConfigError, ModelSettings
from lorikeet.models import default

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


class ModelFolder(NamedTuple):
    """A model on local disk.

    Attributes:
        path: folder with ``config.json``, ``tokenizer.json`` and safetensors.
        identity: name of the base model in the adapter registry, the same wherever the folder is.
        names: that clients may use; the first is reported.
        aliases: further names that are accepted and not listed.
        revision: commit of the hub, if it was downloaded from there.
    """

    path: Path
    identity: str
    names: tuple[str, ...]
    aliases: tuple[str, ...]
    revision: str = ""


def prepare_model(settings: ModelSettings, on_stage: Callable[[str], None]) -> ModelFolder:
    """Find, convert or download the model.

    Args:
        settings: name the model.
        on_stage: called with a few words before a conversion or download.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    if not settings.model:
        path = _default(Path(settings.cache_dir) if settings.cache_dir else default.default_cache_dir(), on_stage)
        return ModelFolder(path, default.NAME, settings.served_names or (default.NAME,), (default.NAME, str(path)))
    local = Path(settings.model).expanduser()
    if local.is_dir():
        path = local.resolve()
        return ModelFolder(path, path.name, settings.served_names or (path.name,), (settings.model, str(path)))
    if local.is_absolute() or settings.model.startswith((".", "~")) or settings.model.count("/") != 1:
        raise ConfigError(f"model {settings.model!r}: no such folder, and not a hub id (owner/name)")
    path = _download(settings.model, on_stage)
    names = settings.served_names or (settings.model,)
    return ModelFolder(path, settings.model, names, (settings.model,), path.name)  # the hub's cache names it so


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


def _download(hub_id: str, on_stage: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    on_stage(f"downloading {hub_id}")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {hub_id!r}: no such folder, and it cannot be downloaded from the hub: {error}"
        ) from error
