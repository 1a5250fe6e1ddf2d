"""``lorikeet router``: routes requests from one address to servers that are already running."""

import os
import re
from collections.abc import Iterable, Set
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorikeet.cli.console import fail, parse_size
from lorikeet.cli.serve_flags import origins, preload_pair

if TYPE_CHECKING:
    from lorikeet.core.splits import Split
    from lorikeet.router.adapters import RoutedAdapter

_RANK = re.compile(r"(.*),rank=(\d+)")


def router(
    backend: Annotated[
        list[str],
        typer.Option(
            help="Server, with its kind and base model if need be; or what finds servers: dns://name:port, file:PATH, "
            "kubernetes://namespace/service:port. Repeatable.",
            metavar="URL[,api=NAME][,base=MODEL][,max_loras=8][,max_rank=64][,kv_events=PORT][,kv_replay=PORT]",
        ),
    ],
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter to serve, with a source that all backends can read; with its rank if it cannot be read here. "
            "Repeatable.",
            metavar="NAME=SOURCE[,rank=16]",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="Name whose requests are split between adapters of --lora-modules by shares. Repeatable.",
            metavar="NAME=ADAPTER:SHARE,...",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset whose routing and placement are used.")] = "auto",
    profile: Annotated[str, typer.Option(help="Cost profile of a backend, for presets that decide by costs.")] = "",
    slo: Annotated[str, typer.Option(help="SLO targets, for presets that use them: ttft=0.5,tpot=0.1 (seconds).")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random choices.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    ssl_certfile: Annotated[str, typer.Option(help="Certificate for HTTPS, in PEM.", metavar="FILE")] = "",
    ssl_keyfile: Annotated[str, typer.Option(help="Its key, if it is in another file.", metavar="FILE")] = "",
    api_key: Annotated[list[str] | None, typer.Option(help="Key that clients need; repeatable.")] = None,
    admin_key: Annotated[list[str] | None, typer.Option(help="Key for changing adapters; repeatable.")] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may use the router, or a JSON list of them; * for any; repeatable.",
            metavar="ORIGIN",
        ),
    ] = None,
    backend_key: Annotated[
        str,
        typer.Option(help="Key for the backends; else they get the client's key.", envvar="LORIKEET_BACKEND_KEY"),
    ] = "",
    pass_client_keys: Annotated[
        bool,
        typer.Option(
            "--pass-client-keys",
            help="Send the clients' keys to the backends, which then apply scopes and limits; --backend-key is only "
            "for the router's own calls. Needs --backend-key and --admin-key.",
        ),
    ] = False,
    tenants: Annotated[
        bool,
        typer.Option(
            "--tenants",
            help="Accept keys of the registry's database, too, with scopes and limits, and count their usage here "
            "(`lorikeet keys`). Needs --admin-key.",
        ),
    ] = False,
    registry_url: Annotated[
        str,
        typer.Option(
            help="SQLAlchemy URL of the database of --tenants, for several routers and servers.",
            envvar="LORIKEET_ADAPTERS__REGISTRY_URL",
            show_default="a file in the user's data folder",
        ),
    ] = "",
    tenant_header: Annotated[
        str,
        typer.Option(
            help="Header in which backends get the client's tenant (its key's name). The backends need the same "
            "--tenant-header; then files, batches and fair shares are apart by client although the router sends its "
            "own key.",
            metavar="NAME",
        ),
    ] = "",
    shared_prefix_cache: Annotated[
        bool, typer.Option("--shared-prefix-cache", help="Let API keys reuse each other's KV at the backends.")
    ] = False,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections open at once; more get 503.")] = 4096,
    max_head: Annotated[
        str,
        typer.Option(
            "--max-head",
            "--h11-max-incomplete-event-size",
            help="Largest request line with headers.",
            metavar="SIZE",
        ),
    ] = "64KiB",
    head_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that the head of a request may take.")] = 15,
    body_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a body may take, beside 16 KiB a second.")
    ] = 30,
    write_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that an answer may stay unread.")] = 60,
    backend_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds without a piece of any answer that is waited for, and without progress in its metrics, after "
            "which a backend is taken out for a minute; 0 for never.",
        ),
    ] = 60,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that requests may go on after SIGTERM.")] = 120,
    log_level: Annotated[str, typer.Option(help="Least severe level of the log.")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Write the log as JSON only.")] = False,
) -> None:
    """Route requests to OpenAI-compatible servers, and place and load adapters there.

    The servers may be vLLM, Lorikeet, SGLang, llama.cpp, Ollama, TGI, LoRAX and others. If a server is lost, another
    one continues its answers.
    """
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.config import SECRET_VARIABLES, ConfigError, check_keys, check_origins
    from lorikeet.core.request import SloError, parse_slo
    from lorikeet.http.connections import ConnectionLimits
    from lorikeet.presets import resolve_preset
    from lorikeet.router.run import RouterOptions, run_router

    for name in SECRET_VARIABLES:  # The processes that read adapters do not need these modules.
        os.environ.pop(name, None)
    try:
        resolve_preset(preset)
        check_keys((*(api_key or ()), *(admin_key or ())))
        pages = tuple(chain.from_iterable(map(origins, allowed_origins or ())))
        check_origins(pages)
        if pass_client_keys and not (backend_key and admin_key):
            raise ValueError("--pass-client-keys needs --backend-key and --admin-key")
        if tenants and not admin_key:
            raise ValueError("--tenants needs --admin-key, which makes the keys of tenants")
        if tenants and pass_client_keys:
            raise ValueError("--tenants counts at the router, --pass-client-keys at the backends; choose one")
        if tenant_header and not re.fullmatch(r"[A-Za-z0-9-]{1,100}", tenant_header):
            raise ValueError(f"--tenant-header: {tenant_header[:100]!r} is not the name of a header")
        adapters = _read_adapters(lora_modules or ())
        options = RouterOptions(
            backends=tuple(backend),
            adapters=adapters,
            splits=_read_splits(split or (), {adapter.name for adapter in adapters}),
            preset=preset,
            profile=profile,
            slo=parse_slo(slo),
            seed=seed,
            host=host,
            port=port,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            api_keys=tuple(api_key or ()),
            admin_keys=tuple(admin_key or ()),
            allowed_origins=pages,
            backend_key=backend_key,
            passes_keys=pass_client_keys,
            tenants=tenants,
            registry_url=registry_url,
            tenant_header=tenant_header,
            shared_prefix_cache=shared_prefix_cache,
            connections=ConnectionLimits(
                max_connections, _head_bytes(max_head), head_timeout, body_timeout, write_timeout
            ),
            backend_timeout_s=backend_timeout,
            drain_timeout_s=drain_timeout,
            log_level=log_level,
            log_json=log_json,
        )
    except (AdapterError, ConfigError, SloError, ValueError) as error:
        fail(str(error), code=2, as_json=log_json)
    run_router(options)


