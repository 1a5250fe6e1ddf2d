"""Serves TGI's routes, and LoRAX's, which add an adapter to them.

TGI: https://huggingface.github.io/text-generation-inference/. LoRAX: https://loraexchange.ai/reference/rest_api/.
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field
from starlette.responses import Response

from lorikeet import __version__
from lorikeet.api.conversion import Answer, whole_answers
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes.completions import StartedCompletion, start_completion
from lorikeet.chat.protocol import (
    Body,
    CompletionRequest,
    Count,
    ExpectedDigest,
    MergedAdapters,
    Penalty,
    StopString,
    Temperature,
    refuse_unsupported,
    validated,
)
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.core.plan import Token
from lorikeet.http.errors import ApiError, in_words
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.streaming import CancelOnDisconnect, EventStream, begun
from lorikeet.serving.generation import OutputDelta
from lorikeet.serving.requests import Sender
from lorikeet.serving.service import Service

ROUTES = Routes(note="TGI's and LoRAX's: see [other servers' routes](#other-servers-routes)")

_DEFAULT_MAX_TOKENS = 100
_BASE = ("", "__base__")
"""Values of ``adapter_id`` for the base model; the second is LoRAX's."""
_WORDS = {
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "model": "adapter_id",
    "logprobs": "top_n_tokens",
    "truncate_prompt_tokens": "truncate",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "ignore_eos": "ignore_eos_token",
}
_FINISH = {"length": "length", "stop": "eos_token", "abort": "length"}


