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

_ORDERS = (3, 1)
"""Lengths of the n-grams that are looked up, the longer one first."""
_LONGEST_MATCH = 12
"""Most agreeing tokens that are counted; guesses with more are not right more often."""
_KEPT_TOKENS = 4096
"""Tokens that are indexed: of an adapter's latest answers; of a sequence, at its first draft (later ones are added)."""
_KEPT_ADAPTERS, _KNOWN_ADAPTERS = 64, 4096
"""Adapters whose answers are kept (some hundred kilobytes each), and whose rates are: those used last."""
_LEAST_CHANCE = 0.5
"""A draft ends before a token whose probability, by the rates of earlier guesses, is lower."""
_PRIOR = 2.0
"""Weight of the prior rate of a kind of guess, in guesses."""
_FADING, _FADING_BY_ANSWER = 0.95, 0.9
"""Factors of the counts of a kind of guess, at each new one and after each answer, so that newer ones count more."""
_MOST_COST = 0.9
"""Limit of the cost of a drafted token, so that a wrong measurement does not end all drafts."""
_START_BALANCE, _MAX_BALANCE = 2.0, 16.0
"""Balance of an adapter that has had no draft, and the highest one, in drafted tokens that may be wrong."""
_PER_TOKEN = 0.01
"""Change of the balance, towards its start, for each token that comes without a draft."""
_PER_KEPT = 0.5
"""Rise of the balance for each drafted token that was right; a wrong one lowers it by 1."""
_PAYS_BALANCE = 4.0
"""From this balance on, drafts save more than plans of several steps, which have none."""


class Guess(NamedTuple):
    """What may come next.

    Attributes:
        agreeing: how many of the last tokens are the same as those before the place; at most ``_LONGEST_MATCH``.
        repeated: how often in a row the token has followed the n-gram again, after the first time.
        token_id: the token.
    """

    agreeing: int
    repeated: int
    token_id: int

    @property
    def kind(self) -> tuple[int, int]:
        """Guesses of the same kind are about equally often right."""
        return min(self.agreeing.bit_length(), 4), min(self.repeated, 3)

    @property
    def prior(self) -> float:
        """How often such guesses are taken to be right before there have been any."""
        agreeing, repeated = self.kind
        return 1 - 0.7 * 0.75 ** (agreeing - 1) * 0.6**repeated


