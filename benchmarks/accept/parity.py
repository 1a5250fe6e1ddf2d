"""What transformers and PEFT say to single requests, and how close their decisions were."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

TIE = 1e-4
"""A peer whose two best logits lie closer than this decided by rounding."""


class PeerAnswer(NamedTuple):
    """A greedy answer of the peer.

    Attributes:
        token_ids: chosen tokens.
        gaps: for each, the distance between the best and the second logit.
    """

    token_ids: list[int]
    gaps: list[float]


class Peer:
    """transformers with PEFT, one request at a time.

    Args:
        model: folder of the base model.
        dtype: it computes in.
        adapters: name → folder.
    """

    def __init__(self, model: Path, dtype: torch.dtype, adapters: dict[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        (first, folder), *others = adapters.items()
        self._model = PeftModel.from_pretrained(base, folder, adapter_name=first, autocast_adapter_dtype=False)
        for name, folder in others:
            self._model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
        self._model = self._model.to(dtype).eval()

    def answer(self, prompt: Sequence[int], adapter: str | None, tokens: int) -> PeerAnswer:
        """Return ``tokens`` greedy tokens; end of text does not stop it."""
        with torch.inference_mode(), self._under(adapter):
            output = self._model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                temperature=None,
                top_p=None,
                repetition_penalty=1.0,
                eos_token_id=None,
                pad_token_id=0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(output.logits).squeeze(1).float().topk(2).values
        return PeerAnswer(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())

    def best(self, token_ids: Sequence[int], adapter: str | None, last: int) -> list[list[int]]:
        """Return the most likely next tokens after each of the last ``last`` prefixes of ``token_ids``.

        In bf16 several tokens often have the very same largest logit; the one that argmax names comes first.
        """
        with torch.inference_mode(), self._under(adapter):
            logits = self._model(input_ids=torch.tensor([token_ids])).logits[0, -last:].float()
        first = logits.argmax(-1).tolist()
        tied = [torch.nonzero(row == row.max()).flatten().tolist() for row in logits]
        return [[token, *(other for other in row if other != token)] for token, row in zip(first, tied, strict=True)]

    def use_attention(self, implementation: str) -> None:
        """Compute attention by another of transformers' implementations (``eager``, ``sdpa``)."""
        self._model.base_model.model.set_attn_implementation(implementation)

    def _under(self, adapter: str | None):  # type: ignore[no-untyped-def]  # PEFT's own context manager
        from contextlib import nullcontext

        if adapter is None:
            return self._model.disable_adapter()
        self._model.set_adapter(adapter)
        return nullcontext()


class Comparison(NamedTuple):
    """One answer against the peer's.

    Attributes:
        equal: tokens before the first difference.
        is_tie: the difference lies where the peer decided by rounding.
        differs: there is a difference that is no tie.
    """

    equal: int
    is_tie: bool
    differs: bool


def compare(ours: Sequence[int], peer: PeerAnswer) -> Comparison:
    """Compare token for token; what follows a tie is another text and says nothing."""
    for position, (token, expected) in enumerate(zip(ours, peer.token_ids, strict=True)):
        if token != expected:
            is_tie = peer.gaps[position] < TIE
            return Comparison(position, is_tie, not is_tie)
    return Comparison(len(ours), is_tie=False, differs=False)
