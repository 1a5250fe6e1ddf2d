"""Handles flags of vLLM and SGLang without a counterpart in Lorikeet.

Flags with a counterpart are ordinary options of ``lorikeet serve``. The flags in this module are removed from the
command line before it is parsed, most with a note on Lorikeet's behaviour. Some flags are refused, because the server
would otherwise serve something else. Flags in neither list are errors.

Names: https://docs.vllm.ai/en/latest/cli/serve/ and https://docs.sglang.io/docs/advanced_features/server_arguments
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple


class CompatError(ValueError):
    """A flag needs a feature that Lorikeet does not support. The message names a replacement."""


class ForeignFlag(NamedTuple):
    """A flag of another server.

    Attributes:
        text: Lorikeet's behaviour, or the reason for the refusal.
        value: whether the flag has a value.
        same: values that match Lorikeet's behaviour, so that no note is printed.
        refuse: whether other values end the command with an error.
    """

    text: str
    value: bool = True
    same: tuple[str, ...] = ()
    refuse: bool = False


_POOL = "adapters of any rank and KV share one pool, without adapter slots; --memory sets its size"
_HOST = "use --host-memory SIZE, one host tier for adapters and KV"
_ADMISSION = "the preset decides which request is admitted next (for example --preset lorikeet:priority)"
_ALWAYS = "Lorikeet always does this"
_EXPERTS = "adapters of experts are served in the form in which they are saved"
_MAIN = "the hub's main revision is served; fetch another into a folder, and name that"
_TEXT_MODELS = "only models that generate text are served"
_STEPS = "the engine itself decides how many steps are planned at once"
_KERNELS = "the kernels are chosen by device (--kernels), and need no compiler options"
_GRAMMARS = "grammars are compiled by llguidance"
_PROCESSOR = "images are processed by the options in the model's own files"
_OTHER_MACHINES = (
    "ranks on other machines join with --rank-address HOST:PORT here and `lorikeet rank HOST:PORT` there; "
    "--ray-address starts whole replicas on other machines"
)
_OWN_CODE = "code of others does not run in the server"
_ORIGINS = "pages of an allowed origin may use any"

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "--max-loras": ForeignFlag(_POOL),
    "--max-loras-per-batch": ForeignFlag(_POOL),
    "--max-cpu-loras": ForeignFlag(_HOST),
    "--max-loaded-loras": ForeignFlag(_HOST),
    "--fully-sharded-loras": ForeignFlag("adapters are always sharded alongside the model", value=False),
    "--specialize-active-lora": ForeignFlag("work is always the sum of the ranks in the batch", value=False),
    "--lora-target-modules": ForeignFlag("every module that an adapter changes is served", same=("all", "all-linear")),
    "--lora-eviction-policy": ForeignFlag("the preset decides (--preset)", same=("lru",)),
    "--lora-backend": ForeignFlag("the kernels are chosen by device"),
    "--enable-lora-overlap-loading": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--lora-strict-loading": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--lora-drain-wait-threshold": ForeignFlag(_ADMISSION, same=("0", "0.0")),
    "--enable-mixed-moe-lora-format": ForeignFlag(_EXPERTS, value=False),
    "--enable-moe-shared-loras": ForeignFlag(_EXPERTS, value=False),
    "--max-lora-cls-labels": ForeignFlag("a classification adapter may have any number of labels"),
    "--max-lora-chunk-size": ForeignFlag("the kernels choose their own chunks"),
    "--swap-space": ForeignFlag(_HOST),
    "--kv-offloading-size": ForeignFlag(_HOST),
    "--kv-offloading-backend": ForeignFlag(_HOST),
    "--enable-hierarchical-cache": ForeignFlag(_HOST, value=False),
    "--hicache-size": ForeignFlag(_HOST),
    "--hicache-ratio": ForeignFlag(_HOST),
    "--scheduling-policy": ForeignFlag(_ADMISSION, same=("fcfs",)),
    "--schedule-policy": ForeignFlag(_ADMISSION, same=("fcfs",)),
    "--enable-chunked-prefill": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--no-enable-chunked-prefill": ForeignFlag("prompts longer than a step are always computed in parts", value=False),
    "--seed": ForeignFlag("every request without a seed gets one of its own; weights of --load-format dummy are fixed"),
    "--trust-remote-code": ForeignFlag("code from model repositories is never run", value=False),
    "--disable-log-requests": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--no-enable-log-requests": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-log-requests": ForeignFlag("use --request-log FILE, for texts with --request-log-text", value=False),
    "--disable-uvicorn-access-log": ForeignFlag(
        "the log has a line for each request, unless --log-level warning", value=False
    ),
    "--disable-log-stats": ForeignFlag("figures are at /metrics", value=False),
    "--enable-auto-tool-choice": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-prompt-tokens-details": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-server-load-tracking": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-request-id-headers": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-tokenizer-info-endpoint": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-prompt-embeds": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-cache-report": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--enable-metrics": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--runner": ForeignFlag(_TEXT_MODELS, same=("generate", "auto"), refuse=True),
    "--task": ForeignFlag(_TEXT_MODELS, same=("generate", "auto"), refuse=True),
    "--convert": ForeignFlag(_TEXT_MODELS, same=("none", "auto"), refuse=True),
    "--stream-interval": ForeignFlag("the tokens of a step are sent at once", same=("1",)),
    "--async-scheduling": ForeignFlag(_STEPS, value=False),
    "--no-async-scheduling": ForeignFlag(_STEPS, value=False),
    "--num-scheduler-steps": ForeignFlag(_STEPS),
    "--attention-backend": ForeignFlag(_KERNELS),
    "--sampling-backend": ForeignFlag(_KERNELS),
    "--compilation-config": ForeignFlag(_KERNELS),
    "--cuda-graph-max-bs": ForeignFlag(_KERNELS),
    "--structured-outputs-config.backend": ForeignFlag(_GRAMMARS, same=("auto", "guidance")),
    "--guided-decoding-backend": ForeignFlag(_GRAMMARS, same=("auto", "guidance")),
    "--grammar-backend": ForeignFlag(_GRAMMARS, same=("llguidance",)),
    "--tokenizer-mode": ForeignFlag("the tokenizer is the one in the model's folder", same=("auto",)),
    "--override-generation-config": ForeignFlag("change the generation_config.json in the model's folder", refuse=True),
    "--hf-overrides": ForeignFlag("change the config.json in the model's folder", same=("{}",), refuse=True),
    "--middleware": ForeignFlag(f"{_OWN_CODE}; put a proxy in front", refuse=True),
    "--download-dir": ForeignFlag("set HF_HUB_CACHE in the environment to keep what comes from the hub elsewhere"),
    "--allow-credentials": ForeignFlag("keys are in a header, so pages need no cookies", value=False),
    "--allowed-methods": ForeignFlag(_ORIGINS, same=('["*"]',)),
    "--allowed-headers": ForeignFlag(_ORIGINS, same=('["*"]',)),
    "--distributed-executor-backend": ForeignFlag("ranks are processes of one machine", same=("mp",)),
    "--revision": ForeignFlag(_MAIN, same=("main",), refuse=True),
    "--weight-transfer-config": ForeignFlag(
        "trainers send adapters only, by folder or upload: use TRL's AsyncGRPOTrainer with a peft_config; GRPOTrainer "
        "in server mode pushes the weights of the base model over NCCL"
    ),
    "--enable-scale-out": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--speculative-config": ForeignFlag("speculative decoding is not supported", refuse=True),
    "--default-mm-loras": ForeignFlag("a request names its adapter in `model`", refuse=True),
    "--enable-tower-connector-lora": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--mm-processor-kwargs": ForeignFlag(_PROCESSOR, same=("{}",), refuse=True),
    "--enable-multimodal": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--language-model-only": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--kv-transfer-config": ForeignFlag("KV is not handed over to other servers", refuse=True),
    "--enable-sleep-mode": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--api-server-count": ForeignFlag("one process answers, and has others to read large bodies", same=("1",)),
    "--disable-frontend-multiprocessing": ForeignFlag("the engine is always a process of its own", value=False),
    "--structured-outputs-config": ForeignFlag(_GRAMMARS),
    "--constrained-json-whitespace-pattern": ForeignFlag("set per request: guided_whitespace_pattern"),
    "--chat-template-content-format": ForeignFlag(
        "templates get the content as a string", same=("auto", "string"), refuse=True
    ),
    "--default-chat-template-kwargs": ForeignFlag(
        "set per request (chat_template_kwargs), or change the template", same=("{}",), refuse=True
    ),
    "--response-role": ForeignFlag("answers have the role assistant", same=("assistant",), refuse=True),
    "--trust-request-chat-template": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--reasoning-config": ForeignFlag("--reasoning-parser knows how thoughts begin and end"),
    "--tool-parser-plugin": ForeignFlag(f"{_OWN_CODE}; use --tool-call-parser", refuse=True),
    "--reasoning-parser-plugin": ForeignFlag(f"{_OWN_CODE}; use --reasoning-parser", refuse=True),
    "--logits-processors": ForeignFlag(_OWN_CODE, refuse=True),
    "--tool-server": ForeignFlag("tools run at the client", refuse=True),
    "--enable-log-outputs": ForeignFlag("use --request-log FILE with --request-log-text", value=False),
    "--max-log-len": ForeignFlag("the log has no prompts; --request-log-text writes whole ones to the request log"),
    "--show-hidden-metrics-for-version": ForeignFlag("no metric is hidden"),
    "--collect-detailed-traces": ForeignFlag("--otlp-traces-endpoint always gets the parts of TTFT"),
    "--disable-fastapi-docs": ForeignFlag("/docs shows the routes and nothing of this server", value=False),
    "--num-gpu-blocks-override": ForeignFlag("--memory sets the size of the pool, in bytes"),
    "--cpu-offload-gb": ForeignFlag("weights of the base model stay on the device", same=("0", "0.0"), refuse=True),
    "--max-seq-len-to-capture": ForeignFlag(_KERNELS),
    "--optimization-level": ForeignFlag(_KERNELS),
    "--enable-torch-compile": ForeignFlag(_KERNELS, value=False),
    "--disable-custom-all-reduce": ForeignFlag(_KERNELS, value=False),
    "--max-num-partial-prefills": ForeignFlag(_ADMISSION, same=("1",)),
    "--max-long-partial-prefills": ForeignFlag(_ADMISSION, same=("1",)),
    "--long-prefill-token-threshold": ForeignFlag(_ADMISSION, same=("0",)),
    "--schedule-conservativeness": ForeignFlag(_ADMISSION, same=("1", "1.0")),
    "--num-continuous-decode-steps": ForeignFlag(_STEPS, same=("1",)),
    "--enable-mixed-chunk": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--is-embedding": ForeignFlag("/v1/embeddings is there for every model that generates text", value=False),
    "--random-seed": ForeignFlag("every request without a seed gets one of its own"),
    "--watchdog-timeout": ForeignFlag("use --step-timeout and --heartbeat-timeout"),
    "--skip-server-warmup": ForeignFlag("a short warm-up is part of the start", value=False),
    "--decode-log-interval": ForeignFlag("figures are at /metrics, and lorikeet top shows them"),
    "--nnodes": ForeignFlag(_OTHER_MACHINES, same=("1",), refuse=True),
    "--node-rank": ForeignFlag(_OTHER_MACHINES, same=("0",), refuse=True),
    "--dist-init-addr": ForeignFlag(_OTHER_MACHINES, refuse=True),
    "--enable-ssl-refresh": ForeignFlag("a certificate that changes is always read again", value=False),
    "--ssl-ca-certs": ForeignFlag("put a proxy in front to ask clients for certificates", refuse=True),
}

_LISTS = ("--lora-modules", "--lora-paths", "--served-model-name", "--api-key", "--allowed-media-domains")
"""Options that take several values in vLLM and SGLang."""

_LEVEL = re.compile(r"-O=?[0-3]?")
"""vLLM's short form of ``--optimization-level``."""