class NgramIndex:
    """Finds the latest earlier place of the last tokens of a text.

    Args:
        begin: how many tokens of the text are left out at its beginning.

    Attributes:
        begin: see above.
        tokens: the text so far, without these.
    """

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Places that the last of them ends are found once another follows."""
        known, after = self.tokens, self._after
        for token in tokens:
            at = len(known)
            for order in _ORDERS:
                if at >= order:
                    key = tuple(known[at - order :])
                    place, repeated = after.get(key, (-1, 0))
                    after[key] = at, repeated + 1 if place >= 0 and known[place] == token else 0
            known.append(token)

    def guess(self, tail: list[int]) -> Guess | None:
        """Return what followed at the latest place that agrees with the end of ``tail``; None if there is none.

        If only one token agrees, what followed there must have followed it before.
        """
        for order in _ORDERS:
            at, repeated = self._after.get(tuple(tail[-order:]), (0, 0))
            if not at or len(tail) < order:
                continue
            if order == 1 and not repeated:
                return None
            known, agreeing = self.tokens, order
            limit = min(_LONGEST_MATCH, len(tail), at)
            while agreeing < limit and known[at - 1 - agreeing] == tail[-1 - agreeing]:
                agreeing += 1
            return Guess(agreeing, repeated, known[at])
        return None


class _Adapter:
    """What is known of an adapter, or the base model.

    Attributes:
        answers: the latest ones, each with the end of its prompt.
        balance: how many drafted tokens may be wrong before there are no more drafts.
    """

    def __init__(self) -> None:
        self.answers = NgramIndex()
        self.balance = _START_BALANCE
        self._latest: deque[list[int]] = deque()
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}

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

    def may_try(self, guess: Guess) -> bool:
        """Whether to draft an unlikely guess, to learn how often its kind is right; not after many wrong drafts."""
        return self.balance >= _START_BALANCE and self._rates.get(guess.kind, (0.0, 0.0))[1] < 1

    def rate(self, guess: Guess) -> float:
        """Return how often guesses like this one have been right."""
        right, tried = self._rates.get(guess.kind, (0.0, 0.0))
        return (right + _PRIOR * guess.prior) / (tried + _PRIOR)

    def note(self, draft: list[Guess], drafted: int, kept: int) -> None:
        """Note how far a draft was right."""
        for at, guess in enumerate(draft[: min(kept + 1, drafted)]):
            right, tried = self._rates.get(guess.kind, (0.0, 0.0))
            self._rates[guess.kind] = right * _FADING + (at < kept), tried * _FADING + 1
        self.balance = min(_MAX_BALANCE, self.balance + _PER_KEPT * kept - (drafted - kept))

    def rest(self, tokens: int) -> None:
        """Note tokens that came without a draft: the balance goes towards its start."""
        change, missing = _PER_TOKEN * tokens, _START_BALANCE - self.balance
        self.balance += min(missing, change) if missing > 0 else max(missing, -change)


class Drafter:
    """Drafts for the sequences of an engine, and learns for each adapter how often drafts are right.

    An adapter's balance falls with each drafted token that was wrong, and rises with each that was right. Each token
    that comes without a draft moves it a little towards its start. Below 1 there is no draft. So adapters whose answers
    repeat nothing have few drafts.

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
            adapter = self._adapter(sequence)
            most = min(self._most, budget_tokens, sequence.tokens_left - 1, int(adapter.balance))
            if most < 1 or sequence.request.prompt_embeds is not None or sequence.request.pooling is not None:
                continue
            if guesses := self._guess(sequence, adapter, most, min(max(_LEAST_CHANCE, cost), _MOST_COST)):
                drafts[sequence.request_id] = tuple(guess.token_id for guess in guesses)
                self._guesses[sequence.request_id] = guesses
                budget_tokens -= len(guesses)
        return drafts

    def _guess(self, sequence: Sequence, adapter: _Adapter, most: int, least_chance: float) -> list[Guess]:
        """Return what is likely to follow the newest token; one token, to try, if little is known."""
        text = self._texts.get(sequence.request_id)
        if text is None:
            begin = max(0, len(sequence.token_ids) - _KEPT_TOKENS)
            text = self._texts[sequence.request_id] = NgramIndex(begin)
        text.extend(sequence.token_ids[text.begin + len(text.tokens) :])
        tail, stops = sequence.token_ids[-_LONGEST_MATCH:], sequence.request.sampling.stop_token_ids
        guesses: list[Guess] = []
        chance = 1.0
        while len(guesses) < most:
            found = [guess for guess in (text.guess(tail), adapter.answers.guess(tail)) if guess is not None]
            guess = max(found, default=None)
            if guess is None or guess.token_id in stops:  # nothing follows a stop token
                break
            chance *= adapter.rate(guess)
            if chance < least_chance:
                return guesses or ([guess] if adapter.may_try(guess) else [])
            guesses.append(guess)
            tail.append(guess.token_id)
        return guesses

    def pays(self, sequences: Iterable[Sequence]) -> bool:
        """Whether any of these adapters' drafts are right so often that every step should have some."""
        return bool(self._most) and any(self._adapter(sequence).balance >= _PAYS_BALANCE for sequence in sequences)

    def note(self, sequence: Sequence, drafted: int, kept: int, tokens: int) -> None:
        """Note how many drafted tokens were right, and how many tokens a step has yielded in all."""
        adapter = self._adapter(sequence)
        if drafted:
            adapter.note(self._guesses[sequence.request_id], drafted, kept)
            self.drafted_tokens += drafted
            self.kept_tokens += kept
        else:
            adapter.rest(tokens)

    def ended(self, sequence: Sequence, *, will_resume: bool) -> None:
        """Forget a sequence; its answer is kept for others of its adapter unless it resumes."""
        self._texts.pop(sequence.request_id, None)
        if not self._most or will_resume or sequence.output_tokens < 2:
            return
        owner, prompt_tokens = _owner(sequence), sequence.prompt_tokens
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


def _owner(sequence: Sequence) -> tuple[AdapterDigest | None, str]:
    """Return whose answers may be drafts for a sequence: as with KV, those of its adapter under the same salt."""
    return sequence.digest, sequence.request.cache_salt
