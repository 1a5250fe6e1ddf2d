"""Slow, obvious filters of sampling, and comparisons of tokens with the reference."""

import math

import torch
from hypothesis import strategies as st

from lorikeet.kernels.sampling import SamplingTensors, choose

VOCAB = 24
ROUNDING = 2e-6
"""Sums of probabilities in another order differ by less; whether a token at the edge of top-p is kept may, too."""

filters = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 2, 7, VOCAB, 100]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    }
)


def kept_slowly(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that min-p, top-k and top-p leave, for logits without ties."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = [t for t in order if math.exp(logits[t] - logits[order[0]]) >= min_p]
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(logits[t]) for t in order)
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        if top_p < 1 and mass >= top_p:
            break
        kept.add(token)
        mass += math.exp(logits[token]) / total
    return kept


def check_chosen(chosen: torch.Tensor, logits: torch.Tensor, asked: SamplingTensors) -> None:
    """Do nothing if tokens are those of the reference, but for roundings at the edge of top-p."""
    right = choose(logits, asked)
    if not torch.equal(chosen, right):
        others = [choose(logits, asked._replace(top_p=asked.top_p + shift)) for shift in (-ROUNDING, ROUNDING)]
        assert ((chosen == right) | (chosen == others[0]) | (chosen == others[1])).all(), (chosen, right, asked)
