"""Serves SGLang's own routes; ``generate.py`` serves ``/generate``.

The API: https://docs.sglang.io/basic_usage/native_api.html. Sampling parameters:
https://docs.sglang.io/basic_usage/sampling_params.html.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from lorikeet.api.conversion import Answer, whole_answers
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes.completions import StartedCompletion, start_completion
from lorikeet.chat.protocol import (
    Body,
    CompletionRequest,
    ExpectedDigest,
    Penalty,
    StopString,
    Temperature,
    TokenIds,
    refuse_unsupported,
    validated,
)
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.core.plan import PromptToken, Token
from lorikeet.core.provenance import Provenance
from lorikeet.http.errors import ApiError, bad_request, in_words, not_supported
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.streaming import CancelOnDisconnect, EventStream, begun
from lorikeet.serving.requests import Sender
from lorikeet.serving.service import Service

ROUTES = Routes(note="SGLang's")

_DEFAULT_MAX_TOKENS = 128
_HEALTH_TIMEOUT_S = 20.0
_WORDS = {
    "prompt": "text",
    "model": "lora_path",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
_ID_OF_ANSWER = re.compile(r"^(?:chatcmpl-|cmpl-|msg_)")
_DONE = b"data: [DONE]\n\n"


class SglangSampling(Body):
    """SGLang's sampling parameters."""

    refused: ClassVar = {
        "structural_tag": ((), "structural_tag is not supported here; use response_format of /v1/completions."),
        "custom_params": (({},), "Custom parameters are not supported."),
        "no_stop_trim": ((False,), "no_stop_trim is not supported; use include_stop_str_in_output of /v1/completions."),
    }

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None


class SglangRequest(Body):
    """Body of ``/generate``. Lists of parameters, adapters and digests have an entry for each prompt."""

    refused: ClassVar = {
        "image_data": (([],), "Only text is supported."),
        "video_data": (([],), "Only text is supported."),
        "audio_data": (([],), "Only text is supported."),
        "token_ids_logprob": (([],), "token_ids_logprob is not supported; use logprob_token_ids of /v1/completions."),
    }

    text: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    sampling_params: SglangSampling | list[SglangSampling | None] | None = None
    lora_path: str | list[str | None] | None = None
    expect_digest: ExpectedDigest | list[ExpectedDigest | None] | None = None
    rid: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the body has several prompts, whose answers are a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    @property
    def scores_prompt(self) -> bool:
        """Whether the body requests log probabilities of the prompt."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    def completions(self) -> list[CompletionRequest]:
        """Return the requested completions: one, or one for each prompt if the prompts have their own parameters.

        Raises:
            ApiError: 400 or 501, a field is not valid or not supported.
        """
        refuse_unsupported(self)
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("Give either text or input_ids.", "text")
        prompts: Any = self.input_ids if self.text is None else self.text
        if any(isinstance(each, list) for each in (self.sampling_params, self.lora_path, self.expect_digest)):
            if not self.is_batch:
                raise bad_request(
                    "Lists of sampling_params, lora_path or expect_digest need a list of prompts.", "text"
                )
            params = _of_each(self.sampling_params, len(prompts), "sampling_params")
            names = _of_each(self.lora_path, len(prompts), "lora_path")
            digests = _of_each(self.expect_digest, len(prompts), "expect_digest")
            return [self._completion(*one) for one in zip(prompts, params, names, digests, strict=True)]
        return [self._completion(prompts, self.sampling_params, self.lora_path, self.expect_digest)]  # type: ignore[arg-type]

    def _completion(
        self, prompt: Any, params: SglangSampling | None, lora_path: str | None, digest: str | None
    ) -> CompletionRequest:
        given = params or SglangSampling()
        refuse_unsupported(given)
        fields = given.model_dump(exclude_unset=True, include=set(SglangSampling.model_fields))
        renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
        alternatives = (self.top_logprobs_num or 0) if self.return_logprob else None
        fields = {renamed.get(name, name): value for name, value in fields.items()} | {
            "prompt": prompt,
            "lora_path": lora_path,
            "expect_digest": digest,
            "priority": self.priority,
            "logprobs": alternatives,
            "prompt_logprobs": alternatives if self.scores_prompt else None,
        }
        return validated(CompletionRequest, fields)


_T = TypeVar("_T")


def _of_each(value: _T | list[_T], prompts: int, name: str) -> list[_T]:
    """Return a field's entry for each prompt.

    Raises:
        ApiError: 400, the field has more or fewer entries than prompts.
    """
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        raise bad_request(f"{name} has {len(value)} entries for {prompts} prompts.", name)
    return value


async def answer(service: Service, body: SglangRequest, sender: Sender) -> Response:
    """Return the answer to a body of ``/generate``.

    Raises:
        ApiError: the body is not valid, or cannot be served.
    """
    sender = sender._replace(request_id=body.rid or sender.request_id)
    with in_words(_WORDS):
        asked = body.completions()
        if body.stream and len(asked) > 1:
            raise not_supported("stream: prompts with their own parameters cannot be streamed.", "stream")
        started: list[StartedCompletion] = []
        try:
            for one in asked:
                started.append(await start_completion(service, one, sender, default_max_tokens=_DEFAULT_MAX_TOKENS))
        except BaseException:
            _close(started)
            raise
    in_a_list = body.is_batch or any((one.n or 1) > 1 for one in asked)

    async def make() -> Response:
        if body.stream:
            events = await begun(_events(started[0], body, sender.request_id, in_a_list=in_a_list))
            return EventStream(events, started[0].generation.read_until_s)
        written = [
            _answer(whole, body, each.texts, sender.request_id)
            for each in started
            for whole in await whole_answers(each.generation)
        ]
        return Response(msgspec.json.encode(written if in_a_list else written[0]), media_type="application/json")

    return CancelOnDisconnect(make, lambda: _close(started))


def _close(started: list[StartedCompletion]) -> None:
    for each in started:
        each.generation.close()


async def _events(
    started: StartedCompletion, body: SglangRequest, request_id: str, *, in_a_list: bool
) -> AsyncIterator[bytes]:
    """Yield events of all choices, each with the whole text so far."""
    so_far = [Answer(choice) for choice in started.generation.choices]
    has_begun = False
    try:
        async for delta in started.generation.deltas():
            so_far[delta.index].add(delta)
            value = _answer(so_far[delta.index], body, started.texts, request_id)
            has_begun = True
            yield _event(value | ({"index": delta.index} if in_a_list else {}))
    except ApiError as error:
        if not has_begun:
            raise
        yield _event(error.body())
    yield _DONE


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _answer(whole: Answer, body: SglangRequest, texts: TextProcessor, request_id: str) -> dict[str, Any]:
    timings = whole.choice.handle.timings
    meta: dict[str, Any] = {
        "id": request_id,
        "finish_reason": _finish_reason(whole),
        "prompt_tokens": len(whole.prompt_token_ids),
        "completion_tokens": whole.choice.completion_tokens,
        "cached_tokens": timings.cached_tokens,
        "weight_version": whole.choice.provenance.fingerprint,
    }
    if body.return_logprob:
        with_text = bool(body.return_text_in_logprobs)
        meta |= _logprobs("output", whole.tokens, texts, with_text=with_text)
        prompt: list[Token | PromptToken] = []
        if body.scores_prompt:
            scored = whole.choice.handle.prompt_logprobs
            ids = list(enumerate(whole.prompt_token_ids))[body.logprob_start_len or 0 :]
            prompt = [scored[at] if at else Token(token_id) for at, token_id in ids]
        meta |= _logprobs("input", prompt, texts, with_text=with_text)
    return {"text": whole.text, "output_ids": [token.token_id for token in whole.tokens], "meta_info": meta}


def _logprobs(
    kind: str, tokens: "list[Token] | list[Token | PromptToken]", texts: TextProcessor, *, with_text: bool
) -> dict[str, Any]:
    """Return the two lists in ``meta_info`` of the prompt's tokens (``input``) or the answer's (``output``)."""

    def entry(token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token_id, texts.token(token_id).text if with_text else None

    return {
        f"{kind}_token_logprobs": [entry(token.token_id, token.logprob) for token in tokens],
        f"{kind}_top_logprobs": [[entry(*pair) for pair in token.top] or None for token in tokens],
    }


def _finish_reason(whole: Answer) -> dict[str, Any] | None:
    match whole.finish_reason:
        case None:
            return None
        case "stop":
            matched = whole.stop_reason
            if matched is None and whole.tokens:
                matched = whole.tokens[-1].token_id
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": whole.choice.completion_tokens}
        case _:
            return {"type": "abort", "message": "Aborted"}


class AbortRequest(Body):
    """Body of ``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


