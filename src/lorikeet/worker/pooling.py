"""Makes vectors of prompts: pools hidden states, and applies score heads."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import Pooled
from lorikeet.core.request import PoolingKind
from lorikeet.kernels.lora import LoraWeights
from lorikeet.worker.batch import RankSequence


class PooledRows(NamedTuple):
    """Rows of a step whose hidden states are pooled.

    Attributes:
        sequence: the sequence of the prompt.
        first: index of the first row.
        position: position of the first row's token.
        tokens: number of rows, which equals the number of tokens.
    """

    sequence: RankSequence
    first: int
    position: int
    tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the rows include the last token of the prompt."""
        return self.position + self.tokens == self.sequence.prompt_tokens


@torch.inference_mode()
def pool(
    hidden: Tensor, pooled: Sequence[PooledRows], weights: Callable[[AdapterDigest], LoraWeights]
) -> tuple[Pooled, ...]:
    """Pool the hidden states of prompts.

    Sums over several steps are kept in the sequences.

    Args:
        hidden: hidden states after the last norm, ``[rows, hidden]``, for all rows of the step that need them.
        pooled: each prompt's rows in ``hidden``.
        weights: function that returns an adapter's weights on the device, with its score head.

    Returns:
        The vectors of the prompts whose last token is in this step.
    """
    vectors = [(rows.sequence, _vector(hidden, rows)) for rows in pooled]
    done = [(sequence, vector) for sequence, vector in vectors if vector is not None]
    if not done:
        return ()
    by_head: dict[AdapterDigest | None, list[tuple[RankSequence, Tensor]]] = {}
    for sequence, vector in done:
        scores = sequence.pooling is not None and sequence.pooling.scores
        by_head.setdefault(sequence.adapter if scores else None, []).append((sequence, vector))
    # All vectors are copied from the device at once.
    flat = [_results(head, torch.stack([vector for _, vector in each]), weights) for head, each in by_head.items()]
    numbers = torch.cat([each.flatten() for each in flat]).cpu().numpy()
    found = []
    at = 0
    for each, result in zip(by_head.values(), flat, strict=True):
        for sequence, _ in each:
            found.append(Pooled(sequence.request_id, numbers[at : at + result.shape[1]].tobytes()))
            at += result.shape[1]
    return tuple(found)


def _vector(hidden: Tensor, rows: PooledRows) -> Tensor | None:
    """Return the pooled vector of a prompt, None before its last token."""
    sequence = rows.sequence
    states = hidden[rows.first : rows.first + rows.tokens]
    assert sequence.pooling is not None
    kind = sequence.pooling.kind
    if kind is PoolingKind.LAST:
        return states[-1] if sequence.pooling.scores else states[-1].float()
    added = states.float()
    if kind is PoolingKind.WEIGHTED_MEAN:
        positions = torch.arange(rows.position + 1, rows.position + rows.tokens + 1, device=hidden.device)
        added = added * positions[:, None]
    total = added.sum(dim=0)
    if sequence.pooled_sum is not None:
        total += sequence.pooled_sum
    sequence.pooled_sum = total
    tokens = sequence.prompt_tokens
    weight = tokens if kind is PoolingKind.MEAN else tokens * (tokens + 1) / 2
    return total / weight if rows.is_last else None


def _results(head: AdapterDigest | None, vectors: Tensor, weights: Callable[[AdapterDigest], LoraWeights]) -> Tensor:
    """Return the vectors, or the logits of an adapter's score head for the vectors: fp32 ``[vectors, numbers]``."""
    if head is None:
        return vectors
    return torch.cat([linear(vectors, rows) for rows in weights(head).score], dim=1).float()
