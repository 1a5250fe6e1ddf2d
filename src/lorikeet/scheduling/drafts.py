"""Drafts: tokens that may come next, found by n-grams in a sequence's own tokens and its adapter's latest answers.

A step computes a draft behind a sequence's newest token, and the tokens that it yields show how far the draft was right
(``SequenceStep.draft``). A token is a function of the logits, the seed and its position, so an answer is the same with
any draft. See docs/decisions/speculation.md.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.scheduling.state import Sequence

Drafts = Mapping[RequestId, tuple[int, ...]]
"""The drafted tokens of some sequences."""

_ORDERS = (3, 2, 1)
"""Lengths of the n-grams that are looked up, the longest one first."""
_LONGEST_MATCH = 12
"""Most agreeing tokens that are counted; guesses with more are not right more often."""
_KEPT_TOKENS = 4096
"""Indexed tokens of an adapter's latest answers, and of a sequence at its first draft (later ones are added)."""
_KEPT_ADAPTERS = 64
_KNOWN_ADAPTERS = 4096
"""Number of recently used adapters whose answers (some hundred kilobytes each), and whose rates, are kept."""
_LEAST_CHANCE = 0.5
"""A draft ends before a token with a lower probability, by the rates of earlier guesses."""
_ONCE_ANSWERED = 0.6
"""Factor of the prior rate of a token seen once in an earlier answer: answers may differ in this place."""
_PRIOR = 2.0
"""Weight of the prior rate of a kind of guess, in guesses."""
_FADING = 0.95
_FADING_BY_ANSWER = 0.9
"""Factors of the counts of a kind of guess, at each new one and after each answer, so that newer ones count more."""
_MOST_COST = 0.9
"""Limit of the cost of a drafted token, so that a wrong measurement does not end all drafts."""
_MIN_BALANCE = -2.0
_START_BALANCE = 2.0
_MAX_BALANCE = 8.0
"""Lower bound, start and upper bound of an adapter's balance, in drafted tokens that may be wrong."""
_PER_TOKEN = 0.01
"""Fall of the balance, down to its start, for each token that comes without a draft."""
_PER_RIGHT = 0.5
"""Rise of the balance for each token that was guessed right, drafted or not; a wrong guess lowers it by 1."""
_PAYS_BALANCE = 4.0
"""From this balance on, drafts save more than plans of several steps, which have none."""


