"""Drafts likely next tokens from n-grams in a sequence's tokens and in its adapter's latest answers.

A step computes a draft after a sequence's newest token. The sampled tokens show how many drafted tokens were right
(``SequenceStep.draft``). A token is a function of the logits, the seed and the position, so drafts never change an
answer. See docs/decisions/speculation.md.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.scheduling.state import Sequence

Drafts = Mapping[RequestId, tuple[int, ...]]
"""Drafted tokens, by request."""

_ORDERS = (3, 2, 1)
"""Lengths of the n-grams that are looked up, the longest first."""
_LONGEST_MATCH = 12
"""Largest number of agreeing tokens that counts. Guesses with more agreeing tokens are not right more often."""
_KEPT_TOKENS = 4096
"""Number of indexed tokens of an adapter's latest answers, and of a sequence at its first draft.

Later tokens are added.
"""
_KEPT_ADAPTERS = 64
_KNOWN_ADAPTERS = 4096
"""Number of recently used adapters whose answers and rates are kept.

An adapter's answers take some hundred kilobytes.
"""
_LEAST_CHANCE = 0.5
"""A draft ends before a token with a lower probability, by the rates of earlier guesses."""
_ONCE_ANSWERED = 0.6
"""Factor of the prior rate of a token that was seen only once in an earlier answer, because answers may differ
there."""
_PRIOR = 2.0
"""Weight of the prior rate of a kind of guess, in guesses."""
_FADING = 0.95
_FADING_BY_ANSWER = 0.9
"""Factors by which the counts of a kind of guess fade, at each new guess and after each answer, so that newer guesses
count more."""
_MOST_COST = 0.9
"""Upper limit of the cost of a drafted token, so that a wrong measurement does not stop all drafts."""
_MIN_BALANCE = -2.0
_START_BALANCE = 2.0
_MAX_BALANCE = 8.0
"""Lower limit, start and upper limit of an adapter's balance, in drafted tokens that may be wrong."""
_PER_TOKEN = 0.01
"""Amount by which the balance falls, down to its start value, for each token without a draft."""
_PER_RIGHT = 0.5
"""Amount by which the balance rises for each token that was guessed right, drafted or not.

A wrong guess lowers the balance by 1.
"""
_PAYS_BALANCE = 4.0
"""Balance from which drafts save more than plans of several steps, which have no drafts."""


class Guess(NamedTuple):
    """Describes a guess of the next token.

    Attributes:
        agreeing: number of last tokens that equal the tokens before the matching place; at most ``_LONGEST_MATCH``.
        repeated: number of times in a row that the token has followed the n-gram again.
        token_id: the guessed token.
        is_own: whether the place is in the sequence's tokens, not in an earlier answer.
    """

    agreeing: int
    repeated: int
    token_id: int
    is_own: bool

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Kind of the guess. Guesses of one kind are right about equally often."""
        return min(self.agreeing.bit_length(), 4), min(self.repeated, 3), self.is_own

    @property
    def prior(self) -> float:
        """Assumed share of right guesses of this kind, before any guess."""
        agreeing, repeated, is_own = self.kind
        rate = 1 - 0.7 * 0.75 ** (agreeing - 1) * 0.6**repeated
        return rate if is_own or repeated else _ONCE_ANSWERED * rate


class NgramIndex:
    """Finds the latest earlier place where the last tokens of a text occur.

    Args:
        begin: number of tokens that are left out at the beginning of the text.
        is_own: see :class:`Guess`.

    Attributes:
        begin: see the argument.
        tokens: tokens of the text so far, without the left-out tokens.
    """

    def __init__(self, begin: int = 0, *, is_own: bool = False) -> None:
        self.begin = begin
        self._is_own = is_own
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. A place that ends with the last token is found only after another token follows."""
        known = self.tokens
        after = self._after
        for token in tokens:
            at = len(known)
            for order in _ORDERS:
                if at >= order:
                    key = tuple(known[at - order :])
                    place, repeated = after.get(key, (-1, 0))
                    after[key] = at, repeated + 1 if place >= 0 and known[place] == token else 0
            known.append(token)

    def guess(self, tail: list[int]) -> Guess | None:
        """Return the token after the latest place that agrees with the end of ``tail``; None if no place agrees.

        If only one token agrees, the guessed token must have followed it before.
        """
        for order in _ORDERS:
            at, repeated = self._after.get(tuple(tail[-order:]), (0, 0))
            if not at or len(tail) < order:
                continue
            if order == 1 and not repeated:
                return None
            known = self.tokens
            agreeing = order
            limit = min(_LONGEST_MATCH, len(tail), at)
            while agreeing < limit and known[at - 1 - agreeing] == tail[-1 - agreeing]:
                agreeing += 1
            return Guess(agreeing, repeated, known[at], self._is_own)
        return None


