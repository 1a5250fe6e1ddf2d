"""Drafts: tokens that may come next, found in what a sequence or its adapter has said before.

A step computes a draft behind a sequence's newest token, and the tokens that it yields show how far the draft was right
(``SequenceStep.draft``). A token is a function of the logits, the seed and its position, so an answer is the same with
any draft. See docs/decisions/speculation.md.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.scheduling.state import Sequence

Drafts = Mapping[RequestId, tuple[int, ...]]
"""The drafted tokens of some sequences."""

_NGRAM = 3
"""Tokens that must agree with an earlier place for what follows there to be a draft."""
_LONGEST_MATCH = 12
"""More agreeing tokens say no more."""
_KEPT_TOKENS = 4096
"""Of the latest answers of an adapter."""
_KEPT_ADAPTERS = 64
"""Adapters whose answers are kept, those that ended last: some hundred kilobytes each."""
_LEAST_SHARE = 0.5
"""A token is drafted if it comes with at least this probability, given what drafts of its kind did before."""
_FADING = 0.95
"""Weight of what is known of a kind of draft, whenever there is a new one of that kind."""
_MOST_COST = 0.9
"""So much at most a drafted token is taken to cost, so that a wrong measure does not end drafts for ever."""
_START, _MOST = 2.0, 16.0
"""Drafted tokens that may fail before an adapter has had any draft, and at any time."""
_PER_TOKEN = 0.01
"""By so much the balance goes back to the start with each token that comes without a draft."""
_PER_KEPT = 0.5
"""Drafted tokens that may fail for each that was right."""
_PAYS = 4.0
"""From this balance on an adapter's drafts are right so often that plans of several steps would lose by having none."""


class NgramIndex:
    """Finds the latest earlier place of the last tokens of a text.

    Attributes:
        tokens: the text so far.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Places that the last of them ends are found once another follows."""
        known = self.tokens
        for token in tokens:
            if len(known) >= _NGRAM:
                self._after[tuple(known[-_NGRAM:])] = len(known)
            known.append(token)

    def find(self, tail: list[int], most: int) -> tuple[int, list[int]]:
        """Return how many of the last tokens of ``tail`` are before the latest place, and what follows there."""
        at = self._after.get(tuple(tail[-_NGRAM:]))
        if at is None:
            return 0, []
        known, agreeing = self.tokens, _NGRAM
        limit = min(_LONGEST_MATCH, len(tail), at)
        while agreeing < limit and known[at - 1 - agreeing] == tail[-1 - agreeing]:
            agreeing += 1
        return agreeing, known[at : at + most]


class _Adapter:
    """What is known of an adapter, or the base model.

    Attributes:
        answers: the latest ones.
        balance: how many drafted tokens may fail.
    """

    def __init__(self) -> None:
        self.answers = NgramIndex()
        self.balance = _START
        self._latest: deque[list[int]] = deque()
        self._right = [0.0] * (_LONGEST_MATCH + 1)
        self._wrong = [0.0] * (_LONGEST_MATCH + 1)

    def add(self, answer: list[int]) -> None:
        """Add an answer, and forget the oldest ones."""
        answer = answer[:_KEPT_TOKENS]
        self._latest.append(answer)
        if len(self.answers.tokens) + len(answer) > _KEPT_TOKENS:
            total = 0
            kept = deque[list[int]]()
            while self._latest and total + len(self._latest[-1]) <= _KEPT_TOKENS // 2:
                total += len(self._latest[-1])
                kept.appendleft(self._latest.pop())
            self._latest, self.answers = kept or deque([answer]), NgramIndex()
            for each in self._latest:
                self.answers.extend(each)
        else:
            self.answers.extend(answer)

    def note(self, agreeing: int, drafted: int, kept: int) -> None:
        """Note how far a draft was right."""
        self._right[agreeing] = self._right[agreeing] * _FADING + kept
        self._wrong[agreeing] = self._wrong[agreeing] * _FADING + (kept < drafted)
        self.balance = min(_MOST, self.balance + _PER_KEPT * kept - (drafted - kept))

    def length(self, agreeing: int, cost: float) -> int:
        """Return how many tokens to draft where so many tokens agree.

        Where that has not paid, one is tried if nothing has failed lately.
        """
        right, wrong = self._right[agreeing] + agreeing / 4, self._wrong[agreeing] + 1.0
        each = right / (right + wrong)
        length = int(math.log(min(max(_LEAST_SHARE, cost), _MOST_COST)) / math.log(each))
        return min(max(length, self.balance >= _START), int(self.balance))

    def rest(self, tokens: int) -> None:
        """Note tokens that came without a draft."""
        change, missing = _PER_TOKEN * tokens, _START - self.balance
        self.balance += min(missing, change) if missing > 0 else max(missing, -change)


