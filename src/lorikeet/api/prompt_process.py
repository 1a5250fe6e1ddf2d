"""``python -m lorikeet.api.prompt_process``: reads large bodies for an API process.

To decode, validate and tokenize megabytes takes seconds, and Python runs nothing else meanwhile: in the API process
every stream would wait. Here only other large bodies do. What is sent back is small: the token ids of the prompts, and
the other fields of the body.

Its memory is limited. A body that takes more ends the process, and the API process starts another.
"""

import json
import os
import resource
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from pydantic import ValidationError
from tokenizers import Tokenizer

from lorikeet.api.body_structure import BodyStructure, check_structure
from lorikeet.api.errors import ApiError, bad_request, invalid_body, invalid_json, model_not_found, unexpected_failure
from lorikeet.api.middleware import AdmissionGate
from lorikeet.api.protocol import (
    Body,
    ChatCompletionRequest,
    ChatMessage,
    ChatOptions,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
    prompts_of,
    refuse_lone_surrogates,
    refuse_unsupported,
)
from lorikeet.api.sampling import MAX_BIASES, ModelLimits, check_prompt, logit_bias_pairs
from lorikeet.api.text_processor import ChatTemplate, TextProcessor, content_text
from lorikeet.core.process_tuning import lower_priority, return_freed_memory

