"""Turns messages and prompts into token ids, and token ids into text as they arrive.

A lower bound on its tokens refuses text that is far too long before it is tokenized. The bound is known for byte-level
BPE and for BPE with byte fallback; for other tokenizers it is 0.
"""

import copy
import json
import math
import re
from collections.abc import Container, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from lorikeet.chat.added_tokens import add_named_tokens
from lorikeet.chat.conversation import plain_message, with_calls_as_text, with_instructions, with_system_prompt
from lorikeet.chat.image_parts import images_of
from lorikeet.chat.protocol import ChatMessage, ContentPart, Tool, ToolCall
from lorikeet.chat.sampling import ModelLimits, check_text_length
from lorikeet.chat.tool_parsers import TOOL_FORMATS, format_of_template
from lorikeet.chat.tool_parsers.base import ToolFormat
from lorikeet.core.chat_template import (
    DEFAULT,
    IMAGE_MARK,
    TEMPLATES_FILE,
    ChatTemplate,
    TemplateError,
    default_and_others,
    special_tokens,
    template_files,
    templates_in,
)
from lorikeet.core.images import ImageTokens
from lorikeet.http.errors import bad_request
from lorikeet.http.threads import THREAD_LENGTH, off_the_loop
from lorikeet.models.json_section import ModelConfigError, read_json_object


