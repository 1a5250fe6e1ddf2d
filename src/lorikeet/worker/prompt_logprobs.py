"""Computes the log probabilities of prompt tokens.

They are the model's in every mode of log probabilities, as in vLLM: nobody samples the tokens of a prompt.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.plan import PromptLogprobs, PromptToken
from lorikeet.kernels.devices import to_device
from lorikeet.worker.batch import RankSequence

_SLICE_ROWS = 64
"""Rows whose logits are held at once; the logits of a whole prompt would take gigabytes."""


class ScoredRows(NamedTuple):
    """Rows of a step that score the prompt of a sequence.

    Attributes:
        sequence: the sequence of the prompt.
        first: index of the first row.
        position: position of the token that the first row scores.
        tokens: number of rows, which equals the number of tokens.
    """

    sequence: RankSequence
    first: int
    position: int
    tokens: int


def score_prompts(head: Callable[[Sequence[int]], Tensor], scored: Sequence[ScoredRows]) -> tuple[PromptLogprobs, ...]:
    """Return the log probabilities of prompt tokens.

    Args:
        head: the output layer, which returns the logits ``[rows, vocab]`` of given rows of the step.
        scored: the rows of the step that score prompts, with the prompt tokens.
    """
    return tuple(PromptLogprobs(rows.sequence.request_id, rows.position, tuple(_tokens(head, rows))) for rows in scored)


@torch.inference_mode()
def _tokens(head: Callable[[Sequence[int]], Tensor], rows: ScoredRows) -> list[PromptToken]:
    sampling = rows.sequence.sampling
    alternatives = sampling.prompt_logprobs or 0
    token_ids = rows.sequence.token_ids.values[rows.position : rows.position + rows.tokens].copy()
    found: list[PromptToken] = []
    for begin in range(0, rows.tokens, _SLICE_ROWS):
        end = min(begin + _SLICE_ROWS, rows.tokens)
        logits = head(range(rows.first + begin, rows.first + end)).float()
        logprobs = logits.log_softmax(dim=-1)
        wanted = to_device(torch.from_numpy(token_ids[begin:end]), logprobs.device)
        own = logprobs.gather(1, wanted[:, None])
        ranks = (logprobs > own).sum(dim=1) + 1
        best = logprobs.topk(min(alternatives, logprobs.shape[1]), dim=1)
        columns = (token_ids[begin:end].tolist(), own[:, 0].tolist(), ranks.tolist())
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found += [
            PromptToken(token_id, logprob, rank, tuple(zip(ids, values, strict=True)))
            for token_id, logprob, rank, (ids, values) in zip(*columns, tops, strict=True)
        ]
    return found