PATHS: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""Routes whose bodies may be large."""
BODY = struct.Struct("!BQ")
"""Before a body: which of ``PATHS``, and its length."""
LENGTH = struct.Struct("!Q")
"""Before a message."""
MAX_TOKENS = 2**20
"""Of all prompts of a request together, or of one that is as long as the context."""
MAX_TOKENIZED = 2**18
"""Tokens that the two routes of the tokenizer take, or as many as the context has."""

_MAX_DEPTH = 100
_MAX_CONTAINERS = 2**16
_LONGEST_NAME = 512
_MEMORY_BYTES = 2**30
"""Address space that a body may take."""
_APART = {"prompt", "messages", "tokens", "chat_template_kwargs", "user"}
"""Fields that are sent back in another form, or have no effect."""


class PromptSetup(msgspec.Struct, frozen=True):
    """What a process begins with.

    Attributes:
        folder: of the model; empty: tokenizer and template are given here.
        chat_template: file instead of the folder's.
        tokenizer: ``tokenizer.json``'s content.
        template: Jinja source; empty for none.
        special_tokens: of the template.
        limits: of the model.
        max_queued: most sequences of a request.
    """

    limits: ModelLimits
    max_queued: int
    folder: str = ""
    chat_template: str = ""
    tokenizer: str = ""
    template: str = ""
    special_tokens: dict[str, str] = {}


class BodyRead(msgspec.Struct, frozen=True, tag=True):
    """What a body says.

    Attributes:
        fields: a small body as JSON: the prompts left out, all else as it was.
        prompts: token ids of each prompt, as 32-bit integers.
        texts: texts that answers open with, for ``echo``.
        answer: of a route of the tokenizer, the whole answer.
    """

    fields: bytes
    prompts: tuple[bytes, ...] = ()
    texts: tuple[str, ...] = ()
    answer: bytes = b""


class BodyRefused(msgspec.Struct, frozen=True, tag=True):
    """The arguments of an ``ApiError``."""

    status: int
    message: str
    param: str | None
    kind: str


class PromptReader:
    """Reads bodies one after the other.

    Args:
        text_processor: of the model.
        limits: of the model.
        max_queued: most sequences of a request.
    """

    def __init__(self, text_processor: TextProcessor, limits: ModelLimits, max_queued: int) -> None:
        self._text_processor = text_processor
        self._limits = limits
        self._max_queued = max_queued
        self._max_tokens = max(MAX_TOKENS, limits.max_model_len)
        self._max_tokenized = max(MAX_TOKENIZED, limits.max_model_len)
        # A message, which has a token at least, is an object and may have parts.
        containers = min(4 * (limits.max_model_len + max_queued), _MAX_CONTAINERS)
        keys = 2 * containers + MAX_BIASES
        self._max = BodyStructure(_MAX_DEPTH, containers, keys, self._max_tokens + containers + keys)

    def read(self, path: str, content: bytes) -> BodyRead:
        """Return what a body says.

        Raises:
            ApiError: it is not valid, or asks for more than can be served.
        """
        check_structure(content, self._max)
        body = _validated(PATHS[path], content)
        refuse_unsupported(body)
        match body:
            case CompletionRequest():
                return self._completion(body)
            case ChatCompletionRequest():
                return self._chat(body)
            case TokenizeRequest():
                return self._tokenized(body)
            case _:
                assert isinstance(body, DetokenizeRequest)
                return self._detokenized(body)

    def _completion(self, body: CompletionRequest) -> BodyRead:
        prompts = prompts_of(body)
        self._check(body, len(prompts))
        token_ids, total = [], 0
        for prompt in prompts:
            ids = self._token_ids(prompt, "prompt", special=body.add_special_tokens is not False)
            total += len(ids)
            if total > self._max_tokens:
                raise bad_request(f"The prompts have more than {self._max_tokens} tokens together.", "prompt")
            token_ids.append(_packed(ids))
        texts = (each if isinstance(each, str) else self._text_processor.decode(each) for each in prompts if body.echo)
        return BodyRead(_fields(body, prompt=""), tuple(token_ids), tuple(texts))

    def _chat(self, body: ChatCompletionRequest) -> BodyRead:
        self._check(body, 1)
        prompt = self._chat_prompt(body, body.messages)
        ids = self._token_ids(prompt, "messages", special=False)
        last = {"role": body.messages[-1].role, "content": content_text(body.messages[-1]) if body.echo else ""}
        return BodyRead(_fields(body, messages=[last]), (_packed(ids),))

    def _chat_prompt(self, body: ChatOptions, messages: Sequence[ChatMessage]) -> str:
        return self._text_processor.chat_prompt(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=body.chat_template_kwargs or {},
            continue_final_message=bool(body.continue_final_message),
        )

    def _check(self, body: GenerationBody, prompts: int) -> None:
        sequences = prompts * (body.n or 1)
        AdmissionGate(self._max_queued).enter(sequences)
        logit_bias_pairs(body, self._limits.vocabulary, sequences)

    def _token_ids(self, prompt: str | list[int], param: str, *, special: bool) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._text_processor.token_ids(
                prompt, add_special_tokens=special, limits=self._limits, param=param
            )
        check_prompt(prompt, self._limits, param)
        return prompt

    def _tokenized(self, body: TokenizeRequest) -> BodyRead:
        is_chat = body.messages is not None
        if is_chat == (body.prompt is not None):
            return BodyRead(_fields(body, prompt=None))  # the route refuses it
        text, param = (
            (self._chat_prompt(body, body.messages), "messages")
            if body.messages is not None
            else (body.prompt or "", "prompt")
        )
        fewest, most = self._text_processor.fewest_tokens(text, self._max_tokenized), self._max_tokenized
        special = not is_chat and body.add_special_tokens is not False
        ids = self._text_processor.token_ids(text, add_special_tokens=special) if fewest <= most else []
        if max(fewest, len(ids)) > most:
            raise bad_request(f"{param}: more than {most} tokens, the most that are taken here.", param)
        strings = [self._text_processor.tokenizer.id_to_token(each) for each in ids] if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": self._limits.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        placeholder: dict[str, Any] = {"messages": [{"role": "user"}]} if is_chat else {"prompt": ""}
        return BodyRead(_fields(body, **placeholder), answer=msgspec.json.encode(answer))

    def _detokenized(self, body: DetokenizeRequest) -> BodyRead:
        if len(body.tokens) > self._max_tokenized:
            raise bad_request(f"There are more than {self._max_tokenized} tokens.", "tokens")
        if (outside := max(body.tokens, default=0)) >= self._limits.vocabulary:
            raise bad_request(f"Token id {outside} is outside the vocabulary.", "tokens")
        answer = msgspec.json.encode({"prompt": self._text_processor.decode(body.tokens)})
        return BodyRead(_fields(body, tokens=[]), answer=answer)


def _validated(kind: type[Body], content: bytes) -> Body:
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        raise invalid_json(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request("There was an error parsing the body.") from error
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    refuse_lone_surrogates(content, value)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise invalid_body([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from error
    for name in (getattr(body, "model", None), getattr(body, "lora_path", None)):
        if name is not None and len(name) > _LONGEST_NAME:
            raise model_not_found(f"{name[:_LONGEST_NAME]}…")
    return body


def _fields(body: Body, **placeholders: Any) -> bytes:
    """Return the body's own fields, without what is large or unknown."""
    include: dict[str, Any] = dict.fromkeys(body.model_fields_set & set(type(body).model_fields) - _APART, True)
    if getattr(body, "stream_options", None) is not None and "stream_options" in include:
        include["stream_options"] = {"include_usage", "continuous_usage_stats"}
    return msgspec.json.encode(body.model_dump(mode="json", exclude_unset=True, include=include) | placeholders)


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def main() -> None:
    """Read bodies from standard input until it ends."""
    answers, bodies = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # whatever a library prints is no message
    setup = msgspec.msgpack.decode(_exactly(bodies, LENGTH.unpack(_exactly(bodies, LENGTH.size))[0]), type=PromptSetup)
    reader = PromptReader(_texts(setup), setup.limits, setup.max_queued)
    lower_priority()
    _limit_memory()
    paths = tuple(PATHS)
    _send(answers, b"")
    while head := bodies.read(BODY.size):
        which, length = BODY.unpack(head)
        answer = _answer(reader, paths[which], _exactly(bodies, length))
        _send(answers, msgspec.msgpack.encode(answer))
        del answer
        return_freed_memory()


def _answer(reader: PromptReader, path: str, body: bytes) -> BodyRead | BodyRefused:
    # Each error is dropped at once: kept beside its own frames it would keep the body until a collection.
    try:
        return reader.read(path, body)
    except ApiError as error:
        return _refused(error)
    except MemoryError:
        return _refused(ApiError(413, "Reading the body takes too much memory."))
    except Exception:
        sys.excepthook(*sys.exc_info())
        return _refused(unexpected_failure())


def _refused(error: ApiError) -> BodyRefused:
    return BodyRefused(error.status, error.message, error.param, error.type)


def _texts(setup: PromptSetup) -> TextProcessor:
    if setup.folder:
        return TextProcessor.read(Path(setup.folder), setup.chat_template)
    template = ChatTemplate(setup.template, setup.special_tokens) if setup.template else None
    return TextProcessor(Tokenizer.from_str(setup.tokenizer), template)


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES, taken + _MEMORY_BYTES))


def _exactly(stream: BinaryIO, length: int) -> bytes:
    content = stream.read(length)
    if len(content) < length:
        raise SystemExit  # the API process is gone
    return content


def _send(stream: BinaryIO, content: bytes) -> None:
    stream.write(LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


if __name__ == "__main__":
    main()
