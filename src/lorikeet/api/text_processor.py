"""Tokenizer and chat template of a model: messages and prompts to token ids, and token ids to text as they arrive.

The chat template is the checkpoint's Jinja template, rendered as transformers does, without importing transformers
(https://huggingface.co/docs/transformers/chat_templating). Text that is far too long is refused by a lower bound on its
tokens, before it is tokenized. The bound is known for byte-level BPE and for BPE with byte fallback; for other
tokenizers it is 0.
"""

import json
import math
import re
import secrets
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from lorikeet.api.errors import bad_request, not_supported
from lorikeet.api.protocol import ChatMessage, TextPart
from lorikeet.api.sampling import ModelLimits, check_text_length
from lorikeet.api.threads import THREAD_LENGTH, off_the_loop
from lorikeet.models.config import ModelConfigError, read_json_object

_END_MARK, _END_SPACE = str(secrets.randbits(128)), "  "
"""Mark the end of a message that is to be continued. The mark has digits only, which no filter of a template changes.
The spaces behind it are missing if the template strips the message; a template may add one.
"""


_FAILURES_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What templates raise on messages that they do not expect, beside their own errors."""


class TemplateError(ValueError):
    """The template is missing or broken, or it refused the messages; the error text says which."""


class _GenerationBlocks(Extension):
    """Accepts ``{% generation %}``, which marks answers for training, and renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: variables such as ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render_open(self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]) -> str:
        """Return the prompt that ends with the text of the last message, for an answer that continues it.

        Args:
            messages: at least one.
            extra: as in :meth:`render`.

        Raises:
            TemplateError: as :meth:`render`, or the template leaves out the last message.
        """
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + _END_MARK + _END_SPACE}]
        text, mark, rest = self.render(marked, add_generation_prompt=False, extra=extra).rpartition(_END_MARK)
        if not mark:
            raise TemplateError("the chat template leaves out the last message, so it cannot be continued")
        if not rest.startswith(_END_SPACE):
            text = text.rstrip()
        # A template may write the message twice.
        return text.replace(_END_MARK + _END_SPACE, "").replace(_END_MARK, "")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        """Return the prompt for ``messages``; ``extra`` holds further variables of the template.

        OpenAI's role ``developer`` is ``system`` to a template that does not know it.

        Raises:
            TemplateError: the template refuses the messages or fails on them.
        """
        variables = {**self.special_tokens, "tools": None, "documents": None, **extra}
        known = messages if self._knows_developer else map(_as_system, messages)
        variables |= {"messages": list(known), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, *_FAILURES_OF_TEMPLATES) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