class Drafter:
    """Drafts for the sequences of an engine, and learns for each adapter how often drafts are right.

    An adapter's balance falls by each drafted token that does not come, and rises by each that does and, a little, by
    every token of its answers. Without a balance there is no draft. So an adapter whose answers repeat nothing has few.

    Args:
        most: most tokens of a draft; 0 for no drafts.

    Attributes:
        drafted_tokens, kept_tokens: since the start.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._adapters: OrderedDict[tuple[AdapterDigest | None, str], _Adapter] = OrderedDict()
        self._texts: dict[RequestId, NgramIndex] = {}
        self._agreeing: dict[RequestId, int] = {}
        self.drafted_tokens = self.kept_tokens = 0

    def draft(self, sequences: Iterable[Sequence], budget_tokens: int, cost: float) -> dict[RequestId, tuple[int, ...]]:
        """Return drafts for sequences that decode.

        Args:
            sequences: which.
            budget_tokens: most tokens of all drafts.
            cost: what a drafted token adds to a step, as a share of what a step takes for each of its sequences: a
                token is drafted only if it is more likely to come.
        """
        drafts: dict[RequestId, tuple[int, ...]] = {}
        self._agreeing.clear()
        for sequence in sequences:
            adapter = self._adapter(sequence)
            most = min(self._most, budget_tokens, sequence.tokens_left - 1)
            if most < 1 or adapter.balance < 1 or sequence.request.prompt_embeds is not None:
                continue
            text = self._texts.setdefault(sequence.request_id, NgramIndex())
            text.extend(sequence.token_ids[len(text.tokens) :])
            tail = sequence.token_ids[-_LONGEST_MATCH:]
            agreeing, found = text.find(tail, most)
            if agreeing < _LONGEST_MATCH:
                agreeing, found = max((agreeing, found), adapter.answers.find(tail, most), key=lambda each: each[0])
            tokens = _before_stop(found[: adapter.length(agreeing, cost)] if found else [], sequence)
            if tokens:
                drafts[sequence.request_id] = tokens
                self._agreeing[sequence.request_id] = agreeing
                budget_tokens -= len(tokens)
        return drafts

    def pays(self, sequences: Iterable[Sequence]) -> bool:
        """Whether any of these adapters' drafts are right so often that every step should have some."""
        return bool(self._most) and any(self._adapter(sequence).balance >= _PAYS for sequence in sequences)

    def note(self, sequence: Sequence, drafted: int, kept: int, tokens: int) -> None:
        """Note how many drafted tokens were right, and how many tokens a step has yielded in all."""
        adapter = self._adapter(sequence)
        if drafted:
            adapter.note(self._agreeing[sequence.request_id], drafted, kept)
            self.drafted_tokens += drafted
            self.kept_tokens += kept
        else:
            adapter.rest(tokens)

    def ended(self, sequence: Sequence, *, will_resume: bool) -> None:
        """Forget a sequence; its answer is kept for others of its adapter unless it resumes."""
        self._texts.pop(sequence.request_id, None)
        if self._most and not will_resume and sequence.output_tokens > _NGRAM:
            self._adapter(sequence).add(sequence.token_ids[sequence.prompt_tokens :])
            self._adapters.move_to_end(_owner(sequence))

    def _adapter(self, sequence: Sequence) -> _Adapter:
        found = self._adapters.get(_owner(sequence))
        if found is None:
            found = self._adapters[_owner(sequence)] = _Adapter()
            if len(self._adapters) > _KEPT_ADAPTERS:
                self._adapters.popitem(last=False)
        return found


def _owner(sequence: Sequence) -> tuple[AdapterDigest | None, str]:
    """Return whose answers may be drafts for a sequence: as with KV, those of its adapter under the same salt."""
    return sequence.digest, sequence.request.cache_salt


def _before_stop(tokens: list[int], sequence: Sequence) -> tuple[int, ...]:
    """Return the tokens up to one that would end the sequence: nothing follows it."""
    stops = sequence.request.sampling.stop_token_ids
    return tuple(tokens[: next((at for at, token in enumerate(tokens) if token in stops), len(tokens))])