def read_chat_template(folder: Path, override: str = "") -> ChatTemplate | None:
    """Read the template of a model folder.

    Args:
        folder: the model's folder; see ``core.chat_template`` for the files with templates.
        override: file to use instead, or name of one of the folder's templates.

    Returns:
        The template; None for a model without one, such as a base model.

    Raises:
        TemplateError: the file is missing, or the template does not compile.
        ModelConfigError: ``tokenizer_config.json`` cannot be read.
    """
    config = _tokenizer_config(folder)
    if override and Path(override).is_file():
        return ChatTemplate(Path(override).read_text(), special_tokens(config))
    templates = {name: path.read_text() for name, path in template_files(folder).items()}
    if not templates and (folder / TEMPLATES_FILE).is_file():
        templates = templates_in(read_json_object(folder / TEMPLATES_FILE))
    templates = templates or templates_in(config)
    if override and override not in templates:
        named = f", and the model has no template of this name, only {', '.join(templates)}" if templates else ""
        raise TemplateError(f"chat template {override}: no such file{named}")
    source, others = default_and_others(templates, override or DEFAULT)
    return ChatTemplate(source, special_tokens(config), others) if source else None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json`` with the tokens of ``special_tokens_map.json``, which older folders have."""
    files = (folder / name for name in ("special_tokens_map.json", "tokenizer_config.json"))
    config: dict[str, Any] = {}
    for file in files:
        config |= read_json_object(file) if file.is_file() else {}
    return config


_MAX_COMPOSED = 4
"""Most characters that NFC composes into one: the length of the longest canonical decomposition."""


class TokenLowerBound:
    """Computes a lower bound on the number of tokens of a text.

    Args:
        tokenizer: the tokenizer, without truncation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        added = spec["added_tokens"]
        composed = _max_composed(_steps(spec["normalizer"], "normalizers"))
        dropped = _dropped(spec["model"], _steps(spec["pre_tokenizer"], "pretokenizers"))
        # A token that strips the whitespace beside it may cover any amount of whitespace.
        takes_space = any(token["lstrip"] or token["rstrip"] for token in added)
        self._dropped = ""
        self._max_characters = math.inf
        """Most characters of a text that one token covers."""
        if not takes_space and composed is not None and dropped is not None:
            longest = max(map(len, (*spec["model"]["vocab"], *(token["content"] for token in added))))
            self._dropped = dropped
            self._max_characters = longest * composed

    def lower_bound(self, text: str) -> int:
        """Return a lower bound on the number of tokens of ``text``."""
        characters = len(text) - sum(map(text.count, self._dropped))
        return math.ceil(characters / self._max_characters)


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, in order."""
    if part is None:
        return []
    return [step for each in part[key] for step in _steps(each, key)] if part["type"] == "Sequence" else [part]


def _max_composed(normalizers: list[dict[str, Any]]) -> int | None:
    """Return the most characters that may become one; None if unknown."""
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
    """Return the characters that tokens may drop; None if unknown."""
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
    # The last UTF-8 byte of every character is the last byte of one of these tokens.
    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    last_bytes = {chr(code): bytes_of(chr(code))[0][0][-1] for code in range(0xC0)}
    lacking = [character for character, byte in last_bytes.items() if byte not in model["vocab"]]
    return "".join(lacking) if all(map(str.isascii, lacking)) else None


_CONTEXT_TOKENS = (6, 24)
"""Numbers of prompt tokens used as context: the last 6 if they end with a whole character, else up to 24."""


class IncrementalDetokenizer:
    """Decodes one sequence token by token, and returns a character split over tokens once it is whole.

    Args:
        tokenizer: the model's tokenizer.
        context: the prompt, whose last tokens decide whether the first word starts with a space.
        skipped: tokens that the text leaves out, such as end of text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skipped: Container[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._shown = self._end_of(context)
        self._pending: list[int] = []
        self._stream = DecodeStream(list(self._shown), skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that it completes, possibly empty."""
        if token_id in self._skipped:  # The stream would decode it with every later token.
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # The library raises no narrower class.
            if "Invalid prefix" not in str(error):
                raise
            # This byte keeps the bytes before it, whose text was returned, from forming characters; see flush.
            text = self._decode(self._pending)
            self._stream = DecodeStream(list(self._pending), skip_special_tokens=False)
        if text is None:
            return ""
        self._shown = self._pending
        self._pending = []
        return text

    def flush(self) -> str:
        """Return the rest at the end of the text: replacement characters for incomplete ones."""
        if not self._pending:
            return ""
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._pending)
        # A byte that forms no character also changes the text of the bytes before it, which was already returned.
        text = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        self._pending = []
        return text

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt as the start of a stream; none if their text ends with U+FFFD.

        The stream would treat such text as half a character, and return all of it with the first token. Some byte
        tokens form characters only together with the tokens before them.
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
        stops: the stop strings, which must not be empty.
        include: whether a found stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(map(_StopString, stops))
        self._include = include
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """Begin and end of each hidden part of the text held back."""

    def push(self, text: str, *, may_stop: bool = True, is_hidden: bool = False) -> tuple[str, str | None]:
        """Add text; return the text that is safe to send, and the stop string that ended it.

        Args:
            text: new text.
            may_stop: whether stop strings that end in the new text count.
            is_hidden: whether the new text is searched but not shown, like the text of a special token.

        Returns:
            The text that is safe to send, and the stop string or None. The stop string that starts first counts, and
            the longest of several that start together. Nothing more may be pushed after a match.
        """
        held = len(self._held)
        text = self._held + text
        if is_hidden:
            self._hidden.append((held, len(text)))
        if may_stop:
            found = [(at, -len(each.text), each.text) for each in self._stops if (at := each.find(text, held)) >= 0]
            if found:
                at, _, stop = min(found)
                self._held = ""
                shown = self._shown(text[:at])
                return shown + stop if self._include else shown, stop
        for each in self._stops:
            each.advance(text[held:])
        keep = max((each.matched for each in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return self._shown(text[: len(text) - keep]), None

    def release(self) -> str:
        """Return the text held back, at the end of the text."""
        text = self._held
        self._held = ""
        return self._shown(text)

    def _shown(self, text: str) -> str:
        """Return the beginning of the text held back without hidden parts, and shift the places of the rest."""
        if not self._hidden:
            return text
        size = len(text)
        for begin, end in reversed(self._hidden):
            text = text[: min(begin, size)] + text[min(end, size) :]
        self._hidden = [(max(0, begin - size), end - size) for begin, end in self._hidden if end > size]
        return text


class _StopString:
    """Stop string with the length of its prefix that ends the text so far.

    A character of text takes a few steps on average, however long both are: D. Knuth, J. Morris and V. Pratt, "Fast
    Pattern Matching in Strings", SIAM Journal on Computing 6 (1977). The table is built only as far as needed.

    Args:
        text: the stop string, which must not be empty.

    Attributes:
        text: the stop string.
        matched: length of its longest proper prefix that ends the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0]  # Entry i: length of the longest proper prefix of text[: i + 1] that is its suffix.

    def find(self, text: str, ends_after: int) -> int:
        """Find the stop string in ``text``. Return the first position that ends after ``ends_after``, or -1."""
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
        """Return the length of the prefix matched after ``letter``, given ``matched`` characters before it."""
        while matched and self.text[matched] != letter:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == letter)