class _Adapter:
    """Holds the answers and rates of an adapter, or of the base model.

    Attributes:
        answers: latest answers, each with the end of its prompt.
        balance: number of drafted tokens that may be wrong before drafts stop.
    """

    def __init__(self) -> None:
        self.answers = NgramIndex()
        self.balance = _START_BALANCE
        self._latest: deque[list[int]] = deque()
        self._rates: dict[tuple[int, int, bool], tuple[float, float]] = {}

    def add(self, answer: list[int]) -> None:
        """Add an answer, and delete the oldest answers."""
        self._rates = {
            kind: (right * _FADING_BY_ANSWER, tried * _FADING_BY_ANSWER) for kind, (right, tried) in self._rates.items()
        }
        self._latest.append(answer[:_KEPT_TOKENS])
        if len(self.answers.tokens) + len(self._latest[-1]) <= _KEPT_TOKENS:
            self.answers.extend(self._latest[-1])
            return
        while len(self._latest) > 1 and sum(map(len, self._latest)) > _KEPT_TOKENS // 2:
            self._latest.popleft()
        self.answers = NgramIndex()
        for each in self._latest:
            self.answers.extend(each)

    def forget_answers(self) -> None:
        """Delete all answers, but keep the rates of guesses."""
        self._latest.clear()
        self.answers = NgramIndex()

    def rate(self, guess: Guess) -> float:
        """Return the share of right guesses among earlier guesses of this kind."""
        right, tried = self._rates.get(guess.kind, (0.0, 0.0))
        return (right + _PRIOR * guess.prior) / (tried + _PRIOR)

    def note(self, draft: list[Guess], drafted: int, kept: int) -> None:
        """Record the number of right tokens in a draft."""
        for at, guess in enumerate(draft[: min(kept + 1, drafted)]):
            self._count(guess, at < kept)
        self._change(_PER_RIGHT * kept - (drafted - kept))

    def note_undrafted(self, guess: Guess | None, token_id: int) -> None:
        """Record the sampled token for a guess that was not drafted."""
        if self.balance > _START_BALANCE:
            self.balance = max(_START_BALANCE, self.balance - _PER_TOKEN)
        if guess is None:
            return
        is_right = guess.token_id == token_id
        if self.rate(guess) >= _LEAST_CHANCE:  # the guess was likely enough for a draft
            self._change(_PER_RIGHT if is_right else -1.0)
        self._count(guess, is_right)

    def _count(self, guess: Guess, is_right: bool) -> None:
        right, tried = self._rates.get(guess.kind, (0.0, 0.0))
        self._rates[guess.kind] = right * _FADING + is_right, tried * _FADING + 1

    def _change(self, change: float) -> None:
        self.balance = max(_MIN_BALANCE, min(_MAX_BALANCE, self.balance + change))


