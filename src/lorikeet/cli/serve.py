"""``lorikeet serve``: merges flags, environment and file into settings, then runs the server."""

import inspect
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet.api.launch import launch
from lorikeet.chat.reasoning import REASONING_FORMATS
from lorikeet.chat.tool_parsers import TOOL_FORMATS
from lorikeet.cli import serve_flags
from lorikeet.cli.console import fail, note
from lorikeet.cli.serve_checks import check_settings
from lorikeet.config import SECRET_VARIABLES, AdapterDirMode, ConfigError, EngineSettings, Settings, load_settings
from lorikeet.observe.slo_targets import read_targets

Model = Annotated[str | None, typer.Argument(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file, a table per section; flags win over it.")]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        " /--disable-radix-cache",  # This is SGLang's name of the flag.
        help="Keep KV for later requests of the same adapter; the preset decides.",
        rich_help_panel="Engine",
        show_default=False,
    ),
]

_LOAD_FROM_ANYWHERE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Variable with which vLLM's routes load adapters from any local folder; documents of trainers set it."""


def serve(model: Model = None, config: ConfigFile = None, prefix_caching: PrefixCaching = None, **flags: Any) -> None:
    """Serve a base model and many adapters over an OpenAI-compatible API.

    Every setting can also come from the file given with --config, or from LORIKEET_SECTION__KEY in the
    environment. Flags of vLLM and SGLang are accepted, some with a note.
    """
    environment = dict(os.environ)
    name_settings = partial(serve_flags.name_settings, given=flags, file=config, environment=environment)
    try:
        settings = build_settings(model, config, prefix_caching, flags, environment)
        check_settings(settings)
    except ConfigError as error:
        fail(name_settings(str(error)), code=2, as_json=bool(flags.get("server_log_json")))
    if settings.server.uds:
        for flag in (name for name in ("host", "port") if flags.get(f"server_{name}") is not None):
            note(f"--{flag} is not used: the server listens on --uds", as_json=settings.server.log_json)
    for name in SECRET_VARIABLES:
        os.environ.pop(name, None)
    launch(settings, name_settings)


def _with_table(function: Any) -> None:
    """Replace ``**flags`` in the signature by the options of the table, which typer reads."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = inspect.Signature([*own, *serve_flags.parameters()], return_annotation=None)


_with_table(serve)


def build_settings(
    model: str | None,
    config: Path | None,
    prefix_caching: bool | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Settings:
    """Merge flags, environment, file and defaults.

    Args:
        model: folder or hub id.
        config: TOML file.
        prefix_caching: false chooses the preset that drops KV, unless another preset is named. True changes nothing.
        flags: values by the names of ``serve_flags.parameters``.
        environment: the process's environment. ``VLLM_API_KEY`` is used if no other key is given, and
            ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` if no folder of adapters is given.

    Raises:
        ConfigError: a setting is wrong. The message names the setting's source.
    """
    tables = serve_flags.sections(flags)
    tables["model"]["model"] = model
    settings = load_settings(tables, config, environment)
    if prefix_caching is False:
        if (preset := settings.engine.preset) != EngineSettings().preset:
            raise ConfigError(
                f"--no-enable-prefix-caching: preset {preset} decides what happens to KV; to drop it, use "
                f"--preset {preset},kv_after_finish=dropped"
            )
        tables["engine"]["preset"] = "lorikeet:plain-no-reuse"
        settings = load_settings(tables, config, environment)
    if not settings.server.api_keys and "VLLM_API_KEY" in environment:
        tables["server"]["api_keys"] = [environment["VLLM_API_KEY"]]
        settings = load_settings(tables, config, environment)
    if not settings.adapters.adapter_dir and environment.get(_LOAD_FROM_ANYWHERE, "").lower() in ("1", "true"):
        tables["adapters"] |= {"adapter_dir": "/", "adapter_dir_mode": AdapterDirMode.ALLOW}
        settings = load_settings(tables, config, environment)
    if settings.adapters.adapter_dir and not Path(settings.adapters.adapter_dir).expanduser().is_dir():
        raise ConfigError(f"adapter_dir: there is no folder {settings.adapters.adapter_dir!r}")
    _check_parser("tool_call_parser", settings.model.tool_call_parser, TOOL_FORMATS)
    _check_parser("reasoning_parser", settings.model.reasoning_parser, REASONING_FORMATS)
    read_targets(settings.server, settings.cluster)
    return settings


def _check_parser(setting: str, name: str, known: Iterable[str]) -> None:
    """Check the name of a parser at the start, since the server uses the parser only for some requests.

    Raises:
        ConfigError: the name is unknown.
    """
    if name and name not in known:
        raise ConfigError(f"{setting}: {name!r} must be one of {', '.join(known)}")
