"""Defines the settings of a server: one frozen struct per section, filled from flags, environment and a TOML file.

Precedence: flags, then the environment (``LORIKEET_<SECTION>__<KEY>``), then the file, then the defaults here. Unknown
keys are errors. Policies are not set here one by one; ``engine.preset`` names a preset (see ``presets``).
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from lorikeet.core.objective import Objective
from lorikeet.core.text import unknown_name

SECRET_VARIABLES = (
    "LORIKEET_SERVER__API_KEYS",
    "LORIKEET_SERVER__ADMIN_KEYS",
    "LORIKEET_ADAPTERS__REGISTRY_URL",
    "LORIKEET_CLUSTER__REGISTRY_URL",
    "LORIKEET_BACKEND_KEY",
    "VLLM_API_KEY",
)
"""Environment variables with keys and passwords. They are removed once read: no engine or reader process has them."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


MIN_HEAD_BYTES = 1024
"""Least limit on the head of a request: clients' own headers take some hundred bytes."""


class ConfigError(ValueError):
    """A setting is unknown or has a wrong value. The message names the setting and its source."""


DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "dummy")
KERNELS = ("auto", "native", "triton", "reference")
MODEL_IMPLS = ("auto", "lorikeet", "transformers")
"""Values of ``engine.device`` and ``kernels``, and of ``model.dtype``, ``load_format`` and ``model_impl``."""
MEMORY_BITS = {"auto": 0, "int8": 8}
"""Values of ``engine.lora_dtype`` and ``kv_cache_dtype``: bits of an element; 0 for the model's dtype."""


class ExecutorKind(StrEnum):
    """The executor that runs the plans of an engine."""

    TORCH = "torch"
    """The executor computes the model."""
    PACED = "paced"
    """The executor computes nothing: step times come from a hardware profile, and answers are meaningless."""


class LengthPredictor(StrEnum):
    """The source of predicted answer lengths."""

    NONE = "none"
    HISTORY = "history"
    """The recent answers of the same adapter predict the length."""
    LEARNED = "learned"
    """A model of `lorikeet train-predictor` predicts the length, or history if the model is late."""
    AUTO = "auto"
    """``learned`` if the file's model was better than history on held-out requests, otherwise ``history``."""


class LogprobsMode(StrEnum):
    """The distribution whose log probabilities answers report."""

    RAW = "raw_logprobs"
    """The model's distribution."""
    PROCESSED = "processed_logprobs"
    """The distribution that was sampled from, after bias, penalties, temperature and filters."""


class ReplicaStart(StrEnum):
    """The starter of a cluster's engines."""

    RAY = "ray"
    """Ray starts them, on any of its machines."""
    LOCAL = "local"
    """The server starts them as processes on its own machine, without Ray."""