class Drafter:
    """Drafts tokens for the sequences of an engine, and learns each adapter's share of right guesses.

    Every token is guessed, even if the guess is not drafted, because a guess costs a step no time. An adapter's balance
    falls with each likely guess that was wrong, and rises with each right guess. Below 1, the adapter has no drafts. So
    adapters whose answers do not repeat have few drafts, and adapters whose answers begin to repeat soon get drafts.

    Args:
        most: largest number of tokens in a draft; 0 for no drafts.

    Attributes:
        drafted_tokens, kept_tokens: numbers of drafted and of right tokens since the start.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._adapters: OrderedDict[tuple[AdapterDigest | None, str], _Adapter] = OrderedDict()
        self._answered: OrderedDict[tuple[AdapterDigest | None, str], None] = OrderedDict()
        self._texts: dict[RequestId, NgramIndex] = {}
        self._guesses: dict[RequestId, list[Guess]] = {}
        self._noted: dict[RequestId, int] = {}
        """Number of tokens of each sequence that have been learned from when the next tokens are read."""
        self.drafted_tokens = self.kept_tokens = 0

    def draft(self, sequences: Iterable[Sequence], budget_tokens: int, cost: float) -> dict[RequestId, tuple[int, ...]]:
        """Return drafts for sequences that yield a token in the step.

        Args:
            sequences: the sequences.
            budget_tokens: largest total number of drafted tokens.
            cost: time that a drafted token adds to a step, as a share of the step's time for each sequence. A token is
                drafted only if its probability exceeds this cost.
        """
        drafts: dict[RequestId, tuple[int, ...]] = {}
        self._guesses.clear()
        for sequence in sequences:
            if not self._most or sequence.request.prompt_embeds is not None or sequence.request.pooling is not None:
                continue
            adapter = self._adapter(sequence)
            text = self._read(sequence, adapter)
            most = min(self._most, budget_tokens, sequence.tokens_left - 1, int(adapter.balance))
            if most < 1:
                continue
            if guesses := self._guess(sequence, text, adapter, most, min(max(_LEAST_CHANCE, cost), _MOST_COST)):
                drafts[sequence.request_id] = tuple(guess.token_id for guess in guesses)
                self._guesses[sequence.request_id] = guesses
                budget_tokens -= len(guesses)
        return drafts

    def _read(self, sequence: Sequence, adapter: _Adapter) -> NgramIndex:
        """Return the index of a sequence's tokens, after learning from tokens that were sampled without a draft."""
        token_ids = sequence.token_ids
        text = self._texts.get(sequence.request_id)
        if text is None:
            text = self._texts[sequence.request_id] = NgramIndex(max(0, len(token_ids) - _KEPT_TOKENS), is_own=True)
            text.extend(token_ids[text.begin : sequence.prompt_tokens])
        noted = self._noted.pop(sequence.request_id, 0)
        for at in range(text.begin + len(text.tokens), len(token_ids)):
            if at >= noted:
                guess = _best(text, adapter, token_ids[max(0, at - _LONGEST_MATCH) : at])
                adapter.note_undrafted(guess, token_ids[at])
            text.extend(token_ids[at : at + 1])
        return text

    def _guess(
        self, sequence: Sequence, text: NgramIndex, adapter: _Adapter, most: int, least_chance: float
    ) -> list[Guess]:
        """Return the tokens that probably follow the newest token."""
        tail = sequence.token_ids[-_LONGEST_MATCH:]
        stops = sequence.request.sampling.stop_token_ids
        guesses: list[Guess] = []
        chance = 1.0
        while len(guesses) < most:
            guess = _best(text, adapter, tail)
            if guess is None or guess.token_id in stops:  # no token follows a stop token
                break
            chance *= adapter.rate(guess)
            if chance < least_chance:
                break
            guesses.append(guess)
            tail.append(guess.token_id)
        return guesses

    def pays(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether an adapter's drafts are right so often that every step should have drafts."""
        return bool(self._most) and any(self._adapter(sequence).balance >= _PAYS_BALANCE for sequence in sequences)

    def note(self, sequence: Sequence, drafted: int, kept: int, known: int) -> None:
        """Record the number of drafted tokens that were right.

        Args:
            sequence: the sequence.
            drafted: drafted tokens.
            kept: number of drafted tokens that were right.
            known: tokens of the sequence at the time of the draft.
        """
        if drafted:
            self._adapter(sequence).note(self._guesses[sequence.request_id], drafted, kept)
            self._noted[sequence.request_id] = known + min(kept + 1, drafted)
            self.drafted_tokens += drafted
            self.kept_tokens += kept

    def ended(self, sequence: Sequence, *, will_resume: bool) -> None:
        """Remove a sequence. Unless the sequence resumes, its answer is kept for other sequences of its adapter."""
        if sequence.request_id in self._texts:
            self._read(sequence, self._adapter(sequence))
            del self._texts[sequence.request_id]
        if not self._most or will_resume or sequence.output_tokens < 2:
            return
        owner = _owner(sequence)
        prompt_tokens = sequence.prompt_tokens
        begin = prompt_tokens if sequence.request.prompt_embeds is not None else max(0, prompt_tokens - _LONGEST_MATCH)
        self._adapter(sequence).add(sequence.token_ids[begin:])
        self._adapters.move_to_end(owner)
        self._answered[owner] = None
        self._answered.move_to_end(owner)
        if len(self._answered) > _KEPT_ADAPTERS:
            oldest, _ = self._answered.popitem(last=False)
            if oldest in self._adapters:
                self._adapters[oldest].forget_answers()

    def _adapter(self, sequence: Sequence) -> _Adapter:
        found = self._adapters.get(_owner(sequence))
        if found is None:
            found = self._adapters[_owner(sequence)] = _Adapter()
            if len(self._adapters) > _KNOWN_ADAPTERS:
                self._adapters.popitem(last=False)
        return found


def _best(text: NgramIndex, adapter: _Adapter, tail: list[int]) -> Guess | None:
    """Return the guess with the most agreeing tokens; None if there is none."""
    one = text.guess(tail)
    other = adapter.answers.guess(tail)
    return max(one, other) if one and other else one or other


def _owner(sequence: Sequence) -> tuple[AdapterDigest | None, str]:
    """Return the key of the answers that may be drafts for a sequence: its adapter and its salt, as with KV."""
    return sequence.digest, sequence.request.cache_salt
