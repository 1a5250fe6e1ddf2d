"""Reads large bodies for an API process, as ``python -m lorikeet.chat.prompt_process``.

Decoding, validating and tokenizing megabytes takes seconds, in which Python runs nothing else: in the API process
every stream would wait. Here only other large bodies wait. The result is small: the token ids of the prompts, and the
other fields of the body.

The memory of the process is limited. A body that takes more ends it, and the API process starts another.
"""

import json
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from lorikeet.adapters.chat import AdapterChat
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings, with_template
from lorikeet.chat.choice_prompt import choice_prompt
from lorikeet.chat.conversation import content_text
from lorikeet.chat.image_parts import ImageFile, image_files
from lorikeet.chat.messages_body import CountTokensRequest, MessagesRequest
from lorikeet.chat.prompt_embeds import read_prompt_embeds, token_count
from lorikeet.chat.protocol import (
    Body,
    ChatCompletionRequest,
    ChatMessage,
    ChatOptions,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
    check_prompt_embeds,
    prompts_of,
    refuse_lone_surrogates,
    refuse_unsupported,
    validated,
)
from lorikeet.chat.responses_body import ResponsesRequest, in_these_words
from lorikeet.chat.sampling import MAX_BIASES, ModelLimits, check_prompt, logit_bias_pairs, of_prompt, truncated
from lorikeet.chat.structured_output import grammar_spec
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.chat.tokens_body import WORDS, TokensRequest
from lorikeet.core.chat_template import ChatTemplate, TemplateError
from lorikeet.core.request import PromptEmbeds
from lorikeet.http.admission import AdmissionGate
from lorikeet.http.body_structure import BodyStructure, check_structure
from lorikeet.http.errors import ApiError, bad_request, in_words, invalid_json, model_not_found, unexpected_failure
from lorikeet.http.helper_main import run_helper
from lorikeet.http.model_routes import AUTO_MODEL

KINDS: tuple[type[Body], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokensRequest,
)
"""Kinds of bodies that may be large. A message to the process is a body after the number of its kind, one byte."""
MODEL = b"\xff"
"""Kind of a message with a ``BodyNeeds``, which the last body needs."""
MAX_TOKENS = 2**20
"""Most tokens of all prompts of a request together; a single prompt may be as long as the context."""
MAX_TOKENIZED = 2**18
"""Most tokens on the two routes of the tokenizer; a longer context raises the limit."""

_MAX_DEPTH = 100
_MAX_CONTAINERS = 2**16
_LONGEST_NAME = 512
_MAX_TEMPLATES = 64
"""Number of compiled templates of adapters and requests that are kept."""
_TEMPLATE_CPU_S = 2.0
"""Most CPU time to compile a template that is not the server's, and as much for one prompt from it."""
_MEMORY_BYTES = 2**30
"""Most address space that a body may take."""
_APART = {
    "prompt",
    "prompt_embeds",
    "messages",
    "system",
    "input",
    "tokens",
    "token_ids",
    "chat_template_kwargs",
    "user",
}
"""Fields that are returned in another form, or have no effect."""


class PromptSetup(msgspec.Struct, frozen=True):
    """Setup of a process.

    Attributes:
        folder: the model's folder; empty if the setup contains tokenizer and template.
        chat_template: file of the template, instead of the folder's.
        tokenizer: content of ``tokenizer.json``.
        template: Jinja source of the template; empty for no template.
        special_tokens: special tokens of the template.
        tool_parser: name of the format of tool calls; empty for the template's format.
        limits: the model's limits.
        max_queued: most sequences of a request.
    """

    limits: ModelLimits
    max_queued: int
    folder: str = ""
    chat_template: str = ""
    tokenizer: str = ""
    template: str = ""
    special_tokens: dict[str, str] = {}
    tool_parser: str = ""


class WhichModel(msgspec.Struct, frozen=True, tag=True):
    """Requests the settings of a body's model. The next message is ``MODEL`` with a ``BodyNeeds``.

    Attributes:
        model, lora_path: fields of the body.
        previous_response_id: field of a body that continues a stored response.
        user: field of a body that names the user.
        prompt: the text by which the model ``auto`` is chosen; empty for other models.
    """

    model: str | None
    lora_path: str | None
    previous_response_id: str | None = None
    user: str | None = None
    prompt: str = ""


