"""Checks a body's sampling fields and returns the engine's sampling parameters."""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from lorikeet.chat.protocol import ChatCompletionRequest, GenerationBody
from lorikeet.core.images import ImageTokens
from lorikeet.core.request import SamplingParams
from lorikeet.http.errors import ApiError, bad_request

_SEED_BITS = 63
_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds of neighbouring choices differ in all bits.

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
"""Matches a token id in JSON's form, so that no token has two keys. Ten digits exceed every vocabulary."""

_MAX_SHOWN = 20
_MOST_SHOWN = 10
"""Most characters of a key, and most keys, in an error message."""

MAX_BIASES = 2**16
"""Most ``logit_bias`` entries over all sequences of a request; each sequence is sent with its own copy."""

_Number = TypeVar("_Number", int, float)

_CONFIGURED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults of sampling fields: OpenAI's, overridden by the model's ``generation_config.json`` as in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """Return the defaults in ``config``; ignore other keys.

        Raises:
            msgspec.ValidationError: a value has the wrong type.
        """
        return msgspec.convert({key: config[key] for key in _CONFIGURED if config.get(key) is not None}, cls)


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits and defaults of the model, for checks of requests.

    Attributes:
        max_model_len: longest sequence in tokens, prompt and answer together.
        vocabulary: size of the vocabulary; token ids are below it.
        eos_token_ids: tokens that end an answer.
        defaults: defaults of the sampling fields.
        max_logprobs: most alternatives that a request may have for each token; -1 for no limit.
        processed_logprobs: whether log probabilities are those of the sampled distribution, unless a request sets it.
        hidden: size of an embedding; 0 for a model that takes only token ids.
        image_tokens: the texts that stand for images in prompts; None for a model that takes no images.
    """

    max_model_len: int
    vocabulary: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    max_logprobs: int = 20
    hidden: int = 0
    processed_logprobs: bool = False
    image_tokens: ImageTokens | None = None


def check_text_length(least_tokens: int, limits: ModelLimits, param: str) -> None:
    """Check the length of a text before it is tokenized, by a lower bound on its tokens.

    Raises:
        ApiError: 400, the text leaves no space for an answer.
    """
    if least_tokens >= limits.max_model_len:
        raise _too_long(f"at least {least_tokens}", limits, param)


@contextmanager
def of_prompt(where: str) -> Iterator[None]:
    """Prefix errors within the context with ``where``, the place of one of several prompts; empty for only one."""
    try:
        yield
    except ApiError as error:
        if not where:
            raise
        message = f"{where}: {error.message}"
        raise ApiError(error.status, message, param=error.param, type=error.type, headers=error.headers) from error


def check_prompt(token_ids: list[int], limits: ModelLimits, param: str) -> None:
    """Check the length and the token ids of a prompt.

    Raises:
        ApiError: 400, the prompt is empty, leaves no space for an answer, or has an id outside the vocabulary.
    """
    if not token_ids:
        raise bad_request("The prompt is empty; at least one token is needed.", param)
    if len(token_ids) >= limits.max_model_len:
        raise _too_long(str(len(token_ids)), limits, param)
    if max(token_ids) >= limits.vocabulary:
        raise bad_request(f"Token id {max(token_ids)} is out of vocabulary: ids are below {limits.vocabulary}.", param)


def sampling_params(
    body: GenerationBody,
    limits: ModelLimits,
    *,
    prompt_tokens: int,
    default_max_tokens: int | None,
    logprobs: int | None,
    logit_bias: tuple[tuple[int, float], ...],
    grammar: str = "",
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Check the fields of ``body`` against each other and the model.

    Args:
        body: the body, with types and ranges of its fields already checked.
        limits: the model's limits.
        prompt_tokens: length of the prompt.
        default_max_tokens: limit if the body sets none, as far as the context has space; None for all of that space.
        logprobs: number of alternatives to report with each token; -1 for all, None for no log probabilities.
        logit_bias: result of :func:`logit_bias_pairs`; the same object for all prompts of the body.
        grammar: grammar of the answers, which then always end with an end token; empty for no grammar.
        prompt_logprobs: number of alternatives for each token of the prompt, in the form of ``logprobs``.
        bad_words: token sequences that the answers must not contain.

    Returns:
        Parameters of the first choice; :func:`params_for_choice` returns those of the others.

    Raises:
        ApiError: 400, a field is not valid; the message names it.
    """
    max_tokens, param = body.most_tokens
    room = limits.max_model_len - prompt_tokens
    if max_tokens is not None and max_tokens > room:
        raise bad_request(
            f"{_context(limits)} However, you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the "
            f"input, {max_tokens} in the completion). Please reduce the length of the input or {param}.",
            param,
        )
    # At least one token is generated: the engine needs it to end, and the answer leaves it out.
    most = min(room, default_max_tokens or room) if max_tokens is None else max(1, max_tokens)
    if (body.min_tokens or 0) > most:
        raise bad_request(f"min_tokens is {body.min_tokens}, more than the {most} tokens allowed.", "min_tokens")
    stop_token_ids = set(body.stop_token_ids or ())
    if outside := [token for token in stop_token_ids if token >= limits.vocabulary]:
        raise bad_request(f"Token id {outside[0]} is out of vocabulary.", "stop_token_ids")
    if grammar or not body.ignore_eos:  # EOS ids beyond the vocabulary are never generated.
        stop_token_ids |= {token for token in limits.eos_token_ids if token < limits.vocabulary}
    logprob_token_ids = _known_ids(body.logprob_token_ids, limits, "logprob_token_ids")
    if logprob_token_ids and (logprobs is None or max_tokens == 0):
        raise bad_request("logprob_token_ids needs logprobs, and tokens to generate.", "logprob_token_ids")
    field = "top_logprobs" if isinstance(body, ChatCompletionRequest) else "logprobs"
    alternatives = 0 if logprob_token_ids else _alternatives(logprobs, limits, field)
    defaults = limits.defaults
    top_k = _given(body.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=most,
        seed=secrets.randbits(_SEED_BITS) if body.seed is None else body.seed % 2**_SEED_BITS,
        min_tokens=body.min_tokens or 0,
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=0 if top_k < 0 else top_k,
        min_p=_given(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_bias,
        stop_token_ids=tuple(sorted(stop_token_ids)),
        logprobs=alternatives,
        logprob_token_ids=logprob_token_ids,
        prompt_logprobs=_alternatives(prompt_logprobs, limits, "prompt_logprobs"),
        processed_logprobs=(
            limits.processed_logprobs if body.logprobs_mode is None else body.logprobs_mode == "processed_logprobs"
        ),
        allowed_token_ids=_known_ids(body.allowed_token_ids, limits, "allowed_token_ids"),
        bad_words=bad_words,
        grammar=grammar,
    )


def check_some_token(params: SamplingParams, vocabulary: int, first: bytes = b"", grammar_param: str = "") -> None:
    """Check that an answer can have a first token.

    Args:
        params: parameters of the answer.
        vocabulary: token ids are below it.
        first: a bit for each token that the grammar allows first, the lowest bit of a byte first; empty without a
            grammar.
        grammar_param: field of the grammar, for the error.

    Raises:
        ApiError: 400, no token is left; the message names the fields.
    """
    if not (params.allowed_token_ids or params.bad_words or params.min_tokens):
        return
    stops = set(params.stop_token_ids)
    candidates: Iterable[int] = params.allowed_token_ids or range(vocabulary)
    if first:
        bits = np.unpackbits(np.frombuffer(first, dtype=np.uint8), bitorder="little")
        begins = set(np.flatnonzero(bits).tolist())
        if begins <= stops:  # min_tokens has no effect beyond the end of the grammar.
            params = msgspec.structs.replace(params, min_tokens=0)
        if begins & stops:  # The answer may be empty, so any end token may come.
            begins |= stops
        candidates = [each for each in candidates if each in begins]
    barred = {word[0] for word in params.bad_words if len(word) == 1} | (stops if params.min_tokens else set())
    if any(token_id not in barred for token_id in candidates):
        return
    given = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "min_tokens": params.min_tokens,
        grammar_param: grammar_param,
    }
    names = [name for name, value in given.items() if value]
    raise bad_request(f"{' and '.join(names)} leave no token that could begin an answer.", names[0])