def _head_bytes(text: str) -> int:
    """Return the size of ``--max-head``.

    Raises:
        ValueError: the value is not a size, or is too small.
    """
    from lorikeet.config import MIN_HEAD_BYTES

    if (size_bytes := parse_size(text)) < MIN_HEAD_BYTES:
        raise ValueError(
            f"--max-head: {size_bytes} bytes are too few for the head of a request; at least {MIN_HEAD_BYTES}"
        )
    return size_bytes


def _read_adapters(texts: Iterable[str]) -> "tuple[RoutedAdapter, ...]":
    """Read all ``--lora-modules``. Errors are those of ``read_adapter``, or two adapters of one name."""
    adapters: dict[str, RoutedAdapter] = {}
    for adapter in map(read_adapter, texts):
        first = adapters.setdefault(adapter.name, adapter)
        if first is not adapter:
            raise ValueError(f"adapter {adapter.name!r} is named twice: from {first.source} and from {adapter.source}")
    return tuple(adapters.values())


def _read_splits(texts: Iterable[str], adapters: Set[str]) -> "dict[str, Split]":
    """Read all ``--split``.

    Raises:
        ValueError: a value is not of the form ``NAME=ADAPTER:SHARE,...``, a share is not valid, a name is in use, or an
            adapter does not exist.
    """
    from lorikeet.core.splits import Split, why_invalid

    splits: dict[str, Split] = {}
    for text in texts:
        name, _, pairs = text.partition("=")
        versions = {}
        for pair in pairs.split(","):
            version, _, share = pair.rpartition(":")
            try:
                versions[version] = float(share)
            except ValueError:
                raise ValueError(f"--split: {text!r} must be NAME=ADAPTER:SHARE,...") from None
            if version not in adapters:
                raise ValueError(f"--split: {version!r} in {text!r} is not a name of --lora-modules")
        if reason := why_invalid(name, versions, {}):
            raise ValueError(f"--split: {text!r}: {reason}")
        if not name or name in adapters or name in splits:
            raise ValueError(f"--split: the name {name!r} is empty or in use")
        splits[name] = Split(versions)
    return splits


def read_adapter(text: str) -> "RoutedAdapter":
    """Return the adapter that a value of ``--lora-modules`` names. A local folder becomes an absolute path.

    Raises:
        AdapterError: the adapter cannot be read, and the value lacks a rank.
        ValueError: the value is neither ``NAME=SOURCE`` nor vLLM's JSON.
    """
    from lorikeet.router.adapters import describe_adapter

    name, _, source = preload_pair(text).partition("=")
    match = _RANK.fullmatch(source)
    rank = None if match is None else int(match[2])
    source = source if match is None else match[1]
    folder = Path(source)
    return describe_adapter(name, str(folder.resolve()) if folder.is_dir() else source, rank)
