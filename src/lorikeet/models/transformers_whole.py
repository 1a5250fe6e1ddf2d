"""Runs models of transformers as a whole, for one row of one sequence at a time.

Such a model does not compute one row of hidden states for each token it gets, or its tokens see later tokens of a
prompt. For a row it is run on all tokens up to the row, with the inputs that transformers' ``generate`` prepares
without a cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

WHOLE = frozenset({"BltForCausalLM", "CpmAntForCausalLM", "ProphetNetForCausalLM", "XLNetLMHeadModel"})
"""Classes of models that run as a whole.

BLT joins bytes to patches; CPM-Ant puts a prompt of its own before the tokens, which see each other; ProphetNet
computes further rows that predict; XLNet predicts from a placeholder after the tokens.
"""


class WholeModel:
    """A model and the input of its output layer.

    Args:
        model: the model, whose output layer is replaced.
        output: the output layer.
        project: computes logits from hidden states.
    """

    def __init__(self, model: PreTrainedModel, output: nn.Module, project: Any) -> None:
        self._model = model
        self.project = project
        self._seen: Tensor | None = None
        output.forward = self._see

    def _see(self, x: Tensor) -> Tensor:
        """Keep the input of the output layer, and return logits of a vocabulary of one token."""
        self._seen = x
        return x.new_zeros((*x.shape[:-1], 1))

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the hidden state ``[hidden]`` from which the token after ``ids [T]`` is predicted."""
        run_whole(self._model, ids)
        found = self._seen
        assert found is not None, "the model has not called its output layer"
        self._seen = None
        while found.dim() > 2:  # ProphetNet's first dimensions are the sequence and the stream of predictions.
            found = found[0]
        return found[-1]


def run_whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits ``[vocab]`` of the token after ``ids [T]``."""
    given = model.prepare_inputs_for_generation(ids[None], use_cache=False)
    logits = model(**{**given, "use_cache": False}).logits[0, -1]
    assert isinstance(logits, Tensor)
    return logits


def logits_of_rows(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits after each token of ``ids [T]``, ``[T, vocab]``."""
    return torch.stack([run_whole(model, ids[: row + 1]) for row in range(len(ids))])