def logit_bias_pairs(body: GenerationBody, vocabulary: int, sequences: int) -> tuple[tuple[int, float], ...]:
    """Return ``body.logit_bias`` as pairs of token id and bias.

    Args:
        body: the body, with types and ranges of its fields already checked.
        vocabulary: token ids are below it.
        sequences: number of sequences of the request.

    Raises:
        ApiError: 400, a key is not a token id, or the entries are too many.
    """
    biases = body.logit_bias or {}
    for name, entries in (("logit_bias", biases), ("allowed_token_ids", body.allowed_token_ids or ())):
        if len(entries) * sequences > MAX_BIASES:
            raise bad_request(
                f"{name}: {len(entries)} entries for each of {sequences} sequences; at most {MAX_BIASES} are allowed "
                "for all of them together.",
                name,
            )
    pairs = [(int(key) if _TOKEN_ID.fullmatch(key) else vocabulary, bias) for key, bias in biases.items()]
    if wrong := [key for key, (token_id, _) in zip(biases, pairs, strict=True) if token_id >= vocabulary]:
        names = [repr(key if len(key) <= _MAX_SHOWN else f"{key[:_MAX_SHOWN]}…") for key in wrong[:_MOST_SHOWN]]
        shown = ", ".join(names) + (f" and {len(wrong) - _MOST_SHOWN} others" if len(wrong) > _MOST_SHOWN else "")
        fault = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise bad_request(f"logit_bias: {shown} {fault} below {vocabulary}.", "logit_bias")
    return tuple(pairs)