@ROUTES.add(Route("POST /abort_request", Callers.KEYS))
async def abort_request(body: AbortRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Abort one request of the sender's tenant by its id, or all of them; ignore an unknown id."""
    if not body.rid and not body.abort_all:
        raise bad_request("Give rid or abort_all.", "rid")
    wanted = _ID_OF_ANSWER.sub("", body.rid)
    for generation in tuple(service.generations):
        request = generation.choices[0].handle.request
        is_meant = body.abort_all or request.request_id.rsplit("-", 2)[0] == wanted
        if is_meant and request.tenant == sender.tenant:
            generation.abort()
    return Response(status_code=200)


@ROUTES.add(Route("POST /flush_cache", Callers.ADMINS))
async def flush_cache(service: ServiceDep) -> Response:
    """Exclude the present KV from reuse by later requests."""
    service.reset_prefix_cache()
    return PlainTextResponse("Cache flushed.\n")


@ROUTES.add(Route("GET /health_generate", Callers.OPERATOR))
async def health_generate(service: ServiceDep, sender: SenderDep) -> Response:
    """Answer 200 if the engine generates a token, or if the server is only busy."""
    if not service.client.alive:
        raise ApiError(503, "The engine is not available.")
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await service.warm(None, sender)
    except TimeoutError:
        raise ApiError(503, f"No token was generated within {_HEALTH_TIMEOUT_S:g} s.") from None
    except ApiError as error:
        if error.status != 429:
            raise
    return Response(status_code=200)


@ROUTES.add(Route("GET /model_info /get_model_info", Callers.KEYS))
async def model_info(service: ServiceDep) -> dict[str, Any]:
    """Return the description of the model in SGLang's fields."""
    root = service.models.card(service.models.base)["root"]
    return {
        "model_path": root,
        "tokenizer_path": root,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": Provenance(service.models.base_digest).fingerprint,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
