"""Tokens to text while they arrive, and stop strings in that text."""

from collections.abc import Container, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = (6, 24)
"""How many of a prompt's last tokens are looked at: so many if they end with a whole character, else up to so many."""


class TextStream:
    """Decodes one sequence token by token; characters split over tokens come out once they are whole.

    Args:
        tokenizer: the model's.
        context: the prompt; its last tokens decide whether the first word starts with a space.
        unseen: tokens that are left out, such as end of text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), unseen: Container[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._unseen = unseen
        self._shown = self._end_of(context)
        self._pending: list[int] = []
        self._stream = DecodeStream(list(self._shown), skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        """Take one token in; return the text it completes, often all of its own, sometimes none."""
        if token_id in self._unseen:  # else the stream would keep it, and decode it again with every one that follows
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # tokenizers knows no other class
            if "Invalid prefix" not in str(error):
                raise
            # See flush: with this byte those before it, which have been shown, make no characters any more.
            text = self._decode(self._pending)
            self._stream = DecodeStream(list(self._pending), skip_special_tokens=False)
        if text is None:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return what is left at the end: characters that never became whole, as replacement characters."""
        if not self._pending:
            return ""
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._pending)
        # A byte that makes no character spoils those of the bytes before it, too, which have been shown.
        text = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        self._pending = []
        return text

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """Return the end of a prompt for a stream to begin with; nothing if its text ends with U+FFFD.

        With that the stream would take the text for half a character, and show all of it with the first token. Of
        bytes, some make characters only together with those before them.
        """
        least, most = (min(tokens, len(context)) for tokens in _CONTEXT_TOKENS)
        for tokens in range(least, most + 1):
            end = [token_id for token_id in context[len(context) - tokens :] if token_id not in self._unseen]
            if not self._decode(end).endswith("\ufffd"):
                return end
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopScanner:
    """Finds stop strings in text that arrives in pieces, holding back what may become one.

    Args:
        stops: the stop strings, none of them empty.
        include: whether the one that is found stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(map(_Stop, stops))
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take text in.

        Args:
            text: what has come.
            may_stop: whether stop strings that end in it count.

        Returns:
            The text that may be shown, and the stop string that ended it. Of several in the same text, the
            one that starts first counts, of those the longest; after a match nothing more may be pushed.
        """
        held, text = len(self._held), self._held + text
        if may_stop:
            found = [(at, -len(each.text), each.text) for each in self._stops if (at := each.find(text, held)) >= 0]
            if found:
                at, _, stop = min(found)
                self._held = ""
                return text[: at + len(stop) if self._include else at], stop
        for each in self._stops:
            each.follow(text[held:])
        keep = max((each.begun for each in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def release(self) -> str:
        """Return the text held back; no stop string came of it."""
        text, self._held = self._held, ""
        return text


class _Stop:
    """A stop string, and how much of it the text so far ends with.

    However long both are, a letter of text takes a few steps on average: D. Knuth, J. Morris and V. Pratt, "Fast
    Pattern Matching in Strings", SIAM Journal on Computing 6 (1977), its table made as far as the text has come.

    Args:
        text: not empty.

    Attributes:
        text: see above.
        begun: letters at its beginning that the text ends with, all of them left out.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        self._borders = [0]  # at i: letters that text[: i + 1] both begins and ends with, all of them left out

    def find(self, text: str, ends_after: int) -> int:
        """Return where it is first in a text, to end after so many letters or more; -1 if it is not."""
        return text.find(self.text, max(0, ends_after - len(self.text) + 1))

    def follow(self, letters: str) -> None:
        """Take in what the text goes on with."""
        if not self.begun and self.text[0] not in letters:
            return
        for letter in letters:
            self.begun = self._longer(self.begun, letter)
            if self.begun > len(self._borders):
                self._borders.append(self._longer(self._borders[-1], letter))
            if self.begun == len(self.text):
                self.begun = self._borders[-1]

    def _longer(self, begun: int, letter: str) -> int:
        """Return how much of it a text ends with that ended with ``begun`` letters of it before ``letter`` came."""
        while begun and self.text[begun] != letter:
            begun = self._borders[begun - 1]
        return begun + (self.text[begun] == letter)