def truncated(token_ids: list[int], body: GenerationBody, limits: ModelLimits) -> list[int]:
    """Return the part of a prompt that ``truncate_prompt_tokens`` keeps: its end, or its beginning."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return token_ids
    if kept < 0:
        kept = max(1, limits.max_model_len - max(1, body.most_tokens[0] or 1))
    if len(token_ids) <= kept:
        return token_ids
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[len(token_ids) - kept :]


def _alternatives(wanted: int | None, limits: ModelLimits, param: str) -> int | None:
    """Return the number of alternatives to report; None for no log probabilities.

    Raises:
        ApiError: 400, the server allows fewer; in vLLM's words.
    """
    if wanted is None:
        return None
    number = limits.vocabulary if wanted < 0 else wanted
    if 0 <= limits.max_logprobs < number:
        kind = "prompt" if param == "prompt_logprobs" else "sample"
        raise bad_request(
            f"Requested {kind} logprobs of {number}, which is greater than max allowed: {limits.max_logprobs}; the "
            "server sets it by --max-logprobs.",
            param,
        )
    return number


def _known_ids(token_ids: list[int] | None, limits: ModelLimits, param: str) -> tuple[int, ...]:
    """Return token ids without repetitions.

    Raises:
        ApiError: 400, a token id is outside the vocabulary.
    """
    if outside := [token_id for token_id in token_ids or () if token_id >= limits.vocabulary]:
        raise bad_request(f"Token id {outside[0]} is out of vocabulary: ids are below {limits.vocabulary}.", param)
    return tuple(dict.fromkeys(token_ids or ()))


def params_for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Return ``params`` with the seed of a choice; choice 0 keeps the seed unchanged."""
    return msgspec.structs.replace(params, seed=(params.seed + choice * _SEED_STRIDE) % 2**_SEED_BITS)


def _given(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value


def _too_long(tokens: str, limits: ModelLimits, param: str) -> ApiError:
    return bad_request(
        f"{_context(limits)} However, your request has {tokens} input tokens. "
        "Please reduce the length of the input messages.",
        param,
    )


def _context(limits: ModelLimits) -> str:
    """Return the first sentence of the error, in the words of OpenAI and vLLM that clients match."""
    return f"This model's maximum context length is {limits.max_model_len} tokens."
