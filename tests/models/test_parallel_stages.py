"""Pipeline stages together give the results of the whole decoder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import SingleRankGroup
from tests.models.arenas import Arena
from tests.models.checkpoints import make_checkpoint


class HandOver(SingleRankGroup):
    """A group whose stages compute in turn, in this process."""

    sent: Tensor

    def send(self, x: Tensor) -> None:
        """Keep it for the next stage."""
        self.sent = x

    def receive(self, x: Tensor) -> Tensor:
        """Return what the stage before has sent."""
        return x.copy_(self.sent)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_give_the_logits_of_the_whole_decoder(tmp_path: Path, tied: bool) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=4, tie_word_embeddings=tied)
    config = read_model_config(tmp_path)
    kernels = ReferenceKernels()
    whole = Decoder(config, load_weights(tmp_path, config, torch.float32), kernels, SingleRankGroup())
    whole_arena = Arena.make(config, whole)
    group = HandOver()
    shares = [config.stage(number, 2) for number in range(2)]
    first, last = (Decoder(share, load_weights(tmp_path, share, torch.float32), kernels, group) for share in shares)
    arenas = [Arena.make(share, decoder) for share, decoder in zip(shares, (first, last), strict=True)]
    for step in ([("a", [5, 6, 7, 8, 9]), ("b", [3, 4])], [("a", [1]), ("b", [2])]):
        expected = whole.forward(whole_arena.batch(step), whole_arena.kv)
        assert not len(first.hidden(arenas[0].batch(step), arenas[0].kv))
        assert torch.equal(last.forward(arenas[1].batch(step), arenas[1].kv), expected)