def read_chat_template(folder: Path, override: str = "") -> ChatTemplate | None:
    """Read the template of a model folder.

    Args:
        folder: with ``chat_template.jinja`` or ``tokenizer_config.json``.
        override: file to use instead.

    Returns:
        None if the model has none (a base model).

    Raises:
        TemplateError: the file given is missing, or the template does not compile.
        ModelConfigError: ``tokenizer_config.json`` cannot be read.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.is_file() else {}
    source: Any
    if override:
        if not Path(override).is_file():
            raise TemplateError(f"chat template {override}: no such file")
        source = Path(override).read_text()
    elif (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text()
    else:
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens under keys that end in ``_token``; each is a string or an object with ``content``."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


_MAX_COMPOSED = 4
"""Most characters that NFC composes into one: the length of the longest canonical decomposition."""


class TokenLowerBound:
    """Computes a lower bound on the number of tokens of a text.

    Args:
        tokenizer: without truncation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        added = spec["added_tokens"]
        composed = _max_composed(_steps(spec["normalizer"], "normalizers"))
        dropped = _dropped(spec["model"], _steps(spec["pre_tokenizer"], "pretokenizers"))
        # A token that strips the whitespace beside it may stand for any amount of it.
        takes_space = any(token["lstrip"] or token["rstrip"] for token in added)
        self._dropped = ""
        self._max_characters = math.inf
        """Most characters of a text in one token."""
        if not takes_space and composed is not None and dropped is not None:
            longest = max(map(len, (*spec["model"]["vocab"], *(token["content"] for token in added))))
            self._dropped, self._max_characters = dropped, longest * composed

    def lower_bound(self, text: str) -> int:
        """Return the least number of tokens that ``text`` may have."""
        characters = len(text) - sum(map(text.count, self._dropped))
        return math.ceil(characters / self._max_characters)


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, in order."""
    if part is None:
        return []
    return [step for each in part[key] for step in _steps(each, key)] if part["type"] == "Sequence" else [part]


def _max_composed(normalizers: list[dict[str, Any]]) -> int | None:
    """Return how many characters may become one; None if not known."""
    most = 1
    for step in normalizers:
        match step:
            case {"type": "NFC"}:
                most *= _MAX_COMPOSED
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(new) >= len(old):
                pass
            case _:
                return None
    return most


def _dropped(model: dict[str, Any], pre_tokenizers: list[dict[str, Any]]) -> str | None:
    """Return the characters that the tokens may leave out; None if not known."""
    is_of_bytes = False
    for step in pre_tokenizers:
        match step:
            case {"type": "ByteLevel"}:
                is_of_bytes = True
            case {"type": "Digits" | "Metaspace"}:
                pass
            case {"type": "Split", "behavior": behavior} if behavior != "Removed":
                pass
            case _:
                return None
    if model["type"] != "BPE":
        return None
    if not is_of_bytes:
        has_bytes = model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        return "" if has_bytes else None
    # The last UTF-8 byte of every character is the last byte of one of these.
    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    last_bytes = {chr(code): bytes_of(chr(code))[0][0][-1] for code in range(0xC0)}
    lacking = [character for character, byte in last_bytes.items() if byte not in model["vocab"]]
    return "".join(lacking) if all(map(str.isascii, lacking)) else None


_CONTEXT_TOKENS = (6, 24)
"""Prompt tokens used as context: the last 6 if they end with a whole character, else more, up to 24."""


class IncrementalDetokenizer:
    """Decodes one sequence token by token; a character split over tokens is returned once it is whole.

    Args:
        tokenizer: of the model.
        context: the prompt; its last tokens decide whether the first word starts with a space.
        skipped: tokens that are left out, such as end of text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skipped: Container[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._shown = self._end_of(context)
        self._pending: list[int] = []
        self._stream = DecodeStream(list(self._shown), skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that it completes, which may be empty."""
        if token_id in self._skipped:  # else the stream would keep it and decode it with every later token
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # tokenizers knows no other class
            if "Invalid prefix" not in str(error):
                raise
            # As in flush: with this byte the bytes before it, whose text was returned, make no characters any more.
            text = self._decode(self._pending)
            self._stream = DecodeStream(list(self._pending), skip_special_tokens=False)
        if text is None:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the rest at the end: incomplete characters, as replacement characters."""
        if not self._pending:
            return ""
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._pending)
        # A byte that makes no character also changes the text of the bytes before it, which was returned already.
        text = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        self._pending = []
        return text

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt for a stream to begin with; none if their text ends with U+FFFD.

        The stream would take such text for half a character, and return all of it with the first token. Some byte
        tokens make characters only together with those before them.
        """
        least, most = (min(tokens, len(context)) for tokens in _CONTEXT_TOKENS)
        for tokens in range(least, most + 1):
            end = [token_id for token_id in context[len(context) - tokens :] if token_id not in self._skipped]
            if not self._decode(end).endswith("\ufffd"):
                return end
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopScanner:
    """Finds stop strings in text that arrives in pieces, and holds back text that may become one.

    Args:
        stops: the stop strings, none of them empty.
        include: whether a stop string that is found stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(map(_StopString, stops))
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text.

        Args:
            text: new text.
            may_stop: whether stop strings that end in it count.

        Returns:
            The text that is safe to send, and the stop string that ended it, if any. Of several in the same text the
            one that starts first counts, of those the longest. After a match nothing more may be pushed.
        """
        held, text = len(self._held), self._held + text
        if may_stop:
            found = [(at, -len(each.text), each.text) for each in self._stops if (at := each.find(text, held)) >= 0]
            if found:
                at, _, stop = min(found)
                self._held = ""
                return text[: at + len(stop) if self._include else at], stop
        for each in self._stops:
            each.advance(text[held:])
        keep = max((each.matched for each in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def release(self) -> str:
        """Return the text held back, at the end."""
        text, self._held = self._held, ""
        return text


class _StopString:
    """A stop string, and the length of its prefix that the text so far ends with.

    A character of text takes a few steps on average, however long both are: D. Knuth, J. Morris and V. Pratt, "Fast
    Pattern Matching in Strings", SIAM Journal on Computing 6 (1977). The table is built only as far as needed.

    Args:
        text: not empty.

    Attributes:
        text: the stop string.
        matched: length of its longest proper prefix that the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0]  # at i: length of the longest proper prefix of text[: i + 1] that is also its suffix

    def find(self, text: str, ends_after: int) -> int:
        """Return the first position in ``text`` at which it ends after ``ends_after`` characters; -1 if none."""
        return text.find(self.text, max(0, ends_after - len(self.text) + 1))

    def advance(self, letters: str) -> None:
        """Add the next characters of the text."""
        if not self.matched and self.text[0] not in letters:
            return
        for letter in letters:
            self.matched = self._next_match(self.matched, letter)
            if self.matched > len(self._borders):
                self._borders.append(self._next_match(self._borders[-1], letter))
            if self.matched == len(self.text):
                self.matched = self._borders[-1]

    def _next_match(self, matched: int, letter: str) -> int:
        """Return the length of the prefix matched after ``letter``, if ``matched`` characters matched before it."""
        while matched and self.text[matched] != letter:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == letter)


