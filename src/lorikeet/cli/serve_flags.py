"""Lists the flags of ``lorikeet serve`` in a table, each with its setting."""

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from lorikeet.cli.console import parse_size
from lorikeet.config import ENVIRONMENT_PREFIX, Settings
from lorikeet.core.text import format_size

_HALF_NAMES = {"half": "float16", "float": "float32"}
_FORMAT_NAMES = {"safetensors": "auto", "gguf": "auto", "bitsandbytes": "auto"}


class Flag(NamedTuple):
    """An option of the command line.

    Attributes:
        names: the names on the command line: Lorikeet's or vLLM's name first, then aliases.
        setting: ``section.key`` of the settings.
        kind: type of the value. ``list[str]`` can be repeated; ``bool`` is a switch.
        help: text for ``--help``.
        parse: function that converts the text into the value; for ``list[str]`` into one entry or a list. None for the
            type's conversion.
        metavar: name of the value in the help.
    """

    names: str
    setting: str
    kind: Any
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None


def preload_pair(text: str) -> str:
    """Return ``name=source`` for a value of ``--lora-modules``, which may be vLLM's JSON form.

    Raises:
        ValueError: the value has another form, or JSON with an unsupported layout.
    """
    if not text.startswith("{"):
        name, _, source = text.partition("=")
        if not name or not source:
            raise ValueError(f"{text!r} must be NAME=SOURCE")
        return text
    module = json.loads(text)
    if not (isinstance(module, dict) and isinstance(module.get("name"), str) and isinstance(module.get("path"), str)):
        raise ValueError(f"{text!r} needs at least a name and a path")
    return f"{module['name']}={module['path']}"


def origins(text: str) -> list[str]:
    """Return the entries in a value of ``--allowed-origins`` and the like: a single one, or vLLM's JSON list.

    Raises:
        ValueError: the value looks like JSON but is not a list of strings.
    """
    if not text.startswith(("[", "{", '"')):
        return [text]
    named = json.loads(text)
    if not (isinstance(named, list) and all(isinstance(each, str) for each in named)):
        raise ValueError(f"{text!r} is not a list of strings")
    return named


def _gigabytes(text: str) -> float:
    return float(text) * 1e9


def _count(text: str) -> int:
    """Parse a number: ``8192``, ``8k`` or ``0.5m`` (powers of 1000), ``8K`` (of 1024), or ``auto`` for 0, the default.

    The letters are vLLM's.

    Raises:
        ValueError: the text has none of these forms.
    """
    if text.lower() in ("auto", "-1"):
        return 0
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a number; write for example 8192, 8k or auto")
    number = float(found[1]) * _COUNT_UNITS[found[2]]
    if number != round(number):
        raise ValueError(f"{text!r} is not a whole number")
    return round(number)


_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)")
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}

