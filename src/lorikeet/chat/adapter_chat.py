"""Fits the chat settings of an adapter's folder to the base model, and applies them."""

from functools import lru_cache, partial

import msgspec

from lorikeet.adapters.chat import AdapterChat, AddedToken
from lorikeet.adapters.errors import AdapterError
from lorikeet.chat.added_tokens import differing_tokens, with_tokens
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.reasoning import REASONING_FORMATS
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.chat.tool_parsers import TOOL_FORMATS
from lorikeet.http.threads import in_daemon_thread

_MAX_TOKENIZERS = 8
"""Number of tokenizers with added tokens that are kept; adapters with the same tokens share one."""


class AdapterChats:
    """Makes the chat settings of adapters on first use, and keeps them. Thread-safe.

    Args:
        base: the base model's settings.
    """

    def __init__(self, base: ChatSettings) -> None:
        self.base = base
        self._texts = lru_cache(_MAX_TOKENIZERS)(self._make_texts)

    def fit(self, chat: AdapterChat) -> AdapterChat:
        """Return the settings that differ from the base model's; added tokens take time.

        Raises:
            AdapterError: a parser is unknown, or a token cannot be served.
        """
        for key, name, known in (
            ("tool_call_parser", chat.tool_call_parser, TOOL_FORMATS),
            ("reasoning_parser", chat.reasoning_parser, REASONING_FORMATS),
        ):
            if name and name not in known:
                raise AdapterError(f"{key}: {name[:100]!r} must be one of {', '.join(known)}")
        base = self.base
        added = self._new_tokens(chat)
        if added:
            self._texts(added)
        template = base.text_processor.template
        is_own = bool(chat.chat_template) and (
            template is None
            or chat.chat_template.strip() != template.source.strip()
            or chat.other_templates != {name: other.source for name, other in template.others.items()}
            or bool(added)
            or any(
                key in template.source and template.special_tokens.get(key) != text
                for key, text in chat.special_tokens.items()
            )
        )
        return msgspec.structs.replace(
            chat,
            chat_template=chat.chat_template if is_own else "",
            knows_tools=is_own and chat.knows_tools,
            other_templates=chat.other_templates if is_own else {},
            special_tokens=chat.special_tokens if is_own else {},
            pad_token="",
            eos_token="",
            added_tokens=added,
            eos_token_ids=self._end_tokens(chat),
        )

    async def settings_of(self, chat: AdapterChat) -> ChatSettings:
        """Return the settings of an adapter like :meth:`settings`, but make its tokenizer in a thread.

        A new tokenizer takes up to a second and is kept.
        """
        if not chat.added_tokens:
            return self.settings(chat)
        return await in_daemon_thread(partial(self.settings, chat))

    def settings(self, chat: AdapterChat) -> ChatSettings:
        """Return the settings of an adapter, given its differences from the base model."""
        base = self.base
        if chat == AdapterChat():
            return base
        given = {
            field.name: value
            for field in msgspec.structs.fields(chat.generation)
            if (value := getattr(chat.generation, field.name)) is not None
        }
        limits = msgspec.structs.replace(
            base.limits,
            defaults=msgspec.structs.replace(base.limits.defaults, **given),
            eos_token_ids=tuple(dict.fromkeys((*base.limits.eos_token_ids, *chat.eos_token_ids))),
        )
        return ChatSettings(
            self._texts(chat.added_tokens) if chat.added_tokens else base.text_processor,
            limits,
            chat.system_prompt or base.system_prompt,
            chat.tool_call_parser or ("" if chat.chat_template else base.tool_parser),
            chat.reasoning_parser or base.reasoning_parser,
            chat if chat.chat_template or chat.added_tokens else None,
        )

    def _new_tokens(self, chat: AdapterChat) -> tuple[AddedToken, ...]:
        """Return the tokens that the base tokenizer lacks or treats differently.

        Raises:
            AdapterError: a token has no embedding.
        """
        vocabulary = self.base.limits.vocabulary
        new = []
        for token in differing_tokens(self.base.text_processor.tokenizer, chat.added_tokens):
            if token.id < vocabulary:
                new.append(token)
            elif token.content != chat.pad_token or token.content == chat.eos_token:
                raise AdapterError(
                    f"its tokenizer adds {token.content[:100]!r} as token {token.id}, but the base model has "
                    f"embeddings only for tokens below {vocabulary}"
                )
        return tuple(new)

    def _end_tokens(self, chat: AdapterChat) -> tuple[int, ...]:
        """Return the tokens that end answers, besides the base model's end tokens."""
        named = next((token.id for token in chat.added_tokens if token.content == chat.eos_token), None)
        if named is None and chat.eos_token:
            named = self.base.text_processor.tokenizer.token_to_id(chat.eos_token)
        found = dict.fromkeys((*chat.eos_token_ids, *(() if named is None else (named,))))
        base = self.base.limits
        return tuple(each for each in found if each < base.vocabulary and each not in base.eos_token_ids)

    def _make_texts(self, added: tuple[AddedToken, ...]) -> TextProcessor:
        return TextProcessor(with_tokens(self.base.text_processor.tokenizer, added), self.base.text_processor.template)