class BodyNeeds(msgspec.Struct, frozen=True):
    """Facts that are needed to read a body.

    Attributes:
        chat: its model's own settings.
        previous: the conversation that the body continues, as a JSON array of items; empty without one.
    """

    chat: AdapterChat
    previous: bytes = b""


class BodyRead(msgspec.Struct, frozen=True, tag=True):
    """Content of a body.

    Attributes:
        fields: the body as JSON without its prompts.
        prompts: token ids of each prompt, as 32-bit integers.
        texts: texts that open the answers, for ``echo``.
        answer: the whole answer on a route of the tokenizer.
        conversation: conversation of a stored body of the responses API, as a JSON array of items.
        embeds: embeddings of each prompt, whose token ids then mean nothing.
        text: the prompt of a conversation with images. It has a placeholder for each, and no token ids yet.
        images: these images.
    """

    fields: bytes
    prompts: tuple[bytes, ...] = ()
    texts: tuple[str, ...] = ()
    answer: bytes = b""
    conversation: bytes = b""
    embeds: tuple[PromptEmbeds, ...] = ()
    text: str = ""
    images: tuple[ImageFile, ...] = ()


class BodyRefused(msgspec.Struct, frozen=True, tag=True):
    """Arguments of an ``ApiError``."""

    status: int
    message: str
    param: str | None
    kind: str