FLAGS = (
    Flag("--served-model-name", "model.served_names", list[str], "Name of the base model for clients; repeatable."),
    Flag("--dtype", "model.dtype", str, "auto, bfloat16, float16 or float32.", lambda t: _HALF_NAMES.get(t, t), "TEXT"),
    Flag(
        "--load-format",
        "model.load_format",
        str,
        "auto (safetensors or GGUF) or dummy (random weights).",
        lambda t: _FORMAT_NAMES.get(t, t),
        "TEXT",
    ),
    Flag(
        "--quantization -q",
        "model.quantization",
        str,
        "int8 or int4 quantises the weights when they are loaded; none dequantises a quantised checkpoint. By "
        "default as stored.",
        str.lower,
        "TEXT",
    ),
    Flag("--tokenizer", "model.tokenizer", str, "Folder or hub id of the tokenizer for a GGUF file."),
    Flag("--model-impl", "model.model_impl", str, "auto, lorikeet (its own decoder) or transformers (its modules)."),
    Flag(
        "--max-model-len --context-length",
        "model.max_model_len",
        int,
        "Longest sequence, in tokens, such as 8k or 8K (of 1000, of 1024); auto: the model's.",
        _count,
        "NUMBER",
    ),
    Flag("--chat-template", "model.chat_template", str, "File with a Jinja template instead of the tokenizer's."),
    Flag(
        "--generation-config",
        "model.generation_config",
        str,
        "Sampling defaults: auto (the model's), vllm (the API's), or a folder with generation_config.json.",
        None,
        "TEXT",
    ),
    Flag("--tool-call-parser", "model.tool_call_parser", str, "How the model writes tool calls; else by its template."),
    Flag("--reasoning-parser", "model.reasoning_parser", str, "Parser of the model's reasoning, such as qwen3."),
    Flag("--cache-dir", "model.cache_dir", str, "Where converted weights are kept."),
    Flag(
        "--preset",
        "engine.preset",
        str,
        "System to run as; `lorikeet presets` lists them. elora,eviction=lru changes an option of elora.",
    ),
    Flag("--executor", "engine.executor", str, "torch, or paced: no arithmetic, step times from --profile."),
    Flag("--profile", "engine.profile", str, "Name or file of a profile, for --executor paced, and for some clusters."),
    Flag("--memory", "engine.memory_bytes", int, "Pool for adapters and KV, such as 4GiB.", parse_size, "SIZE"),
    Flag(
        "--gpu-memory-utilization --mem-fraction-static",
        "engine.gpu_memory_utilization",
        float,
        "Share of a GPU's memory for weights, pool and steps together, unless --memory sets the pool's size.",
    ),
    Flag(
        "--host-memory",
        "engine.host_memory_bytes",
        int,
        "Host tier, for adapters and KV that do not fit into the pool; 0: none. By default twice the pool, if free "
        "memory allows.",
        parse_size,
        "SIZE",
    ),
    Flag(
        "--image-memory",
        "engine.image_memory_bytes",
        int,
        "Embeddings of images that are kept for later requests, beside the pool; 256MiB by default.",
        parse_size,
        "SIZE",
    ),
    Flag("--touch-memory", "engine.touch_memory", bool, "Allocate all memory at the start."),
    Flag(
        "--link-gb-per-s",
        "engine.link_bytes_per_s",
        float,
        "Declared speed of the link to the host tier, in 10^9 bytes a second each way; on CPUs.",
        _gigabytes,
        "NUMBER",
    ),
    Flag("--block-size", "engine.block_size", int, "Tokens of KV in a block."),
    Flag(
        "--kv-cache-dtype",
        "engine.kv_cache_dtype",
        str,
        "auto (KV in the model's dtype) or int8: nearly twice as many tokens in the same memory; on CPUs.",
        str.lower,
        "TEXT",
    ),
    Flag(
        "--lora-dtype",
        "engine.lora_dtype",
        str,
        "auto (adapters in the model's dtype) or int8: half the memory, and half the reading in each step; on CPUs.",
        str.lower,
        "TEXT",
    ),
    Flag(
        "--objective",
        "engine.objective",
        str,
        "What the preset auto saves time for, where requests state no limits (--slo-ttft, --slo-tpot).",
    ),
    Flag("--max-num-seqs --max-running-requests", "engine.max_num_seqs", int, "Most sequences running at once."),
    Flag(
        "--max-num-batched-tokens --chunked-prefill-size",
        "engine.max_num_batched_tokens",
        int,
        "Most tokens in a step.",
        _count,
        "NUMBER",
    ),
    Flag("--tensor-parallel-size --tp-size --tp -tp", "engine.tensor_parallel", int, "Ranks that share every layer."),
    Flag("--pipeline-parallel-size --pp-size --pp -pp", "engine.pipeline_parallel", int, "Stages of layers."),
    Flag("--rank-address", "engine.rank_address", str, "Wait there for ranks on other machines.", None, "HOST:PORT"),
    Flag("--rank-key-file", "engine.rank_key_file", str, "File with their key.", None, "FILE"),
    Flag("--device", "engine.device", str, "cpu or cuda."),
    Flag("--kernels", "engine.kernels", str, "auto, native, triton or reference."),
    Flag(
        "--deterministic",
        "engine.deterministic",
        bool,
        "Compute answers to the same bits in any batch, after prefix hits, preemption and restarts. CPU only; slower.",
    ),
    Flag(
        "--enforce-eager --disable-cuda-graph", "engine.enforce_eager", bool, "Do not capture decode steps as graphs."
    ),
    Flag("--threads", "engine.threads", int, "Threads of one rank; 0 for a fair part of the cores."),
    Flag("--record", "engine.record", str, "Record plans, prompts and times there, for lorikeet replay.", None, "FILE"),
    Flag(
        "--heartbeat-timeout",
        "engine.heartbeat_timeout_s",
        float,
        "Seconds until a silent engine is replaced; 0: never.",
    ),
    Flag("--step-timeout", "engine.step_timeout_s", float, "Seconds until an engine stuck in a step is; 0: never."),
    Flag("--enable-lora/--no-enable-lora", "adapters.enabled", bool, "Serve adapters."),
    Flag(
        "--lora-modules --lora-paths",
        "adapters.preload",
        list[str],
        "Adapter to register at start, or JSON with name and path; repeatable.",
        preload_pair,
        "NAME=SOURCE",
    ),
    Flag(
        "--adapter-dir",
        "adapters.adapter_dir",
        str,
        "Folder whose adapters are served; others may be added only from it.",
    ),
    Flag(
        "--adapter-dir-mode", "adapters.adapter_dir_mode", str, "serve, or allow: only add adapters from it by routes."
    ),
    Flag(
        "--adapter-resolver",
        "adapters.resolvers",
        list[str],
        "URL prefix, such as hf://org/, under which requests may name adapters; repeatable.",
    ),
    Flag(
        "--adapter-ttl",
        "adapters.ttl_s",
        float,
        "Seconds until an unused one of them is removed; 0: never.",
    ),
    Flag(
        "--allow-source", "adapters.allowed_sources", list[str], "URL prefix that adapters may come from; repeatable."
    ),
    Flag("--store-dir", "adapters.store_dir", str, "Where the content of adapters is kept."),
    Flag("--registry-url", "adapters.registry_url", str, "SQLAlchemy URL of the registry; SQLite in the store."),
    Flag("--max-lora-rank", "adapters.max_rank", int, "Refuse larger ranks."),
    Flag("--max-adapter-size", "adapters.max_bytes", int, "Refuse larger weight files.", parse_size, "SIZE"),
    Flag("--source-timeout", "adapters.source_timeout_s", float, "Seconds to read an adapter from a URL; 0: no limit."),
    Flag("--strict-base", "adapters.strict_base", bool, "Refuse adapters whose config names another base model."),
    Flag(
        "--base-alias",
        "adapters.base_aliases",
        list[str],
        "Another name of the base model in adapters' configs; repeatable.",
        None,
        "NAME",
    ),
    Flag(
        "--replicas --data-parallel-size --dp-size --dp -dp",
        "cluster.replicas",
        int,
        "Number of engines; the preset places adapters and routes requests.",
    ),
    Flag("--min-replicas", "cluster.min_replicas", int, "Fewest engines when their number follows the load; else 1."),
    Flag("--max-replicas", "cluster.max_replicas", int, "Most engines; without it their number is fixed."),
    Flag(
        "--ray-address", "cluster.ray_address", str, "Ray cluster to join; else one is started here.", None, "ADDRESS"
    ),
    Flag(
        "--orphan-timeout",
        "cluster.orphan_timeout_s",
        float,
        "Seconds for which replicas on a joined Ray cluster outlive their server, so that another adopts them.",
        None,
        "SECONDS",
    ),
    Flag("--host", "server.host", str, "Address to listen on."),
    Flag("--port", "server.port", int, "Port; 0 picks a free one."),
    Flag("--uds", "server.uds", str, "Unix socket to listen on instead of a port.", None, "PATH"),
    Flag("--ssl-certfile", "server.ssl_certfile", str, "Certificate for HTTPS, in PEM.", None, "FILE"),
    Flag("--ssl-keyfile", "server.ssl_keyfile", str, "Its key, if it is in another file.", None, "FILE"),
    Flag("--root-path", "server.root_path", str, "Path that a proxy in front puts before the routes.", None, "PREFIX"),
    Flag(
        "--api-key",
        "server.api_keys",
        list[str],
        "Key for all routes but health, ping, version, load and metrics; repeatable.",
    ),
    Flag("--admin-key --admin-api-key", "server.admin_keys", list[str], "Key for changing adapters; repeatable."),
    Flag(
        "--allowed-origins",
        "server.allowed_origins",
        list[str],
        "Origin whose web pages may use the server, or a JSON list of them; * for any; repeatable.",
        origins,
        "ORIGIN",
    ),
    Flag(
        "--max-queued --max-queued-requests", "server.max_queued", int, "Unfinished sequences before 429 is answered."
    ),
    Flag("--max-logprobs", "server.max_logprobs", int, "Most alternatives with each token; -1: the vocabulary."),
    Flag(
        "--logprobs-mode",
        "server.logprobs_mode",
        str,
        "raw_logprobs (the model's) or processed_logprobs (those of the distribution that is sampled from).",
    ),
    Flag(
        "--return-tokens-as-token-ids",
        "server.return_tokens_as_token_ids",
        bool,
        "Name tokens token_id:ID in log probabilities.",
    ),
    Flag(
        "--enable-force-include-usage",
        "server.force_include_usage",
        bool,
        "Count tokens in every chunk of a stream, unless its stream_options differ.",
    ),
    Flag(
        "--enable-per-request-metrics",
        "server.request_metrics",
        bool,
        "Report the times of a request in its answer.",
    ),
    Flag("--max-body", "server.max_body_bytes", int, "Largest request body.", parse_size, "SIZE"),
    Flag(
        "--allowed-media-domains",
        "server.allowed_media_domains",
        list[str],
        "Host or URL prefix from which images of requests are fetched; repeatable.",
        origins,
        "HOST",
    ),
    Flag("--media-timeout", "server.media_timeout_s", float, "Seconds that fetching an image may take."),
    Flag("--max-images", "server.max_images", int, "Images of a request."),
    Flag("--max-image-pixels", "server.max_image_pixels", int, "Largest area of an image, in pixels."),
    Flag("--max-connections", "server.max_connections", int, "Connections open at once; more are answered with 503."),
    Flag(
        "--max-head --h11-max-incomplete-event-size",
        "server.max_head_bytes",
        int,
        "Largest request line with headers; 64KiB.",
        parse_size,
        "SIZE",
    ),
    Flag("--head-timeout", "server.head_timeout_s", float, "Seconds that the head of a request may take."),
    Flag("--body-timeout", "server.body_timeout_s", float, "Seconds that a body may take, beside 16 KiB a second."),
    Flag("--write-timeout", "server.write_timeout_s", float, "Seconds that an answer may stay unread."),
    Flag("--request-timeout", "server.request_timeout_s", float, "Seconds until a request is ended; 0: never."),
    Flag("--drain-timeout", "server.drain_timeout_s", float, "Seconds that requests may go on after SIGTERM."),
    Flag("--auto-model", "server.auto_model", bool, "Choose the adapter by the prompt where `model` is `auto`."),
    Flag("--metrics-adapters", "server.metrics_adapters", int, "Adapters with metrics of their own."),
    Flag("--metrics-max-adapters", "server.metrics_max_adapters", int, "Adapters named as loaded in metrics."),
    Flag("--otlp-traces-endpoint", "server.otlp_traces_endpoint", str, "Where OpenTelemetry traces are sent, a URL."),
    Flag("--exporter", "server.exporters", list[str], "Plug-in that gets every ended request; repeatable."),
    Flag(
        "--tenants",
        "server.tenants",
        bool,
        "Take keys made by `lorikeet keys`, with scopes and limits; every request needs a key then.",
    ),
    Flag("--tenant-header", "server.tenant_header", str, "Header that names a request's tenant; else its key does."),
    Flag("--shared-prefix-cache", "server.shared_prefix_cache", bool, "Let API keys reuse each other's KV."),
    Flag(
        "--stored-responses", "server.stored_responses", int, "Most answers of /v1/responses that are stored; 0: none."
    ),
    Flag(
        "--stored-responses-size",
        "server.stored_responses_bytes",
        int,
        "Most memory that they take.",
        parse_size,
        "SIZE",
    ),
    Flag("--stored-responses-time", "server.stored_responses_s", float, "Seconds for which one is stored."),
    Flag("--batch-dir", "batches.dir", str, "Where files and batches are kept."),
    Flag("--batch-concurrency", "batches.concurrency", int, "Requests of batches at once; else as many as can run."),
    Flag("--max-batch-file", "batches.max_file_bytes", int, "Largest file of a batch.", parse_size, "SIZE"),
    Flag("--max-batch-requests", "batches.max_requests", int, "Most requests in a file."),
    Flag("--max-batch-files", "batches.max_files", int, "Most files and batches that are kept."),
    Flag("--batch-storage", "batches.storage_bytes", int, "Most bytes of all files.", parse_size, "SIZE"),
    Flag("--batch-keep", "batches.keep_s", float, "Seconds for which files and ended batches are kept."),
    Flag("--slo-ttft", "server.slo_ttft_s", float, "Target for the time to first token, in seconds."),
    Flag("--slo-tpot", "server.slo_tpot_s", float, "Target for the mean time per token after the first, in seconds."),
    Flag(
        "--adapter-slo",
        "server.adapter_slos",
        list[str],
        "Targets of an adapter, instead of the server's, as NAME=ttft=0.5,tpot=0.1; repeatable.",
        None,
        "TARGETS",
    ),
    Flag("--shed", "server.shed", bool, "Answer 429 if the first token is predicted to miss its target."),
    Flag("--request-log", "server.request_log", str, "File for the request log, in the workload format."),
    Flag("--request-log-text", "server.request_log_text", bool, "Also log prompts and answers."),
    Flag("--length-predictor", "server.length_predictor", str, "none, history, learned or auto."),
    Flag(
        "--length-predictor-file",
        "server.length_predictor_file",
        str,
        "File written by lorikeet train-predictor.",
        None,
        "FILE",
    ),
    Flag(
        "--length-predictor-timeout",
        "server.length_predictor_timeout_s",
        float,
        "Seconds after which history predicts instead.",
    ),
    Flag(
        "--log-level --uvicorn-log-level",
        "server.log_level",
        str,
        "Least severe level of the log: debug, info, warning, error.",
    ),
    Flag(
        "--kv-events-endpoint",
        "kv_events.endpoint",
        str,
        "ZeroMQ address, such as tcp://*:5557, for events of cached KV in vLLM's format.",
    ),
    Flag(
        "--kv-events-replay-endpoint",
        "kv_events.replay_endpoint",
        str,
        "Address from which subscribers get the events that they missed.",
    ),
    Flag("--kv-events-topic", "kv_events.topic", str, "Topic of the events, such as kv@pod-1@llama."),
    Flag("--kv-events-buffer-steps", "kv_events.buffer_steps", int, "Batches of events kept for the replay."),
    Flag("--kv-events-hwm", "kv_events.hwm", int, "Batches of events that may wait for a slow subscriber."),
    Flag("--log-json", "server.log_json", bool, "Write the log as JSON only."),
)
"""Every flag that fills a setting. Flags of vLLM and SGLang keep their names."""


