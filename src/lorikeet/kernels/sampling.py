"""From logits to token ids, in plain torch.

A token is ``argmax(logits / temperature + noise)`` over the tokens that min-p, top-k and top-p leave (the Gumbel-max
trick, https://arxiv.org/abs/1411.0030). The noise is a function of (seed, position) alone, from the counter-based
generator Philox (Salmon et al., SC 2011), so whoever computes a token, and in whatever company, draws the same one.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.kernels.tensors import to_device

CANDIDATES = (128, 2048)
"""Top-p looks at so many of the most likely tokens first; sorting a whole vocabulary is slow and rarely needed."""

GREEDY_BELOW = 1e-5
"""Lower temperatures choose the most likely token: in fp32 nothing would be left of the others."""


class SamplingTensors(NamedTuple):
    """How the token of each row is chosen: contiguous tensors ``[S]`` where the logits are.

    Attributes:
        temperature: fp32; below ``GREEDY_BELOW`` the most likely token is chosen.
        top_k: int64; 0 for all.
        top_p: fp32, at most 1; 1 for all.
        min_p: fp32, at most 1; 0 for all.
        seed: int64, the 64 bits of an unsigned number.
        position: int64, of the new token.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    def on(self, device: torch.device) -> "SamplingTensors":
        """Return them on a device, as they are now: they may change on the host as soon as this returns."""
        if self.seed.device == device:
            return self
        return SamplingTensors(*(to_device(values, device) for values in self))


def choose(logits: Tensor, parameters: SamplingTensors) -> Tensor:
    """Choose one token per row of ``logits [S, vocab]``, computed in fp32; the first of equal ones.

    Returns:
        int64 ``[S]`` where the logits are; -1 where the largest logit is not finite.
    """
    largest, most_likely = logits.max(dim=-1)
    token_ids = torch.where(torch.isfinite(largest), most_likely, -1)
    for i in torch.nonzero((parameters.temperature >= GREEDY_BELOW) & (token_ids >= 0)).flatten().tolist():
        row = SamplingTensors(*(values[i] for values in parameters))
        token_ids[i] = _draw(logits[i].float(), row)
    return token_ids


def lowest_kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the lowest logit that min-p, top-k and top-p, in this order, leave; equal logits stay together.

    Each filter sees what the one before left: top-p is the mass among the tokens that top-k kept. One row at a
    time, because torch sums a row of several in another order than a row alone, and then the last bit of a mass
    would depend on who shares the batch.

    Args:
        logits: fp32 ``[vocab]``, already divided by the temperature.
        top_k, top_p, min_p: the three filters, see ``SamplingTensors``.

    Returns:
        fp32 scalar, ``-inf`` if nothing is filtered.
    """
    vocab = len(logits)
    lowest = logits.new_tensor(-torch.inf)
    if min_p > 0:
        lowest = logits.max() + math.log(min_p)
    if 0 < top_k < vocab:
        lowest = torch.maximum(lowest, logits.topk(top_k).values[-1])
    if top_p < 1:
        mass = torch.where(logits >= lowest, logits, -torch.inf).logsumexp(dim=-1)
        for width in sorted({min(width, vocab) for width in (*CANDIDATES, vocab)}):
            ordered = logits.topk(width).values
            probabilities = (ordered - mass).exp()
            kept = int((probabilities.cumsum(dim=-1) - probabilities < top_p).sum())
            if kept < width:
                break
        lowest = torch.maximum(lowest, ordered[max(kept, 1) - 1])
    return lowest


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of some tokens at one position: fp32 ``[len(token_ids)]``.

    Each value is a function of (seed, position, token id) alone. ``random_raw`` is the one stream that numpy promises
    to keep between versions. The position goes into a high word of the counter, as the low word counts the draws.
    """
    generator = np.random.Philox(key=seed % 2**64, counter=position << 64)
    raw: npt.NDArray[np.uint64] = np.asarray(generator.random_raw(int(token_ids.max()) // 2 + 1))
    uniform = (raw.view(np.uint32)[token_ids] + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)


def _draw(logits: Tensor, row: SamplingTensors) -> int:
    """Choose for one row ``logits [vocab]`` with a finite largest one."""
    scaled = (logits - logits.max()) / float(row.temperature)
    scaled = torch.where(scaled.isnan(), -torch.inf, scaled)  # of -inf, where fp32 takes the temperature for infinite
    lowest = lowest_kept(scaled, int(row.top_k), float(row.top_p), float(row.min_p))
    kept = torch.nonzero(scaled >= lowest).flatten()
    noise = gumbel_noise(int(row.seed), int(row.position), kept.cpu().numpy())
    return int(kept[(scaled[kept] + torch.from_numpy(noise).to(scaled)).argmax()])