class AdapterDirMode(StrEnum):
    """The use of ``adapter_dir``."""

    SERVE = "serve"
    """Each adapter in the folder is served under its subfolder's name, and loaded by its first request."""
    ALLOW = "allow"
    """Only the adapter routes may load adapters from the folder."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the base model, and sets the way to load it.

    Attributes:
        model: local folder, GGUF file or hub id; empty for the default model, SmolLM2-135M-Instruct.
        served_names: names that clients may use. Answers report the first. Empty: the name is derived from ``model``.
        dtype: ``auto`` (the checkpoint's), ``bfloat16``, ``float16`` or ``float32``.
        load_format: ``auto`` (safetensors or GGUF) or ``dummy`` (random weights of the right shapes).
        quantization: ``auto`` (like the checkpoint), ``int8`` or ``int4`` (quantise the linear weights while loading),
            ``none`` (dequantise them), or the method of a quantised checkpoint: ``gguf``, ``awq``, ``gptq``,
            ``compressed-tensors``, ``bitsandbytes`` or ``fp8``.
        tokenizer: local folder or hub id of the tokenizer for a GGUF file; empty for the file's tokenizer.
        model_impl: implementation of the model: ``lorikeet`` (Lorikeet's decoder), ``transformers`` (the modules of
            that library, with Lorikeet's cache and adapters), or ``auto``: Lorikeet's decoder if it supports the model,
            otherwise ``transformers``.
        max_model_len: most tokens of a sequence, prompt and output; 0 for the model's own limit.
        chat_template: file with a Jinja template that replaces the tokenizer's.
        generation_config: source of the sampling fields that a request leaves open: ``auto`` (the
            ``generation_config.json`` in the model's folder), ``vllm`` (the API's defaults), or another folder with
            such a file.
        tool_call_parser: format of the model's tool calls (``hermes``, ``llama3_json``, ``mistral``, ``qwen3_coder``,
            ``pythonic`` or ``granite``); empty: the format of the chat template.
        reasoning_parser: format of the model's thoughts (``deepseek_r1``, ``qwen3``, ``mistral`` or ``granite``);
            empty: thoughts stay in the text of an answer.
        cache_dir: folder for converted weights; empty for the user's cache folder.
    """

    model: str = ""
    served_names: tuple[str, ...] = ()
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = "auto"
    tokenizer: str = ""
    model_impl: str = "auto"
    max_model_len: Count = 0
    chat_template: str = ""
    generation_config: str = "auto"
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    cache_dir: str = ""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the engine's preset, memory, step limits, device and threads.

    Attributes:
        preset: name of the preset (see ``lorikeet presets``), or ``auto``.
        objective: what decisions of ``auto`` save time for, if requests have no limits (``slo_ttft_s``,
            ``slo_tpot_s``): ``mixed`` for the first token and a sixteenth as much for answers, ``latency`` for whole
            answers, ``goodput`` for requests within 2 s to the first token and 0.2 s per token, ``throughput`` for
            tokens per second.
        executor: ``torch``, or ``paced``: an engine without computation, for tests of everything else.
        profile: name or file of the hardware profile. It sets the step times of a paced executor, and some cluster
            policies need it.
        memory_bytes: size of the device arena. 0: on a CPU 40 % of the free memory, but at most 4 GiB or the smallest
            working size, whichever is larger; on a GPU the rest of the share ``gpu_memory_utilization`` after weights
            and steps.
        gpu_memory_utilization: share of a GPU's memory for weights, arena and steps together, including other users of
            the GPU. The memory of the largest step is measured at start-up, and the same amount is reserved for CUDA
            graphs. The setting has no effect with ``memory_bytes`` or on a CPU.
        host_memory_bytes: size of the host arena, which caches adapters and KV that are not on the device; 0 for no
            host arena. Not set: twice the device arena, but for all ranks and replicas together at most a quarter of
            the free memory of the machine or container. Pages are allocated on first use.
        touch_memory: allocate all pages of both arenas at start-up instead of on first use. Start-up takes longer, but
            requests do not wait for new pages, which can be slow on a virtual machine.
        image_memory_bytes: largest size of the embeddings of images that are kept, beside the arenas.
        link_bytes_per_s: declared bandwidth between host and device, in each direction. Copies of the CPU backend are
            faster than any real link and are slowed down to this bandwidth; 0 for no limit.
        block_size: number of tokens whose KV fits in a block.
        lora_dtype: dtype of adapters in memory: ``auto`` (the model's dtype) or ``int8`` (A and B in 8 bits with a
            scale for each rank row: half the bytes of 16 bits on every tier; only on CPUs).
        kv_cache_dtype: dtype of KV in memory: ``auto`` (the model's dtype) or ``int8`` (8 bits with a scale for each
            token and head; only on CPUs, with Lorikeet's decoder).
        max_num_seqs: most sequences in a step. Further sequences may wait for a batching mode and keep their blocks.
        max_num_batched_tokens: most tokens in one step. Longer prompts are prefilled in chunks.
        num_scheduler_steps: most identical decode steps in one plan. On a GPU, tokens are returned after each step and
            an arriving request ends the plan. While no request waits, plans on a GPU have up to 32 steps, unless this
            setting is 1.
        multi_step_limit_s: seconds after which a plan of several steps ends; on a GPU only if requests wait.
        draft_tokens: most draft tokens of a sequence that a step verifies. Drafts come from the prompt and the
            adapter's latest answers; 0 for no drafts. Answers in float32 do not depend on this setting; in 16 bits sums
            may differ, as between any two batches. A GPU and several ranks have no drafts.
        tensor_parallel: number of ranks, each with a part of every layer.
        pipeline_parallel: number of stages, each with a part of the layers and ``tensor_parallel`` ranks. Stages make
            room for larger models but do not add speed, since one stage computes at a time.
        rank_address: HOST:PORT at which the engine waits for ranks on other machines, which ``lorikeet rank`` starts;
            empty: all ranks are processes of this machine.
        rank_key_file: file with the key of ranks on other machines, 16 bytes or more.
        device: ``cpu`` or ``cuda``.
        kernels: ``native``, ``triton``, ``reference`` or ``auto``. ``auto`` chooses native on a CPU and Triton on a GPU
            if these are installed and support dtype and device. With Triton, steps without CUDA graphs use FlashInfer's
            attention for bfloat16 and float16 if FlashInfer is installed.
        deterministic: compute every row in one order of sums. Then an answer, its tokens and log probabilities do not
            depend on other requests, chunks, prefix hits, preemption or a restart, to the last bit. Only on CPUs, with
            the native kernels, for Lorikeet's own decoder on one rank; slower.
        enforce_eager: launch every kernel of every step. Otherwise pure decode steps are captured as CUDA graphs and
            replayed, on a GPU with one rank.
        threads: number of threads of one rank; 0 for ``OMP_NUM_THREADS``, or else an equal share of the cores that
            other processes leave.
        load_threads: number of adapters that each rank reads at the same time. Prefetches do not delay an adapter that
            a request waits for.
        host_lora_workers: number of processes that compute LoRA for prefills while the adapter is copied from the host,
            for presets with cold assist, on an x86-64 CPU and with at most one GPU. Each process has one thread and
            works only during such prefills. With ``threads``, and on a GPU, each gets a separate core if enough cores
            are left. 0 for no processes: requests then wait for their adapters.
        record: file to which the engine's work is recorded, including prompts; empty for no recording.
        heartbeat_timeout_s: seconds without a heartbeat after which an engine process is killed and replaced. Its
            requests continue. After a third of this time, the server is not ready. A long step does not delay
            heartbeats. 0 for never.
        step_timeout_s: seconds after which an engine that still runs the same step is killed and replaced. Choose
            several times the longest prefill step. 0 for never.
    """

    preset: str = "auto"
    objective: Objective = Objective.MIXED
    executor: ExecutorKind = ExecutorKind.TORCH
    profile: str = ""
    memory_bytes: Count = 0
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    host_memory_bytes: Count | None = None
    touch_memory: bool = False
    image_memory_bytes: Count = 256 * 2**20
    link_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    block_size: Positive = 16
    lora_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 512
    num_scheduler_steps: Positive = 8
    multi_step_limit_s: Seconds = 0.05
    draft_tokens: Count = 8
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    rank_address: str = ""
    rank_key_file: str = ""
    device: str = "cpu"
    kernels: str = "auto"
    deterministic: bool = False
    enforce_eager: bool = False
    threads: Count = 0
    load_threads: Positive = 1
    host_lora_workers: Count = 1
    record: str = ""
    heartbeat_timeout_s: Seconds = 30.0
    step_timeout_s: Seconds = 300.0

    @property
    def ranks(self) -> int:
        """Return the number of processes that share the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def local_ranks(self) -> int:
        """Return the number of ranks on the machine of rank 0."""
        return 1 if self.rank_address else self.ranks

    @property
    def memory_ranks(self) -> int:
        """Return the number of ranks that each have the memory that ``memory_bytes`` and the engine's statistics name.

        Both name the memory of one rank, and each rank holds its share of every adapter and of all KV. A paced executor
        names the memory of all ranks together.
        """
        return 1 if self.executor is ExecutorKind.PACED else self.ranks


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the sources and the storage of adapters.

    Attributes:
        enabled: whether adapters are served. If not, registered adapters stay in the registry.
        preload: ``name=source`` pairs, which are registered at every start. They replace versions that were loaded
            under these names at run time.
        adapter_dir: the only folder from which local adapters may be loaded at run time; empty for no folder.
        adapter_dir_mode: ``serve``: requests may name every adapter in ``adapter_dir`` by the name of its subfolder,
            and load it. ``allow``: only adapter routes load from the folder.
        resolvers: URL prefixes (``hf://org/``, ``s3://bucket/team/``) below which an unregistered adapter is searched
            when a request names it. Adapter routes may load from them, too.
        ttl_s: seconds without requests after which an adapter that a request has loaded is removed; 0 for never.
        allowed_sources: URL prefixes (``s3://bucket/team/``, ``hf://org/``) from which adapters may be loaded.
        store_dir: folder for the files of registered adapters; empty for the user's data folder.
        registry_url: SQLAlchemy URL of the registry; empty for SQLite in ``store_dir``.
        max_rank: largest rank of an adapter; 0 for no limit.
        max_bytes: largest size of an adapter's weight files.
        source_timeout_s: most seconds for reading a source from a URL; 0 for no limit.
        strict_base: whether an adapter whose config names another base model is refused. Otherwise the adapter is
            served with a warning if its shapes fit.
        base_aliases: further names of the base model in configs of adapters, such as the name of a 4-bit version.
    """

    enabled: bool = True
    preload: tuple[str, ...] = ()
    adapter_dir: str = ""
    adapter_dir_mode: AdapterDirMode = AdapterDirMode.SERVE
    resolvers: tuple[str, ...] = ()
    ttl_s: Seconds = 0.0
    allowed_sources: tuple[str, ...] = ()
    store_dir: str = ""
    registry_url: str = ""
    max_rank: Count = 0
    max_bytes: Positive = 4 * 2**30
    source_timeout_s: Seconds = 600.0
    strict_base: bool = False
    base_aliases: tuple[str, ...] = ()


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the HTTP server's access, limits, targets, logs and length prediction.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 picks a free one.
        uds: path of a Unix socket to listen on instead of a port; only the user of the server may connect.
        ssl_certfile: PEM file of the certificate for HTTPS, followed by the certificates of authorities below the root.
            A changed file is read again.
        ssl_keyfile: PEM file of the certificate's key, without a password; empty if the key is in ``ssl_certfile``.
        root_path: prefix, such as ``/llm``, that a proxy adds to all paths. Routes answer with and without the prefix.
        api_keys: bearer keys for all routes except health, ping, version, load and metrics; empty for open access.
        admin_keys: keys for the routes that change adapters; empty: the API keys allow these routes, too.
        allowed_origins: origins (``https://example.org``) whose web pages may use the server; ``*`` for all pages,
            empty for no pages.
        max_queued: most accepted and unfinished sequences. Further requests get 429. A request counts as one sequence
            for each prompt and choice.
        max_logprobs: most alternatives that a request may get for each token; -1 for the whole vocabulary.
        logprobs_mode: log probabilities that answers report: ``raw_logprobs``, the model's, or ``processed_logprobs``,
            those of the distribution that was sampled from. A request may set it, too.
        return_tokens_as_token_ids: default of the field that names tokens ``token_id:ID`` in log probabilities.
        force_include_usage: whether every chunk of a stream has the token counts so far, unless ``stream_options`` sets
            it.
        request_metrics: whether answers to completions and chats have the times of the request, in ``metrics``.
        max_body_bytes: largest request body. Larger bodies get 413.
        allowed_media_domains: hosts, or URL prefixes such as ``https://example.org/images/``, from which the server
            fetches the images of requests; empty for none, so that requests contain their images. An address inside a
            network is allowed only if it is named itself, such as ``http://10.0.0.7:9000/``; a name is not enough.
        media_timeout_s: most seconds to fetch an image.
        max_images: most images of a request; 0 refuses images.
        max_image_pixels: largest area of an image, in pixels.
        max_connections: most open connections. Further connections get 503. The system's limit on open files may allow
            fewer.
        max_head_bytes: largest request line with headers. Larger heads get 431.
        head_timeout_s: most seconds for the request line and headers, from the first byte or the start of the
            connection. Slower requests get 408.
        body_timeout_s: most seconds for a body, in addition to its time at 16 KiB per second. Slower bodies get 408.
        write_timeout_s: most seconds for which a client may leave its answer unread. The connection is then closed.
        request_timeout_s: seconds after which a request ends with an error; 0 for never.
        drain_timeout_s: seconds for which accepted requests may continue after SIGTERM.
        auto_model: whether requests may name the model ``auto``. The adapter whose examples are nearest to the prompt
            then answers, or the base model if no adapter is near.
        metrics_adapters: number of adapters with their own metrics; the others share the label ``other``.
        metrics_max_adapters: most adapters that ``vllm:lora_requests_info`` and ``vllm:lora_adapter_loaded`` name; the
            busiest are named.
        otlp_traces_endpoint: URL for OpenTelemetry traces by OTLP over HTTP, such as
            ``http://collector:4318/v1/traces``; empty for no traces.
        exporters: plug-ins that get every ended request, with their parameters: ``mine(path=/tmp/log)``.
        tenants: whether the server also accepts keys of the registry's database, with scopes and limits (`lorikeet
            keys`). Every request then needs a key. The setting needs ``admin_keys``.
        tenant_header: header that names the tenant of a request. Its value is trusted. Without the header, the
            request's API key names the tenant.
        shared_prefix_cache: whether requests of different API keys reuse each other's KV. ``cached_tokens`` and the
            latency then reveal whether another client has sent the same prompt. Otherwise only requests of the same
            tenant share KV. Without API keys, KV is always shared.
        stored_responses: most stored answers of the responses API; 0 for no storage.
        stored_responses_bytes: most bytes of memory for stored answers. The oldest answers of the tenant with the most
            memory are dropped first.
        stored_responses_s: seconds for which an answer is stored.
        slo_ttft_s: target for the time to first token, in seconds; 0 for no target.
        slo_tpot_s: target for the mean time per output token after the first, in seconds; 0 for no target.
        adapter_slos: targets of single adapters, which override the server's: ``name=ttft=0.5,tpot=0.1``, or one entry
            for each target; 0 for no target.
        shed: whether requests whose first token is predicted to miss its target get 429 immediately.
        request_log: file for the request log; empty for no log.
        request_log_text: whether the log includes prompts and answers.
        request_log_max_bytes: size beyond which the request log is rotated.
        request_log_keep: number of rotated logs to keep.
        length_predictor: source of predicted output lengths, for policies that use them: ``none``, ``history`` (recent
            answers of the adapter), ``learned`` (from the prompt, with ``length_predictor_file``) or ``auto``: learned
            if the file's model was better than history on held-out requests, else history.
        length_predictor_file: model file of `lorikeet train-predictor`; empty for no file.
        length_predictor_timeout_s: most seconds for a learned prediction. History replaces a later one.
        log_level: level of the server's log.
        log_json: whether log lines are JSON.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    uds: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    root_path: str = ""
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queued: Positive = 1024
    max_logprobs: Annotated[int, msgspec.Meta(ge=-1)] = 20
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    request_metrics: bool = False
    max_body_bytes: Positive = 8 * 2**20
    allowed_media_domains: tuple[str, ...] = ()
    media_timeout_s: PositiveSeconds = 10.0
    max_images: Count = 16
    max_image_pixels: Positive = 2**25
    max_connections: Positive = 4096
    max_head_bytes: Annotated[int, msgspec.Meta(ge=MIN_HEAD_BYTES)] = 64 * 1024
    head_timeout_s: PositiveSeconds = 15.0
    body_timeout_s: PositiveSeconds = 30.0
    write_timeout_s: PositiveSeconds = 60.0
    request_timeout_s: Seconds = 600.0
    drain_timeout_s: Seconds = 120.0
    auto_model: bool = False
    metrics_adapters: Count = 20
    metrics_max_adapters: Count = 500
    otlp_traces_endpoint: str = ""
    exporters: tuple[str, ...] = ()
    tenants: bool = False
    tenant_header: str = ""
    shared_prefix_cache: bool = False
    stored_responses: Count = 4096
    stored_responses_bytes: Positive = 128 * 2**20
    stored_responses_s: PositiveSeconds = 86400.0
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


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the storage and limits of batches, whose requests are answered when no other request waits.

    Attributes:
        dir: folder for files and batches, with a subfolder for each base model; empty for the user's data folder. Only
            one server may use the folder.
        concurrency: most requests of batches that run at the same time; 0 for ``max_num_seqs`` of all replicas.
        max_file_bytes: largest file.
        max_requests: most requests in a file.
        max_files: most stored files and batches.
        storage_bytes: most bytes of all files. The output of accepted batches may exceed the limit.
        keep_s: seconds for which files and ended batches are kept, and the longest duration of a batch.
    """

    dir: str = ""
    concurrency: Count = 0
    max_file_bytes: Positive = 200 * 2**20
    max_requests: Positive = 50_000
    max_files: Positive = 10_000
    storage_bytes: Positive = 8 * 2**30
    keep_s: PositiveSeconds = 30 * 86400.0


class ClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the number and place of engines behind one address. The preset places adapters and routes requests.

    Attributes:
        replicas: number of engines, each with the settings of ``[engine]``.
        start: ``ray``: Ray starts them; ``local``: they are processes of this machine, without Ray.
        ray_address: address of a Ray cluster to join; empty starts one here, which ends with the server.
        pool_dir: folder on each machine for its replicas' copies of adapters; empty for a temporary folder.
        registry_url: SQLAlchemy URL of the state that several servers of one cluster share; empty for
            ``adapters.registry_url``.
        min_replicas: smallest number of replicas, if the number follows the load.
        max_replicas: largest number of replicas, if the number follows the load; 0 for a fixed number.
        orphan_timeout_s: seconds for which replicas on a joined Ray cluster outlive their server, so that another
            server adopts them; 0: they end with it.
    """

    replicas: Positive = 1
    start: ReplicaStart = ReplicaStart.RAY
    ray_address: str = ""
    pool_dir: str = ""
    registry_url: str = ""
    min_replicas: Count = 0
    max_replicas: Count = 0
    orphan_timeout_s: Seconds = 60.0

    @property
    def is_one_engine(self) -> bool:
        """Return whether the server always consists of one engine on this machine."""
        return self.replicas == 1 and not self.max_replicas and not self.ray_address


class KvEventSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events of cached KV, for routers that score replicas by the blocks of a prompt.

    Attributes:
        endpoint: ZeroMQ address on which each engine publishes events in vLLM's format, such as ``tcp://*:5557``; empty
            for none. A replica's number is added to the port.
        replay_endpoint: address on which subscribers get the batches that they missed, such as ``tcp://*:5558``; empty
            for none.
        topic: first frame of each message, such as ``kv@pod-1@llama``.
        buffer_steps: batches kept for subscribers that missed them.
        hwm: batches that wait for a slow subscriber before it loses some.
    """

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    buffer_steps: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=0)] = 100_000


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one server."""

    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    adapters: AdapterSettings = msgspec.field(default_factory=AdapterSettings)
    server: ServerSettings = msgspec.field(default_factory=ServerSettings)
    batches: BatchSettings = msgspec.field(default_factory=BatchSettings)
    cluster: ClusterSettings = msgspec.field(default_factory=ClusterSettings)
    kv_events: KvEventSettings = msgspec.field(default_factory=KvEventSettings)


def for_engines(settings: Settings) -> Settings:
    """Return the settings for engine processes, without keys and without URLs that may contain passwords.

    Engines may run on other machines and do not need these.
    """
    replace = msgspec.structs.replace
    return replace(
        settings,
        adapters=replace(settings.adapters, preload=(), allowed_sources=(), resolvers=(), registry_url=""),
        server=replace(settings.server, api_keys=(), admin_keys=()),
        cluster=replace(settings.cluster, registry_url=""),
    )


ENVIRONMENT_PREFIX = "LORIKEET_"
_KEYS = ("api_keys", "admin_keys")
_URL_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+.*")
_ROOT_PATH = re.compile(r"/?|(/[A-Za-z0-9._~-]+)+/?")
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
        environment: defaults to the environment of the process.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is wrong or conflicts with another.
    """
    merged: dict[str, dict[str, Any]] = {}
    if file is not None:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # The file is not readable, not UTF-8 or not TOML.
            raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
        _merge(merged, tables, str(file))
    _merge(merged, _from_environment(os.environ if environment is None else environment), "environment")
    given = {s: {k: v for k, v in values.items() if v is not None} for s, values in (flags or {}).items()}
    _merge(merged, given, "flags")
    settings: Settings = convert(merged, Settings, "settings")
    _check_scaling(settings.cluster)
    if settings.adapters.preload and not settings.adapters.enabled:
        raise ConfigError(
            f"settings: [adapters]: {settings.adapters.preload[0]!r} cannot be preloaded, since adapters are disabled"
        )
    _check_names(settings.adapters.preload)
    check_keys((*settings.server.api_keys, *settings.server.admin_keys))
    if settings.server.tenants and not settings.server.admin_keys:
        raise ConfigError(
            "settings: [server]: tenants: an admin key is needed to make the tenants' keys; set admin_keys"
        )
    check_origins(settings.server.allowed_origins)
    _check_root_path(settings.server.root_path)
    _check_traces_endpoint(settings.server.otlp_traces_endpoint)
    for key in ("resolvers", "allowed_sources"):
        _check_prefixes(key, getattr(settings.adapters, key))
    return settings


def _check_traces_endpoint(url: str) -> None:
    if url and not url.lower().startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint (server.otlp_traces_endpoint): {url!r} is not a URL such as "
            "http://localhost:4318/v1/traces"
        )