def parameters() -> list[inspect.Parameter]:
    """Return the table as keyword parameters for typer. All default to None, which means "not given"."""
    return [_parameter(flag) for flag in FLAGS]


def sections(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return parsed values by section and key. Their names are those of :func:`parameters`."""
    tables: dict[str, dict[str, Any]] = {}
    for flag in FLAGS:
        value = given[_variable(flag)]
        section, key = flag.setting.split(".")
        if flag.kind == list[str] and value:
            value = [one for each in value for one in (each if isinstance(each, list) else [each])]
        tables.setdefault(section, {})[key] = value
    return tables


def name_settings(text: str, given: Mapping[str, Any], file: Path | None, environment: Mapping[str, str]) -> str:
    """Return an error text in which settings have the names that the user has used.

    ``memory_bytes`` becomes ``--memory``, or ``LORIKEET_ENGINE__MEMORY_BYTES`` or ``[engine] memory_bytes`` where it
    was set there. Only keys of a single section are recognized; those without an underscore only at the beginning of
    the text, before a colon.

    Args:
        text: error text with the keys of settings.
        given: values of flags by the names of :func:`parameters`.
        file: the TOML file; None without a file.
        environment: the process's environment.
    """
    if text.startswith("environment: "):  # The error of an environment variable names the variable.
        return text
    in_file = _keys_of(file)

    def name(section: str, key: str) -> str:
        setting = f"{section}.{key}"
        flag = _FLAG_OF.get(f"{section}.{key}")
        variable = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
        if flag is not None and given.get(_variable(flag)) not in (None, []):
            return flag.names.split()[0]
        if variable in environment:
            return variable
        return f"[{section}] {key}" if flag is None or setting in in_file else flag.names.split()[0]

    def wrong_flag(found: re.Match[str]) -> str:
        return f"{name(found[1], found[3])}: {found[2]}"

    text = _WRONG_FLAG.sub(wrong_flag, text)
    text = _HEAD.sub(lambda found: name(_SECTIONS_OF[found[1]][0], found[1]) + ": ", text)
    return _KEY.sub(lambda found: name(_SECTION_OF[found[0]], found[0]), text)


def _keys_of(file: Path | None) -> set[str]:
    """Return the settings in a file as ``section.key``; empty for a file that cannot be read."""
    try:
        tables = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {f"{section}.{key}" for section, keys in tables.items() if isinstance(keys, dict) for key in keys}


_FLAG_OF = {flag.setting: flag for flag in FLAGS}
_SECTIONS_OF: dict[str, list[str]] = {}
for _section in msgspec.structs.fields(Settings):
    for _field in msgspec.structs.fields(_section.type):
        _SECTIONS_OF.setdefault(_field.name, []).append(_section.name)
_SECTION_OF = {key: sections[0] for key, sections in _SECTIONS_OF.items() if "_" in key and len(sections) == 1}
_KEY = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(_SECTION_OF, key=len, reverse=True))})(?![\w.=/])")
_HEAD = re.compile(rf"^({'|'.join(key for key, sections in _SECTIONS_OF.items() if len(sections) == 1)}): ")
_WRONG_FLAG = re.compile(r"^flags: \[(\w+)\]: (.*) - at `\$\.(\w+)(?:\[\d+\])?`$")
"""A value that does not fit its setting, as ``load_settings`` reports it for flags."""


def _variable(flag: Flag) -> str:
    return flag.setting.replace(".", "_")


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    """Return the result of ``parse`` for ``text``. Errors become errors of the command line, without another prefix."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _shown_default(flag: Flag) -> str | bool:
    """Return the default for ``--help``; False for a default that is empty, zero or False."""
    section, key = flag.setting.split(".")
    value = getattr(getattr(Settings(), section), key)
    if not value:
        return False
    return "yes" if value is True else format_size(value) if flag.parse is parse_size else str(value)


def _parameter(flag: Flag) -> inspect.Parameter:
    panel = flag.setting.split(".")[0].capitalize()
    option = typer.Option(
        *flag.names.split(),
        help=flag.help,
        parser=None if flag.parse is None else partial(_parsed, flag.parse),
        metavar=flag.metavar,
        rich_help_panel=panel,
        show_default=_shown_default(flag),
    )
    kind: Any = flag.kind | None
    annotation = Annotated[kind, option]
    return inspect.Parameter(_variable(flag), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