class PromptReader:
    """Reads bodies one by one, each in two steps, since its model may have its own chat template.

    Args:
        base: the base model's settings.
        max_queued: most sequences of a request.
    """

    def __init__(self, base: ChatSettings, max_queued: int) -> None:
        self._chats = AdapterChats(base)
        self._template = lru_cache(_MAX_TEMPLATES)(_template)
        self._body: Body | None = None
        self._set_model(AdapterChat())
        limits = base.limits
        self._limits = limits
        self._max_queued = max_queued
        self._max_tokens = max(MAX_TOKENS, limits.max_model_len)
        self._max_tokenized = max(MAX_TOKENIZED, limits.max_model_len)
        # A message has at least one token, is an object and may have parts.
        containers = min(4 * (limits.max_model_len + max_queued), _MAX_CONTAINERS)
        keys = 2 * containers + MAX_BIASES
        self._max = BodyStructure(_MAX_DEPTH, containers, keys, self._max_tokens + containers + keys)

    def begin(self, kind: type[Body], content: bytes) -> WhichModel:
        """Check a body, and return the names of its model; :meth:`read` then reads the body.

        Raises:
            ApiError: the body is not valid.
        """
        self._body = None
        check_structure(content, self._max)
        body = self._body = _body_of(kind, content)
        refuse_unsupported(body)
        previous = body.previous_response_id if isinstance(body, ResponsesRequest) else None
        user = getattr(body, "user", None)
        model = getattr(body, "model", None)
        prompt = choice_prompt(body, self._chats.base.text_processor) if model == AUTO_MODEL else ""
        return WhichModel(model, getattr(body, "lora_path", None), previous, user, prompt)

    def read(self, needs: BodyNeeds) -> BodyRead:
        """Return the content of the checked body.

        Args:
            needs: facts that are needed beside the body.

        Raises:
            ApiError: a field is not valid or exceeds a limit.
        """
        body = self._body
        self._body = None
        self._set_model(self._settings_for(body, needs.chat))
        match body:
            case CompletionRequest():
                return self._completion(body)
            case TokensRequest():
                completion = body.completion()
                with in_words(WORDS):
                    read = self._completion(completion)
                return BodyRead(_fields(body, token_ids=[0]), read.prompts)
            case ChatCompletionRequest():
                return self._chat(body)
            case MessagesRequest():
                return self._conversation(body.chat(), _fields(body, messages=[{"role": "user", "content": ""}]))
            case ResponsesRequest():
                try:
                    read = self._conversation(body.chat(needs.previous), _fields(body, input=""))
                except ApiError as error:
                    raise in_these_words(error) from error
                conversation = b"" if body.store is False else body.conversation(needs.previous)
                return msgspec.structs.replace(read, conversation=conversation)
            case CountTokensRequest():
                asked = body.tokenize_body()
                fields = _fields(body, messages=[{"role": "user", "content": ""}])
                if read_images := self._with_images(asked, asked.messages or (), fields):
                    return read_images
                ids = self._tokenized_ids(asked)
                return BodyRead(fields, answer=msgspec.json.encode({"input_tokens": len(ids)}))
            case TokenizeRequest():
                return self._tokenized(body)
            case _:
                assert isinstance(body, DetokenizeRequest)
                return self._detokenized(body)

    def _settings_for(self, body: Body | None, chat: AdapterChat) -> AdapterChat:
        """Return the settings of a body's model, with the body's own chat template if it has one."""
        if not isinstance(body, ChatOptions) or not body.own_template:
            return chat
        settings = self._chats.settings(chat)
        return with_template(chat, body, settings.system_prompt, settings.tool_parser)

    def _set_model(self, chat: AdapterChat) -> None:
        settings = self._chats.settings(chat)
        texts = settings.text_processor
        self._is_own = bool(chat.chat_template)
        if chat.chat_template:
            inherited = {} if texts.template is None else texts.template.special_tokens
            tokens = tuple(sorted((inherited | chat.special_tokens).items()))
            others = tuple(sorted(chat.other_templates.items()))
            try:
                with _limited_time():
                    texts = texts.with_template(self._template(chat.chat_template, tokens, others))
            except (TemplateError, RecursionError) as error:
                raise bad_request(f"chat_template: {error}.", "chat_template") from error
        self._settings = settings
        self._text_processor = texts

    def _completion(self, body: CompletionRequest) -> BodyRead:
        if body.prompt_embeds is not None:
            return self._embedded(body)
        prompts = prompts_of(body)
        self._check(body, len(prompts))
        token_ids = []
        total = 0
        for at, prompt in enumerate(prompts):
            with of_prompt(f"prompt.{at}" if len(prompts) > 1 else ""):
                ids = self._token_ids(body, prompt, "prompt", special=body.add_special_tokens is not False)
            total += len(ids)
            if total > self._max_tokens:
                raise bad_request(f"prompt: the prompts have more than {self._max_tokens} tokens together.", "prompt")
            token_ids.append(_packed(ids))
        unpacked = (array("i", ids).tolist() for ids in token_ids)
        texts = (
            each if isinstance(each, str) and not body.truncates else self._text_processor.decode(ids)
            for each, ids in zip(prompts, unpacked, strict=True)
            if body.echo
        )
        return BodyRead(_fields(body, prompt=""), tuple(token_ids), tuple(texts))

    def _embedded(self, body: CompletionRequest) -> BodyRead:
        check_prompt_embeds(body)
        field = body.prompt_embeds or ""
        limits = self._limits
        self._check(body, len(field) if isinstance(field, list) else 1)
        embeds = tuple(read_prompt_embeds(field, limits.hidden, limits.max_model_len))
        prompts = tuple(_packed([0] * token_count(each, limits.hidden)) for each in embeds)
        return BodyRead(_fields(body, prompt=""), prompts, embeds=embeds)

    def _conversation(self, body: ChatCompletionRequest, fields: bytes) -> BodyRead:
        """Return the token ids of a conversation, or its text and images."""
        self._check(body, 1)
        if read := self._with_images(body, body.messages, fields):
            return read
        prompt = self._chat_prompt(body, body.messages)
        return BodyRead(fields, (_packed(self._token_ids(body, prompt, "messages", special=False)),))

    def _with_images(self, body: ChatOptions, messages: Sequence[ChatMessage], fields: bytes) -> BodyRead | None:
        """Return the text and the images of a conversation; None for one that is tokenized here."""
        if self._limits.image_tokens is None or not (images := image_files(messages)):
            return None
        return BodyRead(fields, text=self._chat_prompt(body, messages), images=images)

    def _chat(self, body: ChatCompletionRequest) -> BodyRead:
        last = {"role": body.messages[-1].role, "content": content_text(body.messages[-1]) if body.echo else ""}
        return self._conversation(body, _fields(body, messages=[last]))

    def _chat_prompt(self, body: ChatOptions, messages: Sequence[ChatMessage]) -> str:
        if not self._is_own:
            return self._text_processor.chat_prompt(messages, self._settings.style(body))
        with _limited_time():
            return self._text_processor.chat_prompt(messages, self._settings.style(body))

    def _check(self, body: GenerationBody, prompts: int) -> None:
        sequences = prompts * body.choices_per_prompt
        AdmissionGate(self._max_queued).enter(sequences)
        logit_bias_pairs(body, self._limits.vocabulary, sequences)
        grammar_spec(body)  # A grammar that is too large must not be returned.

    def _token_ids(self, body: GenerationBody, prompt: str | list[int], param: str, *, special: bool) -> list[int]:
        if isinstance(prompt, str):
            limits = None if body.truncates else self._limits
            prompt = self._text_processor.token_ids(prompt, add_special_tokens=special, limits=limits, param=param)
        prompt = truncated(prompt, body, self._limits)
        check_prompt(prompt, self._limits, param)
        return prompt

    def _tokenized(self, body: TokenizeRequest) -> BodyRead:
        is_chat = body.messages is not None
        if is_chat == (body.prompt is not None):
            return BodyRead(_fields(body, prompt=None))  # The route refuses this body.
        placeholder: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]} if is_chat else {"prompt": ""}
        if read := self._with_images(body, body.messages or (), _fields(body, **placeholder)):
            return read
        ids = self._tokenized_ids(body)
        strings = [self._text_processor.tokenizer.id_to_token(each) for each in ids] if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": self._limits.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return BodyRead(_fields(body, **placeholder), answer=msgspec.json.encode(answer))

    def _tokenized_ids(self, body: TokenizeRequest) -> list[int]:
        text, param = (
            (self._chat_prompt(body, body.messages), "messages")
            if body.messages is not None
            else (body.prompt or "", "prompt")
        )
        fewest = self._text_processor.fewest_tokens(text, self._max_tokenized)
        most = self._max_tokenized
        special = body.messages is None and body.add_special_tokens is not False
        ids = self._text_processor.token_ids(text, add_special_tokens=special) if fewest <= most else []
        if max(fewest, len(ids)) > most:
            raise bad_request(f"{param}: the text has more than {most} tokens, the limit of this route.", param)
        return ids

    def _detokenized(self, body: DetokenizeRequest) -> BodyRead:
        if len(body.tokens) > self._max_tokenized:
            raise bad_request(
                f"tokens: the list has more than {self._max_tokenized} tokens, the limit of this route.", "tokens"
            )
        if (outside := max(body.tokens, default=0)) >= self._limits.vocabulary:
            raise bad_request(f"Token id {outside} is out of vocabulary.", "tokens")
        answer = msgspec.json.encode({"prompt": self._text_processor.decode(body.tokens)})
        return BodyRead(_fields(body, tokens=[]), answer=answer)