def _check_root_path(path: str) -> None:
    if not _ROOT_PATH.fullmatch(path):
        raise ConfigError(
            f"root_path: {path!r} must be a path such as /llm, which begins with / and has only plain names"
        )


def _check_prefixes(key: str, prefixes: Iterable[str]) -> None:
    """Check that sources of adapters are prefixes of URLs with at least a host, bucket or organization.

    Raises:
        ConfigError: a source is not such a prefix.
    """
    for prefix in prefixes:
        if not _URL_PREFIX.fullmatch(prefix):
            raise ConfigError(
                f"settings: [adapters]: {key}: {prefix!r} must be a prefix of URLs, such as hf://org/ or s3://bucket/team/"
            )


def _check_names(preload: Iterable[str]) -> None:
    """Check that the adapters to register at the start have different names.

    Raises:
        ConfigError: two adapters have the same name.
    """
    sources: dict[str, str] = {}
    for pair in preload:
        name, _, source = pair.partition("=")
        if name in sources:
            raise ConfigError(
                f"settings: [adapters]: {name!r} is preloaded twice: from {sources[name]!r} and from {source!r}"
            )
        sources[name] = source


def check_keys(keys: Iterable[str]) -> None:
    """Check bearer keys. An empty key, as from an unset variable, would admit requests without a key.

    Raises:
        ConfigError: a key is empty or blank.
    """
    if not all(map(str.strip, keys)):
        raise ConfigError("an API key or admin key is empty: check that the key's environment variable is set")


