"""Finds the adapter whose examples of prompts are nearest to a prompt, without a model.

Texts are vectors of word, word pair and character n-gram features (TF-IDF over the examples). No prompt leaves the
process, and a prompt costs no computation of the engine.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NEAREST = 3
"""Examples of an adapter whose mean similarity is the adapter's similarity."""
_LENGTHS = (3, 4, 5)
"""Lengths of character n-grams, which find other forms of a word, and words of languages without spaces."""
_END_CHARS = 2000
"""Characters of the beginning, and of the end, of a long prompt that are used. The instruction is in one of them."""
_MOST_LEARNED = 1000
"""Most examples from which the threshold is learned, evenly taken from all adapters."""

_WORDS = re.compile(r"\w+|[^\w\s]")


class Nearest(NamedTuple):
    """The outcome of a search.

    Attributes:
        name: the chosen adapter; empty if no adapter is near.
        why: the similarity of the nearest adapter and the threshold, in words.
    """

    name: str
    why: str


class NearestExamples:
    """Examples of several adapters, ready for searches.

    An adapter's similarity to a prompt is the mean cosine of the prompt and its three nearest examples. The threshold
    is the similarity that best separates two kinds of prompts, both taken from the examples themselves: an example and
    the other examples of its adapter, and the same example when its adapter is left out. The threshold of a single
    adapter is the median similarity of its examples.

    Args:
        examples: examples of prompts by adapter. Adapters with the same examples count as one, the first.
    """

    def __init__(self, examples: Mapping[str, Sequence[str]]) -> None:
        first: dict[tuple[str, ...], str] = {}
        for name in sorted(examples):
            first.setdefault(tuple(dict.fromkeys(examples[name])), name)
        self._names = list(first.values())
        texts = [text for each in first for text in each]
        self._number = len(texts)
        self._adapter = np.repeat(np.arange(len(first)), [len(each) for each in first])
        self._place = np.concatenate([np.arange(len(each)) for each in first] or [np.zeros(0, int)])
        self._sizes = np.array([len(each) for each in first])
        self._features: dict[str, int] = {}
        features = [_features(text) for text in texts]
        self._index(features)
        self.threshold = self._learned(features)

    def nearest(self, prompt: str) -> Nearest:
        """Return the nearest adapter. The same prompt and examples always give the same one."""
        if not self._names:
            return Nearest("", "no adapter that the key may use has examples")
        similarity = self._by_adapter(self._similarities(_features(prompt)), self._sizes)
        best = int(similarity.argmax())
        name = self._names[best]
        if similarity[best] >= self.threshold > 0:
            return Nearest(name, f"{name}: similarity {similarity[best]:.3f}, threshold {self.threshold:.3f}")
        return Nearest("", f"none: the nearest is {name}, {similarity[best]:.3f} below {self.threshold:.3f}")

    def similarities(self, text: str) -> NDArray[np.float64]:
        """Return the cosine of a text and every example, in the order of the adapters' names."""
        return self._similarities(_features(text))

    def _index(self, texts: Sequence[list[list[str]]]) -> None:
        """Build the postings: for each feature, the examples that have it and its weight in each."""
        for parts in texts:
            for feature in (each for part in parts for each in part):
                self._features.setdefault(feature, len(self._features))
        columns = [[np.array([self._features[each] for each in part], int) for part in parts] for parts in texts]
        counts = np.zeros(len(self._features))
        for column_ids in (each for groups in columns for each in groups):
            counts[column_ids] += 1
        least = 1 / max(1, len(self._names))  # With few adapters, features that all their examples share count, too.
        self._idf = np.log((len(texts) + 1) / (counts + 1)) + least
        self._unknown_idf = float(np.log(len(texts) + 1)) + least
        rows, found, weights = [], [], []
        for row, groups in enumerate(columns):
            for column_ids in groups:
                weight = self._idf[column_ids]
                norm = float(np.sqrt((weight**2).sum()))
                rows.append(np.full(len(column_ids), row))
                found.append(column_ids)
                weights.append(weight / (norm * np.sqrt(len(groups))) if norm else weight)
        column = np.concatenate(found or [np.zeros(0, int)])
        order = np.argsort(column, kind="stable")
        self._rows = np.concatenate(rows or [np.zeros(0, int)])[order]
        self._weights = np.concatenate(weights or [np.zeros(0)])[order]
        self._starts = np.searchsorted(column[order], np.arange(len(self._features) + 1))

    def _similarities(self, parts: list[list[str]]) -> NDArray[np.float64]:
        """Return the cosine of a text and every example."""
        rows, weights = [], []
        for part in parts:
            known = [self._features[each] for each in part if each in self._features]
            squares = float((self._idf[known] ** 2).sum()) + self._unknown_idf**2 * (len(part) - len(known))
            if not squares:
                continue
            scale = 1.0 / np.sqrt(squares * len(parts))
            for feature in known:
                found = slice(self._starts[feature], self._starts[feature + 1])
                rows.append(self._rows[found])
                weights.append(self._weights[found] * (self._idf[feature] * scale))
        if not rows:
            return np.zeros(self._number)
        return np.bincount(np.concatenate(rows), np.concatenate(weights), self._number).astype(np.float64)

    def _by_adapter(self, similarities: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the similarity of every adapter, given those of its examples and its number of examples."""
        table = np.zeros((len(self._names), max(_NEAREST, int(self._sizes.max()))))
        table[self._adapter, self._place] = similarities
        best = -np.partition(-table, _NEAREST - 1, axis=1)[:, :_NEAREST]
        sums: NDArray[np.float64] = best.sum(axis=1)
        return sums / np.clip(sizes, 1, _NEAREST)

    def _learned(self, texts: Sequence[list[list[str]]]) -> float:
        """Return the threshold, at which the two shares of right choices have the largest sum."""
        right: list[float] = []
        foreign: list[float] = []
        learners = np.unique(np.linspace(0, len(texts) - 1, min(len(texts), _MOST_LEARNED)).astype(int))
        for at in learners:
            own = self._adapter[at]
            similarities = self._similarities(texts[at])
            similarities[at] = 0.0
            sizes = self._sizes.copy()
            sizes[own] -= 1
            by_adapter = self._by_adapter(similarities, sizes)
            if sizes[own] and by_adapter.argmax() == own:
                right.append(float(by_adapter[own]))
            if len(self._names) > 1:
                foreign.append(float(np.delete(by_adapter, own).max()))
        if not right:
            return np.inf
        if not foreign:
            return float(np.median(right))
        chosen = np.sort(right)
        refused = np.sort(foreign)
        candidates = np.unique(chosen)
        kept = (len(chosen) - np.searchsorted(chosen, candidates)) / len(learners)
        away = np.searchsorted(refused, candidates) / len(refused)
        return float(candidates[np.argmax(kept + away)])


def used_part(text: str) -> str:
    """Return the part of a prompt that a search uses: a long prompt's beginning and end."""
    return text if len(text) <= 2 * _END_CHARS else f"{text[:_END_CHARS]} {text[-_END_CHARS:]}"


def _features(text: str) -> list[list[str]]:
    """Return the features of a text in three groups, which count the same: words, pairs of words, n-grams."""
    words = _WORDS.findall(used_part(text).casefold())
    pairs = [f"{one} {other}" for one, other in pairwise(words)]
    padded = [f" {word} " for word in words if word[0].isalnum() or word[0] == "_"]
    grams = [f"#{word[at : at + n]}" for word in padded for n in _LENGTHS for at in range(len(word) - n + 1)]
    # A set would make the order, and so the last bits of a similarity, differ between processes.
    return [list(dict.fromkeys(each)) for each in (words, pairs, grams)]