@contextmanager
def _limited_time() -> Iterator[None]:
    """End the process if a template takes too long, since nothing else would interrupt it."""
    signal.setitimer(signal.ITIMER_PROF, _TEMPLATE_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _template(
    source: str, special_tokens: tuple[tuple[str, str], ...], others: tuple[tuple[str, str], ...]
) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens), dict(others))


def _body_of(kind: type[Body], content: bytes) -> Body:
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        raise invalid_json(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request("There was an error parsing the body.") from error
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    refuse_lone_surrogates(content, value)
    body = validated(kind, value)
    for name in (getattr(body, "model", None), getattr(body, "lora_path", None)):
        if name is not None and len(name) > _LONGEST_NAME:
            raise model_not_found(f"{name[:_LONGEST_NAME]}…")
    return body


def _fields(body: Body, **placeholders: Any) -> bytes:
    """Return the body's own fields, without large and unknown ones."""
    include: dict[str, Any] = dict.fromkeys(body.model_fields_set & set(type(body).model_fields) - _APART, True)
    if getattr(body, "stream_options", None) is not None and "stream_options" in include:
        include["stream_options"] = {"include_usage", "continuous_usage_stats"}
    return msgspec.json.encode(body.model_dump(mode="json", exclude_unset=True, include=include) | placeholders)


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def main() -> None:
    """Read bodies from standard input until the input ends."""
    run_helper(_prepare, _MEMORY_BYTES)


def _prepare(setup_message: bytes) -> Callable[[bytes], bytes]:
    setup = msgspec.msgpack.decode(setup_message, type=PromptSetup)
    base = ChatSettings(_texts(setup), setup.limits, tool_parser=setup.tool_parser)
    reader = PromptReader(base, setup.max_queued)

    def answer(message: bytes) -> bytes:
        if message[:1] == MODEL:
            needs = msgspec.msgpack.decode(message[1:], type=BodyNeeds)
            return msgspec.msgpack.encode(_answer(lambda: reader.read(needs)))
        return msgspec.msgpack.encode(_answer(lambda: reader.begin(KINDS[message[0]], message[1:])))

    return answer


def _answer(read: Callable[[], WhichModel | BodyRead]) -> WhichModel | BodyRead | BodyRefused:
    # Each error is dropped immediately, since its frames would keep the body until a garbage collection.
    try:
        return read()
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


if __name__ == "__main__":
    main()