def check_origins(origins: Iterable[str]) -> None:
    """Check that each origin has the exact form that browsers send, since origins are compared as strings.

    Raises:
        ConfigError: an origin has another form.
    """
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allowed origins: {origin!r} must be * or an origin such as https://example.org or "
                "http://localhost:3000"
            )


def _check_scaling(cluster: ClusterSettings) -> None:
    """Check the number of replicas against its limits, after all sources were merged.

    Raises:
        ConfigError: the number is outside the limits.
    """
    least = cluster.min_replicas
    most = cluster.max_replicas
    if (least or most) and not least <= cluster.replicas <= most:
        raise ConfigError(
            f"settings: [cluster]: replicas is {cluster.replicas}, which is not between min_replicas ({least}) and "
            f"max_replicas ({most})"
        )


def _merge(into: dict[str, dict[str, Any]], tables: Mapping[str, Any], source: str) -> None:
    """Check each table against its section, so that errors name ``source``, and merge it into ``into``."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for section, values in tables.items():
        if section not in sections or not isinstance(values, Mapping):
            raise ConfigError(f"{source}: unknown section {section!r}; sections: {', '.join(sections)}")
        convert(dict(values), sections[section], f"{source}: [{section}]")
        into.setdefault(section, {}).update(values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    known = {
        section.name: {field.name: field.type for field in msgspec.structs.fields(section.type)}
        for section in msgspec.structs.fields(Settings)
    }
    # Other variables with this prefix are ignored, such as Kubernetes' LORIKEET_SERVER_PORT=tcp://... for a service
    # "lorikeet-server".
    misspelt = {f"{section}_{key}": f"{section}__{key}" for section, keys in known.items() for key in keys}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in misspelt and "://" not in text:
            meant = ENVIRONMENT_PREFIX + misspelt[name].upper()
            raise ConfigError(f"environment: {variable} is not a setting; did you mean {meant}, with two underscores?")
        if "__" not in name:
            continue
        section, key = name.split("__", 1)
        types = known.get(section, {})
        value: str | tuple[str, ...] = text
        if types.get(key) == tuple[str, ...]:
            value = tuple(filter(None, map(str.strip, text.split(","))))
            if not value and key in _KEYS:  # An empty list would remove the intended protection.
                raise ConfigError(f"environment: {variable} is set, but contains no key")
        _check_variable(variable, section, key, value)
        tables.setdefault(section, {})[key] = value
    return tables


def _check_variable(variable: str, section: str, key: str, value: str | tuple[str, ...]) -> None:
    """Check the value of one variable, so that an error names the variable.

    Raises:
        ConfigError: the setting is unknown, or has a wrong value.
    """
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    where = f"environment: {variable}"
    if section not in sections:
        raise ConfigError(f"{where}: {unknown_name('section', section, list(sections))}")
    keys = [field.name for field in msgspec.structs.fields(sections[section])]
    if key not in keys:
        raise ConfigError(f"{where}: {unknown_name('setting', key, keys)}")
    try:
        convert({key: value}, sections[section], where)
    except ConfigError as error:
        raise ConfigError(str(error).partition(" - at `$.")[0]) from None


def convert(values: Any, to: Any, where: str) -> Any:
    """Return ``values`` as a settings struct.

    Raises:
        ConfigError: a key or value is wrong. The message begins with ``where``.
    """
    try:
        return msgspec.convert(values, to, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_with_choices(str(error), to)}") from error


_WRONG_CHOICE = re.compile(r"Invalid enum value ('.*')(?= - at `\$\.(?:\w+\.)?(\w+)`)")


def _with_choices(text: str, to: Any) -> str:
    """Return an error text that lists the choices of the faulty field."""
    structs = [to, *(field.type for field in msgspec.structs.fields(to))]
    kinds = {f.name: f.type for s in structs if isinstance(s, type(msgspec.Struct)) for f in msgspec.structs.fields(s)}

    def choices(found: re.Match[str]) -> str:
        kind = kinds.get(found[2])
        types = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, StrEnum)]
        listed = types[0] if types else ()
        return f"{found[1]} must be one of {', '.join(listed)}"

    return _WRONG_CHOICE.sub(choices, text)
