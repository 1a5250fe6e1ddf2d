"""The tasks of an adapter besides text: vectors, by its pooling, and labels, by its score head and config."""

from collections.abc import Sequence

import msgspec

from lorikeet.core.request import PoolingKind

SCORE_MODULES = frozenset({"score", "classifier"})
"""Modules that PEFT adds to ``modules_to_save`` for sequence classification. Decoders have only the first."""


class AdapterTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of vectors and labels; by default those of the base model.

    Attributes:
        labels: names of the score head's labels, in order; empty without a head or names.
        is_multi_label: whether a text can have several labels, so that each has a probability of its own.
        pooling: pooling of embeddings; None if no file sets it.
        normalizes: whether embeddings have length 1; None if no file sets it.
        invocation_token_ids: tokens of an aLoRA, which acts from their last occurrence in a prompt on; else empty.
    """

    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    pooling: PoolingKind | None = None
    normalizes: bool | None = None
    invocation_token_ids: tuple[int, ...] = ()

    def start(self, prompt: Sequence[int]) -> int | None:
        """Return the position from which on the adapter acts on a prompt; None: it does not, as in PEFT."""
        wanted = self.invocation_token_ids
        if not wanted:
            return 0
        for at in range(len(prompt) - len(wanted), -1, -1):
            if prompt[at] == wanted[0] and tuple(prompt[at : at + len(wanted)]) == wanted:
                return at
        return None
