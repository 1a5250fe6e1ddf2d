"""The text side of one model: prompts to tokens, tokens to strings."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from lorikeet.models.checkpoint import ModelConfigError, read_object
from lorikeet.server.chat_template import ChatTemplate, TemplateError, read_chat_template
from lorikeet.server.errors import bad_request, not_supported
from lorikeet.server.protocol import ChatMessage, TextPart
from lorikeet.server.sampling import ModelLimits, check_text
from lorikeet.server.text import TextStream
from lorikeet.server.threads import THREAD_LENGTH, off_the_loop
from lorikeet.server.token_bound import TokenBound

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A byte in vocabularies of SentencePiece."""


class TokenText(NamedTuple):
    """A token by itself.

    Attributes:
        text: U+FFFD for what is no whole character.
        utf8: the bytes that it stands for, also where they are part of a character.
    """

    text: str
    utf8: tuple[int, ...]


class Texts:
    """Tokenizer and chat template.

    Args:
        tokenizer: the model's.
        template: None if the model has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._bound = TokenBound(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tokens: dict[int, TokenText] = {}

    @classmethod
    def read(cls, folder: Path, chat_template: str = "") -> "Texts":
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
        return cls(tokenizer, read_chat_template(folder, chat_template))

    async def encode(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        limits: ModelLimits | None = None,
    ) -> list[list[int]]:
        """Return the token ids of every prompt; those that are token ids already stay as they are.

        Args:
            prompts: text or token ids.
            add_special_tokens: those that begin or end a text of this model.
            limits: of the model, for text that is to be answered; None takes text of any length.

        Raises:
            ApiError: 400 for text that cannot be within the limits, however it is tokenized.
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
        """Return the token ids of one text; arguments and errors as of :meth:`encode`, which errors name ``param``."""
        if limits is not None:
            check_text(self._bound.fewest(text), limits, param)
        # Calls for single texts would keep Python to themselves until they are done, and every stream would wait.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``, all at once."""
        (text,) = self.tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """Return what turns the tokens that answer ``context`` into text while they arrive."""
        return TextStream(self.tokenizer, context, self._special if skip_special_tokens else ())

    def token(self, token_id: int) -> TokenText:
        """Return a token by itself; what was asked for once is remembered."""
        known = self._tokens.get(token_id)
        if known is None:
            text = self.decode([token_id])
            known = self._tokens[token_id] = TokenText(text, tuple(self._utf8(token_id, text)))
        return known

    def _utf8(self, token_id: int, text: str) -> bytes:
        entry = self.tokenizer.id_to_token(token_id) or ""
        if "\ufffd" in text and (byte := _BYTE_TOKEN.fullmatch(entry)):
            return bytes.fromhex(byte[1])
        if "\ufffd" in text and all(letter in _BYTES for letter in entry):
            return bytes(map(_BYTES.__getitem__, entry))
        return text.encode()

    async def decode_all(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Return the text of every prompt; those that are text already stay as they are."""

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
            add_generation_prompt: end with what opens an answer.
            extra: further variables of the template.
            continue_final_message: end with the text of the last message instead.
            limits: as of :meth:`encode`.

        Raises:
            ApiError: 400 if the model has no template, it refuses the messages, or they cannot be within the limits,
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
    """Return the letters that vocabularies of bytes write them with, as GPT-2 began it.

    Printable letters of Latin-1 stand for themselves, the letters from U+0100 on for the other bytes in their order.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _letters_of_bytes()


def _length(messages: Sequence[ChatMessage], extra: dict[str, Any]) -> int:
    """Return the size of all that a template sees, in characters and values; once it is large, no more is counted."""
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
    """A message as templates expect it: content as one string, text parts joined by newlines as vLLM does.

    Fields that say nothing, which clients write into answers that they send back, are left out: to templates a field
    that is there means something.
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
        plain["content"] = "\n".join(part.text or "" for part in message.content)
    else:
        plain["content"] = message.content or ""
    return plain


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the model's own sampling defaults; empty if it has none."""
    file = folder / "generation_config.json"
    return read_object(file) if file.is_file() else {}