_PIECE = 2**16
"""Characters of long text that are tokenized at once."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A byte token in SentencePiece vocabularies."""


class TokenText(NamedTuple):
    r"""What a token adds to a text.

    Attributes:
        text: with the space that it begins with. What is no whole character is written as OpenAI does it,
            ``bytes:\xe2\x80``.
        utf8: the bytes that it stands for, also where they are part of a character.
    """

    text: str
    utf8: tuple[int, ...]


class TextProcessor:
    """Tokenizer and chat template.

    Args:
        tokenizer: of the model.
        template: None if the model has no chat template.

    Attributes:
        origin: the arguments of :meth:`read`, if it was read.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.origin: tuple[Path, str] | None = None
        self._bound = TokenLowerBound(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tokens: dict[int, TokenText] = {}

    @classmethod
    def read(cls, folder: Path, chat_template: str = "") -> "TextProcessor":
        """Read ``tokenizer.json`` and the chat template of a model folder.

        Raises:
            TemplateError: the template is missing or broken.
            FileNotFoundError: the folder has no ``tokenizer.json``.
            ModelConfigError: one of the files cannot be read.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: the server needs a model folder with a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers knows no other class
            raise ModelConfigError(f"{file}: cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        texts = cls(tokenizer, read_chat_template(folder, chat_template))
        texts.origin = folder, chat_template
        return texts

    async def encode(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        limits: ModelLimits | None = None,
    ) -> list[list[int]]:
        """Return the token ids of every prompt; prompts of token ids are returned as they are.

        Args:
            prompts: text or token ids.
            add_special_tokens: add the tokens that begin or end a text of this model.
            limits: of the model, for prompts of requests; None accepts text of any length.

        Raises:
            ApiError: 400 for text that exceeds the limits however it is tokenized.
        """

        def run() -> list[list[int]]:
            return [
                self.token_ids(prompt, add_special_tokens=add_special_tokens, limits=limits, param="prompt")
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        return await off_the_loop(run, sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))

    def token_ids(
        self, text: str, *, add_special_tokens: bool, limits: ModelLimits | None = None, param: str = ""
    ) -> list[int]:
        """Return the token ids of one text; arguments and errors as of :meth:`encode`, errors name ``param``."""
        if limits is not None:
            check_text_length(self.fewest_tokens(text, limits.max_model_len), limits, param)
        # The call for a single text holds the GIL until it is done, and would block every stream.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def fewest_tokens(self, text: str, most: int) -> int:
        """Return a number of tokens that ``text`` has at least, which is above ``most`` for text that is far longer.

        Long text is tokenized in pieces first: tokens take some hundred bytes each until they are ids.
        """
        fewest, counted = self._bound.lower_bound(text), 0
        if fewest <= most and len(text) > max(_PIECE, 4 * most):
            for start in range(0, len(text), _PIECE):
                (encoding,) = self.tokenizer.encode_batch_fast([text[start : start + _PIECE]], add_special_tokens=False)
                counted += len(encoding)
                if counted > 2 * most:  # to put the pieces together does not halve it
                    return counted // 2
        return fewest

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``."""
        (text,) = self.tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Return an incremental detokenizer for the answer to the prompt ``context``."""
        return IncrementalDetokenizer(self.tokenizer, context, self._special if skip_special_tokens else ())

    def token(self, token_id: int) -> TokenText:
        """Return what a token adds to a text; results are cached."""
        known = self._tokens.get(token_id)
        if known is None:
            utf8 = self._utf8(token_id)
            try:
                text = utf8.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
            known = self._tokens[token_id] = TokenText(text, tuple(utf8))
        return known

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token is one of those that ``skip_special_tokens`` leaves out."""
        return token_id in self._special

    def _utf8(self, token_id: int) -> bytes:
        text = self.decode([token_id])
        if token_id in self._special:
            return text.encode()
        entry = self.tokenizer.id_to_token(token_id) or ""
        if "\ufffd" in text and (byte := _BYTE_TOKEN.fullmatch(entry)):
            return bytes.fromhex(byte[1])
        if "\ufffd" in text and all(letter in _BYTE_OF_LETTER for letter in entry):
            return bytes(map(_BYTE_OF_LETTER.__getitem__, entry))
        # Decoders of SentencePiece take the space away that a text begins with, and leave it further on.
        twice = self.decode([token_id, token_id])
        return (twice[len(text) :] if twice.startswith(text) else text).encode()

    async def decode_all(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Return the text of every prompt; prompts of text are returned as they are."""

        def run() -> list[str]:
            return [prompt if isinstance(prompt, str) else self.decode(prompt) for prompt in prompts]

        return await off_the_loop(run, sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's entry for every token."""
        return await off_the_loop(lambda: [self.tokenizer.id_to_token(token) for token in token_ids], len(token_ids))

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        extra: dict[str, Any],
        continue_final_message: bool = False,
        limits: ModelLimits | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Args:
            messages: at least one.
            add_generation_prompt: end with the opening of an answer.
            extra: further variables of the template.
            continue_final_message: end with the text of the last message instead.
            limits: as of :meth:`encode`.

        Raises:
            ApiError: 400 if the model has no template, the template refuses the messages, or they exceed the limits;
                501 for content other than text.
        """

        def run() -> list[int]:
            prompt = self.chat_prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                extra=extra,
                continue_final_message=continue_final_message,
            )
            return self.token_ids(prompt, add_special_tokens=False, limits=limits, param="messages")

        return await off_the_loop(run, _length(messages, extra))

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        extra: dict[str, Any],
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation; arguments and errors as of :meth:`encode_chat`."""
        if self.template is None:
            raise bad_request("This model has no chat template; use /v1/completions or start with --chat-template.")
        plain = [_plain(message, index) for index, message in enumerate(messages)]
        try:
            if continue_final_message:
                return self.template.render_open(plain, extra=extra)
            return self.template.render(plain, add_generation_prompt=add_generation_prompt, extra=extra)
        except TemplateError as error:
            raise bad_request(str(error)[:1].upper() + str(error)[1:], "messages") from error


def _letters_of_bytes() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies, which follow GPT-2.

    Printable letters of Latin-1 stand for themselves, letters from U+0100 on for the other bytes in order.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters_of_bytes()


def _length(messages: Sequence[ChatMessage], extra: dict[str, Any]) -> int:
    """Return the size of a template's input in characters and values; counting stops once it is large."""
    length, left = 0, [extra, *messages]
    while left and length < THREAD_LENGTH:
        part: Any = left.pop()
        match part:
            case ChatMessage():
                left += (part.role, part.content, part.model_extra)
            case TextPart():
                left.append(part.text)
            case dict():
                left += (*part, *part.values())
            case list():
                left += part
        length += len(part) if isinstance(part, str) else 1
    return length


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return a message for the template: content as one string, text parts joined by newlines as in vLLM.

    Null fields, which clients send back with earlier answers, are left out, since templates test whether a field is
    defined.
    """
    plain = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    plain["role"] = message.role
    if plain.pop("tool_calls", None):
        raise not_supported("Tool calls are not supported yet.", "messages")
    if isinstance(message.content, list):
        for part in message.content:
            if part.type not in ("text", "input_text"):
                raise not_supported(f"messages.{index}: content of type {part.type!r} is not supported.", "messages")
            if part.text is None:
                raise bad_request(f"messages.{index}: a text part has no text.", "messages")
    plain["content"] = content_text(message)
    return plain


def content_text(message: ChatMessage) -> str:
    """Return a message's content as one string."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the model's own sampling defaults; empty if it has none."""
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}