_PIECE = 2**16
"""Number of characters of a long text that are tokenized at once."""
DEFAULT_TOOL_FORMAT = TOOL_FORMATS["hermes"]
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""Matches a byte token in SentencePiece vocabularies."""


class TokenText(NamedTuple):
    r"""Text and bytes that a token adds to a text.

    Attributes:
        text: the text with its leading space. Parts of a character have OpenAI's form, ``bytes:\xe2\x80``.
        utf8: the bytes of the token, even if they are part of a character.
    """

    text: str
    utf8: tuple[int, ...]


class PromptStyle(NamedTuple):
    """Style in which messages become a prompt.

    Attributes:
        add_generation_prompt: whether the prompt ends with the opening of an answer.
        continue_final_message: whether the prompt ends with the text of the last message instead.
        extra: further variables of the template.
        tools: tools that the model may call.
        system_prompt: the system prompt of conversations without one.
        tool_parser: name of the format of tool calls; empty for the template's format.
        template: name of one of the model's templates; empty for the one that fits.
        image_tokens: the texts that stand for images; None for a model that takes no images.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] = {}
    tools: Sequence[Tool] = ()
    system_prompt: str = ""
    tool_parser: str = ""
    template: str = ""
    image_tokens: ImageTokens | None = None


class TextProcessor:
    """Converts text and token ids by a model's tokenizer and chat template.

    Args:
        tokenizer: the model's tokenizer.
        template: the chat template; None for a model without one.

    Attributes:
        origin: the arguments of :meth:`read`; None if the processor was made in another way.
        eos_token_id: the token that ends texts; None if the files name none.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.origin: tuple[Path, str] | None = None
        self.eos_token_id: int | None = None
        self._bound = TokenLowerBound(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tokens: dict[int, TokenText] = {}

    def with_template(self, template: ChatTemplate | None) -> "TextProcessor":
        """Return a processor with the same tokenizer and another template."""
        other = copy.copy(self)
        other.template = template
        other.origin = None
        return other

    @classmethod
    def read(cls, folder: Path, chat_template: str = "") -> "TextProcessor":
        """Read ``tokenizer.json`` and the chat template of a model folder.

        Raises:
            TemplateError: the template is missing or broken.
            FileNotFoundError: the folder has no ``tokenizer.json``.
            ModelConfigError: a file cannot be read.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: the server needs a model folder with a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises no narrower class.
            raise ModelConfigError(f"{file}: cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _tokenizer_config(folder)
        named = special_tokens(config)
        add_named_tokens(tokenizer, config, tuple(named.values()))
        texts = cls(tokenizer, read_chat_template(folder, chat_template))
        texts.origin = folder, chat_template
        texts.eos_token_id = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
        return texts

    async def encode(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        limits: ModelLimits | None = None,
    ) -> list[list[int]]:
        """Return the token ids of every prompt; prompts of token ids stay unchanged.

        Args:
            prompts: text or token ids.
            add_special_tokens: whether to add the tokens that begin or end a text of this model.
            limits: the model's limits, for prompts of requests; None accepts text of any length.

        Raises:
            ApiError: 400, a text certainly exceeds the limits.
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
        """Return the token ids of one text; see :meth:`encode` for arguments and errors, which name ``param``."""
        if limits is not None:
            check_text_length(self.fewest_tokens(text, limits.max_model_len), limits, param)
        # The call for a single text keeps the GIL until its end, and would block every stream.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def pair_token_ids(
        self, pair: tuple[str, str], *, add_special_tokens: bool, limits: ModelLimits | None = None, param: str = ""
    ) -> list[int]:
        """Return the token ids of a pair of texts, joined by the tokenizer."""
        if limits is not None:
            check_text_length(sum(self.fewest_tokens(each, limits.max_model_len) for each in pair), limits, param)
        (encoding,) = self.tokenizer.encode_batch_fast([pair], add_special_tokens=add_special_tokens)
        return encoding.ids

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of words that an answer must not contain.

        Each word counts alone and, if a space before it changes only the first token, after a space, as in vLLM.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            plain = self.token_ids(word.lstrip(), add_special_tokens=False)
            spaced = self.token_ids(f" {word.lstrip()}", add_special_tokens=False)
            found += [tuple(plain)] if plain else []
            if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(tuple(spaced))
        return tuple(found)

    def fewest_tokens(self, text: str, most: int) -> int:
        """Return a lower bound on the tokens of ``text``, which exceeds ``most`` for text that is far longer.

        Long text is tokenized in pieces first, since each token takes some hundred bytes until it is an id.
        """
        fewest = self._bound.lower_bound(text)
        counted = 0
        if fewest <= most and len(text) > max(_PIECE, 4 * most):
            for start in range(0, len(text), _PIECE):
                (encoding,) = self.tokenizer.encode_batch_fast([text[start : start + _PIECE]], add_special_tokens=False)
                counted += len(encoding)
                if counted > 2 * most:  # Joining the pieces cannot halve the count.
                    return counted // 2
        return fewest

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        (text,) = self.tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def stream(
        self, context: Sequence[int], *, skip_special_tokens: bool = True, kept: Set[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """Return an incremental detokenizer for the answer to the prompt ``context``.

        Args:
            context: token ids of the prompt.
            skip_special_tokens: whether to leave out tokens such as end of text.
            kept: special tokens that always stay in the text.
        """
        return IncrementalDetokenizer(self.tokenizer, context, self._special - kept if skip_special_tokens else ())

    def special_tokens_in(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens whose text occurs in one of the texts, with their text."""
        decoder = {token_id: self.tokenizer.id_to_token(token_id) or "" for token_id in self._special} if texts else {}
        return {token_id: name for token_id, name in decoder.items() if any(name in text for text in texts)}

    def special_token_id(self, text: str) -> int | None:
        """Return the id of a special token; None for other text."""
        token_id = self.tokenizer.token_to_id(text)
        return token_id if token_id in self._special else None

    def added_token_id(self, text: str) -> int | None:
        """Return the id of an added token, special or not; None for other text."""
        token_id = self.tokenizer.token_to_id(text)
        return token_id if token_id in self._added else None

    def token(self, token_id: int) -> TokenText:
        """Return the text that a token adds; results are cached."""
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
        """Return whether ``skip_special_tokens`` leaves a token out."""
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
        # Decoders of SentencePiece remove the space at the begin of a text and keep later spaces.
        twice = self.decode([token_id, token_id])
        return (twice[len(text) :] if twice.startswith(text) else text).encode()

    async def decode_all(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Return the text of every prompt; prompts of text stay unchanged."""

        def run() -> list[str]:
            return [prompt if isinstance(prompt, str) else self.decode(prompt) for prompt in prompts]

        return await off_the_loop(run, sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's entry of every token."""
        return await off_the_loop(lambda: [self.tokenizer.id_to_token(token) for token in token_ids], len(token_ids))

    async def encode_chat(
        self, messages: Sequence[ChatMessage], style: PromptStyle, *, limits: ModelLimits | None = None
    ) -> list[int]:
        """Return the token ids of a conversation.

        Args:
            messages: at least one.
            style: style of the prompt.
            limits: the model's limits; see :meth:`encode`.

        Raises:
            ApiError: 400, the model has no template, the template refuses the messages, or they exceed the limits;
                501, the content is not text.
        """

        def run() -> list[int]:
            prompt = self.chat_prompt(messages, style)
            return self.token_ids(prompt, add_special_tokens=False, limits=limits, param="messages")

        return await off_the_loop(run, _length(messages, style))

    async def render_chat(self, messages: Sequence[ChatMessage], style: PromptStyle) -> str:
        """Render a conversation, in a thread if it is long; see :meth:`encode_chat` for arguments and errors."""
        return await off_the_loop(lambda: self.chat_prompt(messages, style), _length(messages, style))

    def chat_prompt(self, messages: Sequence[ChatMessage], style: PromptStyle) -> str:
        """Render a conversation; see :meth:`encode_chat` for arguments and errors."""
        template = self._template_for(style)
        takes_images = style.image_tokens is not None
        plain = [plain_message(message, index, takes_images=takes_images) for index, message in enumerate(messages)]
        plain = with_system_prompt(plain, style.system_prompt)
        tools = [tool.model_dump(exclude_unset=True) for tool in style.tools]
        has_calls = any(message.get("tool_calls") or message["role"] == "tool" for message in plain)
        if has_calls and not template.knows_calls:
            plain = with_calls_as_text(plain, self.tool_format(style.tool_parser) or DEFAULT_TOOL_FORMAT)
        if tools and not template.knows_tools:
            plain = with_instructions(plain, tools, self.tool_format(style.tool_parser) or DEFAULT_TOOL_FORMAT)
        extra = {**style.extra, "tools": tools} if tools else style.extra
        try:
            if style.continue_final_message:
                prompt = template.render_open(plain, extra=extra)
            else:
                prompt = template.render(plain, add_generation_prompt=style.add_generation_prompt, extra=extra)
        except TemplateError as error:
            raise bad_request(str(error)[:1].upper() + str(error)[1:], "messages") from error
        if style.image_tokens is None or not (images := len(images_of(messages))):
            return prompt
        return with_placeholders(prompt, images, style.image_tokens)

    def _template_for(self, style: PromptStyle) -> ChatTemplate:
        """Return the template of a conversation.

        Raises:
            ApiError: 400, the model has no template that takes the request.
        """
        if self.template is None:
            raise bad_request("This model has no chat template; use /v1/completions or start with --chat-template.")
        has_documents = bool(style.extra.get("documents"))
        try:
            template = self.template.choose(name=style.template, tools=bool(style.tools), documents=has_documents)
        except TemplateError as error:
            other = "A template of the request's own is Jinja text, which has braces."
            raise bad_request(f"{str(error)[:1].upper()}{str(error)[1:]}. {other}", "chat_template") from error
        if has_documents and not template.knows_documents:
            why = "The chat template of this model reads no documents; put them into a message."
            raise bad_request(why, "documents")
        if template.leaves_text_out:
            raise bad_request("The chat template of this model drops user messages.", "messages")
        return template

    def tool_format(self, parser: str = "") -> ToolFormat | None:
        """Return the named format of tool calls, else the chat template's; None if the template's is unknown.

        A template without tools gets the tools, and the default format, in a system prompt.
        """
        if self.template is None:
            return tool_format_of("", False, parser)
        template = self.template.choose(tools=True)
        return tool_format_of(template.source, template.knows_tools, parser)


def tool_format_of(template: str, knows_tools: bool, parser: str) -> ToolFormat | None:
    """Return the format of a model's tool calls; see :meth:`TextProcessor.tool_format`."""
    if parser:
        return TOOL_FORMATS[parser]
    return format_of_template(template) if knows_tools else DEFAULT_TOOL_FORMAT


def with_placeholders(prompt: str, images: int, tokens: ImageTokens) -> str:
    """Return a rendered prompt in which one placeholder stands for each image.

    Args:
        prompt: the prompt, in which a template that reads text has left marks instead of placeholders.
        images: number of images.
        tokens: the texts that stand for images.

    Raises:
        ApiError: 400, the template leaves images out, or the text of a message contains a placeholder.
    """
    prompt = prompt.replace(IMAGE_MARK, tokens.placeholder)
    found = prompt.count(tokens.placeholder)
    if found < images:
        raise bad_request("The chat template of this model leaves images out.", "messages")
    is_plain = tokens.embedding == tokens.placeholder or tokens.embedding not in prompt
    if found > images or not is_plain:
        named = tokens.placeholder if found > images else tokens.embedding
        raise bad_request(f"messages: the text contains {named!r}, which stands for an image.", "messages")
    return prompt


def _letters_of_bytes() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies, which follow GPT-2.

    Printable letters of Latin-1 mean their own bytes, and letters from U+0100 on mean the other bytes in order.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters_of_bytes()


def _length(messages: Sequence[ChatMessage], style: PromptStyle) -> int:
    """Return the size of a template's input in characters and values. Counting stops when the size is large."""
    length = 0
    left = [style.extra, *style.tools, *messages]
    while left and length < THREAD_LENGTH:
        part: Any = left.pop()
        match part:
            case ChatMessage():
                left += (part.role, part.content, part.tool_calls, part.model_extra)
            case ToolCall():
                left += (part.function.name, part.function.arguments)
            case Tool():
                left += (part.function.name, part.function.parameters, part.function.model_extra)
            case ContentPart():
                left.append(part.text)
            case dict():
                left += (*part, *part.values())
            case list():
                left += part
        length += len(part) if isinstance(part, str) else 1
    return length


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults of a model's folder; empty for a folder without them."""
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}
