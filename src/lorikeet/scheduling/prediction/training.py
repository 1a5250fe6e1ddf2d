"""Trains a length model on finished requests."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.ensemble import GradientBoostingRegressor

from lorikeet.scheduling.prediction.history import LengthHistory
from lorikeet.scheduling.prediction.learned import (
    LengthModel,
    LengthModelInfo,
    PredictionErrors,
    TreeEnsemble,
    features_of,
)

LEAST_REQUESTS = 100
"""Smallest number of requests. With fewer, a model is no better than the history."""

_HELD_OUT = 0.2
"""Share of the requests (the last ones) that is held out for the comparison with history."""

_MIN_ANSWERS = 20
"""Number of answers that make an adapter known to a model."""

_AXES = 16
_TREES = {
    "n_estimators": 150,
    "max_depth": 4,
    "learning_rate": 0.06,
    "subsample": 0.7,
    "min_samples_leaf": 8,
    "max_features": 0.4,
}


class TooFewRequests(ValueError):
    """There are too few requests to train on."""


class Samples(NamedTuple):
    """Holds finished requests, in the order in which they finished.

    Attributes:
        vectors: sentence vectors of the ends of the prompts, ``[requests, dimensions]`` float32.
        prompt_tokens, output_tokens: lengths of prompt and output.
        adapters: names of adapters; None for the base model.
    """

    vectors: np.ndarray
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    adapters: Sequence[str | None]

    def part(self, begin: int, end: int) -> "Samples":
        """Return the requests ``begin`` to ``end``, half-open."""
        return Samples(
            self.vectors[begin:end],
            self.prompt_tokens[begin:end],
            self.output_tokens[begin:end],
            self.adapters[begin:end],
        )


def train(samples: Samples, tokenizer_sha256: str) -> LengthModel:
    """Train a length model.

    A model of the first four fifths of the requests is compared with history on the last fifth. The returned model is
    trained on all requests.

    Args:
        samples: at least ``LEAST_REQUESTS`` requests.
        tokenizer_sha256: hash of the tokenizer that counted the tokens.

    Raises:
        TooFewRequests: there are fewer.
    """
    count = len(samples.output_tokens)
    if count < LEAST_REQUESTS:
        raise TooFewRequests(f"{count} requests are too few to train on; {LEAST_REQUESTS} are needed")
    cut = round(count * (1 - _HELD_OUT))
    first = samples.part(0, cut)
    last = samples.part(cut, count)
    nothing = PredictionErrors(0, 0.0, 0.0, 0.0)
    trial = _fit(first, LengthModelInfo((), tokenizer_sha256, cut, nothing, nothing))
    learned = trial.predict(last.vectors, last.prompt_tokens, last.adapters)
    history = predict_by_history(samples, cut)
    about = LengthModelInfo(
        (),
        tokenizer_sha256,
        count,
        errors_of(learned, last.output_tokens, first.output_tokens),
        errors_of(history, last.output_tokens, first.output_tokens),
    )
    return _fit(samples, about)


def predict_by_history(samples: Samples, begin: int) -> list[int]:
    """Return history's predictions for the requests from ``begin`` on, each from all earlier requests."""
    history = LengthHistory()
    predicted = []
    for index, (adapter, tokens) in enumerate(zip(samples.adapters, samples.output_tokens, strict=True)):
        if index >= begin:
            predicted.append(history.predict(adapter) or 1)
        history.add(adapter, tokens)
    return predicted


def errors_of(predicted: Sequence[int], true: Sequence[int], all_lengths: Sequence[int]) -> PredictionErrors:
    """Return the errors of predictions, with quintiles of ``all_lengths``."""
    off = np.abs(np.asarray(predicted, float) - np.asarray(true, float))
    return PredictionErrors(
        len(true),
        float(off.mean()),
        float(np.median(off / np.maximum(true, 1))),
        float(in_true_quintile(predicted, true, all_lengths).mean()),
    )


def in_true_quintile(predicted: Sequence[int], true: Sequence[int], all_lengths: Sequence[int]) -> np.ndarray:
    """Return a mask of the predictions in the same quintile of ``all_lengths`` as the true length."""
    cuts = np.quantile(all_lengths, [0.2, 0.4, 0.6, 0.8])
    same: np.ndarray = np.searchsorted(cuts, predicted, "right") == np.searchsorted(cuts, true, "right")
    return same


def _fit(samples: Samples, about: LengthModelInfo) -> LengthModel:
    """Fit the log of lengths by the absolute error, so that a few very long answers do not dominate."""
    logs = np.log(np.maximum(np.asarray(samples.output_tokens, float), 1.0))
    counts = Counter(samples.adapters)
    enough = (adapter for adapter, count in counts.items() if count >= _MIN_ANSWERS)
    known = tuple(sorted(enough, key=lambda adapter: (adapter is not None, adapter or "")))
    chosen = [np.array([adapter == each for each in samples.adapters]) for adapter in known]
    typical = np.array(
        [(np.median(logs[mask]), logs[mask].std()) for mask in [*chosen, np.ones(len(logs), bool)]], np.float32
    )
    rows = [known.index(adapter) if adapter in known else len(known) for adapter in samples.adapters]
    axes = PCA(min(_AXES, samples.vectors.shape[1]), random_state=0).fit(samples.vectors)
    centre = axes.mean_.astype(np.float32)
    components = axes.components_.astype(np.float32)
    features = features_of(samples.vectors, centre, components, samples.prompt_tokens, typical[rows])
    model = GradientBoostingRegressor(loss="absolute_error", random_state=0, **_TREES).fit(features, logs)
    base = float(np.ravel(model.init_.constant_)[0])
    about = LengthModelInfo(known, about.tokenizer_sha256, about.requests, about.learned, about.history)
    return LengthModel(about, centre, components, typical, _trees(model), base)


def _trees(model: GradientBoostingRegressor) -> TreeEnsemble:
    """Return the trees of a model as arrays, padded with leaves of 0."""
    grown = [estimator.tree_ for estimator in model.estimators_[:, 0]]
    shape = (len(grown), max(tree.node_count for tree in grown))
    here = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    trees = TreeEnsemble(np.zeros(shape, np.int32), np.zeros(shape), here.copy(), here.copy(), np.zeros(shape))
    for number, tree in enumerate(grown):
        inner = np.flatnonzero(tree.children_left >= 0)
        leaves = np.flatnonzero(tree.children_left < 0)
        trees.feature[number, inner] = tree.feature[inner]
        trees.threshold[number, inner] = tree.threshold[inner]
        trees.left[number, inner] = tree.children_left[inner]
        trees.right[number, inner] = tree.children_right[inner]
        trees.value[number, leaves] = model.learning_rate * tree.value[leaves, 0, 0]
    return trees
