"""The tasks of an adapter besides text: vectors by pooling, and labels by a score head."""

from collections.abc import Sequence

import msgspec

from lorikeet.core.request import PoolingKind

SCORE_MODULES = frozenset({"score", "classifier"})
"""Modules that PEFT adds to ``modules_to_save`` for sequence classification. Decoders have only the first."""


class AdapterTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of vectors and labels.

    The defaults are the base model's.

    Attributes:
        labels: names of the score head's labels, in order; empty without a head or names.
        is_multi_label: whether a text can have several labels, so that each label has an independent probability.
        pooling: the pooling of embeddings; None if no file sets it.
        normalizes: whether embeddings are scaled to length 1; None if no file sets it.
        invocation_token_ids: invocation tokens of an aLoRA, which acts from their last occurrence in a prompt on;
            otherwise empty.
    """

    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    pooling: PoolingKind | None = None
    normalizes: bool | None = None
    invocation_token_ids: tuple[int, ...] = ()

    def start(self, prompt: Sequence[int]) -> int | None:
        """Return the position from which on the adapter acts on a prompt. None if it does not act, like in PEFT."""
        wanted = self.invocation_token_ids
        if not wanted:
            return 0
        for at in range(len(prompt) - len(wanted), -1, -1):
            if prompt[at] == wanted[0] and tuple(prompt[at : at + len(wanted)]) == wanted:
                return at
        return None
