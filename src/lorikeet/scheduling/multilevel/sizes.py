"""How large a request is: Chameleon's weighted request size."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Sizes(NamedTuple):
    """What the size of a request is made of, in tokens.

    Attributes:
        input_tokens: of its prompt.
        output_tokens: expected of its answer.
        adapter_tokens: KV that would fit where its adapter lies; 0 for the base model.
    """

    input_tokens: float
    output_tokens: float
    adapter_tokens: float


class Weights(NamedTuple):
    """A, B and C of the weighted request size (section 5 of the spec; printed in the paper)."""

    input: float = 0.3
    output: float = 0.5
    adapter: float = 0.2


PRINTED = Weights()
OUTPUT_ONLY = Weights(0.0, 1.0, 0.0)
"""The ablation that looks at the predicted output alone."""


def weighted_sizes(
    sizes: NDArray[np.float64] | Sizes, largest: Sizes, weights: Weights = PRINTED
) -> NDArray[np.float64]:
    """Return the weighted request sizes, in [0, 1].

    Args:
        sizes: ``[..., 3]``, each row as in ``Sizes``.
        largest: maxima that count as 1; what is above them counts as 1, too.
        weights: of the three parts.
    """
    most = np.maximum(np.asarray(largest, np.float64), 1.0)
    shares: NDArray[np.float64] = np.minimum(np.asarray(sizes, np.float64) / most, 1.0) @ np.asarray(weights)
    return shares
