"""A learned head: from the vector of a prompt, its length and its adapter to the length of the answer.

What `lorikeet train-predictor` learns is kept as plain arrays in a safetensors file: no code is run when it is read,
and predicting needs numpy alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_FORMAT = "lorikeet answer lengths 1"

_MOST_LOG_TOKENS = 20.0


class LengthModelError(ValueError):
    """A file holds no head; the message says why."""


class PredictionErrors(msgspec.Struct, frozen=True):
    """How far predictions were off.

    Attributes:
        requests: that were predicted.
        mean_tokens: mean absolute error.
        median_share: median of the error as a share of the true length.
        in_quintile: share of predictions in the quintile of the true length.
    """

    requests: int
    mean_tokens: float
    median_share: float
    in_quintile: float


class LengthModelInfo(msgspec.Struct, frozen=True):
    """What is known of a head.

    Attributes:
        adapters: those that it knows, None for the base model.
        tokenizer_sha256: of the base model's ``tokenizer.json``: answers were counted in its tokens.
        requests: that it learned from.
        learned, history: errors on the last requests of the log, which were held out: of a head that learned from the
            others, and of the history predictor.
    """

    adapters: tuple[str | None, ...]
    tokenizer_sha256: str
    requests: int
    learned: PredictionErrors
    history: PredictionErrors

    @property
    def is_better(self) -> bool:
        """Whether it was closer than history on what was held out."""
        return self.learned.mean_tokens < self.history.mean_tokens


class TreeEnsemble(msgspec.Struct, frozen=True):
    """Regression trees whose values add up; all arrays are (trees, nodes), node 0 is a root.

    Attributes:
        feature: column that a node looks at, int32.
        threshold: at most so much goes to the left, float64.
        left, right: nodes, int32; a leaf names itself.
        value: of a leaf, float64.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray

    def sums(self, features: np.ndarray) -> np.ndarray:
        """Return the sum of the leaves that each row of ``features`` (rows, columns) float32 comes to."""
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
    """Predicts from vectors.

    Args:
        about: what is known of it.
        centre: mean of the vectors that it learned from, (dimensions,) float32.
        axes: what vectors are projected on, (axes, dimensions) float32.
        typical: for each adapter that it knows, and in the end for all together, the median and the standard deviation
            of the log of the lengths of answers, (adapters + 1, 2) float32.
        trees: over the projections, the log of the length of the prompt, and the two of the adapter.
        base: what the trees add to, log of tokens.
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
        """Return whether it learned from enough answers of ``adapter`` (None for the base model)."""
        return adapter in self._rows

    def predict(self, vectors: np.ndarray, prompt_tokens: Sequence[int], adapters: Sequence[str | None]) -> list[int]:
        """Return the tokens of the answers.

        Args:
            vectors: of the ends of the prompts, (requests, dimensions) float32.
            prompt_tokens: of the whole prompts.
            adapters: names; one that it does not know is taken for an average one.
        """
        rows = [self._rows.get(adapter, len(self._rows)) for adapter in adapters]
        features = features_of(vectors, self._centre, self._axes, prompt_tokens, self._typical[rows])
        logs = np.clip(self._base + self._trees.sums(features), 0.0, _MOST_LOG_TOKENS)
        return [int(tokens) for tokens in np.rint(np.exp(logs))]

    def write(self, path: Path) -> None:
        """Write it to a file.

        Raises:
            OSError: that cannot be done.
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
        """Read a file.

        Raises:
            LengthModelError: it cannot be read or is no head.
        """
        try:
            with safe_open(path, "numpy") as file:
                about = msgspec.json.decode((file.metadata() or {})[_FORMAT], type=LengthModelInfo)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            trees = TreeEnsemble(**{name: arrays[f"trees.{name}"] for name in TreeEnsemble.__struct_fields__})
            head = cls(about, arrays["centre"], arrays["axes"], arrays["typical"], trees, float(arrays["base"][0]))
            head._check()
        except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, IndexError, ValueError) as error:
            words = f"is missing {error}" if isinstance(error, KeyError) else str(error)
            raise LengthModelError(f"{path}: not a file of lorikeet train-predictor: {words}") from error
        return head

    def _check(self) -> None:
        """Try it; sums end, as the nodes of a tree lead downwards.

        Raises:
            IndexError, ValueError: something does not fit.
        """
        trees, here = self._trees, np.arange(self._trees.feature.shape[1])
        if not all(((side >= here) & (side <= here[-1])).all() for side in (trees.left, trees.right)):
            raise ValueError("a tree does not lead downwards")
        if not ((trees.feature >= 0) & (trees.feature < len(self._axes) + 3)).all():
            raise ValueError("a tree looks at what there is not")
        if self._typical.shape != (len(self._rows) + 1, 2):
            raise ValueError("not every adapter has a typical length")
        self.predict(np.zeros((1, len(self._centre)), np.float32), [1], [None])


def features_of(
    vectors: np.ndarray, centre: np.ndarray, axes: np.ndarray, prompt_tokens: Sequence[int], typical: np.ndarray
) -> np.ndarray:
    """Return the features of the trees, ``[requests, axes + 3]`` float32; arguments as in ``LengthModel``."""
    logs = np.log(np.maximum(np.asarray(prompt_tokens, np.float32), 1.0))
    return np.concatenate([(vectors - centre) @ axes.T, logs[:, None], typical], axis=1).astype(np.float32)
