"""From logits to tokens.

A token is ``argmax(logits / temperature + noise)`` over the tokens that top-k, top-p and min-p leave (the Gumbel-max
trick, https://arxiv.org/abs/1411.0030). The noise is a function of (seed, position) alone, from the counter-based
generator Philox (Salmon et al., SC 2011), so whoever computes a token, and in whatever company, draws the same one.

Order of the steps: log probabilities to report (of the unmodified distribution), penalties, bias, ``min_tokens``,
temperature, min-p, top-k, top-p.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.core.plan import Token
from lorikeet.core.request import SamplingParams
from lorikeet.engine.sequences import Ints

CANDIDATES = (128, 2048)
"""Top-p looks at so many of the most likely tokens first; sorting a whole vocabulary is slow and rarely needed."""

GREEDY_BELOW = 1e-5
"""Lower temperatures choose the most likely token: in fp32 nothing would be left of the others."""


class SampleRow(NamedTuple):
    """What the sampler must know of a sequence.

    Attributes:
        params: how its token is chosen.
        token_ids: int64, prompt and outputs so far; their number is the new token's position.
        prompt_tokens: how many of them are prompt.
    """

    params: SamplingParams
    token_ids: Ints
    prompt_tokens: int


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Token | None]:
    """Choose one token per row; None for a row whose largest logit, as it is or as edited, is not finite.

    Args:
        logits: fp32 ``[S, vocab]``; not changed.
        rows: the sequences, in the order of the logits.
    """
    if not rows:
        return []
    largest, most_likely = logits.max(dim=-1)
    finite: list[bool] = torch.isfinite(largest).tolist()
    chosen: list[int] = most_likely.tolist()
    return [
        _token(logits[i], row, chosen[i]) if is_finite else None
        for i, (row, is_finite) in enumerate(zip(rows, finite, strict=True))
    ]


def _token(logits: Tensor, row: SampleRow, most_likely: int) -> Token | None:
    chosen = most_likely if _is_plain_greedy(row) else _choose(logits.clone(), row)
    if chosen is None:
        return None
    if row.params.logprobs is None:
        return Token(chosen)
    return _with_logprobs(logits, chosen, row.params.logprobs)


def gumbel_noise(seed: int, position: int, token_ids: Ints) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of some tokens at one position: fp32 ``[len(token_ids)]``.

    Each value is a function of (seed, position, token id) alone. ``random_raw`` is the one stream that numpy promises
    to keep between versions. The position goes into a high word of the counter, as the low word counts the draws.
    """
    generator = np.random.Philox(key=seed % 2**64, counter=position << 64)
    raw: npt.NDArray[np.uint64] = np.asarray(generator.random_raw(int(token_ids.max()) // 2 + 1))
    uniform = (raw.view(np.uint32)[token_ids] + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)


def edit_logits(logits: Tensor, row: SampleRow) -> None:
    """Apply penalties, bias and ``min_tokens`` to one row's ``logits [vocab]``, in place.

    Token ids outside of the vocabulary have no effect.
    """
    params = row.params
    outputs = row.token_ids[row.prompt_tokens :]
    if params.repetition_penalty != 1.0:
        seen = _indices(np.unique(row.token_ids), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(outputs):
        ids, counts = np.unique(outputs, return_counts=True)
        within = ids < len(logits)
        penalty = params.presence_penalty + params.frequency_penalty * counts[within]
        logits[_indices(ids, logits)] -= torch.from_numpy(penalty).to(logits)
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < len(logits):
            logits[token_id] += bias
    if len(outputs) < params.min_tokens:
        logits[_indices(np.array(params.stop_token_ids, dtype=np.int64), logits)] = -torch.inf


def lowest_kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the lowest logit that min-p, top-k and top-p, in this order, leave; equal logits stay together.

    Each filter sees what the one before left: top-p is the mass among the tokens that top-k kept. One row at a
    time, because torch sums a row of several in another order than a row alone, and then the last bit of a mass
    would depend on who shares the batch.

    Args:
        logits: fp32 ``[vocab]``, already divided by the temperature.
        params: the three filters.

    Returns:
        fp32 scalar, ``-inf`` if nothing is filtered.
    """
    vocab = len(logits)
    lowest = logits.new_tensor(-torch.inf)
    if params.min_p > 0:
        lowest = logits.max() + math.log(params.min_p)
    if 0 < params.top_k < vocab:
        lowest = torch.maximum(lowest, logits.topk(params.top_k).values[-1])
    if params.top_p < 1:
        mass = torch.where(logits >= lowest, logits, -torch.inf).logsumexp(dim=-1)
        for width in sorted({min(width, vocab) for width in (*CANDIDATES, vocab)}):
            ordered = logits.topk(width).values
            probabilities = (ordered - mass).exp()
            kept = int((probabilities.cumsum(dim=-1) - probabilities < params.top_p).sum())
            if kept < width:
                break
        lowest = torch.maximum(lowest, ordered[max(kept, 1) - 1])
    return lowest


def _choose(logits: Tensor, row: SampleRow) -> int | None:
    """Choose for a row that edits or samples, None if the edits leave nothing finite; changes ``logits [vocab]``."""
    edit_logits(logits, row)
    params = row.params
    largest = logits.max()
    if not bool(torch.isfinite(largest)):
        return None
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    logits.sub_(largest).div_(params.temperature)
    kept = torch.nonzero(logits >= lowest_kept(logits, params)).flatten()
    noise = gumbel_noise(params.seed, len(row.token_ids), kept.cpu().numpy())
    return int(kept[(logits[kept] + torch.from_numpy(noise).to(logits)).argmax()])


def _is_plain_greedy(row: SampleRow) -> bool:
    """True if the row's token is the most likely one, whatever came before."""
    params = row.params
    return (
        params.temperature < GREEDY_BELOW
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and len(row.token_ids) - row.prompt_tokens >= params.min_tokens
    )


def _with_logprobs(logits: Tensor, token_id: int, alternatives: int) -> Token:
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Token(token_id, float(logprobs[token_id]), tuple(top))


def _indices(ids: Ints, logits: Tensor) -> Tensor:
    return torch.from_numpy(ids[(ids >= 0) & (ids < len(logits))]).to(logits.device)