class Guess(NamedTuple):
    """A guess of the next token.

    Attributes:
        agreeing: number of last tokens that equal the tokens before the place; at most ``_LONGEST_MATCH``.
        repeated: how often in a row the token has followed the n-gram again, after the first time.
        token_id: the token.
        is_own: whether the place is in the sequence's own tokens, not in an earlier answer.
    """

    agreeing: int
    repeated: int
    token_id: int
    is_own: bool

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Kind of the guess; guesses of one kind are about equally often right."""
        return min(self.agreeing.bit_length(), 4), min(self.repeated, 3), self.is_own

    @property
    def prior(self) -> float:
        """Assumed share of right guesses of this kind before there have been any."""
        agreeing, repeated, is_own = self.kind
        rate = 1 - 0.7 * 0.75 ** (agreeing - 1) * 0.6**repeated
        return rate if is_own or repeated else _ONCE_ANSWERED * rate


class NgramIndex:
    """Finds the latest earlier place of the last tokens of a text.

    Args:
        begin: how many tokens of the text are left out at its beginning.
        is_own: see :class:`Guess`.

    Attributes:
        begin: see above.
        tokens: the text so far, without these.
    """

    def __init__(self, begin: int = 0, *, is_own: bool = False) -> None:
        self.begin = begin
        self._is_own = is_own
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Places that the last of them ends are found once another follows."""
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
        """Return the token after the latest place that agrees with the end of ``tail``; None if there is no such place.

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
    """Answers and rates of an adapter, or of the base model.

    Attributes:
        answers: the latest answers, each with the end of its prompt.
        balance: how many drafted tokens may be wrong before there are no more drafts.
    """

    def __init__(self) -> None:
        self.answers = NgramIndex()
        self.balance = _START_BALANCE
        self._latest: deque[list[int]] = deque()
        self._rates: dict[tuple[int, int, bool], tuple[float, float]] = {}

    def add(self, answer: list[int]) -> None:
        """Add an answer, and forget the oldest ones."""
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
        """Forget all answers, but not how well drafts did."""
        self._latest.clear()
        self.answers = NgramIndex()

    def rate(self, guess: Guess) -> float:
        """Return how often guesses like this one have been right."""
        right, tried = self._rates.get(guess.kind, (0.0, 0.0))
        return (right + _PRIOR * guess.prior) / (tried + _PRIOR)

    def note(self, draft: list[Guess], drafted: int, kept: int) -> None:
        """Note how far a draft was right."""
        for at, guess in enumerate(draft[: min(kept + 1, drafted)]):
            self._count(guess, at < kept)
        self._change(_PER_RIGHT * kept - (drafted - kept))

    def note_undrafted(self, guess: Guess | None, token_id: int) -> None:
        """Note which token has come without a draft where ``guess`` was the guess."""
        if self.balance > _START_BALANCE:
            self.balance = max(_START_BALANCE, self.balance - _PER_TOKEN)
        if guess is None:
            return
        is_right = guess.token_id == token_id
        if self.rate(guess) >= _LEAST_CHANCE:  # it might have been drafted
            self._change(_PER_RIGHT if is_right else -1.0)
        self._count(guess, is_right)

    def _count(self, guess: Guess, is_right: bool) -> None:
        right, tried = self._rates.get(guess.kind, (0.0, 0.0))
        self._rates[guess.kind] = right * _FADING + is_right, tried * _FADING + 1

    def _change(self, change: float) -> None:
        self.balance = max(_MIN_BALANCE, min(_MAX_BALANCE, self.balance + change))


class Drafter:
    """Drafts for the sequences of an engine, and learns for each adapter how often guesses are right.

    Every token is guessed, even if the guess is not drafted, which costs no step any time. An adapter's balance falls
    with each likely guess that was wrong, and rises with each right one. Below 1 there is no draft. So adapters whose
    answers do not repeat have few drafts, and adapters whose answers begin to repeat soon have some.

    Args:
        most: most tokens of a draft; 0 for no drafts.

    Attributes:
        drafted_tokens, kept_tokens: since the start.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._adapters: OrderedDict[tuple[AdapterDigest | None, str], _Adapter] = OrderedDict()
        self._answered: OrderedDict[tuple[AdapterDigest | None, str], None] = OrderedDict()
        self._texts: dict[RequestId, NgramIndex] = {}
        self._guesses: dict[RequestId, list[Guess]] = {}
        self._noted: dict[RequestId, int] = {}
        """By sequence, how many of its tokens have been learned from when its next ones are read."""
        self.drafted_tokens = self.kept_tokens = 0

    def draft(self, sequences: Iterable[Sequence], budget_tokens: int, cost: float) -> dict[RequestId, tuple[int, ...]]:
        """Return drafts for sequences that yield a token.

        Args:
            sequences: which.
            budget_tokens: most tokens of all drafts.
            cost: time that a drafted token adds to a step, as a share of the step's time for each sequence. A token
                is drafted only if its probability is higher.
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
        """Return the index of all tokens of a sequence; learn from the tokens that came without a draft."""
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
        """Return the tokens that probably follow the newest one."""
        tail = sequence.token_ids[-_LONGEST_MATCH:]
        stops = sequence.request.sampling.stop_token_ids
        guesses: list[Guess] = []
        chance = 1.0
        while len(guesses) < most:
            guess = _best(text, adapter, tail)
            if guess is None or guess.token_id in stops:  # nothing follows a stop token
                break
            chance *= adapter.rate(guess)
            if chance < least_chance:
                break
            guesses.append(guess)
            tail.append(guess.token_id)
        return guesses

    def pays(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether drafts of one of these adapters are right so often that every step should have drafts."""
        return bool(self._most) and any(self._adapter(sequence).balance >= _PAYS_BALANCE for sequence in sequences)

    def note(self, sequence: Sequence, drafted: int, kept: int, known: int) -> None:
        """Note how many drafted tokens were right.

        Args:
            sequence: which.
            drafted: tokens of its draft.
            kept: how many of them came.
            known: its tokens when they were drafted.
        """
        if drafted:
            self._adapter(sequence).note(self._guesses[sequence.request_id], drafted, kept)
            self._noted[sequence.request_id] = known + min(kept + 1, drafted)
            self.drafted_tokens += drafted
            self.kept_tokens += kept

    def ended(self, sequence: Sequence, *, will_resume: bool) -> None:
        """Forget a sequence; its answer is kept for others of its adapter unless it resumes."""
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
    """Return the key of the answers that may be drafts for a sequence: as with KV, its adapter and its salt."""
    return sequence.digest, sequence.request.cache_salt
