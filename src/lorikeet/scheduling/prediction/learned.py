"""Predicts output lengths by a learned model from the prompt's sentence vector, its length and the adapter.

`lorikeet train-predictor` writes the model as plain arrays to a safetensors file, so reading it runs no code, and
prediction needs only numpy.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_FORMAT = "lorikeet answer lengths 1"

_MAX_LOG_TOKENS = 20.0


class LengthModelError(ValueError):
    """A file contains no valid length model. The message names the reason."""


class PredictionErrors(msgspec.Struct, frozen=True):
    """Holds the errors of predictions.

    Attributes:
        requests: number of predictions.
        mean_tokens: mean absolute error, in tokens.
        median_share: median of the absolute error divided by the true length.
        in_quintile: share of predictions in the quintile of the true length.
    """

    requests: int
    mean_tokens: float
    median_share: float
    in_quintile: float


class LengthModelInfo(msgspec.Struct, frozen=True):
    """Holds facts about a length model.

    Attributes:
        adapters: adapters with enough answers in the training data; None for the base model.
        tokenizer_sha256: hash of the base model's ``tokenizer.json``, with which answer tokens were counted.
        requests: number of requests in the training data.
        learned, history: errors on held-out requests (the last of the log), of a model trained on the other requests
            and of the history predictor.
    """

    adapters: tuple[str | None, ...]
    tokenizer_sha256: str
    requests: int
    learned: PredictionErrors
    history: PredictionErrors

    @property
    def is_better(self) -> bool:
        """Whether the model's error on held-out requests was smaller than the error of the history predictor."""
        return self.learned.mean_tokens < self.history.mean_tokens


class TreeEnsemble(msgspec.Struct, frozen=True):
    """Sums the values of regression trees. All arrays are ``[trees, nodes]``, and node 0 is the root.

    Attributes:
        feature: feature column that a node compares, int32.
        threshold: largest value of the feature that leads to the left child, float64.
        left, right: children, int32. The child of a leaf is the leaf itself.
        value: value of a leaf, float64.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray

    def sums(self, features: np.ndarray) -> np.ndarray:
        """Return the sum of the leaf values for each row of ``features``, ``[rows, columns]`` float32."""
        trees = np.arange(len(self.feature))
        rows = np.arange(len(features))[:, None]
        node = np.zeros((len(features), len(trees)), np.int32)
        while True:
            goes_left = features[rows, self.feature[trees, node]] <= self.threshold[trees, node]
            following = np.where(goes_left, self.left[trees, node], self.right[trees, node])
            if np.array_equal(following, node):
                total: np.ndarray = self.value[trees, node].sum(1)
                return total
            node = following


class LengthModel:
    """Predicts output lengths from sentence vectors.

    Args:
        about: facts about the model.
        centre: mean of the training vectors, ``[dimensions]`` float32.
        axes: principal axes onto which vectors are projected, ``[axes, dimensions]`` float32.
        typical: median and standard deviation of log output lengths for each known adapter, and in the last row for all
            adapters, ``[adapters + 1, 2]`` float32.
        trees: regression trees over the projections, the log of the prompt length, and the two numbers of the adapter.
        base: constant to which the trees are added, log tokens.
    """

    def __init__(
        self,
        about: LengthModelInfo,
        centre: np.ndarray,
        axes: np.ndarray,
        typical: np.ndarray,
        trees: TreeEnsemble,
        base: float,
    ) -> None:
        self.about = about
        self._centre = centre
        self._axes = axes
        self._typical = typical
        self._trees = trees
        self._base = base
        self._rows = {adapter: row for row, adapter in enumerate(about.adapters)}

    def knows(self, adapter: str | None) -> bool:
        """Return whether the training data had enough answers of ``adapter`` (None for the base model)."""
        return adapter in self._rows

    def predict(self, vectors: np.ndarray, prompt_tokens: Sequence[int], adapters: Sequence[str | None]) -> list[int]:
        """Return the predicted numbers of output tokens of requests.

        Args:
            vectors: sentence vectors of the ends of the prompts, ``[requests, dimensions]`` float32.
            prompt_tokens: lengths of the whole prompts.
            adapters: names of adapters; None for the base model. An unknown adapter counts as an average adapter.
        """
        rows = [self._rows.get(adapter, len(self._rows)) for adapter in adapters]
        features = features_of(vectors, self._centre, self._axes, prompt_tokens, self._typical[rows])
        logs = np.clip(self._base + self._trees.sums(features), 0.0, _MAX_LOG_TOKENS)
        return [int(tokens) for tokens in np.rint(np.exp(logs))]

    def write(self, path: Path) -> None:
        """Write the model to a file.

        Raises:
            OSError: the file cannot be written.
        """
        arrays = {
            "centre": self._centre,
            "axes": self._axes,
            "typical": self._typical,
            "base": np.array([self._base]),
            **{f"trees.{name}": array for name, array in msgspec.structs.asdict(self._trees).items()},
        }
        about = json.dumps(msgspec.to_builtins(self.about))
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, {_FORMAT: about})
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "LengthModel":
        """Read a model from a file.

        Raises:
            LengthModelError: the file cannot be read, or contains no valid model.
        """
        try:
            with safe_open(path, "numpy") as file:
                about = msgspec.json.decode((file.metadata() or {})[_FORMAT], type=LengthModelInfo)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            trees = TreeEnsemble(**{name: arrays[f"trees.{name}"] for name in TreeEnsemble.__struct_fields__})
            model = cls(about, arrays["centre"], arrays["axes"], arrays["typical"], trees, float(arrays["base"][0]))
            model._check()
        except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, IndexError, ValueError) as error:
            reason = f"is missing {error}" if isinstance(error, KeyError) else str(error)
            raise LengthModelError(f"{path}: not a file of lorikeet train-predictor: {reason}") from error
        return model

    def _check(self) -> None:
        """Check the arrays, and make a trial prediction.

        Children must have larger numbers than parents, so that tree walks end.

        Raises:
            IndexError, ValueError: the arrays do not fit together.
        """
        trees = self._trees
        here = np.arange(self._trees.feature.shape[1])
        if not all(((side >= here) & (side <= here[-1])).all() for side in (trees.left, trees.right)):
            raise ValueError("a tree has a cycle")
        if not ((trees.feature >= 0) & (trees.feature < len(self._axes) + 3)).all():
            raise ValueError("a tree uses a feature that does not exist")
        if self._typical.shape != (len(self._rows) + 1, 2):
            raise ValueError("the typical lengths do not match the adapters")
        self.predict(np.zeros((1, len(self._centre)), np.float32), [1], [None])


def features_of(
    vectors: np.ndarray, centre: np.ndarray, axes: np.ndarray, prompt_tokens: Sequence[int], typical: np.ndarray
) -> np.ndarray:
    """Return the features of the trees, ``[requests, axes + 3]`` float32.

    See ``LengthModel`` for the arguments; ``typical`` has one row for each request.
    """
    logs = np.log(np.maximum(np.asarray(prompt_tokens, np.float32), 1.0))
    return np.concatenate([(vectors - centre) @ axes.T, logs[:, None], typical], axis=1).astype(np.float32)
