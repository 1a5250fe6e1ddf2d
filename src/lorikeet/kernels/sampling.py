"""The sampling algorithm in plain torch, which every backend computes.

The noise of a token depends only on the seed, the position and the token id, so a sampled token does not depend on the
rest of the batch.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.kernels.devices import to_device

CANDIDATES = (128, 2048)
"""Numbers of most likely tokens that top-p sorts first; sorting the whole vocabulary is slow and rarely needed."""


GREEDY_BELOW = 1e-5
"""At lower temperatures the most likely token is chosen; in fp32 other probabilities would be 0 anyway."""


class SamplingTensors(NamedTuple):
    """The sampling parameters of each row, as contiguous tensors ``[S]`` on the device of the logits.

    Attributes:
        temperature: fp32. Below ``GREEDY_BELOW`` the most likely token is chosen.
        top_k: int64; 0 for all.
        top_p: fp32, at most 1; 1 for all.
        min_p: fp32, at most 1; 0 for all.
        seed: int64, the bits of an unsigned 64-bit seed.
        position: int64, the new token's position.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    def on(self, device: torch.device) -> "SamplingTensors":
        """Return copies on a device. The host tensors may be changed as soon as this returns."""
        if self.seed.device == device:
            return self
        return SamplingTensors(*(to_device(values, device) for values in self))


def choose(logits: Tensor, parameters: SamplingTensors) -> Tensor:
    """Sample one token per row of ``logits [S, vocab]``, computed in fp32.

    Ties go to the lowest token id.

    Returns:
        Token ids, int64 ``[S]`` on the device of the logits; -1 for a row whose largest logit is not finite.
    """
    largest, most_likely = logits.max(dim=-1)
    token_ids = torch.where(torch.isfinite(largest), most_likely, -1)
    for i in torch.nonzero((parameters.temperature >= GREEDY_BELOW) & (token_ids >= 0)).flatten().tolist():
        row = SamplingTensors(*(values[i] for values in parameters))
        token_ids[i] = _draw(logits[i].float(), row)
    return token_ids


def lowest_kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the lowest logit that min-p, top-k and top-p keep, applied in this order.

    Equal logits are kept together.

    Each filter applies to the tokens that the previous filter kept, so top-p is the mass among the tokens of top-k. The
    function computes one row at a time. In a batch, torch sums rows in another order, and the last bit of a sum would
    depend on other rows.

    Args:
        logits: fp32 ``[vocab]``, already divided by the temperature.
        top_k, top_p, min_p: the filters, see ``SamplingTensors``.

    Returns:
        An fp32 scalar, which is ``-inf`` if nothing is filtered.
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
    """Return standard Gumbel noise for tokens at one position: fp32 ``[len(token_ids)]``.

    Each value is a function of (seed, position, token id). ``random_raw`` is the stream that numpy promises not to
    change between versions. The position is in a high word of the counter, as the low word counts the draws.
    """
    generator = np.random.Philox(key=seed % 2**64, counter=position << 64)
    raw: npt.NDArray[np.uint64] = np.asarray(generator.random_raw(int(token_ids.max()) // 2 + 1))
    uniform = (raw.view(np.uint32)[token_ids] + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)


def _draw(logits: Tensor, row: SamplingTensors) -> int:
    """Sample a token for one row ``logits [vocab]``, whose largest logit must be finite."""
    scaled = (logits - logits.max()) / float(row.temperature)
    # This is NaN if -inf was divided by a temperature that is infinite in fp32.
    scaled = torch.where(scaled.isnan(), -torch.inf, scaled)
    lowest = lowest_kept(scaled, int(row.top_k), float(row.top_p), float(row.min_p))
    kept = torch.nonzero(scaled >= lowest).flatten()
    noise = gumbel_noise(int(row.seed), int(row.position), kept.cpu().numpy())
    return int(kept[(scaled[kept] + torch.from_numpy(noise).to(scaled)).argmax()])