_KV_EVENT_KEYS = {
    "enable_kv_cache_events": "",
    "publisher": "",
    "endpoint": "--kv-events-endpoint",
    "replay_endpoint": "--kv-events-replay-endpoint",
    "topic": "--kv-events-topic",
    "buffer_steps": "--kv-events-buffer-steps",
    "hwm": "--kv-events-hwm",
    "max_queue_size": "",
}
"""Keys of vLLM's ``--kv-events-config``, and our flag for each; events wait in no queue before the socket."""

_MODEL_OPTIONS = ("--model", "--model-path")


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate arguments in vLLM's or SGLang's form for ``lorikeet serve``. Option names may have underscores.

    Several values after one option all belong to the option only if the model comes first; otherwise the last value
    might be the model. An adapter as ``name=path`` is never the model.

    Returns:
        The arguments to parse, and notes for the user.

    Raises:
        CompatError: a flag cannot be honoured, or lacks its value.
    """
    kept: list[str] = []
    notes: list[str] = []
    named_first = bool(arguments) and not arguments[0].startswith("-")
    words = list(arguments)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            word = flag + equals + value
        if _LEVEL.fullmatch(word):
            if word == "-O" and words and words[0].isdecimal():
                words.pop(0)
            notes.append(f"{word} is ignored: {_KERNELS}")
        elif flag == "--kv-events-config":
            kept += _kv_event_flags(value if equals else _take_value(flag, words))
        elif flag == "--limit-mm-per-prompt":
            kept += _image_flags(value if equals else _take_value(flag, words))
        elif flag in FOREIGN_FLAGS:
            if FOREIGN_FLAGS[flag].value and not equals:
                value = _take_value(flag, words)
            notes += _note(flag, value)
        elif flag in _MODEL_OPTIONS:
            kept.insert(0, value if equals else _take_value(flag, words))
            named_first = True
        elif word in _LISTS:
            kept += [flag, _take_value(flag, words)]
            adapters = flag in ("--lora-modules", "--lora-paths")
            while words and not words[0].startswith("-") and (named_first or (adapters and "=" in words[0])):
                kept += [flag, words.pop(0)]
        else:
            kept.append(word)
    return kept, notes


def _image_flags(text: str) -> list[str]:
    """Return Lorikeet's flags for a value of vLLM's ``--limit-mm-per-prompt``, such as ``{"image": 4, "video": 0}``.

    Raises:
        CompatError: the value is not a JSON object of numbers.
    """
    try:
        limits = json.loads(text)
    except ValueError as error:
        raise CompatError(f"--limit-mm-per-prompt: {text!r} is not JSON: {error}") from error
    most = limits.get("image") if isinstance(limits, dict) else ""
    if isinstance(most, dict):
        most = most.get("count")
    if most is not None and not isinstance(most, int):
        raise CompatError(f'--limit-mm-per-prompt: {text!r} must be a JSON object such as {{"image": 4}}')
    return [] if most is None else ["--max-images", str(most)]


def _kv_event_flags(text: str) -> list[str]:
    """Return Lorikeet's flags for a value of vLLM's ``--kv-events-config``, a JSON object.

    Raises:
        CompatError: the value is not a JSON object, or has an unknown key or publisher.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CompatError(f"--kv-events-config: {text!r} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CompatError(f"--kv-events-config: {text!r} must be a JSON object")
    if unknown := config.keys() - _KV_EVENT_KEYS.keys():
        known = ", ".join(_KV_EVENT_KEYS)
        raise CompatError(f"--kv-events-config: {min(unknown)!r} must be one of {known}")
    publisher = config.get("publisher", "zmq")
    if publisher not in ("zmq", "null"):
        raise CompatError(f"--kv-events-config: publisher: {publisher!r} must be zmq or null")
    if not config.get("enable_kv_cache_events") or publisher == "null":
        return []
    given = {"endpoint": "tcp://*:5557", **{key: value for key, value in config.items() if value is not None}}
    return [word for key, flag in _KV_EVENT_KEYS.items() if flag and key in given for word in (flag, str(given[key]))]


def _take_value(flag: str, words: list[str]) -> str:
    if not words or words[0].startswith("--"):
        raise CompatError(f"{flag} needs a value")
    return words.pop(0)


def _note(flag: str, value: str) -> list[str]:
    foreign = FOREIGN_FLAGS[flag]
    if value.lower() in foreign.same:
        return []
    if foreign.refuse:
        raise CompatError(f"{flag}: {foreign.text}")
    return [f"{flag} is ignored: {foreign.text}"]