class Grammar(Body):
    """Form of an answer: a JSON schema or a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]


class ResponseFormat(Body):
    """Form of an answer in LoRAX's fields."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TgiParameters(Body):
    """Parameters of a generation."""

    refused: ClassVar = {
        "best_of": ((1,), "best_of above 1 is not supported here; use /v1/completions."),
        "typical_p": ((1,), "Typical sampling is not supported; use top_p."),
        "apply_chat_template": ((False,), "apply_chat_template is not supported; use /v1/chat/completions."),
    }

    adapter_id: str | None = None
    adapter_source: Literal["", "hub", "local", "s3"] | None = None
    merged_adapters: MergedAdapters | None = None
    adapter_parameters: MergedAdapters | None = None
    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Annotated[Temperature, Field(gt=0)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[list[StopString], Field(max_length=64)] | None = None
    ignore_eos_token: bool | None = None
    truncate: Count | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Annotated[int, Field(ge=0)] | None = None
    return_k_alternatives: Annotated[int, Field(ge=0)] | None = None
    grammar: Grammar | None = None
    response_format: ResponseFormat | None = None
    expect_digest: ExpectedDigest | None = None

    @property
    def alternatives(self) -> int:
        """Number of likeliest tokens to report beside each token; the second name is LoRAX's."""
        return self.top_n_tokens or self.return_k_alternatives or 0

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: on request, or if a field is set that only sampling uses, as in TGI."""
        shapes = (self.temperature or 1.0) != 1.0 or self.top_k is not None or (self.top_p or 1.0) < 1.0
        return bool(self.do_sample) or shapes

    @property
    def structure(self) -> dict[str, Any]:
        """Form of the answer, in fields of a completion."""
        if self.grammar is not None:
            return {"guided_regex" if self.grammar.type == "regex" else "guided_json": self.grammar.value}
        if self.response_format is None or self.response_format.type == "text":
            return {}
        schema = self.response_format.schema_
        return {"response_format": {"type": "json_object"}} if schema is None else {"guided_json": schema}


class TgiRequest(Body):
    """Body of the routes that generate."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None

    @property
    def given(self) -> TgiParameters:
        """Parameters of the body, or the defaults."""
        return self.parameters or TgiParameters()

    def completion(self, *, needs_logprobs: bool) -> CompletionRequest:
        """Return the requested completion.

        Raises:
            ApiError: 400 or 501, a field is not valid or not supported.
        """
        given = self.given
        refuse_unsupported(self)
        refuse_unsupported(given)
        seed = given.seed
        fields = {
            "model": None if given.adapter_id in _BASE else given.adapter_id,
            "merged_adapters": given.merged_adapters or given.adapter_parameters,
            "prompt": self.inputs,
            "max_tokens": given.max_new_tokens,
            "temperature": (given.temperature or 1.0) if given.samples else 0.0,
            "top_k": given.top_k,
            "top_p": given.top_p,
            "repetition_penalty": given.repetition_penalty,
            "frequency_penalty": given.frequency_penalty,
            "seed": seed if seed is None or seed < 2**63 else seed - 2**64,
            "stop": given.stop,
            "include_stop_str_in_output": True,
            "ignore_eos": given.ignore_eos_token,
            "truncate_prompt_tokens": given.truncate,
            "logprobs": given.alternatives if needs_logprobs else None,
            "prompt_logprobs": 0 if given.decoder_input_details else None,
            "expect_digest": given.expect_digest,
            **given.structure,
        }
        return validated(CompletionRequest, fields)


@ROUTES.add(Route("POST /", Callers.KEYS))
async def root(body: TgiRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Continue a prompt: in a list of one answer, or as a stream if the body has ``stream``."""
    return await answer(service, body, sender, stream=bool(body.stream), in_a_list=True)


@ROUTES.add(Route("POST /generate_stream", Callers.KEYS))
async def generate_stream(body: TgiRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Continue a prompt in a stream with an event for each token."""
    return await answer(service, body, sender, stream=True)


@ROUTES.add(Route("GET /info", Callers.KEYS))
async def info(service: ServiceDep) -> dict[str, Any]:
    """Return the description of the server, in the fields of TGI and LoRAX that apply here."""
    limits = service.limits
    return {
        "model_id": service.models.base,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": service.settings.max_queued,
        "max_best_of": 1,
        "max_stop_sequences": 64,
        "max_input_length": limits.max_model_len - 1,
        "max_input_tokens": limits.max_model_len - 1,
        "max_total_tokens": limits.max_model_len,
        "router": "lorikeet",
        "version": __version__,
    }


async def answer(
    service: Service, body: TgiRequest, sender: Sender, *, stream: bool, in_a_list: bool = False
) -> Response:
    """Return the answer to a body.

    Args:
        service: the server's service.
        body: the checked body.
        sender: the request's sender.
        stream: whether the answer is a stream.
        in_a_list: whether an answer that is not a stream is a list of one.

    Raises:
        ApiError: the body is not valid, or cannot be served.
    """
    with in_words(_WORDS):
        needs_logprobs = stream or bool(body.given.details)
        started = await start_completion(
            service,
            body.completion(needs_logprobs=needs_logprobs),
            sender,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
        )
    generation = started.generation

    async def make() -> Response:
        if stream:
            return EventStream(await begun(_events(started, body)), generation.read_until_s)
        (whole,) = await whole_answers(generation)
        written = _whole(whole, body, started.texts)
        return Response(msgspec.json.encode([written] if in_a_list else written), media_type="application/json")

    return CancelOnDisconnect(make, generation.close)


def _whole(whole: Answer, body: TgiRequest, texts: TextProcessor) -> dict[str, Any]:
    written: dict[str, Any] = {"generated_text": _full_text(whole, body)}
    if not body.given.details:
        return written
    details = _details(whole, body) | {
        "prefill": _prefill(whole, texts) if body.given.decoder_input_details else [],
        "tokens": [_token(texts, token, texts.token(token.token_id).text) for token in whole.tokens],
    }
    if body.given.alternatives:
        details["top_tokens"] = [_top(texts, token) for token in whole.tokens]
    return written | {"details": details}


async def _events(started: StartedCompletion, body: TgiRequest) -> AsyncIterator[bytes]:
    so_far = Answer(started.generation.choices[0])
    pieces = started.texts.stream(so_far.prompt_token_ids, skip_special_tokens=True)
    has_begun = False
    try:
        async for delta in started.generation.deltas():
            so_far.add(delta)
            texts = [pieces.push(token.token_id) for token in delta.tokens]
            events = _token_events(started.texts, delta, texts, so_far, body)
            if events:
                has_begun = True
                yield events
    except ApiError as error:
        if not has_begun:
            raise
        yield _event({"error": error.message, "error_type": "generation"})


def _token_events(texts: TextProcessor, delta: OutputDelta, own: list[str], so_far: Answer, body: TgiRequest) -> bytes:
    """Return an event for each token of a delta; ``own`` are their texts."""
    is_last = delta.finish_reason is not None
    # The end may come without a token, but clients expect a token beside the whole text.
    tokens = delta.tokens or (tuple(so_far.tokens[-1:]) if is_last else ())
    if len(own) != len(tokens) or "".join(own) != delta.text:  # The text is held back while it may begin a stop string.
        own = [""] * (len(tokens) - 1) + [delta.text]
    first = len(so_far.tokens) - len(delta.tokens) + 1
    events = b""
    for place, (token, text) in enumerate(zip(tokens, own, strict=False), start=1):
        value: dict[str, Any] = {"index": first + place - 1, "token": _token(texts, token, text)}
        if body.given.alternatives:
            value["top_tokens"] = _top(texts, token)
        value |= {"generated_text": None, "details": None}
        if is_last and place == len(tokens):
            value |= {"generated_text": _full_text(so_far, body), "details": _details(so_far, body)}
        events += _event(value)
    return events


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _full_text(whole: Answer, body: TgiRequest) -> str:
    return body.inputs + whole.text if body.given.return_full_text else whole.text


def _details(whole: Answer, body: TgiRequest) -> dict[str, Any]:
    is_string = isinstance(whole.stop_reason, str)
    prompt_tokens = len(whole.prompt_token_ids)
    return {
        "finish_reason": "stop_sequence" if is_string else _FINISH[whole.finish_reason or "length"],
        "prompt_tokens": prompt_tokens,
        "input_length": prompt_tokens,
        "generated_tokens": whole.choice.completion_tokens,
        "seed": body.given.seed,
        "system_fingerprint": whole.choice.provenance.fingerprint,
    }


def _token(texts: TextProcessor, token: Token, text: str) -> dict[str, Any]:
    return {"id": token.token_id, "text": text, "logprob": token.logprob, "special": texts.is_special(token.token_id)}


def _top(texts: TextProcessor, token: Token) -> list[dict[str, Any]]:
    return [_token(texts, Token(*pair), texts.token(pair[0]).text) for pair in token.top]


def _prefill(whole: Answer, texts: TextProcessor) -> list[dict[str, Any]]:
    """Return the tokens of the prompt; the first has no log probability."""
    scored = whole.choice.handle.prompt_logprobs
    return [
        {"id": token_id, "text": texts.token(token_id).text, "logprob": scored[at].logprob if at else None}
        for at, token_id in enumerate(whole.prompt_token_ids)
    ]
