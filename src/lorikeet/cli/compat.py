"""Flags of vLLM and SGLang without a counterpart in Lorikeet.

Flags with a counterpart are ordinary options of ``lorikeet serve``. Those listed here are removed from the command line
before it is parsed: most with a note that says what Lorikeet does instead. Some are refused, because the server would
otherwise not serve what was asked for. Flags in neither list are errors.

Names: https://docs.vllm.ai/en/latest/cli/serve/ and https://docs.sglang.io/docs/advanced_features/server_arguments
"""

from collections.abc import Sequence
from typing import NamedTuple


class CompatError(ValueError):
    """A flag asks for something that Lorikeet does not support; the message says what to use instead."""


class ForeignFlag(NamedTuple):
    """One flag.

    Attributes:
        text: what Lorikeet does instead, or why it refuses.
        value: whether the flag takes a value.
        same: values that ask for what Lorikeet does anyway; they get no note.
        refuse: whether other values end the command with an error.
    """

    text: str
    value: bool = True
    same: tuple[str, ...] = ()
    refuse: bool = False


_POOL = "adapters of any rank and KV share one pool, so there are no adapter slots to count; --memory sets its size"
_HOST = "use --host-memory SIZE, one host tier for adapters and KV"
_ADMISSION = "the preset decides which request is admitted next (for example --preset lorikeet:priority)"
_ALWAYS = "Lorikeet always does this"
_DENSE = "mixture-of-experts models are not supported"
_MAIN = "the hub's main revision is served; fetch another into a folder, and name that"
_TEXT_MODELS = "only models that generate text are served"
_STEPS = "the engine itself decides how many steps are planned at once"
_KERNELS = "the kernels are chosen by device (--kernels), and need no compiler options"
_GRAMMARS = "grammars are compiled by llguidance"
_ORIGINS = "pages of an allowed origin may use any"

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "--max-loras": ForeignFlag(_POOL),
    "--max-loras-per-batch": ForeignFlag(_POOL),
    "--max-cpu-loras": ForeignFlag(_HOST),
    "--max-loaded-loras": ForeignFlag(_HOST),
    "--lora-dtype": ForeignFlag("adapters are computed in the model's dtype", same=("auto",)),
    "--fully-sharded-loras": ForeignFlag("adapters are always sharded alongside the model", value=False),
    "--specialize-active-lora": ForeignFlag("work is always the sum of the ranks in the batch", value=False),
    "--lora-target-modules": ForeignFlag("every module that an adapter changes is served", same=("all", "all-linear")),
    "--lora-eviction-policy": ForeignFlag("the preset decides (--preset)", same=("lru",)),
    "--lora-backend": ForeignFlag("the kernels are chosen by device"),
    "--enable-lora-overlap-loading": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--lora-strict-loading": ForeignFlag(_ALWAYS, value=False, same=("",)),
    "--lora-drain-wait-threshold": ForeignFlag(_ADMISSION, same=("0", "0.0")),
    "--enable-mixed-moe-lora-format": ForeignFlag(_DENSE, value=False),
    "--enable-moe-shared-loras": ForeignFlag(_DENSE, value=False),
    "--max-lora-cls-labels": ForeignFlag("only models that generate text are served, no classifiers"),
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
    "--kv-cache-dtype": ForeignFlag("KV has the model's dtype", same=("auto",)),
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
    "--enable-force-include-usage": ForeignFlag(
        "requests ask for usage in streams (stream_options.include_usage)", value=False
    ),
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
    "--middleware": ForeignFlag("code of others does not run in the server; put a proxy in front", refuse=True),
    "--download-dir": ForeignFlag("set HF_HUB_CACHE in the environment to keep what comes from the hub elsewhere"),
    "--allow-credentials": ForeignFlag("keys are in a header, so pages need no cookies", value=False),
    "--allowed-methods": ForeignFlag(_ORIGINS, same=('["*"]',)),
    "--allowed-headers": ForeignFlag(_ORIGINS, same=('["*"]',)),
    "--distributed-executor-backend": ForeignFlag("ranks are processes of one machine", same=("mp",)),
    "--revision": ForeignFlag(_MAIN, same=("main",), refuse=True),
    "--generation-config": ForeignFlag(
        "what requests leave open comes from the generation_config.json in the model's folder",
        same=("auto",),
        refuse=True,
    ),
    "--speculative-config": ForeignFlag("speculative decoding is not supported", refuse=True),
    "--default-mm-loras": ForeignFlag("only text models are served", refuse=True),
    "--enable-tower-connector-lora": ForeignFlag("only text models are served", value=False, refuse=True),
    "--enable-ssl-refresh": ForeignFlag("a certificate that changes is always read again", value=False),
    "--ssl-ca-certs": ForeignFlag("put a proxy in front to ask clients for certificates", refuse=True),
}

_LISTS = ("--lora-modules", "--lora-paths", "--served-model-name", "--api-key")
"""Options that take several values in vLLM and SGLang."""

_MODEL_OPTIONS = ("--model", "--model-path")


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate arguments in vLLM's or SGLang's form for ``lorikeet serve``. Option names may have underscores.

    Several values after one option all belong to it only if the model was named first; otherwise the last of them
    might be the model. Adapters as ``name=path`` are no model.

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
        if flag in FOREIGN_FLAGS:
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
